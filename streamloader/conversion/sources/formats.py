"""The formats that can be converted, and which one a source is in. A new one is a file and a line here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamloader.conversion.sources.arrow import arrowfiles, huggingface, parquet
from streamloader.conversion.sources.base import Source
from streamloader.conversion.sources.choose import choose
from streamloader.conversion.sources.files import Listing, list_source
from streamloader.conversion.sources.folders import audio, coco, imagefolder
from streamloader.conversion.sources.loaders import litdata, mds, tfrecord
from streamloader.conversion.sources.tars import webdataset
from streamloader.conversion.sources.tensors import hdf5, netcdf, npy, tokens, zarrstores
from streamloader.conversion.sources.text import csvfiles, jsonl
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError, UsageError


@dataclass(frozen=True)
class SourceFormat:
    """`matches` looks at names only; `open` reads headers and checks the schema, and may follow the wish itself.

    `marked` formats are known by a file of their own, such as an index: they win over those that only see files of
    a kind that they know. Values may be missing in those that are `nullable`.
    """

    matches: Callable[[Listing], bool]
    open: Callable[[Listing, Wish], Source]
    marked: bool = False
    nullable: bool = False


FORMATS: Mapping[str, SourceFormat] = {
    imagefolder.NAME: SourceFormat(imagefolder.matches, imagefolder.open_source),
    webdataset.NAME: SourceFormat(webdataset.matches, webdataset.open_source),
    npy.NAME: SourceFormat(npy.matches, npy.open_source),
    parquet.NAME: SourceFormat(parquet.matches, parquet.open_source, nullable=True),
    arrowfiles.NAME: SourceFormat(arrowfiles.matches, arrowfiles.open_source, nullable=True),
    huggingface.NAME: SourceFormat(huggingface.matches, huggingface.open_source, marked=True, nullable=True),
    coco.NAME: SourceFormat(coco.matches, coco.open_source, marked=True),
    audio.NAME: SourceFormat(audio.matches, audio.open_source),
    tfrecord.NAME: SourceFormat(tfrecord.matches, tfrecord.open_source, nullable=True),
    mds.NAME: SourceFormat(mds.matches, mds.open_source, marked=True),
    litdata.NAME: SourceFormat(litdata.matches, litdata.open_source, marked=True),
    hdf5.NAME: SourceFormat(hdf5.matches, hdf5.open_source),
    netcdf.NAME: SourceFormat(netcdf.matches, netcdf.open_source),
    zarrstores.NAME: SourceFormat(zarrstores.matches, zarrstores.open_source, marked=True),
    tokens.NAME: SourceFormat(tokens.matches, tokens.open_source),
    csvfiles.NAME: SourceFormat(csvfiles.matches, csvfiles.open_source, nullable=True),
    jsonl.NAME: SourceFormat(jsonl.matches, jsonl.open_source, nullable=True),
}


def open_source(
    src: str | os.PathLike[str], format_name: str | None, options: Mapping[str, Any], wish: Wish
) -> tuple[str, Source]:
    """Return the format's name and the source at `src`, opened, with the fields that are wished.

    Raises `UsageError` for an unknown format, or where several fit; `SourceError` where none does; `FieldError` for a
    field that it has not.
    """
    known = ", ".join(FORMATS)
    if format_name is not None and format_name not in FORMATS:
        raise UsageError(f"format {format_name!r}", f"choose one of {known}")
    listing = list_source(src, options)
    chosen = format_name or _detect(listing)
    if wish.fill and not FORMATS[chosen].nullable:
        able = ", ".join(name for name, each in FORMATS.items() if each.nullable)
        raise UsageError(f"fill, for {chosen}, in which no value is missing", f"use map; fill works for {able}")
    return chosen, choose(FORMATS[chosen].open(listing, wish), wish)


def _detect(listing: Listing) -> str:
    fitting = [name for name, each in FORMATS.items() if each.matches(listing)]
    fitting = [name for name in fitting if FORMATS[name].marked] or fitting
    if len(fitting) > 1:
        raise UsageError(
            f"{listing.url} fits the formats {' and '.join(fitting)}", f"choose with --format {fitting[0]}"
        )
    if not fitting:
        seen = ", ".join(info.path for info in listing.files[:3])
        remedy = f"docs/conversion.md lists what can be converted; say which it is with --format ({', '.join(FORMATS)})"
        raise SourceError(f"no known format fits {listing.url} ({len(listing.files)} files: {seen}, ...)", remedy)
    return fitting[0]
