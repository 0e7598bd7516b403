"""Plans, fetches and decodes the chunks of Zarr arrays that others wrote, for boxes of their elements."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader import errors
from streamloader.errors import CorruptError, FieldError, MissingObjectError, NotFoundError, StreamloaderError
from streamloader.format.opening import reread
from streamloader.format.reader import GAP_BYTES, MAX_REQUEST
from streamloader.samples import distinct
from streamloader.storage.buffers import Allocate, LRUCache, empty_buffer
from streamloader.storage.objects import cut_runs
from streamloader.storage.process import run_all
from streamloader.storage.store import RangeReader, Store
from streamloader.zarr.cf import Unpacking, unpacking_of
from streamloader.zarr.codecs import ChunkCodec, Index, ShardIndex, chunk_codec
from streamloader.zarr.metadata import Channel, ZarrArray, ZarrGroup

Place = tuple[int, ...]  # of a chunk in the grid of an array

ABSENT = empty_buffer(0)  # in place of the body of an object that does not exist
INDEX_CACHE_BYTES = 64 << 20
READ_THREADS = 8
PROBES = 256  # objects that are asked for to know whether an array has any
_MAYBE_MISSING = (NotFoundError, errors.AccessError, MissingObjectError)


class Target(NamedTuple):
    """An array to write elements to, and its `first` element. `affine`: the (mean, std) by which they are scaled.

    `rows`: the elements along the dimension `axis`, ascending, if they are not contiguous.
    """

    out: NDArray[Any]
    first: Place
    affine: tuple[float, float] | None = None
    rows: NDArray[np.int64] | None = None
    axis: int = 0

    def places(self, chunks: Place) -> Iterable[Place]:
        """Return the places of the chunks of these sizes that have some of the elements."""
        bounds = zip(self.first, self.out.shape, chunks, strict=True)
        along: list[Iterable[int]] = [range(a // size, -(-(a + n) // size)) for a, n, size in bounds]
        if self.rows is not None:
            along[self.axis] = distinct(self.rows // chunks[self.axis]).tolist()
        return product(*along)


class StoredChunk(NamedTuple):
    """A chunk of a response: its place, and its bytes [start, stop) in the response, (-1, -1) if it is missing."""

    place: Place
    start: int
    stop: int


class ArrayRun(NamedTuple):
    """Chunks that one request reads: the bytes [start, stop) of the object `path`. No request if both are 0.

    An object that is a chunk may end before `stop`. What follows is the number of the array and the region of a block
    that it is for, and the samples of the block: see `RegionReader`.
    """

    path: str
    start: int
    stop: int
    chunks: tuple[StoredChunk, ...]
    member: int = 0
    region: int = 0
    first_sample: int = 0
    num_samples: int = 0


class ArrayReader:
    """Reads chunks of one array; thread-safe. A missing chunk has the fill value, or is an error if `strict`.

    With `strict=False`, also the chunks of a page of references that is missing have the fill value.

    Raises `FormatError` for metadata, a fill value or a codec that cannot be used.
    """

    def __init__(self, store: Store, array: ZarrArray, *, strict: bool | None = None) -> None:
        self.array = array
        self.codec: ChunkCodec = chunk_codec(array)
        self.strict = strict
        self._fill = np.array([array.fill], array.values.dtype.newbyteorder("="))
        self._store = store
        self._indexes = LRUCache[Place, Index](INDEX_CACHE_BYTES, 2)
        self._present = ""  # the path of an object that was read
        self._shards = None if array.sharding is None else ShardIndex(array, array.sharding)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the indexes of shards."""
        return partial(ArrayReader, strict=self.strict), (self._store, self.array)

    @property
    def kept_bytes(self) -> int:
        """The most bytes of the indexes of shards that are cached."""
        return 0 if self._shards is None else min(INDEX_CACHE_BYTES, prod(self.array.grid) * self._shards.nbytes)

    def places(self, boxes: Sequence[tuple[Place, Place]]) -> list[Place]:
        """Return the places of the chunks that the boxes [low, high) touch, each once."""
        places: dict[Place, None] = {}  # a set in order
        for low, high in boxes:
            bounds = zip(low, high, self.array.chunks, strict=True)
            places |= dict.fromkeys(product(*(range(a // size, -(-b // size)) for a, b, size in bounds)))
        return list(places)

    def count_requests(self, boxes: Sequence[tuple[Place, Place]]) -> int:
        """Return about the number of requests for the chunks that the boxes touch, without reading an index."""
        total = 0
        for low, high in boxes:
            objects = prod(-(-b // n) - a // n for a, b, n in zip(low, high, self.array.stored_chunks, strict=True))
            size = prod(b - a for a, b in zip(low, high, strict=True)) * self.array.values.dtype.itemsize
            total += objects if self.array.sharding is None else max(objects, size // MAX_REQUEST)
        return total

    def runs(self, places: Sequence[Place]) -> list[ArrayRun]:
        """Return the requests for the chunks at these places.

        Reads the indexes of shards that are not cached. Raises `CorruptError` for a damaged one, and `StorageError`.
        """
        shards = self._shards
        if shards is None:
            stop = self.codec.most_stored
            return [ArrayRun(self.array.object_key(at), 0, stop, (StoredChunk(at, 0, stop),)) for at in places]
        by_shard: dict[Place, list[Place]] = {}
        for place in places:
            by_shard.setdefault(tuple(at // n for at, n in zip(place, shards.grid, strict=True)), []).append(place)
        return [run for shard, places in by_shard.items() for run in self._runs_of(shards, shard, places)]

    def _runs_of(self, shards: ShardIndex, shard: Place, places: Sequence[Place]) -> Iterable[ArrayRun]:
        """Yield the requests for chunks of a shard, in the order of their bytes."""
        inside = np.array(places, np.int64).reshape(len(places), -1) % shards.grid
        numbers = np.ravel_multi_index(tuple(inside.T), shards.grid) if shards.grid else np.zeros(1, np.int64)
        offsets, sizes = (column[numbers] for column in self._index(shards, shard))
        order = np.argsort(offsets, kind="stable")
        missing, path = int((offsets < 0).sum()), self.array.object_key(shard)
        absent = tuple(StoredChunk(places[i], -1, -1) for i in order[:missing].tolist())
        order = order[missing:]
        starts, stops = offsets[order], offsets[order] + sizes[order]
        if absent:
            yield ArrayRun(path, 0, 0, absent)
        for first, end in cut_runs(starts, stops, GAP_BYTES, MAX_REQUEST):
            begin = int(starts[first])
            chunks = [
                StoredChunk(places[i], int(offsets[i]) - begin, int(offsets[i] + sizes[i]) - begin)
                for i in order[first:end].tolist()
            ]
            yield ArrayRun(path, begin, int(stops[first:end].max()), tuple(chunks))

    def fetch(self, reader: RangeReader, run: ArrayRun, allocate: Allocate = empty_buffer) -> memoryview:
        """Return the bytes of a run by one request, without retries; `ABSENT` if its object does not exist."""
        try:
            body = reader.read(run.path, run.start, run.stop, allocate)
        except _MAYBE_MISSING as error:
            self._check_missing(error)
            return ABSENT
        self._present = run.path if run.stop else self._present
        return body

    def _check_missing(self, error: StreamloaderError) -> None:
        """Raise the error of a read, unless the object is missing: a 403 says so if another one can be read now."""
        if isinstance(error, MissingObjectError):  # a page of references
            is_missing = self.strict is False
        else:
            is_missing = not isinstance(error, errors.AccessError) or (error.may_be_missing and self._find(again=True))
        if not is_missing:
            raise error

    def check_exists(self) -> None:
        """Raise `MissingObjectError` if no object of the array is found, unless `strict` is False.

        Up to `PROBES` are asked for, evenly spread over the array, without retries.
        """
        if self.strict is None and not self._find():
            problem = f"no chunk of the array {self._store.child(self.array.path).url} exists"
            raise MissingObjectError(problem, "check the URL, or read its fill value with strict=False")

    def _find(self, *, again: bool = False) -> bool:
        """Return whether an object of the array can be read; with `again` not only once."""
        present = self._present  # other threads change it
        if present and not again:
            return True
        array, grid = self.array, self.array.grid
        numbers = range(0, prod(grid), max(1, -(-prod(grid) // PROBES)))
        places = (tuple(map(int, np.unravel_index(number, grid))) for number in numbers)
        paths = [present] if present else [array.object_key(place) for place in places]
        found = run_all(self._readable, paths, READ_THREADS)
        self._present = present = next(filter(None, found), "")
        return present != ""

    def _readable(self, path: str) -> str:
        """Return the path of an object if it can be read, else an empty one."""
        try:
            self._store.reader().read(path, 0, 1)
        except _MAYBE_MISSING:
            return ""
        return path

    def decode(self, run: ArrayRun, chunk: StoredChunk, body: memoryview, out: NDArray[Any] | None) -> Any:
        """Return a chunk of a response as an array, None if it is missing.

        It is decoded into C-contiguous `out` if given and the codec can. Raises `CorruptError`, or
        `MissingObjectError` if its shard has an index that lists it, or this reader is strict; both name the object and
        the elements.
        """
        if chunk.start < 0 or body is ABSENT:
            if chunk.start >= 0 and self.array.sharding is not None:
                problem = f"{self._where(run, chunk)} is missing, although the index of this shard was read"
                raise MissingObjectError(problem, "restore the object, or write the shard again")
            if self.strict:
                remedy = "write the chunk, or read it as the fill value with strict=False"
                raise MissingObjectError(f"{self._where(run, chunk)} is missing", remedy)
            return None
        whole = self.array.sharding is None
        if len(body) == run.stop if whole else len(body) != run.stop - run.start:
            problem = f"{self._where(run, chunk)}: {len(body)} bytes were received"
            problem += ", and a chunk of this array has fewer" if whole else ""
            raise CorruptError(problem, "restore the object, or write the chunk again")
        data = body if whole else body[chunk.start : chunk.stop]
        try:
            return self.codec.decode(data, out if out is not None and self.codec.plain else None)
        except CorruptError as error:
            problem = f"{self._where(run, chunk)} is damaged: {error.problem}"
            raise CorruptError(problem, "restore the object, or write the chunk again") from error

    def read_all(self, unpacking: Unpacking | None = None) -> NDArray[Any]:
        """Return all elements, unpacked, by concurrent requests with retries."""
        dtype = self.array.values.dtype.newbyteorder("=") if unpacking is None else np.dtype(unpacking.dtype)
        out = np.empty(self.array.shape, dtype)
        self.read_into([Target(out, (0,) * out.ndim)], unpacking)
        return out

    def read_into(self, targets: Sequence[Target], unpacking: Unpacking | None = None) -> None:
        """Fill the targets, unpacked, by concurrent requests with retries; each chunk is read once."""

        def load(run: ArrayRun) -> None:
            def attempt() -> None:
                body = self._store.retries.call(lambda: self.fetch(self._store.reader(), run))
                for chunk in run.chunks:
                    self.decode_into(run, chunk, body, targets, unpacking)

            reread(attempt)

        places = dict.fromkeys(place for target in targets for place in target.places(self.array.chunks))
        run_all(load, self.runs(list(places)), READ_THREADS)

    def decode_into(
        self,
        run: ArrayRun,
        chunk: StoredChunk,
        body: memoryview,
        targets: Sequence[Target],
        unpacking: Unpacking | None,
        *,
        allocate: Allocate | None = None,
    ) -> bool:
        """Decode a chunk, and write its elements, unpacked and scaled, to each target that it overlaps.

        Return whether the chunk was there. It is decoded into memory from `allocate`, if given, unless it is a part of
        a target. Raises as `decode`.
        """
        first = [at * size for at, size in zip(chunk.place, self.array.chunks, strict=True)]
        inside = [self._overlap(first, target) for target in targets]
        one, codec = inside[0][0], self.codec
        like_chunk = (one.shape, one.dtype) == (codec.shape, codec.dtype) and one.flags.c_contiguous
        out = direct = one if like_chunk and codec.plain and unpacking is None and len(targets) == 1 else None
        if out is None and self.codec.plain and allocate is not None:
            out = np.frombuffer(allocate(self.array.chunk_bytes), self.codec.dtype).reshape(self.codec.shape)
        values = self.decode(run, chunk, body, out)
        for (target, part), affine in zip(inside, (each.affine for each in targets), strict=True):
            if not target.size:
                continue
            if values is None:
                fill = self._fill if unpacking is None else unpacking.apply(self._fill)
                target.fill(fill[0])  # an assignment would cut a text at NUL
            elif values is direct:
                pass
            elif unpacking is None:
                target[...] = values[part]
            else:
                unpacking.write(values[part], target)
            if affine is not None:
                np.subtract(target, affine[0], out=target)
                np.divide(target, affine[1], out=target)
        return values is not None

    def _overlap(self, first: Sequence[int], target: Target) -> tuple[NDArray[Any], tuple[Any, ...]]:
        """Return the part of a target that the chunk beginning at `first` overlaps, and where that is in the chunk."""
        bounds = list(zip(first, self.array.chunks, target.first, target.out.shape, strict=True))
        spans = [(max(a, o), max(a, o, min(a + size, o + count))) for a, size, o, count in bounds]
        at: list[Any] = [slice(a - o, b - o) for (a, b), o in zip(spans, target.first, strict=True)]
        part: list[Any] = [slice(a - o, b - o) for (a, b), o in zip(spans, first, strict=True)]
        if target.rows is not None:
            begin, size = first[target.axis], self.array.chunks[target.axis]
            i, j = np.searchsorted(target.rows, (begin, begin + size)).tolist()
            at[target.axis], part[target.axis] = slice(i, j), target.rows[i:j] - begin
        # the ellipsis makes views of arrays without dimensions too: without it, they are indexed to a copy
        return target.out[(*at, ...)], (*part, ...)

    def _index(self, shards: ShardIndex, shard: Place) -> Index:
        """Return the index of a shard; all chunks are missing if the shard does not exist."""
        cached = self._indexes.get(shard)
        if cached is not None:
            return cached
        index = reread(lambda: self._read_index(shards, shard))
        found = index[0].max(initial=-1) >= 0  # another thread may have read it, although this one did not find it
        return self._indexes.add(shard, index, 2 * index[0].nbytes, replace=found)

    def _read_index(self, shards: ShardIndex, shard: Place) -> Index:
        path, size, count = self.array.object_key(shard), shards.nbytes, prod(shards.grid)
        try:
            data = self._store.get_tail(path, size) if shards.is_last else self._store.get_range(path, 0, size)
        except _MAYBE_MISSING as error:
            self._store.retries.call(partial(self._check_missing, error))
            return np.full(count, -1), np.full(count, -1)
        self._present = path
        remedy = "restore the object, or write the shard again"
        try:
            offsets, sizes = shards.parse(memoryview(data))
            if sizes.max(initial=0) > self.codec.most_stored:
                raise CorruptError(f"a chunk of {sizes.max()} bytes is larger than its metadata allows")
            return offsets, sizes
        except CorruptError as error:
            raise CorruptError(f"the index of {self._store.url}/{path} is damaged: {error.problem}", remedy) from error

    def _where(self, run: ArrayRun, chunk: StoredChunk) -> str:
        bounds = zip(chunk.place, self.array.chunks, self.array.shape, strict=True)
        box = ", ".join(f"{at * size}:{min(at * size + size, n)}" for at, size, n in bounds)
        return f"the chunk [{box}] in {self._store.url}/{run.path}"


def parse_channel(channel: str) -> Channel:
    """Return the array, the coordinate ("" if none is named) and the value of `z@level=500`, None for `z`.

    Raises `FieldError` for a value that is not a number.
    """
    name, at, pick = channel.partition("@")
    dim, _, text = pick.rpartition("=")
    try:
        return name, dim, float(text) if at else None
    except ValueError:
        raise FieldError(f"the channel {channel!r} selects no number", "write it like 'z@500'") from None


def find_index(group: ZarrGroup, channel: str, skipped: Collection[str]) -> dict[str, int]:
    """Return the index on a dimension that a channel `z@500` or `z@level=500` selects; empty for a channel `z`.

    Dimensions in `skipped` are not searched. Raises `FieldError` for an unknown array, and unless exactly one
    coordinate has the value.
    """
    name, dim, value = parse_channel(channel)
    array = group.array(name)
    if value is None:
        return {}
    candidates = [dim] if dim else [other for other in array.dims if other not in skipped]
    found = {}
    for other in candidates:
        coordinate = group.arrays.get(group.beside(name, other) or "")
        if other in array.dims and coordinate is not None and coordinate.dims == (other,):
            where = f"{group.url}/{coordinate.path}"
            unpacking = unpacking_of(coordinate.netcdf_attributes, coordinate.values.dtype, where)
            values = ArrayReader(group.store, coordinate).read_all(unpacking)
            matches = np.flatnonzero(values == value)
            if matches.size == 1:
                found[other] = int(matches[0])
    if len(found) != 1:
        where = " and ".join(found) or "no coordinate"
        problem = f"the channel {channel!r}: {where} of {', '.join(candidates) or 'its dimensions'} has {value:g}"
        raise FieldError(problem, f"choose a value of one coordinate, as in '{name}@level=500'")
    return found
