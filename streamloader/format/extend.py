"""More samples behind those of a finished dataset, on the grid that it has: shards, and what becomes of the last one.

New shards are new objects. The last shard, where it is not full, is written again so that everything that an earlier
version reads of it stays where it is: first the bytes of its chunks, then its last chunk once more where that was not
full, then further chunks, then the index. A reader of an earlier version goes by its own table; a reader of the new
one passes over the stale chunk (`FieldLayout.skips`). The new object is a function of the old table, the bytes that it
covers and the new samples: so writing it twice, also after a kill, gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.errors import CorruptError, FieldError, MissingObjectError, ModifiedError, NotFoundError
from streamloader.format.codecs import CRC_BYTES, Column, decode_fixed, decode_items
from streamloader.format.geometry import Geometry
from streamloader.format.manifest import FieldLayout, Manifest
from streamloader.format.receipts import FieldReceipt, Receipt, StoredObject
from streamloader.format.shard import (
    EncodedShard,
    chunk_entries,
    encode_index,
    encode_shard,
    index_size,
    seal_chunks,
    stored,
)
from streamloader.format.sink import check_columns, column_bytes, little, put_object
from streamloader.format.table import open_table
from streamloader.storage.protocol import Buffer, Store

APPEND = "_streamloader/append"  # what an append leaves until it is published
_RESTORE = "restore the object, or convert the dataset again"


@dataclass(frozen=True, eq=False)
class Tail:
    """A field's last shard where it is not full: it holds `samples`; its rows of the chunk table, and its skips."""

    samples: int
    entries: NDArray[np.uint32]
    skips: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """The bytes from the object's beginning to the end of its last chunk."""
        return int(self.entries[:, 0].sum(dtype=np.int64)) + sum(size for _, size in self.skips)

    def size(self, layout: FieldLayout) -> int:
        """Return the bytes of the object."""
        return self.end + index_size(layout.chunks_per_shard)

    def next_skips(self, layout: FieldLayout) -> tuple[tuple[int, int], ...]:
        """Return the skips of the shard when samples were added: a last chunk that was not full is stale then."""
        chunk, rest = divmod(self.samples, layout.chunk)
        if not rest:
            return self.skips
        skips = dict(self.skips)
        skips[chunk] = skips.get(chunk, 0) + int(self.entries[chunk, 0])
        return tuple(skips.items())  # the last chunk comes last


@dataclass(frozen=True, eq=False)
class Extension:
    """An append, before it is done: the dataset as it is (of its manifest all but the provenance), how many samples
    come behind it, and the last shards that are not full, by field.
    """

    base: Manifest
    added: int
    tails: Mapping[str, Tail] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """The samples of the dataset that is being made."""
        return self.base.num_samples + self.added

    @property
    def geometry(self) -> Geometry:
        """How the dataset is cut."""
        return Geometry(self.base.samples_per_shard, self.base.order, self.base.fields)

    @property
    def shards(self) -> range:
        """The shards of the bulk fields that samples are added to, the first of them perhaps to what it holds."""
        size = self.base.samples_per_shard
        return range(self.base.num_samples // size, -(-self.num_samples // size)) if self.added else range(0)

    def samples(self, shard: int) -> tuple[int, int]:
        """Return [start, stop) of the new samples of a shard, counted from the first new one."""
        size, before = self.base.samples_per_shard, self.base.num_samples
        return max(0, shard * size - before), min(self.added, (shard + 1) * size - before)

    def tail(self, name: str, shard: int) -> Tail | None:
        """Return what the field's shard holds already; None where it is new."""
        first = self.base.num_samples // self.base.fields[name].shard
        return self.tails.get(name) if shard == first else None

    def for_shard(self, shard: int) -> Extension:
        """Return what a worker needs that writes one shard of the bulk fields: most need no tail."""
        tails = {name: tail for name, tail in self.tails.items() if self.tail(name, shard) is not None}
        return replace(self, tails=tails)


def plan_extension(store: Store, base: Manifest, added: int) -> Extension:
    """Return the append of so many samples. Reads the last pages of the chunk tables. Raises what they raise."""
    tails: dict[str, Tail] = {}
    for name, layout in base.fields.items():
        shard, samples = divmod(base.num_samples, layout.shard)
        if not samples:
            continue
        table = open_table(store, base, name)
        offsets, crcs = table.shard(shard)
        entries = np.stack([np.diff(offsets).astype(np.uint32), crcs], axis=1)
        used = -(-samples // layout.chunk)
        if np.any(entries[:used, 0] < CRC_BYTES) or np.any(entries[used:]):
            problem = f"the chunk table of field {name!r} of {store.url} does not fit its {samples} samples in shard"
            raise MissingObjectError(f"{problem} {shard}", "convert the dataset again")
        tails[name] = Tail(samples, entries, tuple(table.skips(shard)))
    return Extension(replace(base, provenance={}), added, tails)


def write_extension(store: Store, extension: Extension, shard: int, columns: Mapping[str, Column]) -> Receipt:
    """Write what is added to one shard of all fields, and then its receipt; `columns` are the new samples, in order.

    The rows of the small fields go into a part, as `write_shard` has it. Raises `FieldError`, `StorageError`, or what
    is wrong with the shard as it is: `MissingObjectError`, `CorruptError`, `ModifiedError`.
    """
    count = check_columns(extension.geometry, columns)
    start, stop = extension.samples(shard)
    if count != stop - start:
        raise FieldError(f"{count} samples for shard {shard}", f"give the {stop - start} that belong to it")
    objects: dict[str, StoredObject] = {}
    fields: dict[str, FieldReceipt] = {}
    part: list[Buffer] = []
    for name, layout in sorted(extension.base.fields.items()):
        if layout.resident:
            part.append(np.asarray(columns[name], little(layout)).tobytes())
            continue
        path = layout.shard_key(name, shard)
        fields[name], objects[path] = write_object(store, extension, name, shard, columns[name])
    if part:
        objects[part_path(shard)] = put_object(store, part_path(shard), part)
    receipt = Receipt(shard, count, objects, fields)
    store.put(f"{APPEND}/receipts/{shard}.json", receipt.to_json())
    return receipt


def part_path(shard: int) -> str:
    """Return the path of the rows of small fields that a shard's samples bring."""
    return f"{APPEND}/parts/{shard}"


def write_object(
    store: Store, extension: Extension, name: str, shard: int, column: Column
) -> tuple[FieldReceipt, StoredObject]:
    """Write one shard object of one field: what it holds already, if anything, and the new samples `column`."""
    layout, tail = extension.base.fields[name], extension.tail(name, shard)
    if tail is None:
        encoded = encode_shard(layout, column)
    else:
        encoded = extend_shard(layout, tail, read_tail(store, name, layout, shard, tail), column)
    stored = put_object(store, layout.shard_key(name, shard), encoded.parts)
    return FieldReceipt(column_bytes(layout, column), stored.size, encoded.entries), stored


def extend_shard(layout: FieldLayout, tail: Tail, old: bytes, column: Column) -> EncodedShard:
    """Return the shard with more samples. `old` are the bytes of its chunks, `tail.end` of them, verified."""
    full, rest = divmod(tail.samples, layout.chunk)
    if rest:
        size = int(tail.entries[full, 0])
        column = _joined(_first_samples(layout, memoryview(old)[-size:-CRC_BYTES], rest), column)
    chunks = seal_chunks(layout, column)
    entries = tail.entries.copy()
    entries[full : full + len(chunks)] = chunk_entries(chunks)
    index = encode_index(entries, tail.next_skips(layout))
    return EncodedShard([old, *stored(chunks), index], entries)


def read_tail(store: Store, name: str, layout: FieldLayout, shard: int, tail: Tail) -> bytes:
    """Return the bytes of a shard up to the end of its last chunk, each chunk compared with its checksums."""
    path = layout.shard_key(name, shard)
    try:
        data = store.get_range(path, 0, tail.end)
    except NotFoundError as error:
        raise MissingObjectError(f"{store.url}/{path} is missing, which the manifest promises", _RESTORE) from error
    if len(data) != tail.end:
        raise CorruptError(f"{store.url}/{path} has {len(data)} bytes, its chunks {tail.end}", _RESTORE)
    at, skips = 0, dict(tail.skips)
    for chunk, (size, crc) in enumerate(tail.entries[: -(-tail.samples // layout.chunk)].tolist()):
        at += skips.get(chunk, 0) + size
        body = memoryview(data)[at - size : at]
        stored = int.from_bytes(body[-CRC_BYTES:], "little")
        where = f"chunk {chunk} of {store.url}/{path}"
        if crc32c.crc32c(body[:-CRC_BYTES]) != stored:
            raise CorruptError(f"{where} is damaged: its crc32c does not match", _RESTORE)
        if stored != crc:
            raise ModifiedError(f"{where} is intact, but not the one that the table says", _RESTORE)
    return data


def _first_samples(layout: FieldLayout, body: memoryview, count: int) -> Column:
    if layout.field.fixed:
        rows = np.empty((count, *layout.field.shape), layout.field.dtype)
        decode_fixed(layout, body, rows)
        return rows
    items = decode_items(layout, body)
    return [bytes(items[i]) for i in range(count)]


def _joined(first: Column, second: Column) -> Column:
    if isinstance(first, np.ndarray):
        return np.concatenate([first, np.asarray(second)])
    return [*first, *second]
