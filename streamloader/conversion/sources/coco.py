"""COCO: a JSON file of annotations, and the images that it names. See formats/coco/MAPPING.md.

The file is parsed in one go, since JSON has no index. Its annotations become columns, one row for each image by
ascending id; each value is checked: a wrong one is a problem of its image, not of the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Source
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat
from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.media import IMAGES, Files, cut_media
from streamloader.conversion.sources.ranged_io import READ_THREADS, Content, Stream
from streamloader.errors import SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.storage.store import ObjectInfo

MAX_JSON = 8 << 30  # bytes: parsing takes several times as much memory
_NAMED = re.compile(r"(?:instances|captions|person_keypoints)_(.*)\.json\Z", re.IGNORECASE)
_MARK = "_annotations.coco.json"
_REPAIR = "repair the file, or make it again"
_MAX_POINTS = 1000  # keypoints of one annotation: those that have none take as much memory
_LARGEST = float(np.finfo(np.float32).max)
_INT64 = np.iinfo(np.int64)
_SHOWN = 60  # characters of a wrong value
_ASCII = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_UNICODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)

Item = dict[str, Any]
Parse = Callable[[Any], float | Sequence[float] | str]  # raises ValueError, which says what was expected


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of the images of a file, by ascending id, and the `problems` of their rows.

    Columns that are not `wanted`, and those of keys that no entry has, are left out.
    """

    ids: NDArray[np.int64]
    wanted: Callable[[str], bool]
    problems: dict[int, str]
    fields: dict[str, Field] = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)

    def add(self, name: str, kind: Field, key: str, parse: Parse, entries: Sequence[tuple[int, Item]]) -> None:
        """Add what entries have under a key, each with the row of its image; rows ascend.

        A tensor has one entry for each image, a ragged field or a text, which is a JSON list, any number.
        """
        if not (self.wanted(name) and any(key in item for _, item in entries)):
            return
        width = int(np.prod(kind.shape, dtype=np.int64))
        blank = "null" if kind.kind == "text" else (0,) * width if kind.shape else 0  # of what is wrong
        found: list[Any] = []
        for row, item in entries:
            value = item.get(key)
            try:
                found.append(parse(value))
            except ValueError as error:
                noun, problem = "entry" if kind.fixed else "annotation", f"has {key} {_shown(value)}"
                problem = problem if key in item else f"has no {key}"
                self.problems.setdefault(row, f"its {noun} {_shown(item.get('id'))} {problem}: {error}")
                found.append(blank)
        self.fields[name] = kind
        edges = np.searchsorted([row for row, _ in entries], np.arange(len(self.ids) + 1))
        if kind.kind == "text":
            self.columns[name] = [f"[{','.join(found[a:b])}]".encode() for a, b in pairwise(edges.tolist())]
            return
        values = np.array(found).reshape(len(found), width).astype(np.dtype(kind.dtype).newbyteorder("<"))
        data = values.tobytes()
        cuts = pairwise((edges * kind.item_bytes).tolist())
        self.columns[name] = values[:, 0] if kind.fixed else [data[a:b] for a, b in cuts]


def _whole(value: Any) -> int:
    if type(value) is not int or not _INT64.min <= value <= _INT64.max:
        raise ValueError("expected a whole number of 64 bits")
    return value


def _flag(value: Any) -> int:
    if value is not None and (type(value) not in (int, bool) or value not in (0, 1)):
        raise ValueError("expected 0 or 1")
    return int(value or 0)


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _LARGEST:  # NaN is not less
        raise ValueError("expected a number that float32 holds")
    return float(value)


def _numbers(count: int, *, optional: bool = False) -> Parse:
    """Return the parser of a list of `count` numbers; zeros for a list that is optional and missing or empty."""

    def parse(value: Any) -> Sequence[float]:
        if optional and (value is None or value == []):
            return (0.0,) * count
        if type(value) is not list or len(value) != count:
            raise ValueError(f"expected {count} numbers")
        return [_number(one) for one in value]

    return parse


def _segmentation(value: Any) -> str:
    """Return the JSON that `_parse` made of polygons. Raises ValueError for what it left as it was."""
    if value is not None and not isinstance(value, str):
        raise ValueError("expected numbers that are finite")
    return value or "null"


def _text(value: Any) -> str:
    """Return a value as JSON for people to read. Raises ValueError for NaN, which only some programs take for JSON."""
    text = _UNICODE.encode(value)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and UTF-8 cannot
        return _ASCII.encode(value)
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def read_annotations(
    data: bytes, where: str, wanted: Callable[[str], bool]
) -> tuple[Table, list[str | None], dict[str, Any]]:
    """Return what a COCO file holds: a table, and the names of its images and notes.

    An image whose entry or annotations do not have what the others have is a problem of its row. Raises `SourceError`
    for what is not a COCO file, and for two images, or categories, of one id.
    """
    document = _parse(data, where, wanted("segmentation"))
    images, annotations, categories = (_items(document, key, where) for key in ("images", "annotations", "categories"))
    _distinct(where, "images", "file_name", [_name(one) for one in images])
    ids = np.array(_ids(images, "images", where), np.int64)
    images = [images[i] for i in np.argsort(ids).tolist()]
    names = [_name(one) for one in images]
    no_name = {row: "its entry has no file_name" for row, name in enumerate(names) if name is None}
    table = Table(np.sort(ids), wanted, no_name, {"image_id": Field("tensor", "int64")}, {"image_id": np.sort(ids)})
    for key in ("width", "height"):
        table.add(key, Field("tensor", "int64"), key, _whole, list(enumerate(images)))
    rows = {image: row for row, image in enumerate(table.ids.tolist())}
    of_images = [one["image_id"] if type(one.get("image_id")) is int else None for one in annotations]
    known = [(rows[image], one) for image, one in zip(of_images, annotations, strict=True) if image in rows]
    notes: dict[str, Any] = {"unknown_images": len(annotations) - len(known)}
    if known:
        notes |= _add_annotations(table, known, categories, where)
    return table, names, notes


def _parse(data: bytes, where: str, segmented: bool) -> Any:
    def shrink(found: Item) -> Item:
        """Keep polygons as text, if they are finite: as Python's own numbers they take most of the memory."""
        if "segmentation" in found:
            with suppress(ValueError):
                found["segmentation"] = _ASCII.encode(found["segmentation"]) if segmented else None
        return found

    try:
        return json.loads(data, object_hook=shrink)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where} is not valid JSON: {error}", _REPAIR) from None


def _items(document: Any, key: str, where: str) -> list[Item]:
    found = document.get(key, [] if key == "categories" else None) if isinstance(document, dict) else None
    if not isinstance(found, list) or (key == "images" and not found):
        raise SourceError(f"{where} is not a COCO file: it has no list {key!r}", "name one with images and annotations")
    wrong = next((at for at, one in enumerate(found) if type(one) is not dict), None)
    if wrong is not None:
        raise SourceError(f"{where}: {key}[{wrong}] is a {type(found[wrong]).__name__}", _REPAIR)
    return found


def _name(image: Item) -> str | None:
    name = image.get("file_name")
    return name if name and isinstance(name, str) else None


def _ids(items: Sequence[Item], key: str, where: str) -> list[int]:
    """Return the ids of all items. Raises `SourceError` for one that is not an int64, or that two of them have."""
    ids: list[int] = []
    for at, one in enumerate(items):
        try:
            ids.append(_whole(one.get("id")))
        except ValueError as error:
            raise SourceError(f"{where}: {key}[{at}] has id {_shown(one.get('id'))}: {error}", _REPAIR) from None
    _distinct(where, key, "id", ids)
    return ids


def _distinct(where: str, key: str, what: str, values: Sequence[int | str | None]) -> None:
    first: dict[int | str, int] = {}
    for at, value in enumerate(values):
        if value is not None and first.setdefault(value, at) != at:
            both = f"{key}[{first[value]}] and {key}[{at}]"
            raise SourceError(f"{where}: {both} have one {what}, {_shown(value)}", "give each its own")


def _add_annotations(
    table: Table, known: Sequence[tuple[int, Item]], categories: Sequence[Item], where: str
) -> dict[str, Any]:
    """Add the columns of annotations, each with its row; return the notes on their classes and keypoints."""
    notes: dict[str, Any] = {}
    labels: dict[Any, int] = {}
    if any("category_id" in one for _, one in known):
        ids = sorted(_ids(categories, "categories", where))
        labels = {category: label for label, category in enumerate(ids)}
        named = {one["id"]: _printable(one.get("name", one["id"])) for one in categories}
        notes = {"classes": {"labels": [named[category] for category in ids]}, "category_ids": ids}

    def label(value: Any) -> int:
        if type(value) is not int or value not in labels:
            raise ValueError("no category has this id")
        return labels[value]

    points = next((len(one["keypoints"]) // 3 for _, one in known if _filled(one.get("keypoints"))), 0)
    columns: list[tuple[str, str, str, Parse]] = [
        ("boxes", "ragged:float32[4]", "bbox", _numbers(4)),
        ("labels", "ragged:int64", "category_id", label),
        ("area", "ragged:float32", "area", _number),
        ("iscrowd", "ragged:bool", "iscrowd", _flag),
        ("annotation_ids", "ragged:int64", "id", _whole),
        ("segmentation", "text", "segmentation", _segmentation),
        ("captions", "text", "caption", _text),
    ]
    if points and table.wanted("keypoints"):
        if points > _MAX_POINTS:
            raise SourceError(f"{where}: an annotation has {points} keypoints, up to {_MAX_POINTS} are read", _REPAIR)
        parse = _numbers(3 * points, optional=True)  # COCO's own zeros: a point that is not labelled
        columns.insert(5, ("keypoints", f"ragged:float32[{points},3]", "keypoints", parse))
        pairs = [(one.get("name"), one["keypoints"]) for one in categories if _filled(one.get("keypoints"))]
        notes["keypoints"] = {_printable(name): list(map(_printable, some)) for name, some in pairs}
    ordered = sorted(known, key=itemgetter(0))
    for name, kind, key, parse in columns:
        table.add(name, Field.parse(kind), key, parse, ordered)
    return notes


def _printable(value: Any) -> str:
    return str(value).encode(errors="replace").decode()


def _filled(value: Any) -> bool:
    return type(value) is list and bool(value)


def matches(listing: Listing) -> bool:
    """Return whether there are images, and a JSON file that is called or lies as COCO's annotations do."""
    if not listing.folder or not any(_is_annotations(info.path) for info in listing.of("json")):
        return False
    return bool(IMAGES.files(listing))


def open_source(listing: Listing, selection: FieldSelection) -> Source:
    """Return the source: a row for each image, by ascending id. The annotations file is read whole.

    Raises `SourceError` where there is not one annotations file to choose, where it is not a COCO file, or where none
    of its images is there.
    """
    info = _annotations(listing)
    where = f"{listing.store.url}/{info.path}"
    if info.size > MAX_JSON:
        raise SourceError(f"{where} has {info.size} bytes, up to {MAX_JSON} are read", "cut it in several")
    stream = Stream(Content(listing.store, info, "", info.size), READ_THREADS)
    table, names, notes = read_annotations(stream.read(0, info.size), where, selection.wanted)
    used, media, fields = {info.path: info}, list[Files](), table.fields
    if selection.wanted("image"):
        images = [_image(found, table.problems, row) for row, found in enumerate(find_images(names, listing, info))]
        there = {image.path: image for image in images if image is not None}
        if not there:
            problem = f"none of the {len(names)} images of {where} is below {listing.url}, such as {names[0]!r}"
            raise SourceError(problem, "give the folder that holds the images and the annotations")
        used, media, fields = used | there, [(IMAGES, images)], {"image": IMAGES.field_of(there), **fields}
    if any(name not in fields for name in selection.fields):
        return open_source(listing, FieldSelection())  # with all fields, to be named in an error
    bad = {}
    for row, problem in sorted(table.problems.items()):
        bad[row] = BadSample(row, f"image {table.ids[row]} ({names[row]!r}) of {listing.store.url}", problem)
    files = [used[path] for path in sorted(used)]
    notes = {"annotations": info.path, **notes, "passed_over": len(listing.files) - len(files)}
    cut = partial(cut_media, listing.store, media, table.columns, bad)
    return Source(listing.url, files, fields, len(names), notes, cut)


def _image(found: Sequence[ObjectInfo], problems: dict[int, str], row: int) -> ObjectInfo | None:
    """Return the file of an image, where just one was found; else add to the problems."""
    if len(found) == 1:
        return found[0]
    several = " or ".join(info.path for info in found[:3])
    problems.setdefault(row, f"its file could be {several}" if several else "its file is nowhere below")
    return None


def _is_annotations(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder.rpartition("/")[2] == "annotations" or name == _MARK or _NAMED.match(name) is not None


def _annotations(listing: Listing) -> ObjectInfo:
    """Return the annotations file that the user names, or the one that is there."""
    if listing.inner:
        path = listing.inner.strip("/")
        found = [info for info in listing.files if info.path == path]
        if not found:
            raise SourceError(f"no file is {listing.store.url}/{path}", "name one behind ::/, from the folder on")
        return found[0]
    documents = listing.of("json")
    found = [info for info in documents if _is_annotations(info.path)] or [*documents]
    if not found:
        remedy = "give the folder that holds annotations, such as instances_train2017.json, and the images"
        raise SourceError(f"{listing.url} holds no JSON file of annotations", remedy)
    if len(found) > 1:
        some = ", ".join(info.path for info in found[:4]) + (", ..." if len(found) > 4 else "")
        remedy = f"choose one, like {listing.url}::/{found[0].path}, or choose another --format"
        raise SourceError(f"{listing.url} holds {len(found)} files of annotations: {some}", remedy)
    return found[0]


def find_images(
    names: Sequence[str | None], listing: Listing, annotations: ObjectInfo
) -> Iterator[Sequence[ObjectInfo]]:
    """Yield the files that each image can have: one, unless it is missing or ambiguous.

    A file fits that is called so from some folder on. Of several the one is taken that lies right in the folder of the
    split (`train2017` for instances_train2017.json), beside the annotations, in the root, or in a folder `images`: the
    first of these that holds one.
    """
    paths = [(name or "").replace("\\", "/").removeprefix("./") for name in names]
    by_name: dict[str, list[ObjectInfo]] = {path.rpartition("/")[2]: [] for path in paths}
    for info in listing.visible:
        by_name.get(info.path.rpartition("/")[2], []).append(info)
    beside, _, own = annotations.path.rpartition("/")
    named = _NAMED.match(own)
    split = named[1] if named else own.removesuffix(".json")
    for path in paths:
        fitting = [info for info in by_name[path.rpartition("/")[2]] if f"/{info.path}".endswith(f"/{path}")]
        ranks = [_rank(info.path[: -len(path)].rstrip("/"), split, beside) for info in fitting]
        yield [info for info, rank in zip(fitting, ranks, strict=True) if rank == min(ranks)]


def _rank(folder: str, split: str, beside: str) -> int:
    last = folder.rpartition("/")[2]
    return [last == split, folder == beside, not folder, last == "images", True].index(True)


FORMATS = (SourceFormat("coco", matches, open_source, marked=True),)
