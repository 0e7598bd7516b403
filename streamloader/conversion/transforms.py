"""Transforms samples between the source and the dataset: a map function, re-encoding of images, indexes of videos."""

import hashlib
import inspect
import io
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import Bad, BadSample, Columns, Fragment, OnBad, RowSource, read_kept
from streamloader.conversion.sources.fields import FieldSelection, FieldsOption, flatten, settle, transform_source
from streamloader.conversion.sources.media import IMAGE_ENCODINGS
from streamloader.conversion.sources.records import Sample, open_records
from streamloader.errors import FieldError, UsageError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.format.values import AUDIO, from_bytes, sniff
from streamloader.format.video import BESIDE, index_columns, unindexed, with_index
from streamloader.options import is_whole, plain_integers

Function = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Mapper:
    """A function from samples to samples.

    If `batch` is None, the function gets one sample, as a mapping of values. Otherwise it gets that many samples, as a
    mapping of columns, and returns as many. `source` and `cache_key` tell whether it is the function of an earlier run.
    """

    function: Function
    name: str
    batch: int | None
    source: str
    cache_key: str | None

    def options(self) -> dict[str, Any]:
        """Return JSON values that identify the function."""
        return {"function": self.name, "source": self.source, "cache_key": self.cache_key, "batch": self.batch}


def parse_map(
    given: str | Function | None, batch: int | None, columns: FieldsOption = None, cache_key: str | None = None
) -> Mapper | None:
    """Return the given function, or the one that `module:function` names; also searches the working directory.

    Raises `UsageError` if it cannot be imported or called, for an invalid `batch` or `cache_key`, and for one of the
    other arguments without a function.
    """
    if batch is not None and not is_whole(batch):
        raise UsageError(f"map_batch={batch!r} is invalid", "give at least 1 sample")
    if cache_key is not None and not isinstance(cache_key, str):
        raise UsageError(f"cache_key={cache_key!r} is invalid", 'give a text, such as "v2"')
    if given is None:
        for name, value in {"columns": columns, "map_batch": batch, "cache_key": cache_key}.items():
            if value is not None:
                raise UsageError(f"{name} without map", "give a map function, or leave it out")
        return None
    function = given if callable(given) else _import(given)
    named = function
    while isinstance(named, partial):
        named = named.func
    if not hasattr(named, "__qualname__"):
        named = type(named)  # of a callable object
    name = given if isinstance(given, str) else f"{getattr(named, '__module__', None) or ''}:{named.__qualname__}"
    source = hashlib.sha256(_source_text(named).encode()).hexdigest()[:16]
    return Mapper(function, name, plain_integers(batch), source, cache_key)


def _import(name: str) -> Any:
    if not all(name.partition(":")):
        raise UsageError(f"map={name!r} names no function", "write it as module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as for `python -m`, but not for a console script
    try:
        function = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"map={name!r} cannot be imported: {error}", "run in its folder, or install it") from error
    if not callable(function):
        raise UsageError(f"map={name!r} is a {type(function).__name__}", "name a function")
    return function


def _source_text(named: Any) -> str:
    """Return the source text of a function or class; if it has none, its name and the text of its module, if any."""
    # of `exec`: Python 3.13 would take the text of `python -c`, which has the same file name
    if getattr(getattr(named, "__code__", None), "co_filename", "") != "<string>":
        with suppress(OSError, TypeError):
            return inspect.getsource(named)
    with suppress(OSError, TypeError):
        return f"{named.__qualname__}\n{inspect.getsource(inspect.getmodule(named))}"  # type: ignore[arg-type]
    return str(named.__qualname__)


def map_source(source: RowSource, mapper: Mapper, selection: FieldSelection) -> RowSource:
    """Return a source of the samples that the function returns. Raises as `open_records`."""

    def cut(rows: NDArray[np.int64]) -> MappedFragment:
        return MappedFragment(source.fragment(rows), dict(source.fields), mapper)

    notes = {key: value for key, value in source.notes.items() if key != "beside"} | {"map": mapper.options()}
    return open_records(source.url, source.files, source.num_samples, cut, selection, notes=notes)


@dataclass(frozen=True)
class MappedFragment:
    """The fragment of a mapped source."""

    fragment: Fragment
    fields: Mapping[str, Field]
    mapper: Mapper

    def __call__(self, on_bad: OnBad) -> Iterator[Sample]:
        """Yield the samples that the function returns; a sample is bad if the function raises for it alone."""
        columns, kept = read_kept(self.fragment, on_bad)
        count, size = len(kept), self.mapper.batch or 1
        pending = [range(first, min(first + size, count)) for first in range(0, count, size)][::-1]
        while pending:
            rows = pending.pop()
            try:
                samples = self._call(columns, rows)
            except Exception as error:  # noqa: BLE001 - the user's code
                if len(rows) > 1:  # one by one, to find the bad samples
                    pending += [range(row, row + 1) for row in reversed(rows)]
                    continue
                problem = f"the map function failed: {type(error).__name__}: {error}"
                on_bad(BadSample(kept[rows[0]], "", problem, "fix the function"))
            else:
                yield from ((kept[row], "", sample) for row, sample in zip(rows, samples, strict=True))

    def _call(self, columns: Mapping[str, Column], rows: range) -> list[dict[str, Any]]:
        """Return the samples that the function returns for these rows."""
        batch = {name: _values(name, kind, columns[name], rows) for name, kind in self.fields.items()}
        if self.mapper.batch is None:
            return [flatten(self.mapper.function({name: values[0] for name, values in batch.items()}))]
        out = self.mapper.function(batch)
        if not isinstance(out, Mapping) or {len(column) for column in out.values()} != {len(rows)}:
            lengths = {name: len(column) for name, column in out.items()} if isinstance(out, Mapping) else type(out)
            raise UsageError(f"it returned {lengths} for {len(rows)} samples", "return a column of as many values")
        # arrays of other libraries, which may be on a device, become numpy arrays
        foreign = {name for name, c in out.items() if hasattr(c, "__dlpack__") and not isinstance(c, np.ndarray)}
        out = {name: settle(c, f"the column {name!r}") if name in foreign else c for name, c in out.items()}
        return [flatten({name: column[i] for name, column in out.items()}) for i in range(len(rows))]


def _values(name: str, kind: Field, column: Column, rows: range) -> Any:
    """Return values for a map function: an array if they have the shape of the field, else a list."""
    values = column[rows.start : rows.stop]
    if isinstance(values, np.ndarray):
        return values
    if kind.fixed and all(isinstance(v, np.ndarray | np.generic) and v.shape == kind.shape for v in values):
        return np.array(values)
    return [from_bytes(name, kind, memoryview(v), 0) if isinstance(v, bytes) else v for v in values]


QUALITY = 95  # of resized JPEGs: with a higher quality, files grow without a visible difference
_SIZE = re.compile(r"(\d{1,5})(?:x(\d{1,5}))?\Z")
_IMAGES = frozenset({*IMAGE_ENCODINGS.values(), "mixed"})


@dataclass(frozen=True)
class Recode:
    """How images are re-encoded.

    `size` is the shorter side in pixels, which is never enlarged, or (height, width). `quality` from 1 to 100 makes
    every image a JPEG; None keeps JPEGs, and makes other images PNGs.
    """

    size: int | tuple[int, int] | None = None
    quality: int | None = None

    def options(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        size = list(self.size) if isinstance(self.size, tuple) else self.size
        return {"resize": size, "quality": self.quality}

    def field(self, field: Field) -> Field:
        """Return the re-encoded field of a field of images, and any other field unchanged."""
        if field.kind != "bytes" or field.encoding not in _IMAGES:
            return field
        if self.quality is not None:
            return replace(field, encoding="jpeg")
        return field if field.encoding in ("jpeg", "mixed") else replace(field, encoding="png")

    def image(self, data: bytes) -> bytes:
        """Return the re-encoded image. Raises Pillow's error if it does not decode.

        The EXIF orientation is applied, because EXIF data are not kept. JPEGs are 8-bit RGB or grey, also of 16-bit and
        palette images.
        """
        from PIL import Image

        from streamloader.images.pillow import (
            eight_bits,
            image_orientation,
            open_image,
            png_mode,
            sixteen_bits,
            transpose,
        )

        with open_image(data) as opened:
            was_jpeg = opened.format == "JPEG"
            turn = image_orientation(opened, data)
            # libjpeg fills up the last pixel of a side that is no multiple of 8; the image must not begin with it
            if self.size is not None and (turn == 1 or not any(side % 8 for side in opened.size)):
                width, height = self._target(opened.size if turn < 5 else (opened.height, opened.width))
                opened.draft(None, (width, height) if turn < 5 else (height, width))
            image = transpose(sixteen_bits(opened), turn)
            image.load()
        target = self._target(image.size)
        if target != image.size:
            image = image.convert("RGB") if image.mode in ("P", "PA") else image
            image = eight_bits(image) if image.mode in ("I", "F") else image  # the resized values may overshoot
            gap = None if image.mode.startswith("I;16") else 3.0  # Pillow cannot reduce 16 bits
            image = image.resize(target, Image.Resampling.LANCZOS, reducing_gap=gap)
        out = io.BytesIO()
        if was_jpeg or self.quality is not None:
            image = image if image.mode in ("L", "RGB") else eight_bits(image)
            image.save(out, "JPEG", quality=self.quality or QUALITY)
        else:
            png_mode(image).save(out, "PNG")
        return out.getvalue()

    def _target(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the new (width, height) of an image of this (width, height)."""
        if self.size is None:
            return size
        if isinstance(self.size, tuple):
            return self.size[1], self.size[0]
        scale = min(1.0, self.size / min(size))
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def parse_recode(resize: str | int | tuple[int, int] | None, quality: int | None) -> Recode | None:
    """Return how to re-encode images for `resize="256"` (shorter side) or `"256x384"` (height, width), and a quality.

    Returns None if both are None. Raises `UsageError`.
    """
    quality = plain_integers(quality)
    if quality is not None and not (is_whole(quality) and quality <= 100):
        raise UsageError(f"quality={quality!r} is invalid", "give the quality of JPEGs from 1 to 100")
    if resize is None:
        return None if quality is None else Recode(None, quality)
    match = _SIZE.match("x".join(map(str, resize)) if isinstance(resize, tuple) else str(resize))
    sides = [int(side) for side in match.groups() if side] if match else [0]
    if min(sides) < 1:
        remedy = "give the shorter side in pixels, like 256, or height x width, 256x384"
        raise UsageError(f"resize={resize!r} is invalid", remedy)
    return Recode(sides[0] if len(sides) == 1 else (sides[0], sides[1]), quality)


def recode_source(source: RowSource, recode: Recode) -> RowSource:
    """Return the source with its images re-encoded. Raises `UsageError` if it has no field of images."""
    images = tuple(name for name, f in source.fields.items() if f.kind == "bytes" and f.encoding in _IMAGES)
    if not images:
        fields = ", ".join(f"{name}: {field}" for name, field in source.fields.items())
        raise UsageError(f"{source.url} has no images to re-encode ({fields})", "leave resize= and quality= out")
    boxes = source.fields.get("boxes", Field("text"))
    if recode.size is not None and (boxes.kind, boxes.shape) == ("ragged", (4,)):
        problem = f"resize would move the pixels of {source.url}, and its field 'boxes' would keep its coordinates"
        raise UsageError(problem, "resize when you read, Decode(size=, boxes='boxes'), or leave boxes out with fields=")
    recoded = {name: recode.field(field) for name, field in source.fields.items()}
    notes, change = {**source.notes, "images": recode.options()}, partial(_recode, recode, images)
    return transform_source(source, change, fields=recoded, notes=notes)


def _recode(recode: Recode, images: Sequence[str], columns: Columns, bad: Bad) -> Columns:
    """Return the columns with the images of the fields `images` re-encoded; an image that does not decode is bad."""
    from PIL import Image

    problems = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)
    for name in images:
        recoded: list[bytes] = []
        for position, data in enumerate(columns[name]):
            try:
                recoded.append(recode.image(data) if isinstance(data, bytes) else data)
            except problems as error:
                recoded.append(b"")
                problem = f"the image of field {name!r} cannot be decoded: {error}"
                audio = sniff(data) in AUDIO
                remedy = "it is audio: leave resize= and quality= out" if audio else "repair or remove it"
                bad.setdefault(position, BadSample(position, "", problem, remedy, data))
        columns[name] = recoded
    return columns


def index_source(source: RowSource) -> RowSource:
    """Return the source with the index of each video beside it. Raises `FieldError` for fields of other types there."""
    names = unindexed(source.fields)
    if not names:
        return source
    return transform_source(source, partial(_index, names), fields=with_index(source.fields))


def _index(names: Sequence[str], columns: Columns, bad: Bad) -> Columns:
    """Return the columns with those that are stored beside videos; a video that cannot be read is bad."""
    for name in names:
        rows: list[dict[str, Column]] = []
        for position, data in enumerate(columns[name]):
            try:
                rows.append(index_columns(name, [data], [position]))
            except FieldError as error:
                bad.setdefault(position, BadSample(position, "", error.problem, error.remedy, data))
                empty = {suffix: [b""] if kind.kind == "bytes" else np.zeros(1) for suffix, kind in BESIDE.items()}
                rows.append({f"{name}_{suffix}": value for suffix, value in empty.items()})
        for suffix, kind in BESIDE.items():
            values = [row[f"{name}_{suffix}"][0] for row in rows]
            columns[f"{name}_{suffix}"] = values if kind.kind == "bytes" else np.array(values, kind.dtype)
    return columns
