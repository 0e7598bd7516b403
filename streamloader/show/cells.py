"""What is shown of each value of a sample, by its type: a cell.

A cell says which macro of `templates/cells.html` renders it, and what that needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UNSEEN
from streamloader.show import media
from streamloader.show.media import Media

TEXT_SHOWN = 2000  # characters of a text
BYTES_SHOWN = 64
NUMBERS_SHOWN = 16  # elements of an array that are written out
TOKENS_SHOWN = 768
FRAMES_SHOWN = 12  # of a video, of windows, or of other arrays of three or more dimensions
BOXES_SHOWN = 200
FIRST = "image frames heat video audio "  # the kinds of cells that come first, in this order
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_COLUMN_OFFSETS = "_offsets"
_DOCUMENTS, _POSITIONS = "_documents", "_positions"  # of the elements of packed rows
CROP = "_crop"  # of the name of an image's crop: top, left, height, width, and whether it is flipped


@dataclass(frozen=True)
class Cell:
    """A value of a sample as it is shown.

    `kind`: the macro that renders it. `text`: the value, or its type and range. `media`: images, a sound or a video.
    `captions`: of images, or empty. `points`: of a plot. `pieces`: the texts of tokens, by document. `size`: the
    (width, height) in which `boxes` are given, each of which is (x, y, width, height, label).
    """

    kind: str
    text: str
    media: tuple[Media, ...] = ()
    captions: tuple[str, ...] = ()
    points: str = ""
    pieces: tuple[tuple[str, ...], ...] = ()
    size: tuple[int, int] = (0, 0)
    boxes: tuple[tuple[float, float, float, float, str], ...] = ()


@dataclass(frozen=True)
class Looks:
    """How columns are shown.

    `classes`: class names by column. `images`: the columns of decoded images, each with the (mean, std) that they were
    normalised by, or None. `boxes`: the column of boxes, and whether they are corners, by the column of their image.
    `tokens`: returns the texts of token numbers, by a tokenizer. `fields`: the columns that are stored, and so are no
    number or mark of a sample, whatever their names. `axes`: what each element is, along each axis but the last two, by
    column, such as the names of channels.
    """

    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    images: Mapping[str, Any] = field(default_factory=dict)
    boxes: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    tokens: Callable[[Sequence[int]], Sequence[str]] | None = None
    fields: Collection[str] = ()
    axes: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A sample of a batch: its cells by column, and the row's own marks, such as "padding" or "error"."""

    number: int
    cells: Mapping[str, Cell]
    marks: tuple[str, ...] = ()
    index: Mapping[str, int] = field(default_factory=dict)


MARKS = {"valid": (False, "padding"), "error": (True, "error"), "replaced": (True, "replaced")}


def rows_of(batch: Mapping[str, Any], looks: Looks, most: int | None = None) -> list[Row]:
    """Return the samples of a batch, or the first `most`: a dict of arrays, tensors and lists, as loaders yield.

    Values that cannot be shown are shown as texts.
    """
    batch = _with_documents(batch)
    columns = {name: column_of(batch, name) for name in batch if name.removesuffix(_COLUMN_OFFSETS) not in batch}
    columns |= {name: column_of(batch, name) for name in batch if not name.endswith(_COLUMN_OFFSETS)}
    lengths = [len(column) for column in columns.values()]
    count = max(set(lengths), key=lengths.count, default=0)
    columns = {name: column for name, column in columns.items() if len(column) == count}
    shown = range(count if most is None else min(most, count))
    return [_row(number, {name: column[number] for name, column in columns.items()}, looks) for number in shown]


def _with_documents(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rows of a batch of documents that were packed without `fit`, with the document of each element.

    What there is for each document is left out: rows have several, and parts of them. Other batches are unchanged.
    """
    packed: dict[str, Any] = {}
    for name in batch:
        values, offsets = to_numpy(batch[name]), to_numpy(batch.get(name + _COLUMN_OFFSETS))
        if np.ndim(offsets) == 1 and np.size(offsets) and np.ndim(values) == 2 and len(values) < offsets[-1]:
            places = np.arange(np.size(values))
            of = np.where(places < offsets[-1], np.searchsorted(offsets, places, side="right") - 1, -1)
            packed |= {name: values, name + _DOCUMENTS: of.reshape(np.shape(values))}
    return packed or batch


def column_of(batch: Mapping[str, Any], name: str) -> Sequence[Any] | NDArray[Any]:
    """Return the values of a column of a batch, of a ragged one as a list."""
    values, offsets = to_numpy(batch[name]), batch.get(name + _COLUMN_OFFSETS)
    if offsets is None:
        return values if isinstance(values, list | tuple) or np.ndim(values) else [values]
    edges = to_numpy(offsets).tolist()
    return [values[begin:end] for begin, end in pairwise(edges)]


def to_numpy(value: Any) -> Any:
    """Return a tensor of any framework as a numpy array on the host; other values unchanged."""
    if isinstance(value, np.ndarray | np.generic | list | tuple | bytes | str) or value is None:
        return value
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    return np.asarray(value) if hasattr(value, "__array__") else value


def _row(number: int, values: dict[str, Any], looks: Looks) -> Row:
    own = {name: value for name, value in values.items() if name not in looks.fields}
    index = {
        name: int(value)
        for name, value in own.items()
        if (name in ("index", "source") or name.startswith("index_")) and isinstance(value, int | np.integer)
    }
    flags = {name for name, value in own.items() if name in MARKS and isinstance(value, bool | np.bool_)}
    marks = tuple(text for name, (sign, text) in MARKS.items() if name in flags and bool(own[name]) is sign)
    values = {name: value for name, value in values.items() if name not in flags | index.keys()}
    cells = {
        name: cell(name, value, looks, values)
        for name, value in values.items()
        if name in looks.fields or not _of_packed_row(name, values)
    }
    cells = dict(sorted(cells.items(), key=lambda pair: FIRST.find(pair[1].kind) % len(FIRST)))
    return Row(number, cells, marks, index)


def _of_packed_row(name: str, others: Mapping[str, Any]) -> bool:
    """Return whether a column has the document or the position of each element of a packed row, another column."""
    of = name.removesuffix(_DOCUMENTS).removesuffix(_POSITIONS)
    return of != name and of in others and np.ndim(others[of]) == 1 and np.shape(others[name]) == np.shape(others[of])


def cell(name: str, value: Any, looks: Looks, others: Mapping[str, Any] | None = None) -> Cell:
    """Return what is shown of a value of the column `name`; `others` has the other values of its sample."""
    value = to_numpy(value)
    if name.endswith(CROP) and name.removesuffix(CROP) in looks.images and np.shape(value) == (5,):
        top, left, height, width, flipped = value.tolist()
        text = f"{width} x {height} from column {left}, row {top}{', flipped' * bool(flipped)}"
        return Cell("number", text, boxes=((left, top, width, height, ""),))
    if isinstance(value, str):
        return Cell("text", _cut(value))
    if isinstance(value, bytes | bytearray | memoryview):
        return _of_bytes(name, bytes(value), looks, others or {})
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return _of_array(name, np.asarray(value), looks, others or {})
    return Cell("text", _cut(str(value)))


def _cut(text: str) -> str:
    shown = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text[:TEXT_SHOWN])
    return shown if len(text) <= TEXT_SHOWN else f"{shown}... ({len(text):,} characters)"


def seen(name: str) -> str:
    """Return a name with escapes for characters that are not seen, so that it cannot imitate another name."""
    return name.translate(UNSEEN)


def _of_bytes(name: str, data: bytes, looks: Looks, others: Mapping[str, Any]) -> Cell:
    if (of := media.image_size(data)) is not None:
        text = f"{of.format} {of.width} x {of.height}, {len(data):,} bytes{', contrast stretched' * of.deep}"
        shown = Cell("image", text, (media.encoded_image(data, of),), size=(of.width, of.height))
        return _with_boxes(name, shown, looks, others)
    if kind := media.media_type(data):
        macro = kind.partition("/")[0]
        return Cell(macro, f"{kind}, {len(data):,} bytes", (Media(kind, lambda: data, len(data)),))
    head = data[:BYTES_SHOWN]
    text = f"{head.hex(' ')}{' ...' if len(data) > len(head) else ''}"
    return Cell("bytes", f"{text} ({len(data):,} bytes)")


def _of_array(name: str, values: NDArray[Any], looks: Looks, others: Mapping[str, Any]) -> Cell:
    if not values.ndim:
        return _of_number(name, values, looks)
    if name in looks.images or (values.ndim >= 3 and _are_pixels(values)):
        return _with_boxes(name, _of_pixels(values, looks.images.get(name)), looks, others)
    named = looks.tokens is not None and ("token" in name or "input_ids" in name)
    if values.ndim == 1 and values.dtype.kind in "iu" and (named or len(values) > NUMBERS_SHOWN):
        return _of_tokens(name, values, looks, others)
    text = describe(values)
    if values.size <= NUMBERS_SHOWN:
        return Cell("number", f"{text} {np.array2string(values, precision=6, separator=', ')}")
    values = np.abs(values) if values.dtype.kind == "c" else values
    if values.dtype.kind == "b":
        text += f", {int(values.sum()):,} true"
    elif values.ndim == 1:
        return Cell("plot", text, points=media.polyline(values))
    planes = values.reshape(-1, *values.shape[-2:]) if values.ndim > 1 else values[None, None]
    limits = media.value_range(planes[:FRAMES_SHOWN])
    frames = tuple(media.heat_map(plane, limits) for plane in planes[:FRAMES_SHOWN])
    more = f", {len(planes)} planes, the first {FRAMES_SHOWN} shown" if len(planes) > FRAMES_SHOWN else ""
    axes = looks.axes.get(name, ())
    fits = values.ndim > 2 and tuple(map(len, axes)) == values.shape[:-2]  # a transform may change it
    captions = tuple(seen(", ".join(each)) for each in islice(product(*axes), FRAMES_SHOWN)) if fits else ()
    return Cell("frames" if len(planes) > 1 else "heat", text + more, frames, captions)


def _are_pixels(values: NDArray[Any]) -> bool:
    """Return whether an array is taken for images: three channels of any numbers, or also one or four of bytes.

    Channels come last, or they come first and are adjacent in memory, as `Decode(normalize=)` makes them.
    """
    if values.shape[-3] == 3 and values.strides[-3] == values.itemsize and min(values.shape[-2:]) > 4:
        return values.dtype.kind in "uif"
    kinds = "u" if values.dtype == np.uint8 else "" if values.shape[-1] != 3 else "uif"
    return values.dtype.kind in kinds and _channels_last(values)


def _channels_last(values: NDArray[Any]) -> bool:
    return values.shape[-1] in (1, 3, 4) and min(values.shape[-3:-1], default=0) > 4


def _of_number(name: str, values: NDArray[Any], looks: Looks) -> Cell:
    value = values.item()
    classes = looks.classes.get(name, ())
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(classes):
        return Cell("class", f"{seen(_cut(str(classes[value])))} ({value})")
    return Cell("number", str(value))


def _of_pixels(values: NDArray[Any], normalization: Any = None) -> Cell:
    """Return images of (..., height, width, channels), (..., channels, height, width), or (height, width)."""
    text = describe(values)
    if values.ndim >= 3 and not _channels_last(values) and values.shape[-3] in (1, 3, 4):
        values = np.moveaxis(values, -3, -1)
    if values.ndim >= 3 and values.shape[-1] not in (1, 3, 4):
        values = values[..., None]
    if values.dtype.kind == "f" and normalization is not None:
        mean, std = (np.asarray(each, np.float32) for each in normalization)
        values = ((values * std + mean) * 255 + 0.5).clip(0, 255).astype(np.uint8)
    images = values[None] if values.ndim <= 3 else values.reshape(-1, *values.shape[-3:])
    height, width = images.shape[1:3]
    shown = tuple(media.pixels(image) for image in images[:FRAMES_SHOWN])
    more = f", {len(images)} frames, the first {FRAMES_SHOWN} shown" if len(images) > FRAMES_SHOWN else ""
    return Cell("frames" if len(images) > 1 else "image", text + more, shown, size=(width, height))


def _of_tokens(name: str, values: NDArray[Any], looks: Looks, others: Mapping[str, Any]) -> Cell:
    """Return tokens as texts, or as their numbers; those of packed rows by document, without padding."""
    shown, text = values[:TOKENS_SHOWN], describe(values)
    documents = to_numpy(others.get(name + _DOCUMENTS))
    edges = [0, len(shown)]
    if isinstance(documents, np.ndarray) and documents.shape == values.shape:
        real = documents[documents >= 0]
        shown, documents = values[documents >= 0][:TOKENS_SHOWN], real[:TOKENS_SHOWN]
        edges = [0, *(np.flatnonzero(np.diff(documents)) + 1).tolist(), len(shown)]
        text += f", {len(np.unique(real))} documents, padding {len(values) - len(real)}"
    texts = [f"{number} " for number in shown.tolist()]
    if looks.tokens is not None:
        texts = [_cut(text) for text in looks.tokens(shown.tolist())]
    pieces = tuple(tuple(texts[begin:end]) for begin, end in pairwise(edges))
    more = f", the first {TOKENS_SHOWN} shown" if len(values) > TOKENS_SHOWN else ""
    return Cell("tokens", f"{text}{more}", pieces=pieces)


def describe(values: NDArray[Any]) -> str:
    """Return the dtype and shape of an array, and the range of its values."""
    shape = " x ".join(map(str, values.shape))
    if not values.size or values.dtype.kind == "b":
        return f"{values.dtype} {shape}"
    low, high = media.value_range(values)
    return f"{values.dtype} {shape},{' magnitudes' * (values.dtype.kind == 'c')} {low:.6g} to {high:.6g}"


def _with_boxes(name: str, shown: Cell, looks: Looks, others: Mapping[str, Any]) -> Cell:
    """Return the cell of an image with the boxes of its sample, and their labels."""
    column, corners = looks.boxes.get(name, ("", False))
    boxes = to_numpy(others.get(column))
    if not isinstance(boxes, np.ndarray) or boxes.ndim != 2 or boxes.shape[-1] != 4 or shown.kind != "image":
        return shown
    names = [each for each, value in others.items() if each in looks.classes and np.shape(value) == (len(boxes),)]
    drawn = []
    for number, box in enumerate(boxes[:BOXES_SHOWN].astype(np.float64).tolist()):
        x, y, width, height = [*box[:2], box[2] - box[0], box[3] - box[1]] if corners else box
        label = _of_number(names[0], np.asarray(others[names[0]][number]), looks).text if names else ""
        if np.isfinite(box).all() and width > 0 and height > 0:
            drawn.append((x, y, width, height, label))
    return replace(shown, boxes=tuple(drawn), text=f"{shown.text}, {len(boxes)} boxes")
