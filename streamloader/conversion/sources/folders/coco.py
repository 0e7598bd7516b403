"""COCO: a JSON file of annotations, and the images that it names. See formats/coco/MAPPING.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import base
from streamloader.conversion.sources.base import BadSample, Range, Refuse
from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.folders.cocojson import Annotated, read_annotations
from streamloader.conversion.sources.folders.imagefolder import IMAGES
from streamloader.conversion.sources.folders.packed import Packed, Values, take
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.storage.protocol import ObjectInfo, Store

NAME = "coco"

MAX_JSON = 8 << 30  # bytes: parsing takes several times as much memory
_NAMED = re.compile(r"(?:instances|captions|person_keypoints)_(.*)\.json\Z", re.IGNORECASE)
_MARK = "_annotations.coco.json"


def matches(listing: Listing) -> bool:
    """Return whether there are images, and a JSON file that is called or lies as COCO's annotations do."""
    if not listing.folder or not any(_is_annotations(info.path) for info in listing.of("json")):
        return False
    return bool(IMAGES.files(listing))


def open_source(listing: Listing, wish: Wish) -> Coco:
    """Return the source: a row for each image, by ascending id. The annotations file is read whole.

    Raises `SourceError` where there is not one annotations file to choose, where it is no COCO file, or names no image
    that is there.
    """
    info = _annotations(listing)
    where = f"{listing.store.url}/{info.path}"
    if info.size > MAX_JSON:
        raise SourceError(f"{where} has {info.size} bytes, up to {MAX_JSON} are read", "cut it in several")
    starts = range(0, info.size, base.REQUEST_BYTES)
    ranges = [Range(info.path, start, min(start + base.REQUEST_BYTES, info.size)) for start in starts]
    found = read_annotations(b"".join(base.read_ranges(listing.store, ranges)), where, wish.wanted)
    with_image = wish.wanted("image")
    images = tuple(find_images(found.names, listing.visible if with_image else (), info.path))
    if with_image and not any(isinstance(image, ObjectInfo) for image in images):
        problem = f"none of the {len(images)} images of {where} is below {listing.url}, such as {found.names[0]!r}"
        raise SourceError(problem, "give the folder that holds the images and the annotations")
    used = {info.path: info} | {image.path: image for image in images if isinstance(image, ObjectInfo)}
    files = tuple(used[path] for path in sorted(used))
    notes = {"annotations": info.path, **found.notes, "passed_over": len(listing.files) - len(files)}
    source = Coco(listing.store, listing.url, files, replace(found, notes=notes), images, with_image)
    if any(name not in source.fields for name in wish.fields):
        return open_source(listing, Wish())  # with all fields, to be named in an error
    return source


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
    names: Sequence[str], files: Sequence[ObjectInfo], annotations: str
) -> Iterable[ObjectInfo | tuple[str, ...]]:
    """Yield the file of each image, or the paths of those that it could be: none, or several.

    A file fits that is called so from some folder on. Of several the one is taken that lies right in the folder of the
    split (`train2017` for instances_train2017.json), beside the annotations, in the root, or in a folder `images`: the
    first of these that holds one.
    """
    last = {name.replace("\\", "/").rpartition("/")[2] for name in names}
    by_name: dict[str, list[ObjectInfo]] = {}
    for info in files:
        name = info.path.rpartition("/")[2]
        if name in last:
            by_name.setdefault(name, []).append(info)
    beside, _, own = annotations.rpartition("/")
    named = _NAMED.match(own)
    split = named[1] if named else own.removesuffix(".json")
    for written in names:
        name = written.replace("\\", "/").removeprefix("./")
        fitting = [info for info in by_name.get(name.rpartition("/")[2], ()) if f"/{info.path}".endswith(f"/{name}")]
        if len(fitting) > 1:
            folders = {info.path: info.path[: -len(name)].rstrip("/") for info in fitting}
            ranks = [_rank(folders[info.path], split, beside) for info in fitting]
            best = [info for info, rank in zip(fitting, ranks, strict=True) if rank == min(ranks)]
            fitting = best if len(best) == 1 else fitting
        yield fitting[0] if len(fitting) == 1 else tuple(info.path for info in fitting)


def _rank(folder: str, split: str, beside: str) -> int:
    last = folder.rpartition("/")[2]
    return [last == split, folder == beside, not folder, last == "images", True].index(True)


@dataclass(frozen=True, eq=False)
class Coco:
    """Images with their annotations. `images` has the file of each row, or those that it could be."""

    store: Store
    url: str
    files: Sequence[ObjectInfo]
    found: Annotated
    images: tuple[ObjectInfo | tuple[str, ...], ...]
    with_image: bool

    @property
    def num_samples(self) -> int:
        """One for each image."""
        return len(self.images)

    @property
    def fields(self) -> Mapping[str, Field]:
        """`image`, `image_id`, and what the annotations hold."""
        paths = [image.path for image in self.images if isinstance(image, ObjectInfo)]
        image = {"image": IMAGES.field_of(paths)} if self.with_image else {}
        return {**image, "image_id": Field("tensor", "int64"), **self.found.fields}

    @property
    def notes(self) -> Mapping[str, Any]:
        """Names of classes and keypoints, which file it was, and how many annotations and files were passed over."""
        return self.found.notes

    def part(self, rows: NDArray[np.int64]) -> CocoPart:
        """Return the images of these rows, with their annotations only."""
        found, some = self.found, rows.tolist()
        columns = {name: take(values, rows) for name, values in {"image_id": found.ids, **found.columns}.items()}
        problems = {i: found.problems[row] for i, row in enumerate(some) if row in found.problems}
        images = tuple(self.images[row] for row in some)
        names = tuple(found.names[row] for row in some)
        return CocoPart(self.store, images, names, columns, problems, self.with_image)


@dataclass(frozen=True, eq=False)
class CocoPart:
    """Some images with their annotations."""

    store: Store
    images: tuple[ObjectInfo | tuple[str, ...], ...]
    names: tuple[str, ...]
    columns: Mapping[str, Values]
    problems: Mapping[int, str]
    with_image: bool

    def read(self, refuse: Refuse) -> dict[str, Column]:
        """Return one column a field. An image that is not there, or cannot be decoded, or whose annotations are not as
        the others', is refused. Raises `SourceChangedError`.
        """
        good: list[int] = []
        for position in range(len(self.images)):
            problem = self.problems.get(position) or self._missing(position)
            if problem:
                number = int(np.asarray(self.columns["image_id"])[position])
                name = f"image {number} ({self.names[position]!r}) of {self.store.url}"
                refuse(BadSample(position, name, problem))
            else:
                good.append(position)
        if not self.with_image:
            return self._columns(good)
        files = [(i, image) for i in good if isinstance(image := self.images[i], ObjectInfo)]
        found = dict(IMAGES.read(self.store, files, refuse))
        return {"image": list(found.values()), **self._columns(list(found))}

    def _missing(self, position: int) -> str:
        image = self.images[position]
        if isinstance(image, ObjectInfo) or not self.with_image:
            return ""
        return f"its file could be {' or '.join(image[:3])}" if image else "its file is nowhere below"

    def _columns(self, positions: list[int]) -> dict[str, Column]:
        kept = {name: take(values, np.array(positions, np.int64)) for name, values in self.columns.items()}
        return {name: one.column() if isinstance(one, Packed) else one for name, one in kept.items()}
