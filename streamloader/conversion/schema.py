"""From a source to the geometry of what is written: a sample of rows, a codec for each field, sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Source, refuse_rows, spread_rows
from streamloader.format.codecs import Column, choose_codec, encode_chunk
from streamloader.format.geometry import Geometry, choose_layouts
from streamloader.format.manifest import Field, FieldLayout
from streamloader.format.values import column_size
from streamloader.options import Layout

PROBE_BYTES = 16 << 20  # what choosing codecs reads at most, unless 16 samples are more
PROBE_RUNS = 16  # places in the source: it is often sorted, and neighbours compress together
PROBE_ROWS = 1 << 20


@dataclass(frozen=True)
class Schema:
    """What the sampled rows say: each field's codec, and its mean stored and decoded bytes a sample."""

    fields: Mapping[str, Field]
    codecs: Mapping[str, str]
    sizes: Mapping[str, float]
    decoded: Mapping[str, float]

    def geometry(self, num_samples: int, options: Layout) -> Geometry:
        """Return how a dataset of so many of these samples is cut."""
        return choose_layouts(self.fields, self.sizes, self.codecs, num_samples, options, decoded=self.decoded)


def probe(source: Source, options: Layout, keep_bad: bool) -> Schema:
    """Read some rows and choose; the same source gives the same schema.

    With `keep_bad` bad samples are left to the shards that they belong to; else the first is a `SourceError`, now.
    Raises what reading raises.
    """
    fields = source.fields
    few = spread_rows(source.num_samples, PROBE_RUNS)
    columns = _read(source, few, keep_bad)
    row_bytes = sum(column_size(column) for column in columns.values()) / max(len(few), 1)
    rows = spread_rows(source.num_samples, int(min(PROBE_ROWS, PROBE_BYTES / max(row_bytes, 1.0))))
    if len(rows) > len(few):
        columns = _read(source, rows, keep_bad)
    codecs = {name: choose_codec(options.codec, field, columns[name]) for name, field in fields.items()}
    sizes = {name: _stored(fields[name], codecs[name], column) for name, column in columns.items()}
    decoded = {name: column_size(column) / max(1, len(column)) for name, column in columns.items()}
    return Schema(fields, codecs, sizes, decoded)


def _read(source: Source, rows: NDArray[np.int64], keep_bad: bool) -> dict[str, Column]:
    passed_over: list[BadSample] = []
    return source.part(rows).read(passed_over.append if keep_bad else refuse_rows(rows))


def _stored(field: Field, codec: str, column: Column) -> float:
    """Return the mean stored bytes a sample; those of an empty source are its decoded ones."""
    if len(column) == 0:
        return float(field.item_bytes)
    layout = FieldLayout(field, chunk=len(column), shard=len(column), codec=codec, resident=False)
    return len(encode_chunk(layout, column)) / len(column)
