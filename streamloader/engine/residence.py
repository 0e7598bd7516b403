"""The *residence* of a field: where its samples are, in all slots of blocks, until they are gathered.

Small rows are in slots (`Rows`), large ones and those of variable size in the chunks that have them (`Chunks`), and
those of arrays in regions (`Regions` of `regions.py`). Row r of slot s is the *slot row* s * block + r. A residence

- states what a pass needs for its field (`demand`),
- `open`s what the responses for a block are decoded into; `Chunks` are told where they were decoded (`write`),
- `mark`s slot rows without values, whose errors are in `bad`,
- `drop`s the samples of a slot,
- `gather`s the columns of a batch: it returns them, and what must be copied to them,
- knows the bytes of samples of variable size (`variable_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.arena import Arena, Buffers, address
from streamloader.engine.budget import LIVE_BATCHES, Demand
from streamloader.engine.collate import LENGTHS, MASK, divided, padded_sizes, padded_widths
from streamloader.engine.faults import BadRows, forget
from streamloader.engine.gather import Copy, flat
from streamloader.engine.transform import Ragged
from streamloader.errors import DecodeError, EngineError, StreamloaderError
from streamloader.format.codecs import Items, scratch_bytes
from streamloader.format.manifest import Field
from streamloader.format.reader import MAX_REQUEST, FieldReader
from streamloader.format.values import from_bytes
from streamloader.options import MIB, Pack, Pad
from streamloader.order.schedule import BatchPlan, BlockRef, Ints
from streamloader.samples import distinct

if TYPE_CHECKING:
    from streamloader.images.decode import ImageDecoder

# What `gather` returns: the columns by name, and what must be copied to them.
Gathered = tuple[Mapping[str, Any], Sequence[Copy]]
RowIndex = slice | Ints
# Rows of this size, or of variable size, stay in their chunks until a batch is gathered. Copying them into a slot first
# would take as long as gathering them, and finding smaller rows takes longer than copying them.
LARGE_ROW = 1 << 14
# The most of a padded field in several steps: a few long values may make padding many times as large.
PADDED_BYTES = 64 * MIB
# A slot stores the address and the size of each item.
ITEM_BYTES = 2 * 8
# The ratio of decoded to encoded size of a photograph: a JPEG of usual quality has 2 to 3 bits per pixel.
IMAGE_EXPANSION = 10


class Rows:
    """Small rows of a fixed size: an array with those of all slots, or all samples of a resident field, in one slot."""

    def __init__(
        self, name: str, field: Field, arena: Arena, shape: tuple[int, int], _pack: Pack | Pad | None = None
    ) -> None:
        self.name, self.field, self._block = name, field, shape[1]
        self.bad: BadRows = {}
        self.values = arena.array((prod(shape), *field.shape), field.dtype)

    @staticmethod
    def demand(readers: Sequence[FieldReader], block: int, rows: int, _decoder: ImageDecoder | None = None) -> Demand:
        """Return the memory that a pass needs for the field, read by one of these readers from each dataset."""
        mean = max(reader.sample_bytes for reader in readers)
        requests = _request_demand(readers, block, mean)
        return replace(requests, slot_bytes=block * int(mean), batch_bytes=int(rows * mean))

    @staticmethod
    def resident_demand(
        readers: Sequence[FieldReader], _block: int, rows: int, _decoder: ImageDecoder | None = None
    ) -> Demand:
        """Return the memory that a pass needs for the field if all of its samples are in memory."""
        mean, samples = max(reader.sample_bytes for reader in readers), sum(reader.num_samples for reader in readers)
        return Demand(resident_bytes=samples * int(mean), batch_bytes=int(rows * mean))

    def open(self, slot: int, ref: BlockRef, _reader: FieldReader, _memory: object = None) -> tuple[NDArray[Any], int]:
        """Return what `FieldReader.write` decodes a block into: its rows, and the number of the first sample."""
        first = slot * self._block
        return self.values[first : first + ref.stop - ref.start], ref.start

    def mark(self, slot_rows: Sequence[int], error: StreamloaderError) -> None:
        """Record that slot rows have no values, because of an error."""
        self.bad |= dict.fromkeys(slot_rows, error)

    def drop(self, slot: int) -> None:
        """Forget the errors of a slot, whose rows are overwritten."""
        forget(self.bad, slot * self._block, (slot + 1) * self._block)

    def variable_bytes(self, _slot_rows: Ints, _step_rows: int) -> int:
        """Return 0."""
        return 0

    def gather(self, slot_rows: Ints, _plan: BatchPlan, buffers: Buffers, _seed: int = 0) -> Gathered:
        """Return the column of a batch, and the copy of the rows at `slot_rows`."""
        out = buffers.lease((len(slot_rows), *self.field.shape), self.field.dtype, LIVE_BATCHES)
        return {self.name: out}, [Copy(out, self.values, slot_rows)]


class Chunks:
    """Large rows, and rows of variable size: where they are in the arena, and the memory of their chunks.

    `shape`: the number of slots, and of rows in each. `pack`: how rows of variable size are packed or padded.
    """

    def __init__(
        self, name: str, field: Field, arena: Arena, shape: tuple[int, int], pack: Pack | Pad | None = None
    ) -> None:
        self.name, self.field = name, field
        self._arena, (slots, self.block), self._pack = arena, shape, pack
        self._leases: list[list[memoryview]] = [[] for _ in range(slots)]
        self.table = arena.array((slots * self.block, 2), "int64")  # where each row begins in the arena, its size
        self.bad: BadRows = {}

    @staticmethod
    def demand(readers: Sequence[FieldReader], block: int, rows: int, decoder: ImageDecoder | None = None) -> Demand:
        """Return the memory that a pass needs for the field, read by one of these readers from each dataset."""
        mean = max(reader.sample_bytes for reader in readers)
        items, finished = int(block * mean), mean if decoder is None else _image_bytes(decoder, mean)
        requests, slot = _request_demand(readers, block, mean), items + block * ITEM_BYTES
        return replace(requests, slot_bytes=slot, item_bytes=items, batch_bytes=int(rows * finished))

    def write(self, slot: int, rows: RowIndex, table: Ints, memory: Sequence[memoryview]) -> None:
        """Put rows into a slot: where they are in the arena, and the memory of their chunks."""
        self.table[slot * self.block : (slot + 1) * self.block][rows] = table
        self._leases[slot] += memory

    def put(self, slot: int, row: int, items: Items) -> None:
        """Put items of the arena into a slot, from `row` on."""
        locate_items(self._arena.bytes, self.table[slot * self.block : (slot + 1) * self.block], row, items)
        self._leases[slot].append(items.buffer)

    def mark(self, slot_rows: Sequence[int], error: StreamloaderError) -> None:
        """Record that slot rows have no values, because of an error; they are empty."""
        self.bad |= dict.fromkeys(slot_rows, error)
        self.table[list(slot_rows)] = 0

    def drop(self, slot: int) -> None:
        """Free the memory of the chunks of a slot; rows that a batch holds stay valid."""
        self._leases[slot] = []
        forget(self.bad, slot * self.block, (slot + 1) * self.block)

    def leases(self, slot_rows: Ints) -> list[list[memoryview]]:
        """Return what keeps the bytes of rows valid after their slots are released."""
        return [self._leases[slot] for slot in distinct(slot_rows // self.block).tolist()]

    def variable_bytes(self, slot_rows: Ints, step_rows: int) -> int:
        """Return the total number of bytes of rows of variable size, padded as in steps of `step_rows`.

        It is 0 of packed rows, which have a fixed size.
        """
        if self.field.fixed or (isinstance(self._pack, Pack) and self._pack.fit is not None):
            return 0
        sizes = self.table[slot_rows, 1]
        if not isinstance(self._pack, Pad):
            return int(sizes.sum())
        item = self.field.item_bytes
        widths = [width or 0 for width in padded_widths(self._pack, sizes // item, step_rows)]
        return int(np.repeat(widths, step_rows)[: len(sizes)].sum()) * (item + self._pack.mask)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The bytes that `table` refers to."""
        return self._arena.bytes

    def items(self, slot_rows: Ints) -> list[memoryview]:
        """Return the bytes of rows, as views that are valid until their slots are released."""
        data = self._arena.bytes.data
        return [data[start : start + size] for start, size in self.table[slot_rows].tolist()]

    def gather(self, slot_rows: Ints, plan: BatchPlan, buffers: Buffers, _seed: int = 0) -> Gathered:
        """Return the column of a batch, and what must be copied to it: the rows at `slot_rows`.

        The column of a variable size is a list of bytes or str, or a `Ragged`. If it is packed or padded, as `pack`
        says, a plan of several steps has a tuple with one for each step: steps have rows of their own length. Raises
        `DecodeError`, which names the sample, for bytes that are invalid for the field.
        """
        field = self.field
        if field.kind in ("bytes", "text"):
            return {self.name: self._objects(slot_rows, plan)}, []
        starts, sizes = self.table.take(slot_rows, axis=0).T.copy()  # indexing takes five times as long
        if field.fixed:
            out = buffers.lease((len(slot_rows), *field.shape), field.dtype, LIVE_BATCHES)
            at = np.arange(len(slot_rows)) * field.item_bytes  # bad rows have no bytes
            return {self.name: out}, [Copy(flat(out), self._arena.bytes, starts, at, sizes)]
        if np.any(sizes % field.item_bytes):
            self.check(slot_rows, plan)
        if isinstance(self._pack, Pad):
            return self._padded(self._pack, (starts, sizes), plan, buffers)
        edges = np.zeros(len(slot_rows) + 1, np.int64)
        np.cumsum(sizes, out=edges[1:])
        columns, copies = [], []
        step_rows = max(1, len(slot_rows) if self._pack is None else plan.step_rows)
        for first in range(0, max(1, len(slot_rows)), step_rows):
            steps, part = slice(first, first + step_rows), edges[first : first + step_rows + 1] - edges[first]
            columns.append(self._lease_ragged(part // field.item_bytes, buffers))
            copies.append(Copy(flat(columns[-1].values), self._arena.bytes, starts[steps], part[:-1], sizes[steps]))
        return {self.name: _of_steps(columns)}, copies

    def _objects(self, slot_rows: Ints, plan: BatchPlan) -> list[Any]:
        """Return rows as bytes or str."""
        make = bytes if self.field.kind == "bytes" else partial(str, encoding="utf-8")
        try:
            return [make(item) for item in self.items(slot_rows)]
        except ValueError:
            self.check(slot_rows, plan)
            raise

    def _padded(self, pad: Pad, rows: tuple[Ints, Ints], plan: BatchPlan, buffers: Buffers) -> Gathered:
        """Return the columns of padded rows, which are given by their addresses and sizes, and their copies.

        The steps of a plan share the memory of a column. Raises `EngineError` if these are too large together.
        """
        item, (starts, sizes), step_rows = self.field.item_bytes, rows, plan.step_rows
        lengths = sizes // item
        widths = padded_widths(pad, lengths, step_rows)
        if None in widths:
            padded_sizes(self.name, pad, lengths[:, None], plan.samples.tolist())  # raises for the longest
        width = np.repeat(np.array(widths, np.int64), step_rows)[: len(lengths)]
        lengths, ends, count = np.minimum(lengths, width), np.cumsum(width), int(width.sum())
        if len(lengths) > step_rows and count * item > PADDED_BYTES:
            problem = f"{self.name!r} of several steps has {count * item} bytes with its padding"
            raise EngineError(problem, f"gather steps one by one if they have more than {PADDED_BYTES}")
        at = ends - (width if pad.side == "right" else lengths)
        firsts = range(0, max(1, len(lengths)), step_rows)
        shapes = [(min(step_rows, len(lengths) - first), each or 0) for first, each in zip(firsts, widths, strict=True)]
        out, longest = buffers.lease((count, *self.field.shape), self.field.dtype), int(width.max(initial=0))
        whole, arena = (0, out.nbytes, longest * item), self._arena.bytes
        copies = [Copy(out, arena, starts, at * item, lengths * item, padded=whole, value=pad.value)]
        columns = {self.name: _of_steps(divided(out, shapes)), self.name + LENGTHS: lengths}
        if pad.mask:
            mask, true = buffers.lease((count,), "bool"), buffers.lease((int(lengths.max(initial=0)),), "bool")
            true[...] = True
            columns[self.name + MASK] = _of_steps(divided(mask, shapes))
            copies.append(Copy(mask, true, np.zeros_like(at), at, lengths, padded=(0, count, longest)))
        return columns, copies

    def _lease_ragged(self, offsets: Ints, buffers: Buffers) -> Ragged:
        """Return a column for rows with these offsets, with its padding if it is packed."""
        count, pack = int(offsets[-1]), self._pack if isinstance(self._pack, Pack) else None
        shape = (count, *self.field.shape) if pack is None else (-(-count // pack.length), pack.length)
        values = buffers.lease(shape, self.field.dtype)
        if pack is not None:
            values.reshape(-1)[count:] = pack.pad
        return Ragged(values, offsets)

    def invalid(self, slot_rows: Ints, plan: BatchPlan) -> dict[int, DecodeError]:
        """Return the errors of the rows that are invalid for the field, by slot row."""
        errors = {}
        for row, item, sample in zip(slot_rows.tolist(), self.items(slot_rows), plan.samples.tolist(), strict=True):
            try:
                from_bytes(self.name, self.field, item, sample)
            except DecodeError as error:
                errors[row] = error
        return errors

    def check(self, slot_rows: Ints, plan: BatchPlan) -> None:
        """Raise `DecodeError` for the first row that is invalid."""
        for error in self.invalid(slot_rows, plan).values():
            raise error


def _of_steps(columns: Sequence[Any]) -> Any:
    """Return the column of a plan, given one for each step."""
    return columns[0] if len(columns) == 1 else tuple(columns)


def _request_demand(readers: Sequence[FieldReader], block: int, mean: float) -> Demand:
    """Return the demand of the requests and decoders of a field whose samples have `mean` bytes."""
    chunks = [int(reader.layout.chunk * mean) for reader in readers]
    scratch = max(scratch_bytes(reader.layout, size) for reader, size in zip(readers, chunks, strict=True))
    return Demand(request_bytes=max(*chunks, int(min(MAX_REQUEST, block * mean))), scratch_bytes=scratch)


def _image_bytes(decoder: ImageDecoder, encoded: float) -> float:
    """Return the estimated bytes of a decoded image that has `encoded` bytes."""
    unsized = encoded * IMAGE_EXPANSION * np.dtype(decoder.dtype).itemsize
    return unsized if decoder.fixed_bytes is None else float(decoder.fixed_bytes)


def locate_items(memory: NDArray[np.uint8], table: NDArray[np.int64], row: int | Ints, items: Items) -> None:
    """Write where items begin in `memory`, and their sizes, to a table, from `row` on, which may be negative.

    Items outside of the table are ignored. `row` may also have the row of each item.
    """
    if not isinstance(row, int):
        start = address(items.buffer) - address(memory) if items.buffer.nbytes else 0
        table[row] = np.stack([items.starts + start, items.stops - items.starts], axis=1)
        return
    low, high = max(row, 0), min(row + len(items), len(table))
    part = slice(low - row, high - row)
    start = address(items.buffer) - address(memory) if items.buffer.nbytes else 0
    table[low:high, 0] = items.starts[part] + start
    table[low:high, 1] = items.stops[part] - items.starts[part]
