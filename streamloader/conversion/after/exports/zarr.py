"""Export to a plain Zarr v3 group: an array for each field, chunked by samples, without shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from streamloader.conversion.after.exports.base import File, Piece, Task
from streamloader.format.codecs import encode_chunk
from streamloader.format.manifest import FieldLayout
from streamloader.format.metadata import field_document, group_document, to_bytes
from streamloader.format.opening import ROOT
from streamloader.options import MIB

OVERHEAD = 16
CHUNK_BYTES = 16 * MIB  # decoded: what a reader loads to see one sample; smaller ones would be many objects


@dataclass(frozen=True)
class ZarrExport:
    """Writes arrays whose chunks are cut as `task.layouts` say: each piece is whole chunks."""

    task: Task

    def files(self, piece: Piece) -> Iterator[File]:
        """Yield the chunks of one piece."""
        for name, layout in self.task.layouts.items():
            column = piece.columns[name]
            for start in range(0, len(column), layout.chunk):
                number = (piece.first + start) // layout.chunk
                yield layout.shard_key(name, number), encode_chunk(layout, column[start : start + layout.chunk])

    def last_files(self) -> Iterator[File]:
        """Yield the documents, the group's last: without it nothing opens."""
        nodes = {name: _document(name, layout, self.task.num_samples) for name, layout in self.task.layouts.items()}
        for name, document in nodes.items():
            yield f"{name}/{ROOT}", to_bytes(document)
        yield ROOT, to_bytes(group_document({}, nodes))


def plan(task: Task) -> ZarrExport:
    """Return the exporter."""
    layouts = {name: _cut(layout, task) for name, layout in task.layouts.items()}
    return ZarrExport(replace(task, layouts=layouts))


def _cut(layout: FieldLayout, task: Task) -> FieldLayout:
    """Return the layout with chunks of about `CHUNK_BYTES`, of which each piece has a whole number."""
    chunk = task.piece
    while chunk % 2 == 0 and chunk * layout.nbytes > CHUNK_BYTES * max(1, task.num_samples):
        chunk //= 2
    return replace(layout, chunk=chunk, shard=chunk)


def _document(name: str, layout: FieldLayout, num_samples: int) -> dict[str, Any]:
    """Return an array's document: that of a dataset of ours, but for the shards around its chunks."""
    document = field_document(name, layout, num_samples)
    inside = document["codecs"][0]["configuration"]
    return document | {"codecs": inside["codecs"]}
