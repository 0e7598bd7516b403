"""COCO: a JSON file of annotations, and the images that it names. See formats/coco/MAPPING.md.

The file is parsed at once, since JSON has no index. Its annotations become columns with one row for each image, by
ascending id. Each value is checked; an invalid one makes a bad sample of its image.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, RowSource
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.media import IMAGES, Files, cut_media
from streamloader.conversion.sources.ranged_io import READ_THREADS, Content, Stream
from streamloader.errors import SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.storage.objects import ObjectInfo

MAX_JSON = 8 << 30  # bytes: parsing takes several times as much memory
_NAMED = re.compile(r"(?:instances|captions|person_keypoints)_(.*)\.json\Z", re.IGNORECASE)
_MARK = "_annotations.coco.json"
_REPAIR = "repair the file, or make it again"
_MAX_POINTS = 1000  # keypoints of an annotation; annotations without keypoints take as much memory
_LARGEST = float(np.finfo(np.float32).max)
# by dtype: the types of values in JSON, the least and the greatest, and what is expected
_VALID: dict[str, tuple[tuple[type, ...], float, float, str]] = {
    "int64": ((int,), -(2**63), 2**63 - 1, "a whole number of 64 bits"),
    "bool": ((int, bool), 0, 1, "0 or 1"),
    "float32": ((int, float), -_LARGEST, _LARGEST, "a number that float32 holds"),
}
# values that stand for zeros, which are those of a point that is not labelled
_ABSENT: dict[str, tuple[Any, ...]] = {"iscrowd": (None,), "keypoints": (None, [])}
_SHOWN = 60  # characters of an invalid value
_ASCII = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_UNICODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)

Item = dict[str, Any]
Entries = Sequence[tuple[int, Item]]  # each with the row of its image; rows ascend
Parse = Callable[[Any], Any]  # raises ValueError, which names the expected value


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of the images of a file, by ascending id, and the `problems` of their rows.

    Columns that are not `selected`, and columns for keys that no entry has, are left out.
    """

    ids: NDArray[np.int64]
    selected: Callable[[str], bool]
    problems: dict[int, str]
    fields: dict[str, Field] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)

    def add(self, name: str, kind: Field, key: str, entries: Entries, parse: Parse | None = None) -> None:
        """Add a column with the values of a key of the entries, each with the row of its image; rows ascend.

        A tensor has one entry for each image; a ragged field, or a text with a JSON list, has any number.
        """
        if not (self.selected(name) and any(key in item for _, item in entries)):
            return
        width, parse = prod(kind.shape), parse or partial(_numbers, kind)
        blank = "null" if kind.kind == "text" else (0,) * width if kind.shape else 0  # replaces an invalid value
        parsed: list[Any] = []
        for row, item in entries:
            try:
                parsed.append(blank if item.get(key) in _ABSENT.get(key, ()) else parse(item.get(key)))
            except ValueError as error:
                noun = "entry" if kind.fixed else "annotation"
                problem = f"has {key} {_shown(item[key])}" if key in item else f"has no {key}"
                self.problems.setdefault(row, f"its {noun} {_shown(item.get('id'))} {problem}: {error}")
                parsed.append(blank)
        self.fields[name] = kind
        edges = np.searchsorted([row for row, _ in entries], np.arange(len(self.ids) + 1))
        if kind.kind == "text":
            self.columns[name] = [f"[{','.join(parsed[a:b])}]".encode() for a, b in pairwise(edges.tolist())]
            return
        values = np.array(parsed).reshape(len(parsed), width).astype(np.dtype(kind.dtype).newbyteorder("<"))
        data = values.tobytes()
        cuts = pairwise((edges * kind.item_bytes).tolist())
        self.columns[name] = values[:, 0] if kind.fixed else [data[a:b] for a, b in cuts]


def _number(dtype: str, value: Any) -> Any:
    types, least, greatest, expected = _VALID[dtype]
    if type(value) not in types or not least <= value <= greatest:  # false for NaN too
        raise ValueError(f"expected {expected}")
    return float(value) if dtype == "float32" else value


def _numbers(kind: Field, value: Any) -> Any:
    """Return the number of a field without a shape, else the list of numbers. Raises ValueError for another value."""
    if not kind.shape:
        return _number(kind.dtype, value)
    if type(value) is not list or len(value) != prod(kind.shape):
        raise ValueError(f"expected {prod(kind.shape)} numbers")
    return [_number(kind.dtype, number) for number in value]


def _segmentation(value: Any) -> str:
    """Return the JSON text into which `_parse` turned polygons. Raises ValueError if they were not valid."""
    if value is not None and not isinstance(value, str):
        raise ValueError("expected numbers that are finite")
    return value or "null"


def _text(value: Any) -> str:
    """Return a value as readable JSON. Raises ValueError for NaN, which is not valid JSON."""
    text = _UNICODE.encode(value)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can represent and UTF-8 cannot
        return _ASCII.encode(value)
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_annotations(
    data: bytes, where: str, selected: Callable[[str], bool]
) -> tuple[Table, list[str | None], dict[str, Any]]:
    """Return the table of a COCO file, the names of its images, and the notes.

    An image whose entry or annotations lack a key that others have is bad. Raises `SourceError` if the file is not a
    COCO file, and for two images or categories with one id.
    """
    document = _parse(data, where, selected("segmentation"))
    images, annotations, categories = (_items(document, key, where) for key in ("images", "annotations", "categories"))
    _check_distinct(where, "images", "file_name", [_name(image) for image in images])
    ids = np.array(_ids(images, "images", where), np.int64)
    images = [images[i] for i in np.argsort(ids).tolist()]
    names = [_name(image) for image in images]
    unnamed = {row: "its entry has no file_name" for row, name in enumerate(names) if name is None}
    table = Table(np.sort(ids), selected, unnamed, {"image_id": Field("tensor", "int64")}, {"image_id": np.sort(ids)})
    for key in ("width", "height"):
        table.add(key, Field("tensor", "int64"), key, list(enumerate(images)))
    rows = {image: row for row, image in enumerate(table.ids.tolist())}
    of_images = [item for item in annotations if type(item.get("image_id")) is int and item["image_id"] in rows]
    known = [(rows[item["image_id"]], item) for item in of_images]
    notes: dict[str, Any] = {"unknown_images": len(annotations) - len(known)}
    if known:
        notes |= _add_annotations(table, known, categories, where)
    return table, names, notes


def _parse(data: bytes, where: str, segmented: bool) -> Any:
    def shrink(item: Item) -> Item:
        """Replace finite polygons by their text: as Python numbers they would take most of the memory."""
        if "segmentation" in item:
            with suppress(ValueError):
                item["segmentation"] = _ASCII.encode(item["segmentation"]) if segmented else None
        return item

    try:
        return json.loads(data, object_hook=shrink)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where} is not valid JSON: {error}", _REPAIR) from None


def _items(document: Any, key: str, where: str) -> list[Item]:
    items = document.get(key, [] if key == "categories" else None) if isinstance(document, dict) else None
    if not isinstance(items, list) or (key == "images" and not items):
        raise SourceError(f"{where} is not a COCO file: it has no list {key!r}", "name one with images and annotations")
    for i, item in enumerate(items):
        if type(item) is not dict:
            raise SourceError(f"{where}: {key}[{i}] is a {type(item).__name__}", _REPAIR)
    return items


def _name(image: Item) -> str | None:
    name = image.get("file_name")
    return name if name and isinstance(name, str) else None


def _ids(items: Sequence[Item], key: str, where: str) -> list[int]:
    """Return the ids of all items. Raises `SourceError` for an id that is not an int64, and for equal ids."""
    ids: list[int] = []
    for i, item in enumerate(items):
        try:
            ids.append(_number("int64", item.get("id")))
        except ValueError as error:
            raise SourceError(f"{where}: {key}[{i}] has id {_shown(item.get('id'))}: {error}", _REPAIR) from None
    _check_distinct(where, key, "id", ids)
    return ids


def _check_distinct(where: str, key: str, noun: str, values: Sequence[int | str | None]) -> None:
    first: dict[int | str, int] = {}
    for i, value in enumerate(values):
        if value is not None and first.setdefault(value, i) != i:
            both = f"{key}[{first[value]}] and {key}[{i}]"
            raise SourceError(f"{where}: {both} have one {noun}, {_shown(value)}", "give each its own")


def _add_annotations(table: Table, known: Entries, categories: Sequence[Item], where: str) -> dict[str, Any]:
    """Add the columns of annotations, each with its row; return the notes on their classes and keypoints."""
    notes: dict[str, Any] = {}
    labels: dict[Any, int] = {}
    if any("category_id" in item for _, item in known):
        ids = sorted(_ids(categories, "categories", where))
        labels = {category: label for label, category in enumerate(ids)}
        names = {item["id"]: _printable(item.get("name", item["id"])) for item in categories}
        notes = {"classes": {"labels": [names[category] for category in ids]}, "category_ids": ids}

    def label(value: Any) -> int:
        if type(value) is not int or value not in labels:
            raise ValueError("no category has this id")
        return labels[value]

    points = next((len(item["keypoints"]) // 3 for _, item in known if _filled(item.get("keypoints"))), 0)
    columns: list[tuple[str, str, str, Parse | None]] = [
        ("boxes", "ragged:float32[4]", "bbox", None),
        ("labels", "ragged:int64", "category_id", label),
        ("area", "ragged:float32", "area", None),
        ("iscrowd", "ragged:bool", "iscrowd", None),
        ("annotation_ids", "ragged:int64", "id", None),
        ("segmentation", "text", "segmentation", _segmentation),
        ("captions", "text", "caption", _text),
    ]
    if points and table.selected("keypoints"):
        if points > _MAX_POINTS:
            raise SourceError(f"{where}: an annotation has {points} keypoints, up to {_MAX_POINTS} are read", _REPAIR)
        columns.insert(5, ("keypoints", f"ragged:float32[{points},3]", "keypoints", None))
        skeletons = [item for item in categories if _filled(item.get("keypoints"))]
        notes["keypoints"] = {_printable(s.get("name")): list(map(_printable, s["keypoints"])) for s in skeletons}
    ordered = sorted(known, key=lambda entry: entry[0])
    for name, kind, key, parse in columns:
        table.add(name, Field.parse(kind), key, ordered, parse)
    return notes


def _printable(value: Any) -> str:
    return str(value).encode(errors="replace").decode()


def _filled(value: Any) -> bool:
    return type(value) is list and bool(value)


def matches(listing: Listing) -> bool:
    """Return whether there are images, and a JSON file whose name or folder is that of COCO's annotations."""
    if not listing.folder or not any(_is_annotations(info.path) for info in listing.of("json")):
        return False
    return bool(IMAGES.files(listing))


def open_source(listing: Listing, selection: FieldSelection) -> RowSource:
    """Return the source: a row for each image, by ascending id. The annotations file is read at once.

    Raises `SourceError` if there is none or more than one annotations file, if it is not a COCO file, or if none of
    its images exists.
    """
    info = _annotations(listing)
    where = f"{listing.store.url}/{info.path}"
    if info.size > MAX_JSON:
        raise SourceError(f"{where} has {info.size} bytes, up to {MAX_JSON} are read", "cut it in several")
    stream = Stream(Content(listing.store, info, "", info.size), READ_THREADS)
    table, names, notes = read_annotations(stream.read(0, info.size), where, selection.includes)
    used, media, fields = {info.path: info}, list[Files](), table.fields
    if selection.includes("image"):
        images = [_image(files, table.problems, row) for row, files in enumerate(find_images(names, listing, info))]
        existing = {image.path: image for image in images if image is not None}
        if not existing:
            problem = f"none of the {len(names)} images of {where} is below {listing.url}, such as {names[0]!r}"
            raise SourceError(problem, "give the folder that holds the images and the annotations")
        used, media, fields = used | existing, [(IMAGES, images)], {"image": IMAGES.field_of(existing), **fields}
    if any(name not in fields for name in selection.fields):
        return open_source(listing, FieldSelection())  # with all fields, which the error about a missing one lists
    bad = {}
    for row, problem in sorted(table.problems.items()):
        bad[row] = BadSample(row, f"image {table.ids[row]} ({names[row]!r}) of {listing.store.url}", problem)
    files = [used[path] for path in sorted(used)]
    notes = {"annotations": info.path, **notes, "passed_over": len(listing.files) - len(files)}
    cut = partial(cut_media, listing.store, media, table.columns, bad)
    return RowSource(listing.url, files, fields, len(names), notes, cut)


def _image(files: Sequence[ObjectInfo], problems: dict[int, str], row: int) -> ObjectInfo | None:
    """Return the file of an image if there is exactly one, else None, with a problem of its row."""
    if len(files) == 1:
        return files[0]
    paths = " or ".join(info.path for info in files[:3])
    problems.setdefault(row, f"its file could be {paths}" if paths else "its file does not exist")
    return None


def _is_annotations(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder.rpartition("/")[2] == "annotations" or name == _MARK or _NAMED.match(name) is not None


def _annotations(listing: Listing) -> ObjectInfo:
    """Return the annotations file that the user names, or the only one."""
    if listing.inner:
        path = listing.inner.strip("/")
        named = next((info for info in listing.files if info.path == path), None)
        if named is None:
            problem = f"no file exists at {listing.store.url}/{path}"
            raise SourceError(problem, "name one behind ::/, from the folder on")
        return named
    documents = listing.of("json")
    candidates = [info for info in documents if _is_annotations(info.path)] or [*documents]
    if not candidates:
        remedy = "give the folder that holds annotations, such as instances_train2017.json, and the images"
        raise SourceError(f"{listing.url} holds no JSON file of annotations", remedy)
    if len(candidates) > 1:
        paths = ", ".join(info.path for info in candidates[:4]) + (", ..." if len(candidates) > 4 else "")
        remedy = f"choose one, like {listing.url}::/{candidates[0].path}, or another format="
        raise SourceError(f"{listing.url} holds {len(candidates)} files of annotations: {paths}", remedy)
    return candidates[0]


def find_images(names: Sequence[str | None], listing: Listing, annotations: ObjectInfo) -> Iterator[list[ObjectInfo]]:
    """Yield the files that each image can have: one, unless it is missing or ambiguous.

    A file matches if its path ends with the image's name. Of several, one is preferred in the folder of the split
    (`train2017` for instances_train2017.json), beside the annotations, in the root, or in a folder `images`, in this
    order.
    """
    paths = [(name or "").replace("\\", "/").removeprefix("./") for name in names]
    by_name: dict[str, list[ObjectInfo]] = {path.rpartition("/")[2]: [] for path in paths}
    for info in listing.visible:
        by_name.get(info.path.rpartition("/")[2], []).append(info)
    beside, _, document = annotations.path.rpartition("/")
    named = _NAMED.match(document)
    split = named[1] if named else document.removesuffix(".json")
    for path in paths:
        matching = [info for info in by_name[path.rpartition("/")[2]] if f"/{info.path}".endswith(f"/{path}")]
        ranks = [_rank(info.path[: -len(path)].rstrip("/"), split, beside) for info in matching]
        yield [info for info, rank in zip(matching, ranks, strict=True) if rank == min(ranks)]


def _rank(folder: str, split: str, beside: str) -> int:
    last = folder.rpartition("/")[2]
    return [last == split, folder == beside, not folder, last == "images", True].index(True)


FORMATS = (SourceFormat("coco", matches, open_source, marked=True),)
