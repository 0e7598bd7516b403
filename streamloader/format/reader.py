"""Plans the ranged requests for samples of a field, and decodes the responses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count, pairwise
from math import inf
from typing import Any, NamedTuple

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.errors import CorruptError, DecodeError, FieldError, MissingObjectError, ModifiedError, NotFoundError
from streamloader.format import codecs
from streamloader.format.codecs import CRC_BYTES, Column, Items
from streamloader.format.deleted import Remaining
from streamloader.format.manifest import MAX_CHUNK_BYTES, Field, Manifest
from streamloader.format.opening import reread
from streamloader.format.rows import copy_rows
from streamloader.format.tables import REOPEN, ChunkTable
from streamloader.options import MIB
from streamloader.storage.buffers import RESIDENT, Allocate, Use, empty_buffer
from streamloader.storage.objects import cut_runs
from streamloader.storage.process import run_all
from streamloader.storage.store import RangeReader, Store

Out = NDArray[Any] | None
Placed = tuple[Any, Items]  # the row of the first item, or an array of the rows of all, and the items of a chunk


class Run(NamedTuple):
    """Consecutive chunks of one shard, read by one request for the bytes [start, stop) of the object `path`.

    `chunk` is the number of the first chunk within the shard; `sizes` (bytes, with checksum) and `crcs` are per chunk.
    `num_samples` excludes the padding of the dataset's last chunk. If only some of the samples are selected, `picks`
    has their numbers in ascending order, perhaps several times, and `first_row` is the number of those before them.
    `rows` has the output row of each of them, if these are not consecutive from `first_row` on. `cached`: the bytes
    [start, stop) that a cache has or gets, a part of which are those of the run, and their content; None: just these.
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
    first_row: int = 0
    rows: NDArray[np.int64] | None = None
    cached: tuple[int, int, str] | None = None

    @property
    def content(self) -> str:
        """What identifies the bytes that a cache has, wherever a version of the dataset has them."""
        return self.cached[2] if self.cached else f"{crc32c.crc32c(self.crcs.tobytes()):08x}"

    @property
    def share(self) -> float:
        """The fraction of the samples that is selected; above 1 if some are several times."""
        return 1.0 if self.picks is None else len(self.picks) / self.num_samples


class ChunkRows(NamedTuple):
    """The rows to take from a chunk of `rows` samples: all, or those in `selected`.

    `row` is the output row of the first of them, or has those of all.
    """

    rows: int
    row: int | NDArray[np.int64]
    selected: NDArray[np.int64] | None = None

    @property
    def size(self) -> int:
        """The number of rows to take."""
        return self.rows if self.selected is None else len(self.selected)


def select_items(items: Items, part: ChunkRows, allocate: Allocate, *, copied: bool = False) -> Items:
    """Return the selected items of a chunk, copied into `allocate(size)` if `copied` or less than half of its bytes."""
    rows = slice(part.rows) if part.selected is None else part.selected
    starts, stops = items.starts[rows], items.stops[rows]
    if not copied and (part.selected is None or 2 * (stops - starts).sum() >= len(items.buffer)):
        return Items(items.buffer, starts, stops)
    edges = np.concatenate([[0], np.cumsum(stops - starts)])
    joined = allocate(int(edges[-1]))
    copy_rows(items.buffer, starts, stops - starts, joined)
    return Items(joined, edges[:-1], edges[1:])


def chunk_rows(run: Run, chunk: int, first: int | None) -> Iterator[ChunkRows]:
    """Yield the rows to take from each chunk of the run.

    `chunk` is the number of samples in a chunk; output row 0 is sample `first`, by default the first of the run.
    """
    stop = run.first_sample + run.num_samples
    starts = range(run.first_sample, stop, chunk)
    if run.picks is None:
        base = run.first_sample if first is None else first
        yield from (ChunkRows(min(chunk, stop - start), start - base) for start in starts)
        return
    base = run.first_row if first is None else first
    edges = np.searchsorted(run.picks, [*starts, stop]).tolist()
    for start, (low, high) in zip(starts, pairwise(edges), strict=True):
        rows, picks = min(chunk, stop - start), run.picks[low:high]
        whole = high - low == rows and bool(np.all(picks[1:] > picks[:-1]))  # each once
        row = run.first_row + low if run.rows is None else run.rows[low:high]
        yield ChunkRows(rows, row - base, None if whole else picks - start)


def read_index(store: Store, path: str, chunks: int) -> NDArray[np.uint64] | None:
    """Return the index of a shard of `chunks` inner chunks, None if it is damaged or there is no such shard."""
    try:
        return codecs.parse_index(store.get_tail(path, codecs.index_size(chunks)), chunks)
    except (CorruptError, NotFoundError):
        return None


COLUMN_THREADS = 4  # concurrent requests for one column
COLUMN_REQUEST = 8 * MIB
MAX_REQUEST = 16 * MIB  # one request to a cloud store transfers 50-90 MB/s: larger requests only add latency
GAP_BYTES = MIB // 2  # up to this size, reading unneeded chunks between others takes no longer than another request


class FieldReader:
    """Plans, fetches and decodes the chunks of one field; thread-safe.

    `store` has the objects of the dataset. With the `remaining` samples of a version that leaves out some, samples are
    numbered as in that version; without, as they are stored. `name` may be set to what errors and batches call the
    field. Raises `FieldError` for an unknown field.
    """

    def __init__(self, store: Store, manifest: Manifest, name: str, remaining: Remaining | None = None) -> None:
        layout = manifest.fields.get(name)
        if layout is None:
            raise FieldError(f"{store.url} has no field {name!r}", f"its fields are {', '.join(manifest.fields)}")
        self.name = name
        self.layout = layout
        self.num_samples = manifest.num_samples if remaining is None else len(remaining)
        self._num_stored = manifest.num_samples
        self._remaining = remaining
        self.store = store
        self.table = ChunkTable(store, manifest, name)
        self._opened = store, manifest, name, remaining

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the cached pages of the chunk table."""
        return FieldReader, self._opened, {"name": self.name}

    @property
    def kept_bytes(self) -> int:
        """The most bytes of the chunk table that are cached."""
        return self.table.kept_bytes

    @property
    def sample_bytes(self) -> float:
        """The bytes of a sample, of a variable size the mean."""
        layout = self.layout
        return float(layout.field.item_bytes) if layout.field.fixed else layout.nbytes / max(1, self._num_stored)

    def runs(self, start: int, stop: int, max_bytes: int = MAX_REQUEST) -> list[Run]:
        """Return the requests that cover the samples [start, stop), in order.

        Each request is for whole chunks of one shard, and has at most `max_bytes` unless one chunk is larger. Reads
        only pages of the chunk table. Raises `IndexError`, `MissingObjectError` for an absent chunk, and as
        `ChunkTable.shard`.
        """
        if not 0 <= start <= stop <= self.num_samples:
            raise IndexError(f"samples [{start}, {stop}) are out of range: the dataset has {self.num_samples}")
        if self._remaining is not None:
            return self._runs_of(self._remaining[start:stop], start, max_bytes)
        return self._runs(start, stop, max_bytes)

    def chunk_samples(self, sample: int) -> tuple[int, int]:
        """Return the samples [first, stop) of the chunk that has a sample."""
        stored = sample if self._remaining is None else int(self._remaining[np.array([sample])][0])
        start = stored - stored % self.layout.chunk
        return self._numbers(start, min(start + self.layout.chunk, self._num_stored))

    def _numbers(self, start: int, stop: int) -> tuple[int, int]:
        """Return which samples, as [first, stop), are among the stored ones [start, stop)."""
        return (start, stop) if self._remaining is None else self._remaining.within(start, stop)

    def _runs(self, start: int, stop: int, max_bytes: int) -> list[Run]:
        """Return the requests that cover the stored samples [start, stop)."""
        layout = self.layout
        runs: list[Run] = []
        for shard in range(start // layout.shard, -(-stop // layout.shard) if stop > start else 0):
            base = shard * layout.shard
            first = (max(start, base) - base) // layout.chunk
            last = -(-(min(stop, base + layout.shard) - base) // layout.chunk)
            starts, stops, crcs = self.table.shard(shard)
            starts, stops, crcs = starts[first:last], stops[first:last], crcs[first:last]
            for low, high in cut_runs(starts, stops, 0, max_bytes):  # without the stale bytes of earlier versions
                runs.append(self.plan_run(shard, first + low, starts[low:high], stops[low:high], crcs[low:high]))
        return runs

    def knows_runs(self, start: int, stop: int) -> bool:
        """Return whether `runs` needs no request, since the pages of the chunk table are cached."""
        if self._remaining is not None and start < stop:
            start, last = self._remaining[np.array([start, stop - 1])].tolist()
            stop = last + 1
        return all(map(self.table.is_cached, range(start // self.layout.shard, -(-stop // self.layout.shard))))

    def runs_of(self, samples: NDArray[np.int64], first_row: int = 0) -> list[Run]:
        """Return the requests for selected samples, with the `picks` of each; they ascend, and may come several times.

        Chunks without a selected sample are read only in gaps of up to `GAP_BYTES`. `first_row` is the output row of
        the first sample. Raises as `runs`.
        """
        stored = samples if self._remaining is None else self._remaining[samples]
        return self._runs_of(stored, first_row, MAX_REQUEST)

    def runs_at(self, samples: NDArray[np.int64], first_row: int) -> list[Run]:
        """Return the requests for samples in any order, perhaps several times; row `first_row` + i gets `samples[i]`.

        Chunks are read as by `runs_of`, in the order in which they are stored. Raises as `runs`.
        """
        rows = np.argsort(samples, kind="stable")
        runs = self.runs_of(samples[rows])
        rows += first_row
        return [run._replace(rows=rows[run.first_row : run.first_row + len(run.picks)]) for run in runs]  # type: ignore[arg-type]

    def _runs_of(self, samples: NDArray[np.int64], first_row: int, most: int) -> list[Run]:
        """Return the requests, of up to `most` bytes, for samples by their numbers among the stored ones."""
        sample_bytes = self.layout.stored / max(1, self._num_stored)
        chunk_bytes = max(1.0, self.layout.chunk * sample_bytes)
        max_bytes = min(most, int(len(samples) * sample_bytes))  # gaps must not add to the bytes in flight
        chunks = samples // self.layout.chunk
        gaps = np.flatnonzero((np.diff(chunks) - 1) * chunk_bytes > GAP_BYTES) + 1
        edges = [0, *gaps.tolist(), len(samples)]
        runs: list[Run] = []
        for low, high in pairwise(edges if len(samples) else []):
            for run in self._runs(int(samples[low]), int(samples[high - 1]) + 1, max_bytes):
                first, last = np.searchsorted(samples, [run.first_sample, run.first_sample + run.num_samples]).tolist()
                if last > first:  # otherwise `max_bytes` cut off a gap
                    runs.append(run._replace(picks=samples[first:last], first_row=first_row + first))
        return runs

    def split(self, run: Run) -> list[Run]:
        """Return a request for each chunk of a run that has a selected sample."""
        stops = run.start + np.cumsum(run.sizes)
        runs = []
        for i, part in enumerate(chunk_rows(run, self.layout.chunk, 0)):
            at = slice(i, i + 1)
            one = self.plan_run(run.shard, run.chunk + i, (stops - run.sizes)[at], stops[at], run.crcs[at])
            if run.picks is not None:
                low, high = np.searchsorted(run.picks, [one.first_sample, one.first_sample + one.num_samples]).tolist()
                rows = None if run.rows is None else run.rows[low:high]
                one = one._replace(picks=run.picks[low:high], first_row=run.first_row + low, rows=rows)
            runs += [one] * bool(part.size)
        return runs

    def bad_rows(self, run: Run, start: int, stop: int) -> Sequence[int]:
        """Return which of the samples [start, stop), counted from 0, a run has; of selected ones those it picks."""
        if run.rows is not None:
            rows: list[int] = (run.rows - start).tolist()
            return rows
        first, count = run.first_sample, run.num_samples
        if run.picks is not None:
            first, count = run.first_row, len(run.picks)
        return range(max(first, start) - start, min(first + count, stop) - start)

    def fetch(self, reader: RangeReader, run: Run, allocate: Allocate = empty_buffer) -> memoryview:
        """Return the bytes of a run by one request, without retries.

        Clients that read in place use the memory of `allocate(size)`. Raises `MissingObjectError` or `StorageError`.
        """
        try:
            return reader.read(run.path, run.start, run.stop, allocate)
        except NotFoundError as error:
            problem = f"{self._url(run)} is missing, but the manifest lists it"
            raise MissingObjectError(problem, "restore the object, or convert the dataset again") from error

    def request(self, run: Run) -> Callable[[], memoryview]:
        """Return a function that fetches the bytes of a run with the store's retries. It raises as `fetch`.

        It is called again if these are damaged, and then does not take them from a cache.
        """
        reads, next_use = count(), RESIDENT if self.layout.resident else inf

        def request() -> memoryview:
            use = Use(next_use, fresh=next(reads) > 0, content=run.content)
            return self.fetch(replace(self.store.reader(), call=self.store.retries.call, use=use), run)

        return request

    def read(
        self, start: int, stop: int, *, threads: int = 1, max_bytes: int = MAX_REQUEST
    ) -> NDArray[Any] | list[Placed]:
        """Return the samples [start, stop), read by up to `threads` concurrent requests, with retries.

        The result is an array (stop - start, *shape) for a fixed shape. For a variable size, it is the items of each
        chunk that holds one of the samples, with the number of the chunk's first sample. Raises as `runs` and `load`.
        """
        field, runs = self.layout.field, self.runs(start, stop, max_bytes)
        out = np.empty((stop - start, *field.shape), field.dtype) if field.fixed else None

        def load(run: Run) -> list[Placed]:
            return self.load(run, self.request(run), out, start if field.fixed else 0) or []

        placed = run_all(load, runs, threads)
        return list(chain.from_iterable(placed)) if out is None else out

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
        """Fetch and decode a run; return as `decode`. Damaged bytes are fetched again, at most twice.

        `on_damage` is called before each further attempt. Raises the errors of `fetch`, and the last error of `decode`.
        """
        return reread(lambda: self.decode(run, fetch(), out, first, allocate), on_damage)

    def decode(
        self, run: Run, data: memoryview, out: Out = None, first: int | None = None, allocate: Allocate = empty_buffer
    ) -> list[Placed] | None:
        """Check the length and the checksum of every chunk with a selected sample, and decode it.

        Row 0 is sample `first`, by default the first of the run; if samples are picked, rows count selected samples.
        A fixed shape is decoded into `out`, C-contiguous (rows, *shape) of the field's dtype; samples outside of it are
        dropped. Without `out`, which a variable size requires, returns the items of each chunk with the row of the
        first, without padding; compressed chunks are decompressed into `allocate(size)`. Raises `CorruptError` or
        `ModifiedError`, which name the object, the chunk and its samples.
        """
        if out is not None and not self.layout.field.fixed:
            raise TypeError(f"field {self.name!r} has a variable size, which is not decoded into an array")
        if len(data) != run.stop - run.start:
            raise self._damage(run, 0, f"{len(data)} of {run.stop - run.start} bytes were received")
        placed: list[Placed] = []
        end = 0
        parts = list(chunk_rows(run, self.layout.chunk, first))
        # items that are not decompressed would keep the chunks between them in memory
        copied = self.layout.codec == "none" and not all(part.size for part in parts)
        for i, (part, size) in enumerate(zip(parts, run.sizes.tolist(), strict=True)):
            end += size
            if not part.size:
                continue
            body = self._verified_body(run, i, data[end - size : end])
            try:
                if out is not None:
                    self._decode_rows(body, out, part)
                else:
                    items = codecs.decode_items(self.layout, body, allocate)
                    placed.append((part.row, select_items(items, part, allocate, copied=copied)))
            except CorruptError as error:
                raise self._damage(run, i, error.problem) from error
        return placed if out is None else None

    def write(
        self, run: Run, body: memoryview, rows: tuple[NDArray[Any], int], _allocate: Allocate = empty_buffer
    ) -> tuple[int, int]:
        """Decode a run of a fixed shape into rows, the first of which is for the sample of a number.

        Return the number of missing chunks, which is 0, and of decoded bytes. Raises as `decode`.
        """
        self.decode(run, body, *rows)
        return 0, run.num_samples * self.layout.field.item_bytes

    def decoded_size(self, runs: Iterable[Run]) -> int:
        """Return the estimated bytes of the decoded chunks of runs."""
        stored = sum(int((run.stop - run.start) * run.share) for run in runs)
        return stored * max(1, self.layout.nbytes) // max(1, self.layout.stored)

    def decoded_bytes(self, run: Run, data: memoryview) -> int:
        """Return the bytes of the decompressed chunks of a run, 0 if they are not compressed or damaged."""
        if self.layout.codec == "none" or run.picks is not None:
            return 0
        stops = np.cumsum(run.sizes).tolist()
        chunks = [data[start:stop] for start, stop in pairwise([0, *stops])]
        try:
            total = sum(codecs.check_frame(self.layout.codec, each[:-CRC_BYTES], 0, MAX_CHUNK_BYTES) for each in chunks)
        except CorruptError:
            return 0
        # memory is reserved for it: damage must not state it
        return total if total <= 2 * self.decoded_size([run]) or all(map(_is_intact, chunks)) else 0

    def _decode_rows(self, body: memoryview, out: NDArray[Any], part: ChunkRows) -> None:
        if not isinstance(part.row, int):
            decoded = np.empty((part.rows, *self.layout.field.shape), out.dtype)
            codecs.decode_fixed(self.layout, body, decoded)
            out[part.row] = decoded if part.selected is None else decoded[part.selected]
            return
        low, high = max(part.row, 0), min(part.row + part.size, len(out))
        if low >= high:
            return
        if low == part.row and part.selected is None:
            codecs.decode_fixed(self.layout, body, out[low:high])
            return
        decoded = np.empty((part.rows, *self.layout.field.shape), out.dtype)
        codecs.decode_fixed(self.layout, body, decoded)
        rows = slice(low - part.row, high - part.row)
        if part.selected is None:
            np.copyto(out[low:high], decoded[rows])
        else:
            np.take(decoded, part.selected[rows], axis=0, out=out[low:high], mode="clip")

    def _verified_body(self, run: Run, i: int, data: memoryview) -> memoryview:
        body = data[:-CRC_BYTES]
        stored = int.from_bytes(data[-CRC_BYTES:], "little")
        computed = crc32c.crc32c(body)
        if computed != stored:
            raise self._damage(run, i, f"its crc32c is {computed:08x}, stored is {stored:08x}")
        if stored != run.crcs[i]:
            (chunks,) = np.nonzero(self.table.shard(run.shard)[2] == stored)
            if len(chunks):
                problem = f"{self._where(run, i)}: the store sent the bytes of chunk {chunks[0]} instead"
                raise CorruptError(problem, "check the server, and any proxy or cache in front of it")
            raise self._modified(run, i, f"its crc32c is {stored:08x}, the chunk table has {run.crcs[i]:08x}")
        return body

    def _damage(self, run: Run, i: int, detail: str) -> CorruptError | ModifiedError:
        """Return the error for a damaged chunk: `ModifiedError` if the shard's index belongs to another object."""
        layout = self.layout
        expected = np.stack([run.start + np.cumsum(run.sizes) - run.sizes, run.sizes], axis=1).astype(np.uint64)
        index = read_index(self.store, run.path, layout.chunks_per_shard)
        if index is not None and not np.array_equal(index[run.chunk : run.chunk + len(run.sizes)], expected):
            return self._modified(run, i, "its index is intact, but does not match the manifest")
        problem = f"{self._where(run, i)} is damaged: {detail}"
        return CorruptError(problem, "restore the object, or convert the dataset again")

    def _modified(self, run: Run, i: int, detail: str) -> ModifiedError:
        problem = f"{self._where(run, i)}: the object was modified after the conversion: {detail}"
        return ModifiedError(problem, REOPEN)

    def _where(self, run: Run, i: int) -> str:
        sample = run.first_sample + i * self.layout.chunk
        first, stop = self._numbers(sample, min(sample + self.layout.chunk, self._num_stored))
        samples = f"samples {first} to {stop - 1}" if first < stop else "deleted samples"
        return f"chunk {run.chunk + i} of {self._url(run)} ({samples})"

    def _url(self, run: Run) -> str:
        return f"{self.store.url}/{run.path}"

    def plan_run(
        self, shard: int, chunk: int, starts: NDArray[np.int64], stops: NDArray[np.int64], crcs: NDArray[np.uint32]
    ) -> Run:
        """Return the request for consecutive chunks of a shard, the first of which has the number `chunk`.

        `starts`, `stops` and `crcs` are those of `ChunkTable.shard`. Raises `MissingObjectError` for an absent chunk.
        """
        layout, sizes, start, stop = self.layout, stops - starts, int(starts[0]), int(stops[-1])
        sample = shard * layout.shard + chunk * layout.chunk
        count = min(len(crcs) * layout.chunk, self._num_stored - sample)
        run = Run(layout.shard_key(self.table.name, shard), start, stop, shard, chunk, sizes, crcs, sample, count)
        short = np.flatnonzero(run.sizes < CRC_BYTES)
        if len(short):
            problem = f"{self._where(run, int(short[0]))} is absent in the chunk table"
            raise MissingObjectError(problem, "convert the dataset again")
        return run


def _is_intact(chunk: memoryview) -> bool:
    return crc32c.crc32c(chunk[:-CRC_BYTES]) == int.from_bytes(chunk[-CRC_BYTES:], "little")


def read_columns(readers: Mapping[str, FieldReader], start: int, stop: int) -> dict[str, Column]:
    """Return the samples [start, stop) of each field as columns: arrays, or lists of bytes.

    Raises `FormatError` or `DecodeError`, which name the object or the sample, or `StorageError`.
    """
    return {name: _column(reader, start, stop) for name, reader in readers.items()}


def _column(reader: FieldReader, start: int, stop: int) -> Column:
    values = reader.read(start, stop, threads=COLUMN_THREADS, max_bytes=COLUMN_REQUEST)
    if isinstance(values, np.ndarray):
        return values
    field, column = reader.layout.field, []
    for number, items in values:
        for bad in bad_items(field, items):
            problem = f"field {reader.name!r} of sample {number + bad[0]} is not {field}: {bad[1]}"
            raise DecodeError(problem, "check the dataset with streamloader verify")
        column += [bytes(items[i]) for i in range(max(start - number, 0), min(stop - number, len(items)))]
    return column


def bad_items(field: Field, items: Items) -> Iterator[tuple[int, str]]:
    """Yield the index of each invalid item of a variable-size field, and the reason."""
    if field.kind == "ragged":
        sizes = items.stops - items.starts
        for row in np.flatnonzero(sizes % field.item_bytes).tolist():
            yield row, f"{sizes[row]} bytes are not a multiple of a row's {field.item_bytes}"
    for row in range(len(items)) if field.kind == "text" else ():
        try:
            str(items[row], "utf-8")
        except UnicodeDecodeError as error:
            yield row, f"{error.reason} at byte {error.start}"
