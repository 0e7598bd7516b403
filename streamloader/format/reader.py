"""From samples to ranged requests, and from their bytes to samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.errors import CorruptError, FieldError, MissingObjectError, ModifiedError, NotFoundError
from streamloader.format.codecs import CRC_BYTES, decode_fixed, decode_items
from streamloader.format.manifest import FieldLayout, Manifest
from streamloader.format.opening import BODY_ATTEMPTS, open_manifest
from streamloader.format.runs import Part, Placed, Run, chosen, parts_of
from streamloader.format.shard import index_size, parse_index
from streamloader.format.table import ChunkTable, open_table
from streamloader.options import MIB
from streamloader.storage.protocol import RangeReader, Room, Store, room_for

__all__ = ["FieldReader", "Placed", "Run", "field_reader", "open_manifest"]

MAX_REQUEST = 16 * MIB  # one request of a cloud store moves 50-90 MB/s: larger ones only add latency
# Chunks that nobody wants are read along where they are so few bytes: a further request costs as much time.
GAP_BYTES = MIB // 2


def field_reader(store: Store, manifest: Manifest, name: str) -> FieldReader:
    """Return a reader of one field of the dataset below `store`. Raises `FieldError` for an unknown field."""
    layout = manifest.fields.get(name)
    if layout is None:
        raise FieldError(f"{store.url} has no field {name!r}", f"its fields are {', '.join(manifest.fields)}")
    return FieldReader(store, name, layout, manifest.num_samples, open_table(store, manifest, name))


class FieldReader:
    """Plans and decodes one field; thread-safe. The requests themselves are the caller's."""

    def __init__(self, store: Store, name: str, layout: FieldLayout, num_samples: int, table: ChunkTable) -> None:
        self.name = name
        self.layout = layout
        self.num_samples = num_samples
        self._store = store
        self._table = table

    @property
    def table_bytes(self) -> int:
        """The most bytes of the chunk table that are kept in memory."""
        return self._table.kept_bytes

    def runs(self, start: int, stop: int, max_bytes: int = MAX_REQUEST) -> list[Run]:
        """Return the requests that cover the samples [start, stop), in order.

        They are cut at shard borders and so that none exceeds `max_bytes`, but never inside a chunk. Reads
        pages of the chunk table and nothing else. Raises `MissingObjectError` for an absent chunk.
        """
        if not 0 <= start <= stop <= self.num_samples:
            raise IndexError(f"samples [{start}, {stop}) of {self.num_samples}")
        layout = self.layout
        runs: list[Run] = []
        for shard in range(start // layout.shard, -(-stop // layout.shard) if stop > start else 0):
            base = shard * layout.shard
            first = (max(start, base) - base) // layout.chunk
            last = -(-(min(stop, base + layout.shard) - base) // layout.chunk)
            offsets, crcs = self._table.shard(shard)
            for begin, end, places in _pieces(offsets, first, last, self._table.skips(shard)):
                for low, high in _cuts(places, begin, end, max_bytes):
                    runs.append(self._run(shard, low, high, places, crcs))
        return runs

    def runs_of(self, samples: NDArray[np.int64], place: int = 0) -> list[Run]:
        """Return the requests for these samples, numbers in ascending order, with what to pick from each.

        Chunks without one of them are not read, except between others where they are small. `place` counts on for
        the first of the samples. Raises as `runs`.
        """
        sample_bytes = self.layout.stored / max(1, self.num_samples)
        chunk_bytes = max(1.0, self.layout.chunk * sample_bytes)
        most = min(MAX_REQUEST, int(len(samples) * sample_bytes))  # gaps included: no more in flight than without
        chunks = samples // self.layout.chunk
        apart = np.flatnonzero((np.diff(chunks) - 1) * chunk_bytes > GAP_BYTES) + 1
        edges = [0, *apart.tolist(), len(samples)]
        found: list[Run] = []
        for low, high in pairwise(edges if len(samples) else []):
            for run in self.runs(int(samples[low]), int(samples[high - 1]) + 1, most):
                first, last = np.searchsorted(samples, [run.first_sample, run.first_sample + run.num_samples]).tolist()
                if last > first:  # else a gap that a request's size has cut off
                    found.append(replace(run, picks=samples[first:last], place=place + first))
        return found

    def fetch(self, reader: RangeReader, run: Run, room: Room | None = None) -> memoryview:
        """Return the run's bytes by one request without a retry, in `room` where the plane can put them.

        Raises `MissingObjectError` or `StorageError`.
        """
        try:
            return reader.read(run.path, run.start, run.stop, room)
        except NotFoundError as error:
            problem = f"{self._url(run)} is missing, which the manifest promises"
            raise MissingObjectError(problem, "restore the object, or convert the dataset again") from error

    def load(
        self,
        run: Run,
        fetch: Callable[[], memoryview],
        out: NDArray[Any] | None = None,
        first: int | None = None,
        *,
        room: Room = room_for,
        on_damage: Callable[[], None] | None = None,
    ) -> list[Placed] | None:
        """Return what `decode` does of the body that `fetch` returns; a damaged one is fetched again, twice at most.

        `on_damage` is told before each further attempt. Raises what `fetch` raises and, in the end, what `decode` does.
        """
        for _ in range(BODY_ATTEMPTS - 1):
            try:
                return self.decode(run, fetch(), out, first, room)
            except (CorruptError, ModifiedError):
                if on_damage is not None:
                    on_damage()
        return self.decode(run, fetch(), out, first, room)

    def decode(
        self,
        run: Run,
        data: memoryview,
        out: NDArray[Any] | None = None,
        first: int | None = None,
        room: Room = room_for,
    ) -> list[Placed] | None:
        """Check length and checksum of every chunk of the run that is wanted, and decode it.

        Row 0 is sample `first` (default: the run's first), or of picked samples the how manieth of all. Fixed shape:
        into `out`, C-contiguous (rows, *shape) of the field's dtype; samples outside of it are dropped. Variable size:
        returns the items of each chunk with the row of the first, without the padding of the last chunk; compressed
        ones are unpacked into `room`. Raises `CorruptError` or `ModifiedError`, which name the object, the chunk and
        its samples.
        """
        if self.layout.field.fixed == (out is None):
            raise TypeError(f"field {self.name!r}: `out` is for fields of fixed shape, and they need it")
        if len(data) != run.stop - run.start:
            raise self._damage(run, 0, f"{len(data)} of {run.stop - run.start} bytes came")
        found: list[Placed] = []
        at = 0
        for i, (part, size) in enumerate(zip(parts_of(run, self.layout.chunk, first), run.sizes.tolist(), strict=True)):
            at += size
            if not part.count:
                continue
            body = self._verified(run, i, data[at - size : at])
            try:
                if out is not None:
                    self._decode_rows(body, out, part)
                else:
                    found.append((part.row, chosen(decode_items(self.layout, body, room), part)))
            except CorruptError as error:
                raise self._damage(run, i, error.problem) from error
        return found if out is None else None

    def _decode_rows(self, body: memoryview, out: NDArray[Any], part: Part) -> None:
        low, high = max(part.row, 0), min(part.row + part.count, len(out))
        if low >= high:
            return
        if low == part.row and part.wanted is None:
            decode_fixed(self.layout, body, out[low:high])
            return
        whole = np.empty((part.rows, *self.layout.field.shape), out.dtype)
        decode_fixed(self.layout, body, whole)
        rows = slice(low - part.row, high - part.row)
        if part.wanted is None:
            np.copyto(out[low:high], whole[rows])
        else:
            np.take(whole, part.wanted[rows], axis=0, out=out[low:high], mode="clip")

    def _verified(self, run: Run, i: int, data: memoryview) -> memoryview:
        body = data[:-CRC_BYTES]
        stored = int.from_bytes(data[-CRC_BYTES:], "little")
        computed = crc32c.crc32c(body)
        if computed != stored:
            raise self._damage(run, i, f"its crc32c is {computed:08x}, stored is {stored:08x}")
        if stored != run.crcs[i]:
            (others,) = np.nonzero(self._table.shard(run.shard)[1] == stored)
            if len(others):
                problem = f"{self._where(run, i)}: the store sent the bytes of chunk {others[0]} instead"
                raise CorruptError(problem, "look at the server, and at a proxy or cache before it")
            raise self._modified(run, i, f"its crc32c is {stored:08x}, the manifest's table says {run.crcs[i]:08x}")
        return body

    def _damage(self, run: Run, i: int, detail: str) -> CorruptError | ModifiedError:
        """Say what is wrong with a chunk, after asking the shard's own index whether the object is another one."""
        layout = self.layout
        expected = np.empty((len(run.sizes), 2), np.uint64)
        expected[:, 1] = run.sizes
        expected[:, 0] = run.start + np.cumsum(run.sizes) - run.sizes
        try:
            tail = self._store.get_tail(run.path, index_size(layout.chunks_per_shard))
            index = parse_index(tail, layout.chunks_per_shard)
        except (CorruptError, NotFoundError):
            index = None  # truncated, or gone since
        if index is not None and not np.array_equal(index[run.chunk : run.chunk + len(run.sizes)], expected):
            return self._modified(run, i, "its index is intact, but not the one that the manifest was written for")
        problem = f"{self._where(run, i)} is damaged: {detail}"
        return CorruptError(problem, "restore the object, or convert the dataset again")

    def _modified(self, run: Run, i: int, detail: str) -> ModifiedError:
        problem = f"{self._where(run, i)}: the object was modified after the conversion: {detail}"
        return ModifiedError(problem, "restore the object, or convert the dataset again")

    def _where(self, run: Run, i: int) -> str:
        sample = run.first_sample + i * self.layout.chunk
        stop = min(sample + self.layout.chunk, self.num_samples)
        return f"chunk {run.chunk + i} of {self._url(run)} (samples {sample} to {stop - 1})"

    def _url(self, run: Run) -> str:
        return f"{self._store.url}/{run.path}"

    def _run(self, shard: int, low: int, high: int, offsets: NDArray[np.int64], crcs: NDArray[np.uint32]) -> Run:
        layout = self.layout
        sample = shard * layout.shard + low * layout.chunk
        run = Run(
            path=layout.shard_key(self.name, shard),
            start=int(offsets[low]),
            stop=int(offsets[high]),
            shard=shard,
            chunk=low,
            sizes=np.diff(offsets[low : high + 1]),
            crcs=crcs[low:high],
            first_sample=sample,
            num_samples=min((high - low) * layout.chunk, self.num_samples - sample),
        )
        short = np.flatnonzero(run.sizes < CRC_BYTES)
        if len(short):
            problem = f"{self._where(run, int(short[0]))} is absent in the chunk table"
            raise MissingObjectError(problem, "convert the dataset again")
        return run


def _pieces(
    offsets: NDArray[np.int64], first: int, last: int, skips: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Yield the chunk ranges of [first, last) that stand without a gap, and the offsets of their chunks in the object.

    What earlier versions left between chunks is no part of any request.
    """
    skipped = 0
    for chunk, size in skips:
        if chunk >= last:
            break
        if chunk > first:
            yield first, chunk, offsets + skipped
            first = chunk
        skipped += size
    yield first, last, offsets + skipped if skipped else offsets


def _cuts(offsets: NDArray[np.int64], first: int, last: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield chunk ranges that cover [first, last), each as long as `max_bytes` allows, and at least one chunk."""
    while first < last:
        room = int(np.searchsorted(offsets, offsets[first] + max_bytes, side="right")) - 1
        stop = min(max(room, first + 1), last)
        yield first, stop
        first = stop
