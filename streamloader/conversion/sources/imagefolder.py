"""Image folders: `root/<class>/**/x.jpg`. See formats/imagefolder/MAPPING.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Range, Refuse, read_ranges
from streamloader.conversion.sources.files import Listing, extension, hidden
from streamloader.conversion.sources.images import ENCODINGS, image_problem
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.storage.protocol import ObjectInfo, Store

NAME = "imagefolder"


def matches(listing: Listing) -> bool:
    """Return whether some visible image stands in a folder of the listing."""
    return listing.folder and any(_is_image(info.path) and "/" in info.path for info in listing.files)


def open_source(listing: Listing, _wish: Wish) -> ImageFolder:
    """Return the source; its rows are sorted by class, then by path.

    Raises `SourceError` for a class folder without images, for images outside one, or where there is no image.
    """
    images = tuple(info for info in listing.files if _is_image(info.path))
    outside = next((info.path for info in images if "/" not in info.path), None)
    if outside is not None:
        raise SourceError(
            f"{listing.url}/{outside} is in no class folder", "put every image into a sub-folder named after its class"
        )
    classes = tuple(name for name in listing.top_folders() if not hidden(name))
    with_images = {info.path.split("/", 1)[0] for info in images}
    empty = [name for name in classes if name not in with_images]
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise SourceError(
            f"the class folder {listing.url}/{empty[0]}{more} holds no image", "add images to it, or remove it"
        )
    if not classes:
        raise SourceError(f"{listing.url} holds no class folder with images", "expected root/<class>/<image>")
    labels = {name: number for number, name in enumerate(classes)}
    images = tuple(sorted(images, key=lambda info: (labels[info.path.split("/", 1)[0]], info.path)))
    return ImageFolder(listing.store, listing.url, images, classes, len(listing.files) - len(images))


def _is_image(path: str) -> bool:
    return extension(path) in ENCODINGS and not hidden(path)


@dataclass(frozen=True)
class ImageFolder:
    """The images of class folders: fields `image` (as it stands in its file) and `label` (int64, the class's rank)."""

    store: Store
    url: str
    images: tuple[ObjectInfo, ...]
    classes: tuple[str, ...]
    passed_over: int

    @property
    def files(self) -> Sequence[ObjectInfo]:
        """The images."""
        return self.images

    @property
    def num_samples(self) -> int:
        """One for each image."""
        return len(self.images)

    @property
    def fields(self) -> Mapping[str, Field]:
        """`image` and `label`; the encoding is "mixed" where the extensions name several."""
        encodings = {ENCODINGS[extension(info.path)] for info in self.images}
        encoding = encodings.pop() if len(encodings) == 1 else "mixed"
        return {"image": Field("bytes", encoding=encoding), "label": Field("tensor", "int64")}

    @property
    def notes(self) -> Mapping[str, Any]:
        """The class names by label, and how many files were hidden or no images."""
        return {"classes": {"label": list(self.classes)}, "passed_over": self.passed_over}

    def part(self, rows: NDArray[np.int64]) -> ImagePart:
        """Return the images of these rows."""
        images = tuple(self.images[row] for row in rows.tolist())
        labels = {name: number for number, name in enumerate(self.classes)}
        return ImagePart(self.store, images, tuple(labels[info.path.split("/", 1)[0]] for info in images))


@dataclass(frozen=True)
class ImagePart:
    """Some images with their labels."""

    store: Store
    images: tuple[ObjectInfo, ...]
    labels: tuple[int, ...]

    def read(self, refuse: Refuse) -> dict[str, Column]:
        """Return `image` and `label`; what is no image is refused. Raises `SourceChangedError`."""
        ranges = [Range(info.path, 0, info.size) for info in self.images]
        images: list[bytes] = []
        labels: list[int] = []
        for position, data in enumerate(read_ranges(self.store, ranges)):
            image = bytes(data)
            problem = image_problem(image)
            if problem:
                name = f"{self.store.url}/{self.images[position].path}"
                refuse(BadSample(position, name, f"the image cannot be decoded: {problem}", data=image))
                continue
            images.append(image)
            labels.append(self.labels[position])
        return {"image": images, "label": np.array(labels, np.int64)}
