"""The registry of source formats, and the detection of a source's format. A new format is a module listed here."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamloader.conversion.sources import arrow, coco, hdf5, mds, media, npy, tar, text, tfrecord, zarr
from streamloader.conversion.sources.base import RowSource
from streamloader.conversion.sources.fields import FieldSelection, SourceFormat, choose
from streamloader.conversion.sources.files import DECODED, Listing, list_source
from streamloader.conversion.sources.mds import has_index
from streamloader.errors import SourceError, UsageError
from streamloader.options import parse_size

_MODULES = (media, tar, npy, arrow, coco, tfrecord, mds, hdf5, zarr, text)
FORMATS: Mapping[str, SourceFormat] = {form.name: form for module in _MODULES for form in module.FORMATS}
_LITDATA_CHUNK = re.compile(r"\Achunk-.*\.bin\Z")


def open_source(
    src: str | os.PathLike[str], format_name: str | None, options: Mapping[str, Any], selection: FieldSelection
) -> tuple[str, RowSource]:
    """Open the source at `src`; return the name of its format, and the source with the selected fields.

    Raises `UsageError` for an unknown format or if several fit, `SourceError` if none fits, `FieldError` for a field
    that the source lacks.
    """
    known = ", ".join(FORMATS)
    if format_name is not None and format_name not in FORMATS:
        raise UsageError(f"format {format_name!r}", f"choose one of {known}")
    if DECODED in options:
        selection = replace(selection, max_decoded=parse_size(options[DECODED], f"{DECODED}: "))
    listing = list_source(src, options)
    chosen = format_name or _detect(listing)
    if selection.fill and not FORMATS[chosen].nullable:
        nullable = ", ".join(name for name, source_format in FORMATS.items() if source_format.nullable)
        raise UsageError(f"fill, for {chosen}, in which no value is missing", f"use map; fill works for {nullable}")
    return chosen, choose(FORMATS[chosen].open(listing, selection), selection)


def _detect(listing: Listing) -> str:
    if has_index(listing, _LITDATA_CHUNK):
        remedy = "its own package reads it: sl.convert(DATASET, DST), see formats/litdata/MAPPING.md"
        raise SourceError(f"{listing.url} is a LitData dataset, which is not read from its files", remedy)
    matching = [name for name, source_format in FORMATS.items() if source_format.matches(listing)]
    matching = [name for name in matching if FORMATS[name].marked] or matching
    if len(matching) > 1:
        names = " and ".join(matching)
        raise UsageError(f"{listing.url} fits the formats {names}", f'choose with format="{matching[0]}"')
    if not matching:
        paths = ", ".join(info.path for info in listing.files[:3])
        remedy = f"name its format with format= ({', '.join(FORMATS)})"
        if any(media.IMAGES.files(listing)):
            remedy = "put images into a folder for each class, and give the folder of these; or " + remedy
        raise SourceError(f"no known format fits {listing.url} ({len(listing.files)} files: {paths}, ...)", remedy)
    return matching[0]
