"""Image folders: `root/<class>/**/x.jpg`, or `root/<split>/<class>/**/x.jpg`. See formats/imagefolder/MAPPING.md."""

from __future__ import annotations

from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.folders.classfolder import MediaFolder, Medium, open_classes
from streamloader.conversion.sources.folders.images import ENCODINGS, image_problem
from streamloader.conversion.sources.wish import Wish

NAME = "imagefolder"
IMAGES = Medium("image", "image", ENCODINGS, image_problem)


def matches(listing: Listing) -> bool:
    """Return whether some visible image stands in a folder of the listing."""
    return listing.folder and any("/" in info.path for info in IMAGES.files(listing))


def open_source(listing: Listing, _wish: Wish) -> MediaFolder:
    """Return the source; its rows are sorted by class, then by path.

    Raises `SourceError` for a class folder or a split without images, or where there is no image.
    """
    return open_classes(listing, IMAGES)
