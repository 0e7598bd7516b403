"""Random fields and columns for the tests of the format, and short ways to write and read them."""

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamloader.format.geometry import Geometry, choose_layouts
from streamloader.format.manifest import DTYPES, Field, Manifest
from streamloader.format.opening import open_root
from streamloader.format.publish import finish, read_receipts, write_shard
from streamloader.format.reader import FieldReader
from streamloader.format.values import from_bytes
from streamloader.options import Layout
from streamloader.storage import open_store
from streamloader.storage.buffers import Allocate, Receiver, empty_buffer
from streamloader.storage.store import RangeReader, Store

CODECS = ("none", "lz4", "zstd")
ALL_KINDS = {
    **{f"f_{dtype}": Field("tensor", dtype, (3,)) for dtype in DTYPES},
    "scalar": Field.parse("int64"),
    "image": Field.parse("uint8[40,33]"),
    "blob": Field.parse("bytes:jpeg"),
    "words": Field.parse("text"),
    "boxes": Field.parse("ragged:float32[4]"),
    "tokens": Field.parse("ragged:uint16"),
}

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
fields = st.one_of(
    st.builds(Field, st.just("tensor"), st.sampled_from(DTYPES), shapes),
    st.builds(Field, st.just("ragged"), st.sampled_from(DTYPES), shapes),
    st.sampled_from([Field("bytes"), Field("bytes", encoding="png"), Field("text")]),
)
some_fields = st.dictionaries(st.sampled_from("abc"), fields, min_size=1)


def column_of(field: Field, count: int, seed: int = 0) -> Any:
    """Return a column as the format holds it: an array, or a list of bytes. About half of it compresses."""
    rng = np.random.default_rng([seed, count])

    def array(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        raw = rng.integers(0, 256, (*shape, np.dtype(field.dtype).itemsize), np.uint8) // rng.choice([1, 64])
        if field.dtype == "bool":
            return raw[..., 0] % 2 == 1
        if field.dtype.startswith("float"):
            return raw[..., 0].astype(field.dtype) / 8
        return raw.view(field.dtype)[..., 0]

    if field.fixed:
        return np.ascontiguousarray(array((count, *field.shape)))
    lengths = rng.integers(0, 9, count).tolist()
    if field.kind == "ragged":
        return [array((length, *field.shape)).tobytes() for length in lengths]
    if field.kind == "text":
        return [(f"é{i} " * length).encode() for i, length in enumerate(lengths)]
    return [rng.bytes(length * 7) for length in lengths]


def columns_of(fields: Mapping[str, Field], count: int, seed: int = 0) -> dict[str, Any]:
    """Return a column for each field."""
    return {name: column_of(field, count, seed + i) for i, (name, field) in enumerate(sorted(fields.items()))}


def memory_store() -> Store:
    """Return an empty store in memory."""
    return open_store(f"memory://{uuid.uuid4().hex}/data")


def geometry_of(fields: Mapping[str, Field], count: int | None, layout: Layout, codec: str = "") -> Geometry:
    """Return a geometry with each codec in turn, or all `codec`."""
    sizes = {name: float(field.item_bytes if field.fixed else 40) for name, field in fields.items()}
    codecs = {name: codec or CODECS[i % 3] for i, name in enumerate(sorted(fields))}
    return choose_layouts(fields, sizes, codecs, count, layout)


def write_shards(store: Store, geometry: Geometry, columns: Mapping[str, Any]) -> None:
    """Write all shards of the columns, without finishing."""
    size = geometry.samples_per_shard
    count = len(next(iter(columns.values())))
    for index in range(-(-count // size)):
        part = {name: column[index * size : (index + 1) * size] for name, column in columns.items()}
        write_shard(store, geometry, index, part)


def write_dataset(store: Store, columns: Mapping[str, Any], geometry: Geometry) -> Manifest:
    """Write and finish a dataset."""
    write_shards(store, geometry, columns)
    return finish(store, geometry, read_receipts(store), {})


def read_column(store: Store, name: str, start: int, stop: int, max_bytes: int = 1 << 24) -> Any:
    """Read a column through `FieldReader`, as the format holds it."""
    manifest, store, _ = open_root(store)
    found = FieldReader(store, manifest, name).read(start, stop, max_bytes=max_bytes)
    if isinstance(found, np.ndarray):
        return found
    return [bytes(items[i]) for number, items in found for i in range(len(items)) if start <= number + i < stop]


def same(left: Any, right: Any) -> bool:
    """Return whether two columns are equal, bit for bit."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return bool(left == right)


def public(field: Field, column: Any) -> Any:
    """Return a column as people give and get it."""
    return column if field.fixed else [from_bytes("x", field, memoryview(item), 0) for item in column]


def equal(left: Any, right: Any) -> bool:
    """Return whether two samples' values, or columns of them, are equal and of the same type."""
    if isinstance(left, list):
        return len(left) == len(right) and all(equal(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, np.ndarray | np.generic):
        return same(np.asarray(left), np.asarray(right))
    return type(left) is type(right) and bool(left == right)


class StoreProxy:
    """A store that answers as another one does, where a subclass does not change it."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


class Counting(StoreProxy):
    """A store that keeps the ranges that its data plane is asked for, and damages the first `flip` responses."""

    def __init__(self, store: Store, flip: int = 0) -> None:
        super().__init__(store)
        self.reads, self.flip = list[tuple[str, int, int]](), flip

    def reader(self) -> RangeReader:
        reader = self.store.reader()

        def fetch(path: str, start: int, stop: int, receiver: Receiver) -> memoryview:
            self.reads.append((path.removeprefix(reader.root).lstrip("/"), start, stop))
            data = bytearray(reader.fetch(path, start, stop, receiver))
            if self.flip:
                self.flip -= 1
                data[0] ^= 1
            return memoryview(data)

        return replace(reader, kind="fake", reason="it counts", fetch=fetch)

    def read(self, path: str, start: int, stop: int, allocate: Allocate = empty_buffer) -> memoryview:
        return self.reader().read(path, start, stop, allocate)


def objects_of(store: Store) -> dict[str, bytes]:
    """Return every object below the store."""
    return {info.path: store.get(info.path) for info in store.list()}


def read_picks(store: Store, name: str, picks: NDArray[np.int64]) -> Any:
    """Read the samples of these numbers, which ascend, through `FieldReader`, as the format holds them."""
    manifest, store, _ = open_root(store)
    reader, plane = FieldReader(store, manifest, name), store.reader()
    field, place = reader.layout.field, 1000  # the number of the first pick is the caller's
    out = np.zeros((len(picks), *field.shape), field.dtype) if field.fixed else None
    items = [b""] * len(picks)
    for run in reader.runs_of(picks, place):
        assert run.picks is not None and len(run.picks)
        for row, chunk in reader.decode(run, reader.fetch(plane, run), out, place) or []:
            for i in range(len(chunk)):
                items[row + i] = bytes(chunk[i])
    return items if out is None else out
