"""The shards of a field, checked: size, index, and of every chunk the checksums, the table's entry, and the items."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.after.check_tables import Chunks, TableCheck
from streamloader.conversion.after.problems import samples_text
from streamloader.conversion.after.stored import bad_item
from streamloader.conversion.after.subject import StoredField
from streamloader.errors import CorruptError, FormatError, MissingObjectError, NotFoundError
from streamloader.format.codecs import CRC_BYTES
from streamloader.format.opening import ROOT
from streamloader.format.reader import field_reader
from streamloader.format.runs import Run
from streamloader.format.shard import index_size, parse_index
from streamloader.options import MIB

PIECE_BYTES = 8 * MIB  # of a shard that a thread reads and decodes at once, unless one chunk is more


@dataclass(frozen=True, eq=False)
class _Shard:
    """One shard object, its samples [first, stop), and its chunks."""

    number: int
    path: str
    samples: tuple[int, int]
    chunks: Chunks

    @property
    def end(self) -> int:
        """Where its index begins."""
        return int(self.chunks.stops[-1]) if len(self.chunks) else 0


class ShardCheck:
    """Checks the shards of one field, in any order and from any thread, when its table has been checked."""

    def __init__(self, field: StoredField, table: TableCheck) -> None:
        self.field = field
        self._layout = field.layout
        self._table = table
        self._reader = field_reader(field.subject.store, field.subject.manifest, field.name)
        self._plane, self._retries = field.subject.store.reader(), field.subject.store.retries
        self._lock = threading.Lock()
        self._stored = self._decoded = 0

    def check(self, number: int) -> int:
        """Check one shard object, and return its bytes; 0 where it is missing."""
        path, samples = self._layout.shard_key(self.field.name, number), self.field.samples(number, number + 1)
        size = self.field.subject.size(path)
        if size is None:
            problem = f"{self.field.url(path)} is missing, which the manifest promises"
            self._add(problem, path, samples)
            return 0
        index = self._index(path)
        chunks = self._table.chunks(number)
        if chunks is not None:
            shard: _Shard | None = _Shard(number, path, samples, chunks)
        else:
            shard = self._by_index(number, size, index)
        counted = size
        if shard is not None and self._grown(shard, size):
            self._check_chunks(shard, len(shard.chunks))
            counted = shard.end + index_size(self._layout.chunks_per_shard)
        elif shard is not None:
            self._check(shard, size, index)
        with self._lock:
            self._stored += counted
        return size

    def _grown(self, shard: _Shard, size: int) -> bool:
        """Return whether an append under way has made the last shard longer: what is there stays where it is."""
        last = shard.number == self.field.num_shards - 1 and self.field.subject.appending
        return last and size > shard.end + index_size(self._layout.chunks_per_shard)

    def check_totals(self) -> None:
        """Compare the bytes of all shards with what the manifest says; for a field in which nothing else is wrong."""
        decoded = self._layout.nbytes if self._layout.field.fixed else self._decoded
        for key, said, there in (
            ("stored", self._layout.stored, self._stored),
            ("nbytes", self._layout.nbytes, decoded),
        ):
            if said != there:
                problem = f"the manifest of {self.field.subject.store.url} says {key} {said} of {self.field.name!r}"
                self.field.add(f"{problem}, its shards have {there}", ROOT)

    def _index(self, path: str) -> NDArray[np.uint64] | None:
        """Return the shard's own index, None where it is damaged."""
        chunks = self._layout.chunks_per_shard
        try:
            return parse_index(self.field.subject.store.get_tail(path, index_size(chunks)), chunks)
        except (CorruptError, NotFoundError):
            return None

    def _by_index(self, number: int, size: int, index: NDArray[np.uint64] | None) -> _Shard | None:
        """Return what a shard's own index says; None, and a problem, where that is of no use either."""
        path, samples = self._layout.shard_key(self.field.name, number), self.field.samples(number, number + 1)
        used = self.field.chunks(number)
        if index is not None and np.all(index[:used] <= size) and np.all(index[:used, 1] > CRC_BYTES):
            places = index[:used].astype(np.int64)
            chunks = Chunks(places[:, 0], places[:, 1], None)
            ascending = np.all(chunks.starts[1:] >= chunks.stops[:-1])
            if ascending and np.array_equal(index, chunks.index(len(index))):
                return _Shard(number, path, samples, chunks)
        problem = f"the index of {self.field.url(path)} is of no use, and neither is the chunk table"
        self._add(f"{problem}: where its chunks are cannot be told", path, samples)
        return None

    def _check(self, shard: _Shard, size: int, index: NDArray[np.uint64] | None) -> None:
        """Check one object of so many bytes; `index` is its own, None where that is damaged."""
        chunks, url = self._layout.chunks_per_shard, self.field.url(shard.path)
        expected = shard.end + index_size(chunks)
        other = index is not None and not np.array_equal(index, shard.chunks.index(chunks))
        replaced = f"{url} was modified after the conversion"
        if size != expected and other:
            self._add(f"{replaced}: its index is intact, but of another object", shard.path, shard.samples)
            return
        if size != expected:
            self._check_chunks(shard, self._wrong_size(shard, size, expected))
            return
        bad = self._check_chunks(shard, len(shard.chunks), silent=other)
        if index is None:
            problem = f"the index of {url} is damaged: its checksum does not match"
        elif not other:
            return
        elif bad:
            problem = f"{replaced}: its index and {bad} of its {len(shard.chunks)} chunks are others"
        else:
            problem = f"the index of {url} is intact, but does not say where its chunks are"
        self._add(problem, shard.path, shard.samples)

    def _wrong_size(self, shard: _Shard, size: int, expected: int) -> int:
        """Say that an object is too short or too long, and return how many of its chunks are there."""
        there = int(np.searchsorted(shard.chunks.stops, size, side="right"))
        problem = f"{self.field.url(shard.path)} has {size} bytes, its chunks and index have {expected}"
        if there < len(shard.chunks):
            first = shard.samples[0] + there * self._layout.chunk
            what = f"the chunks {there} to {len(shard.chunks) - 1} are cut off"
            self._add(f"{problem}: {what}", shard.path, (first, shard.samples[1]), there)
        else:
            what = "its index is cut off" if size < expected else "something was appended"
            self._add(f"{problem}: {what}", shard.path, shard.samples)
        return there

    def _check_chunks(self, shard: _Shard, count: int, silent: bool = False) -> int:
        """Read and decode the first `count` chunks; note each that is bad, unless `silent`, and return how many."""
        bad = 0
        for run in self._pieces(shard, count):
            try:
                self._read(shard, run)
                continue
            except MissingObjectError as error:  # it was there when the store was listed
                self._add(error.problem, shard.path, shard.samples)
                return bad + 1
            except FormatError:
                pass  # which of its chunks it is, is found out below
            for chunk in range(run.chunk, run.chunk + len(run.sizes)):
                one = self._run(shard, chunk, chunk + 1)
                try:
                    self._read(shard, one)
                except FormatError as error:
                    bad += 1
                    samples = (one.first_sample, one.first_sample + one.num_samples)
                    if not silent:
                        self.field.add(error.problem, shard.path, chunk=chunk, samples=samples)
        return bad

    def _pieces(self, shard: _Shard, count: int) -> Iterator[Run]:
        """Yield runs of the first `count` chunks, of about `PIECE_BYTES` at most, encoded and decoded."""
        mean = self._layout.nbytes / max(1, self.field.subject.manifest.num_samples)
        most = max(1, int(PIECE_BYTES // max(1.0, mean * self._layout.chunk)))
        starts, stops = shard.chunks.starts, shard.chunks.stops
        apart = np.append(np.flatnonzero(starts[1:] != stops[:-1]) + 1, len(starts))
        low = 0
        while low < count:
            together = int(apart[np.searchsorted(apart, low, side="right")])
            fitting = int(np.searchsorted(stops, starts[low] + PIECE_BYTES, side="right"))
            high = min(max(fitting, low + 1), low + most, together, count)
            yield self._run(shard, low, high)
            low = high

    def _run(self, shard: _Shard, low: int, high: int) -> Run:
        first, crcs = shard.samples[0] + low * self._layout.chunk, shard.chunks.crcs
        return Run(
            path=shard.path,
            start=int(shard.chunks.starts[low]),
            stop=int(shard.chunks.stops[high - 1]),
            shard=shard.number,
            chunk=low,
            sizes=shard.chunks.sizes[low:high],
            crcs=np.zeros(high - low, np.uint32) if crcs is None else crcs[low:high],
            first_sample=first,
            num_samples=min((high - low) * self._layout.chunk, shard.samples[1] - first),
        )

    def _read(self, shard: _Shard, run: Run) -> None:
        """Fetch and decode a run, and look at its items. Raises `FormatError` where a chunk is damaged."""
        field = self._layout.field
        request = partial(self._reader.fetch, self._plane, run)
        if shard.chunks.crcs is None:  # then what stands behind each chunk is the only checksum
            run = replace(run, crcs=_stored_crcs(self._retries.call(request), run))
        out = np.empty((run.num_samples, *field.shape), field.dtype) if field.fixed else None
        placed = self._reader.load(run, lambda: self._retries.call(request), out) or []
        if out is not None and field.dtype == "bool":
            wrong = np.flatnonzero(out.view(np.uint8).reshape(run.num_samples, -1).max(axis=1) > 1)
            if len(wrong):
                self._bad_value(run, int(wrong[0]), "it is neither 0 nor 1")
        for row, items in placed:
            bad = bad_item(field, items)
            if bad is not None:
                self._bad_value(run, row + bad[0], bad[1])
        with self._lock:
            self._decoded += sum(int((items.stops - items.starts).sum()) for _, items in placed)

    def _bad_value(self, run: Run, row: int, why: str) -> None:
        sample, chunk = run.first_sample + row, run.chunk + row // self._layout.chunk
        where = f"sample {sample}, in chunk {chunk} of {self.field.url(run.path)}"
        problem = f"field {self.field.name!r} of {where}, is not {self._layout.field}: {why}"
        self.field.add(problem, run.path, chunk=chunk, samples=(sample, sample + 1))

    def _add(self, problem: str, path: str, samples: tuple[int, int], chunk: int | None = None) -> None:
        self.field.add(f"{problem} ({samples_text(*samples)})", path, chunk=chunk, samples=samples)


def _stored_crcs(data: memoryview, run: Run) -> NDArray[np.uint32]:
    """Return the checksum that stands at the end of each chunk; 0 for one that the data do not reach."""
    stops = np.cumsum(run.sizes).tolist()
    return np.array([int.from_bytes(data[stop - CRC_BYTES : stop], "little") for stop in stops], np.uint32)
