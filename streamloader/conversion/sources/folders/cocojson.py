"""A COCO annotations file as columns: one row for each image, by ascending id. Nothing here looks at images.

The whole file is parsed at once, since JSON has no index. Its annotations become compact arrays with offsets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.folders.cocotable import (
    Entries,
    Item,
    Numbers,
    Table,
    flag,
    number,
    numbers,
    shown,
    whole,
)
from streamloader.conversion.sources.folders.packed import Values
from streamloader.errors import SourceError
from streamloader.format.manifest import Field

_REPAIR = "repair the file, or make it again"
_MAX_POINTS = 1000  # keypoints of one annotation: those that have none take as much memory
_ASCII = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_UNICODE = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)

Wanted = Callable[[str], bool]


@dataclass(frozen=True, eq=False)
class Annotated:
    """The images of a file, by ascending id: their `ids`, their file `names`, and the `columns` of the `fields`.

    `problems` are the rows that cannot be used, and why.
    """

    ids: NDArray[np.int64]
    names: tuple[str, ...]
    fields: Mapping[str, Field]
    columns: Mapping[str, Values]
    problems: Mapping[int, str]
    notes: Mapping[str, Any]


def read_annotations(data: bytes, where: str, wanted: Wanted) -> Annotated:
    """Return what a COCO file holds; columns that are not `wanted` are left out.

    An image whose entry or annotations do not have what the others have is a problem of its row. Raises `SourceError`
    for what is no COCO file, and for two images, or categories, of one id.
    """
    document = _parse(data, where, wanted("segmentation"))
    images, annotations, categories = (_items(document, key, where) for key in ("images", "annotations", "categories"))
    ids = np.array(_unique_ids(images, "images", where), np.int64)
    order = np.argsort(ids)
    images, ids = [images[i] for i in order.tolist()], ids[order]
    names = _names(images, where)
    table = Table(len(ids), {row: "its entry has no file_name" for row, name in enumerate(names) if not name})
    entries = Entries("entry", images, np.arange(len(ids), dtype=np.int64))
    for key in ("width", "height"):
        if wanted(key) and entries.holds(key):
            table.tensor(key, entries, "int64", whole)
    rows = {image: row for row, image in enumerate(ids.tolist())}
    at = [rows.get(one.get("image_id"), -1) if type(one.get("image_id")) is int else -1 for one in annotations]
    known = [one for one, row in zip(annotations, at, strict=True) if row >= 0]
    notes: dict[str, Any] = {"unknown_images": len(annotations) - len(known)}
    if known:
        found = Entries("annotation", known, np.array([row for row in at if row >= 0], np.int64))
        try:
            notes |= _add_boxes(table, found, categories, wanted) | _add_keypoints(table, found, categories, wanted)
        except ValueError as error:
            raise SourceError(f"{where}: {error}", _REPAIR) from None
        _add_texts(table, found, wanted)
    return Annotated(ids, names, table.fields, table.columns, table.problems, notes)


def _parse(data: bytes, where: str, segmented: bool) -> Any:
    def shrink(found: Item) -> Item:
        """Keep polygons as text: as Python's own numbers they take most of the memory."""
        if "segmentation" in found:
            found["segmentation"] = _json(found["segmentation"], _ASCII) if segmented else ""
        return found

    try:
        return json.loads(data, object_hook=shrink)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where} is no JSON that can be read: {error}", _REPAIR) from None


def _items(document: Any, key: str, where: str) -> list[Item]:
    found = document.get(key, [] if key == "categories" else None) if isinstance(document, dict) else None
    if not isinstance(found, list) or (key == "images" and not found):
        raise SourceError(f"{where} is no COCO file: it has no list {key!r}", "give a file with images and annotations")
    wrong = next((at for at, one in enumerate(found) if type(one) is not dict), None)
    if wrong is not None:
        raise SourceError(f"{where}: {key}[{wrong}] is a {type(found[wrong]).__name__}", _REPAIR)
    return found


def _unique_ids(items: Sequence[Item], key: str, where: str) -> list[int]:
    found: dict[int, int] = {}
    for at, one in enumerate(items):
        try:
            (value,) = map(int, whole(one.get("id")))
        except ValueError as error:
            raise SourceError(f"{where}: {key}[{at}] has id {shown(one.get('id'))}: {error}", _REPAIR) from None
        if value in found:
            raise SourceError(f"{where}: {key}[{found[value]}] and {key}[{at}] have one id, {value}", "repair it")
        found[value] = at
    return list(found)


def _names(images: Sequence[Item], where: str) -> tuple[str, ...]:
    """Return the file name of each image, empty where it has none."""
    names: dict[str, int] = {}
    out: list[str] = []
    for image in images:
        name = image.get("file_name")
        name = name if isinstance(name, str) else ""
        if name in names:
            problem = f"{where}: the images {names[name]} and {image['id']} have one file_name, {shown(name)}"
            raise SourceError(problem, "give each its own, or join them")
        if name:
            names[name] = image["id"]
        out.append(name)
    return tuple(out)


def _add_boxes(table: Table, found: Entries, categories: Sequence[Item], wanted: Wanted) -> dict[str, Any]:
    """Add boxes, labels, area, iscrowd and annotation_ids; return the names of the classes."""
    notes: dict[str, Any] = {}
    if wanted("boxes") and found.holds("bbox"):
        table.ragged("boxes", Field("ragged", "float32", (4,)), found, "bbox", numbers(4))
    if found.holds("category_id"):
        ids = sorted(_unique_ids(categories, "categories", "categories"))
        labels = {category: label for label, category in enumerate(ids)}

        def label_of(value: Any) -> Numbers:
            if type(value) is not int or value not in labels:
                raise ValueError("no category has this id")
            return (labels[value],)

        if wanted("labels"):
            table.ragged("labels", Field("ragged", "int64"), found, "category_id", label_of)
        named = {one["id"]: _told(one.get("name", one["id"])) for one in categories}
        notes = {"classes": {"labels": [named[category] for category in ids]}, "category_ids": ids}
    for name, key, dtype, parse in (
        ("area", "area", "float32", number),
        ("iscrowd", "iscrowd", "bool", flag),
        ("annotation_ids", "id", "int64", whole),
    ):
        if wanted(name) and found.holds(key):
            table.ragged(name, Field("ragged", dtype), found, key, parse)
    return notes


def _add_keypoints(table: Table, found: Entries, categories: Sequence[Item], wanted: Wanted) -> dict[str, Any]:
    """Add keypoints, (x, y, visibility) each; return their names. Raises ValueError where there are too many."""
    count = next((len(one["keypoints"]) // 3 for one in found.items if _filled(one.get("keypoints"))), 0)
    if not count or not wanted("keypoints"):
        return {}
    if count > _MAX_POINTS:
        raise ValueError(f"an annotation has {count} keypoints, up to {_MAX_POINTS} are read")
    absent, parse = (0.0,) * 3 * count, numbers(3 * count)  # COCO's own way to say that a point is not labelled

    def points(value: Any) -> Numbers:
        return absent if value is None or value == [] else parse(value)

    table.ragged("keypoints", Field("ragged", "float32", (count, 3)), found, "keypoints", points)
    named = [(one.get("name"), one["keypoints"]) for one in categories if _filled(one.get("keypoints"))]
    return {"keypoints": {_told(name): list(map(_told, some)) for name, some in named}}


def _add_texts(table: Table, found: Entries, wanted: Wanted) -> None:
    """Add segmentation and captions, as JSON: null for an annotation that has none."""
    if wanted("segmentation") and found.holds("segmentation"):
        table.texts("segmentation", found, [one.get("segmentation", "null") for one in found.items])
    if wanted("captions") and found.holds("caption"):
        table.texts("captions", found, [_text(one.get("caption")) for one in found.items])


def _text(value: Any) -> str:
    """Return a value as JSON for people to read."""
    text = _json(value, _UNICODE)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can write and UTF-8 cannot
        return _json(value, _ASCII)
    return text


def _json(value: Any, encoder: json.JSONEncoder) -> str:
    """Return a value as JSON; nothing for numbers such as NaN, which only some programs take for JSON."""
    try:
        return encoder.encode(value)
    except ValueError:
        return ""


def _told(value: Any) -> str:
    return str(value).encode(errors="replace").decode()


def _filled(value: Any) -> bool:
    return type(value) is list and bool(value)
