"""Random access to samples, without torch: `sl.open` and `Dataset`."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FieldError, UsageError
from streamloader.format.codecs import Items
from streamloader.format.deleted import Remaining, read_lengths, read_remaining
from streamloader.format.manifest import Field, Manifest
from streamloader.format.metadata import field_document
from streamloader.format.opening import Opened, open_root
from streamloader.format.reader import FieldReader
from streamloader.format.tables import ADD_LENGTHS
from streamloader.format.values import from_bytes
from streamloader.options import Cache
from streamloader.show.render import show_table
from streamloader.storage import Store, open_store
from streamloader.storage.buffers import LRUCache
from streamloader.storage.optional import need
from streamloader.storage.process import PerProcess, run_all

if TYPE_CHECKING:
    import dask.array
    import xarray

THREADS = 16  # concurrent requests: they wait for the network, not for a core
DASK = "'dask[array]' xarray"  # to be installed
CACHE_BYTES = 64 << 20  # decoded chunks that are cached for the next `ds[i]`

Chunk = NDArray[Any] | Items


def open(  # noqa: A001 - `sl.open(url)` is named after the builtin
    url: str | os.PathLike[str],
    *,
    split: str | None = None,
    version: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    cache: Cache | None = None,
) -> Dataset:
    """Open a dataset for random access, by one request. A `cache` on local disk keeps what is read.

    `split`: the split of a dataset that has splits. `version`: counted from 1, by default the last. An earlier version,
    and one with deleted samples, takes one more request.

    Raises `NotADatasetError`, `IncompleteError`, `VersionError` or `FormatError` if `url` is not a finished dataset,
    `FieldError` for an unknown or missing `split`, `UsageError` for an unknown version, and `StorageError`.
    """
    if not isinstance(cache, Cache | None):
        raise UsageError(f"cache={cache!r:.60}", "give sl.Cache('/local/disk', limit='200GiB')")
    opened = open_root(open_store(url, storage_options), split, version)
    opened = opened._replace(store=opened.store.cached(cache, opened.manifest.digest, versions=True))
    return Dataset(opened, read_remaining(opened.store, opened.manifest))


class Dataset:
    """A sequence of samples: `ds[i]` is a dict of one sample, `ds[a:b]` a dict of columns, `len(ds)` their number.

    A tensor is a numpy scalar or array, a ragged value an array (k, *shape); bytes and text are `bytes` and `str`. The
    column of a tensor field is one array (b - a, *shape), that of any other field a list. Thread-safe, and can be
    pickled and used after a fork.
    """

    def __init__(self, opened: Opened, remaining: Remaining | None = None) -> None:
        self._opened, self._remaining = opened, remaining
        self._readers = PerProcess[_Readers]()

    def __len__(self) -> int:
        return self.manifest.num_remaining

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {field}" for name, field in self.fields.items())
        return f"Dataset({self.url!r}, {len(self)} samples, {fields})"

    def _repr_html_(self) -> str:
        title = f"{self.url}: {len(self):,} samples"
        rows = [(name, str(field), len(self.classes.get(name, ())) or "") for name, field in self.fields.items()]
        return show_table(title, ("field", "type", "classes"), rows).html

    @property
    def url(self) -> str:
        """The URL of the dataset, or of the opened split."""
        return self._opened.store.url

    @property
    def manifest(self) -> Manifest:
        """The manifest: fields, layout, order and provenance."""
        return self._opened.manifest

    @property
    def digest(self) -> str:
        """The SHA-256 that identifies the content and the order of the dataset, in hexadecimal."""
        return self.manifest.digest

    @property
    def fields(self) -> dict[str, Field]:
        """The fields, by name."""
        return {name: layout.field for name, layout in self.manifest.fields.items()}

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The class names by field: `classes["label"][3]` is the name of label 3. Empty if none were recorded."""
        return self.manifest.classes

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of all splits at the URL that was opened; empty for a dataset without splits."""
        return self._opened.splits

    def __getitem__(self, index: int | slice) -> dict[str, Any]:
        """Return one sample, or the columns of a slice. Raises `IndexError`, `FormatError`, `StorageError`."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise UsageError(f"the slice has step {step}", "use step 1, and select from the result")
            names = list(self.fields)
            readers, stop = self._local_readers(), max(start, stop)
            columns = run_all(lambda name: readers.read(name, start, stop), names, len(names))
            return dict(zip(names, columns, strict=True))
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} is out of range: the dataset has {len(self)}")
        return self._local_readers().sample(number % len(self))

    def read(self, field: str, start: int, stop: int) -> Any:
        """Return the column of one field for the samples [start, stop).

        Raises `FieldError` for an unknown field, `IndexError`, `FormatError` and `StorageError`.
        """
        self._check_field(field)
        return self._local_readers().read(field, operator.index(start), operator.index(stop))

    def lengths(self, field: str) -> NDArray[np.int64]:
        """Return the length of every sample of a variable-length field, int64 (len(ds),), without reading samples.

        In rows for a ragged field, in bytes for bytes and text (UTF-8). Reads the field's table of lengths, by
        concurrent requests. `where=ds.lengths("tokens") >= 64` selects samples by their length.

        Raises `FieldError` for an unknown field, one of fixed shape, and one whose lengths the dataset does not store;
        `MissingObjectError` or `CorruptError` for a damaged table, `ModifiedError` for one that does not match the
        manifest; and `StorageError`.
        """
        self._check_field(field)
        if field not in self.manifest.lengths:
            remedy = ADD_LENGTHS
            if self.fields[field].fixed:
                remedy = f"its samples all have the shape {self.fields[field].shape}"
            raise FieldError(f"{self.url} has no table of lengths of field {field!r}", remedy)
        lengths = read_lengths(self._opened.store, self.manifest, field, self._remaining)
        lengths //= self.fields[field].item_bytes
        return lengths

    def to_dask(self) -> dict[str, dask.array.Array]:
        """Return a lazy `dask.array.Array` for each field, by name. Computing it reads the samples as `read()` does.

        A tensor field is an array (len(ds), *shape) of its dtype. Any other field is an object array (len(ds),) of
        bytes, str, or arrays (k, *shape). A missing or damaged chunk raises the same error as `read()`.

        Each block is one shard: blocks of the order (4 MiB) would be too many tasks for dask, and the shards of a small
        field have more samples than those of a large one. A slice reads only the chunks that hold its samples.

        The arrays can be pickled for dask's processes and clusters; their pickles contain the `storage_options`.
        Raises `UsageError` if dask is not installed.
        """
        from_array = need("dask.array", DASK).from_array
        columns = {name: _LazyColumn(self, name) for name in self.fields}
        shards = {name: layout.shard for name, layout in self.manifest.fields.items()}
        return {name: from_array(column, (shards[name], *column.shape[1:])) for name, column in columns.items()}

    def to_xarray(self) -> xarray.Dataset:
        """Return a lazy `xarray.Dataset` of the arrays of `to_dask()`, along the dimension `sample`.

        The attributes of a variable are the `kind` of its field, and its `encoding` and `classes` if there are any.
        `unify_chunks()` gives all variables the same blocks. xarray uses a field named `sample` with one value per
        sample as an index, which it reads at once. Raises `UsageError` if xarray or dask is not installed.
        """
        module, variables = need("xarray", DASK), {}
        for name, array in self.to_dask().items():
            field, classes = self.fields[name], list(self.classes.get(name, ()))
            attributes = {"kind": field.kind, "encoding": field.encoding, "classes": classes}
            dimensions = field_document(name, self.manifest.fields[name], len(self))["dimension_names"]
            variables[name] = dimensions, array, {key: value for key, value in attributes.items() if value}
        dataset: xarray.Dataset = module.Dataset(variables)
        return dataset

    def _check_field(self, field: str) -> None:
        if field not in self.fields:
            raise FieldError(f"{self.url} has no field {field!r}", f"its fields are {', '.join(self.fields)}")

    def _local_readers(self) -> _Readers:
        """Return the readers of this process: a forked child must not use the locks and clients of its parent."""
        return self._readers.get(lambda: _Readers(self._opened.store, self._opened.manifest, self._remaining))


class _LazyColumn:
    """The column of a field as an array that is read when it is indexed, for dask."""

    def __init__(self, dataset: Dataset, name: str) -> None:
        field = dataset.fields[name]
        self.shape = (len(dataset), *(field.shape if field.fixed else ()))
        self.ndim = len(self.shape)
        self.dtype = np.dtype(field.dtype if field.fixed else object)
        self._dataset, self._name = dataset, name

    def __dask_tokenize__(self) -> tuple[str, str, str]:
        return self._dataset.url, self._dataset.digest, self._name

    def __getitem__(self, index: Any) -> NDArray[Any]:
        """Return the samples of a slice, a number or a list, and of these what the index of the other axes selects."""
        rows, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self._dataset))
            rows = slice(None, None, step)  # dask gives positive steps
        else:
            start, stop = int(np.min(rows)), int(np.max(rows)) + 1
            rows = np.asarray(rows) - start
        column = self._dataset.read(self._name, start, max(start, stop))
        if not isinstance(column, np.ndarray):
            column = np.fromiter(column, object, len(column))
        values: NDArray[Any] = column[(rows, *rest, ...)]  # with `...`, one sample is an array too
        return values


class _Readers:
    """The readers of all fields in one process, with a cache of decoded chunks."""

    def __init__(self, store: Store, manifest: Manifest, remaining: Remaining | None) -> None:
        self._fields = {name: FieldReader(store, manifest, name, remaining) for name in manifest.fields}
        self._chunks = LRUCache[tuple[str, int], Chunk](CACHE_BYTES)

    def read(self, name: str, start: int, stop: int) -> Any:
        """Return a column, read by concurrent requests without the cache."""
        field = self._fields[name]
        column = field.read(start, stop, threads=THREADS)
        if isinstance(column, np.ndarray):
            return column
        return [
            from_bytes(name, field.layout.field, items[i], number + i)
            for number, items in column
            for i in range(max(start - number, 0), min(stop - number, len(items)))
        ]

    def sample(self, number: int) -> dict[str, Any]:
        """Return one sample; its chunks are cached for its neighbours."""
        firsts = {name: field.chunk_samples(number)[0] for name, field in self._fields.items()}
        chunks = {name: self._chunks.get((name, first)) for name, first in firsts.items()}
        missing = [name for name, chunk in chunks.items() if chunk is None]
        chunks |= zip(missing, run_all(partial(self._load, number), missing, THREADS), strict=True)
        sample: dict[str, Any] = {}
        for name, chunk in chunks.items():
            layout = self._fields[name].layout
            row = number - firsts[name]
            if isinstance(chunk, Items):
                sample[name] = from_bytes(name, layout.field, chunk[row], number)
            else:
                assert chunk is not None
                sample[name] = chunk[row].copy()
        return sample

    def _load(self, number: int, name: str) -> Chunk:
        """Read the chunk that holds sample `number`, and cache it."""
        field = self._fields[name]
        first, stop = field.chunk_samples(number)
        column = field.read(first, stop)
        chunk = column if isinstance(column, np.ndarray) else column[0][1]
        size = chunk.nbytes if isinstance(chunk, np.ndarray) else chunk.buffer.nbytes
        return self._chunks.add((name, first), chunk, size)
