"""From samples to ranged requests, and from their bytes to samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.errors import CorruptError, DecodeError, FieldError, MissingObjectError, ModifiedError, NotFoundError
from streamloader.format.chunk_table import ChunkTable
from streamloader.format.codecs import CRC_BYTES, Column, Items, decode_fixed, decode_items, index_size, parse_index
from streamloader.format.manifest import Field, Manifest
from streamloader.format.opening import reread
from streamloader.options import MIB
from streamloader.storage.process import run_all
from streamloader.storage.store import Allocate, RangeReader, Store, cut_runs, empty_buffer

Out = NDArray[Any] | None
Placed = tuple[int, Items]  # the row of the first item, and a chunk's items


class Run(NamedTuple):
    """Whole, neighbouring chunks of one shard: one ranged request of bytes [start, stop) of the object `path`.

    `chunk` is the first of them within the shard, `sizes` (bytes, with checksum) and `crcs` are per chunk.
    `num_samples` counts those that exist: the dataset's last chunk may be partly padding. Where only some of them are
    wanted, `picks` has their numbers, ascending, and `place` counts those that were asked for before them.
    """

    path: str
    start: int
    stop: int
    shard: int
    chunk: int
    sizes: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    first_sample: int
    num_samples: int
    picks: NDArray[np.int64] | None = None
    place: int = 0

    @property
    def share(self) -> float:
        """The part of the samples that is wanted."""
        return 1.0 if self.picks is None else len(self.picks) / self.num_samples


class Part(NamedTuple):
    """What is wanted of a chunk of so many `rows`: all, or the rows `wanted`; `row` is where the first of them goes."""

    rows: int
    row: int
    wanted: NDArray[np.int64] | None = None

    @property
    def size(self) -> int:
        """How many rows are wanted."""
        return self.rows if self.wanted is None else len(self.wanted)


def chosen(items: Items, part: Part) -> Items:
    """Return what is wanted of a chunk's items; where that is less than half of it, in memory of its own."""
    if part.wanted is None:
        few = part.rows < len(items)
        return Items(items.buffer, items.starts[: part.rows], items.stops[: part.rows]) if few else items
    starts, stops = items.starts[part.wanted], items.stops[part.wanted]
    edges = np.concatenate([[0], np.cumsum(stops - starts)])
    if 2 * edges[-1] >= len(items.buffer):
        return Items(items.buffer, starts, stops)
    joined = b"".join(items[i] for i in part.wanted.tolist())
    return Items(memoryview(joined), edges[:-1], edges[1:])


def parts_of(run: Run, chunk: int, first: int | None) -> Iterator[Part]:
    """Yield what is wanted of each chunk of `chunk` samples; row 0 is `first`, by default the run's first."""
    stop = run.first_sample + run.num_samples
    starts = range(run.first_sample, stop, chunk)
    if run.picks is None:
        base = run.first_sample if first is None else first
        yield from (Part(min(chunk, stop - start), start - base) for start in starts)
        return
    base = run.place if first is None else first
    edges = np.searchsorted(run.picks, [*starts, stop]).tolist()
    for start, (low, high) in zip(starts, pairwise(edges), strict=True):
        rows = min(chunk, stop - start)
        yield Part(rows, run.place + low - base, None if high - low == rows else run.picks[low:high] - start)


COLUMN_THREADS = 4  # requests of one column at once
COLUMN_REQUEST = 8 * MIB
MAX_REQUEST = 16 * MIB  # one request of a cloud store moves 50-90 MB/s: larger ones only add latency
# Unwanted chunks are read along where they are at most this many bytes: a further request costs as much time.
GAP_BYTES = MIB // 2


class FieldReader:
    """Reads one field of the dataset below `store`: plans, fetches and decodes; thread-safe.

    Raises `FieldError` for an unknown field.
    """

    def __init__(self, store: Store, manifest: Manifest, name: str) -> None:
        layout = manifest.fields.get(name)
        if layout is None:
            raise FieldError(f"{store.url} has no field {name!r}", f"its fields are {', '.join(manifest.fields)}")
        self.name = name
        self.layout = layout
        self.num_samples = manifest.num_samples
        self._store = store
        self.table = ChunkTable(store, manifest, name)

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
            starts, stops, crcs = self.table.shard(shard)
            starts, stops, crcs = starts[first:last], stops[first:last], crcs[first:last]
            for low, high in cut_runs(starts, stops, 0, max_bytes):  # what earlier versions left is never read
                runs.append(self.run(shard, first + low, starts[low:high], stops[low:high], crcs[low:high]))
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
                    found.append(run._replace(picks=samples[first:last], place=place + first))
        return found

    def fetch(self, reader: RangeReader, run: Run, allocate: Allocate | None = None) -> memoryview:
        """Return the run's bytes by one request without a retry, in `allocate(size)` where the client reads in place.

        Raises `MissingObjectError` or `StorageError`.
        """
        try:
            return reader.read(run.path, run.start, run.stop, allocate)
        except NotFoundError as error:
            problem = f"{self._url(run)} is missing, but the manifest lists it"
            raise MissingObjectError(problem, "restore the object, or convert the dataset again") from error

    def request(self, run: Run) -> Callable[[], memoryview]:
        """Return what fetches the run's bytes from the store, with its retries. Raises as `fetch`."""
        return partial(self._store.retries.call, partial(self.fetch, self._store.reader(), run))

    def read(
        self, start: int, stop: int, *, threads: int = 1, max_bytes: int = MAX_REQUEST
    ) -> NDArray[Any] | list[Placed]:
        """Return the samples [start, stop), read by up to `threads` requests at once, with retries.

        Fixed shape: an array (stop - start, *shape). Variable size: the items of each chunk that holds one of the
        samples, with the number of the chunk's first sample.
        """
        field, runs = self.layout.field, self.runs(start, stop, max_bytes)
        out = np.empty((stop - start, *field.shape), field.dtype) if field.fixed else None

        def load(run: Run) -> list[Placed]:
            return self.load(run, self.request(run), out, start if field.fixed else 0) or []

        placed = run_all(load, runs, threads)
        return [one for some in placed for one in some] if out is None else out

    def load(
        self,
        run: Run,
        fetch: Callable[[], memoryview],
        out: Out = None,
        first: int | None = None,
        *,
        allocate: Allocate = empty_buffer,
        on_damage: Callable[[], None] | None = None,
    ) -> list[Placed] | None:
        """Return what `decode` does of the body that `fetch` returns; a damaged one is fetched again, twice at most.

        `on_damage` is called before each further attempt. Raises what `fetch` raises, and at last what `decode` does.
        """
        return reread(lambda: self.decode(run, fetch(), out, first, allocate), on_damage)

    def decode(
        self, run: Run, data: memoryview, out: Out = None, first: int | None = None, allocate: Allocate = empty_buffer
    ) -> list[Placed] | None:
        """Check length and checksum of every chunk of the run that is wanted, and decode it.

        Row 0 is sample `first` (default: the run's first), or of picked samples their place among all that are picked.
        Fixed shape: into `out`, C-contiguous (rows, *shape) of the field's dtype; samples outside of it are dropped.
        Variable size: returns the items of each chunk with the row of the first, without the padding of the last chunk;
        compressed ones are unpacked into `allocate(size)`. Raises `CorruptError` or `ModifiedError`, which name the
        object, the chunk and its samples.
        """
        if self.layout.field.fixed == (out is None):
            raise TypeError(f"field {self.name!r}: `out` is for fields of fixed shape, and they need it")
        if len(data) != run.stop - run.start:
            raise self._damage(run, 0, f"{len(data)} of {run.stop - run.start} bytes were received")
        found: list[Placed] = []
        at = 0
        for i, (part, size) in enumerate(zip(parts_of(run, self.layout.chunk, first), run.sizes.tolist(), strict=True)):
            at += size
            if not part.size:
                continue
            body = self._verified(run, i, data[at - size : at])
            try:
                if out is not None:
                    self._decode_rows(body, out, part)
                else:
                    found.append((part.row, chosen(decode_items(self.layout, body, allocate), part)))
            except CorruptError as error:
                raise self._damage(run, i, error.problem) from error
        return found if out is None else None

    def _decode_rows(self, body: memoryview, out: NDArray[Any], part: Part) -> None:
        low, high = max(part.row, 0), min(part.row + part.size, len(out))
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
            (others,) = np.nonzero(self.table.shard(run.shard)[2] == stored)
            if len(others):
                problem = f"{self._where(run, i)}: the store sent the bytes of chunk {others[0]} instead"
                raise CorruptError(problem, "look at the server, and at a proxy or cache before it")
            raise self._modified(run, i, f"its crc32c is {stored:08x}, the manifest's table has {run.crcs[i]:08x}")
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

    def run(
        self, shard: int, chunk: int, starts: NDArray[np.int64], stops: NDArray[np.int64], crcs: NDArray[np.uint32]
    ) -> Run:
        """Return the request for contiguous chunks of a shard, from `chunk` on: where each begins and ends, its crc.

        Raises `MissingObjectError` for an absent chunk.
        """
        layout, sizes, start, stop = self.layout, stops - starts, int(starts[0]), int(stops[-1])
        sample = shard * layout.shard + chunk * layout.chunk
        count = min(len(crcs) * layout.chunk, self.num_samples - sample)
        run = Run(layout.shard_key(self.name, shard), start, stop, shard, chunk, sizes, crcs, sample, count)
        short = np.flatnonzero(run.sizes < CRC_BYTES)
        if len(short):
            problem = f"{self._where(run, int(short[0]))} is absent in the chunk table"
            raise MissingObjectError(problem, "convert the dataset again")
        return run


def read_columns(readers: Mapping[str, FieldReader], start: int, stop: int) -> dict[str, Column]:
    """Return the samples [start, stop) of each field as they are stored: arrays, or lists of bytes.

    Raises a `FormatError` or `DecodeError`, which name the object or the sample, or a `StorageError`.
    """
    return {name: _column(reader, start, stop) for name, reader in readers.items()}


def _column(reader: FieldReader, start: int, stop: int) -> Column:
    found = reader.read(start, stop, threads=COLUMN_THREADS, max_bytes=COLUMN_REQUEST)
    if isinstance(found, np.ndarray):
        return found
    field, column = reader.layout.field, []
    for number, items in found:
        bad = bad_item(field, items)
        if bad is not None:
            problem = f"field {reader.name!r} of sample {number + bad[0]} is not {field}: {bad[1]}"
            raise DecodeError(problem, "look at the dataset with streamloader verify")
        column += [bytes(items[i]) for i in range(max(start - number, 0), min(stop - number, len(items)))]
    return column


def bad_item(field: Field, items: Items) -> tuple[int, str] | None:
    """Return the first item that is no value of a variable-size field, and why; None where all are."""
    if field.kind == "ragged":
        sizes = items.stops - items.starts
        for row in np.flatnonzero(sizes % field.item_bytes)[:1].tolist():
            return row, f"{sizes[row]} bytes are not a multiple of a row's {field.item_bytes}"
        return None
    for row in range(len(items)) if field.kind == "text" else ():
        try:
            str(items[row], "utf-8")
        except UnicodeDecodeError as error:
            return row, f"{error.reason} at byte {error.start}"
    return None
