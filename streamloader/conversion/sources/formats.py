"""The formats that can be converted, and which one a source is in. A new one is a file and a line here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamloader.conversion.sources import imagefolder, npy, webdataset
from streamloader.conversion.sources.base import Source
from streamloader.conversion.sources.files import Listing, list_source
from streamloader.errors import SourceError, UsageError


@dataclass(frozen=True)
class SourceFormat:
    """`matches` looks at names only; `open` reads headers and checks the schema."""

    matches: Callable[[Listing], bool]
    open: Callable[[Listing], Source]


FORMATS: Mapping[str, SourceFormat] = {
    imagefolder.NAME: SourceFormat(imagefolder.matches, imagefolder.open_source),
    webdataset.NAME: SourceFormat(webdataset.matches, webdataset.open_source),
    npy.NAME: SourceFormat(npy.matches, npy.open_source),
}


def open_source(src: str | os.PathLike[str], format_name: str | None, options: Mapping[str, Any]) -> tuple[str, Source]:
    """Return the format's name and the source at `src`, opened.

    Raises `UsageError` for an unknown format, or where several fit; `SourceError` where none does.
    """
    known = ", ".join(FORMATS)
    if format_name is not None and format_name not in FORMATS:
        raise UsageError(f"format {format_name!r}", f"choose one of {known}")
    listing = list_source(src, options)
    fitting = [name for name, each in FORMATS.items() if each.matches(listing)]
    if format_name is None and len(fitting) > 1:
        raise UsageError(
            f"{listing.url} fits the formats {' and '.join(fitting)}", f"choose with --format {fitting[0]}"
        )
    if format_name is None and not fitting:
        seen = ", ".join(info.path for info in listing.files[:3])
        remedy = f"known are class folders of images, .tar, .npy and .npz; say which with --format ({known})"
        raise SourceError(f"no known format fits {listing.url} ({len(listing.files)} files: {seen}, ...)", remedy)
    chosen = format_name or fitting[0]
    return chosen, FORMATS[chosen].open(listing)
