"""The formats that can be converted, and which one a source is in. A new one is a module, listed here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from streamloader.conversion.sources import arrow, coco, hdf5, mds, media, npy, tar, text, tfrecord, zarr
from streamloader.conversion.sources.base import Source
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat, choose
from streamloader.conversion.sources.files import Listing, list_source
from streamloader.conversion.sources.mds import has_index
from streamloader.errors import SourceError, UsageError

FORMATS: Mapping[str, SourceFormat] = {
    each.name: each
    for module in (media, tar, npy, arrow, coco, tfrecord, mds, hdf5, zarr, text)
    for each in module.FORMATS
}
_LITDATA_CHUNK = re.compile(r"\Achunk-.*\.bin\Z")


def open_source(
    src: str | os.PathLike[str], format_name: str | None, options: Mapping[str, Any], selection: FieldSelection
) -> tuple[str, Source]:
    """Return the format's name and the source at `src`, opened, with the selected fields.

    Raises `UsageError` for an unknown format, or where several fit; `SourceError` where none does; `FieldError` for a
    field that it has not.
    """
    known = ", ".join(FORMATS)
    if format_name is not None and format_name not in FORMATS:
        raise UsageError(f"format {format_name!r}", f"choose one of {known}")
    listing = list_source(src, options)
    chosen = format_name or _detect(listing)
    if selection.fill and not FORMATS[chosen].nullable:
        able = ", ".join(name for name, each in FORMATS.items() if each.nullable)
        raise UsageError(f"fill, for {chosen}, in which no value is missing", f"use map; fill works for {able}")
    return chosen, choose(FORMATS[chosen].open(listing, selection), selection)


def _detect(listing: Listing) -> str:
    if has_index(listing, _LITDATA_CHUNK):
        remedy = "its own package reads it: sl.convert(DATASET, DST), see formats/litdata/MAPPING.md"
        raise SourceError(f"{listing.url} is a LitData dataset, which is not read from its files", remedy)
    fitting = [name for name, each in FORMATS.items() if each.matches(listing)]
    fitting = [name for name in fitting if FORMATS[name].marked] or fitting
    if len(fitting) > 1:
        several = " and ".join(fitting)
        raise UsageError(f"{listing.url} fits the formats {several}", f"choose with --format {fitting[0]}")
    if not fitting:
        seen = ", ".join(info.path for info in listing.files[:3])
        remedy = f"docs/conversion.md lists what can be converted; name the format with --format ({', '.join(FORMATS)})"
        raise SourceError(f"no known format fits {listing.url} ({len(listing.files)} files: {seen}, ...)", remedy)
    return fitting[0]
