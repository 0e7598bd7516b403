"""`open` and `Dataset`: random access to samples, without torch."""

from __future__ import annotations

import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UsageError
from streamloader.format.codecs import Items
from streamloader.format.manifest import Field, Manifest
from streamloader.format.opening import Opened, open_root
from streamloader.format.reader import FieldReader, Placed, Run, field_reader
from streamloader.format.threads import run_all
from streamloader.format.values import from_bytes
from streamloader.storage import open_store
from streamloader.storage.protocol import RangeReader, Store

THREADS = 16  # requests at once: they wait for the network, not for a core
CACHE_BYTES = 64 << 20  # decoded chunks that are kept for the next `ds[i]`

Chunk = NDArray[Any] | Items


def open(  # noqa: A001 - `sl.open(url)` reads as the builtin does
    url: str | os.PathLike[str], *, split: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> Dataset:
    """Open a dataset for random access, by one request.

    Raises `NotADatasetError`, `IncompleteError`, `VersionError` or `FormatError` for what is not a finished
    dataset, `FieldError` for a wrong or missing `split`, and `StorageError`.
    """
    return Dataset(open_root(open_store(url, storage_options), split))


class Dataset:
    """Samples by number. `ds[i]` is a dict of one sample, `ds[a:b]` a dict of columns, `len(ds)` their number.

    Tensors come as numpy scalars or arrays, bytes as bytes, text as str, ragged as arrays (k, *shape); columns
    of tensors as one array (b - a, *shape), of the others as lists. Thread-safe; may be pickled and forked.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._process: _Process | None = None

    def __len__(self) -> int:
        return self.manifest.num_samples

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {field}" for name, field in self.fields.items())
        return f"Dataset({self.url!r}, {len(self)} samples, {fields})"

    @property
    def url(self) -> str:
        """The URL of the dataset, or of the opened split."""
        return self._opened.store.url

    @property
    def manifest(self) -> Manifest:
        """What the dataset says of itself."""
        return self._opened.manifest

    @property
    def digest(self) -> str:
        """The SHA-256 that names these samples in this order, in hexadecimal."""
        return self.manifest.digest

    @property
    def fields(self) -> dict[str, Field]:
        """The fields, by name."""
        return {name: layout.field for name, layout in self.manifest.fields.items()}

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Class names by field: `classes["label"][3]` is the name of label 3. Empty where none were recorded."""
        return self.manifest.classes

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of all splits at the URL that was opened; empty where there are none."""
        return self._opened.splits

    def __getitem__(self, index: int | slice) -> dict[str, Any]:
        """Return one sample, or the columns of a slice. Raises `IndexError`, `FormatError`, `StorageError`."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise UsageError(f"a slice of step {step}", "read with step 1, and choose from what comes")
            names = list(self.fields)
            process, stop = self._here(), max(start, stop)
            return dict(
                zip(names, run_all(lambda name: process.read(name, start, stop), names, len(names)), strict=True)
            )
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self._here().sample(number % len(self))

    def read(self, field: str, start: int, stop: int) -> Any:
        """Return the column of one field's samples [start, stop). Raises `FieldError`, `IndexError` and as `[]`."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"samples [{start}, {stop}) of {len(self)}")
        return self._here().read(field, start, stop)

    def __getstate__(self) -> dict[str, Any]:
        return {"_opened": self._opened, "_process": None}

    def _here(self) -> _Process:
        """Return this process' readers and cache: a fork's child must not use its parent's locks and clients."""
        process = self._process
        if process is None or process.pid != os.getpid():
            process = self._process = _Process(self._opened.store, self._opened.manifest)
        return process


class _Process:
    """What a dataset holds in one process: the data plane, a reader for each field, the latest decoded chunks."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.pid = os.getpid()
        self._store = store
        self._manifest = manifest
        self._fields: dict[str, FieldReader] = {}
        self._chunks: OrderedDict[tuple[str, int], tuple[Chunk, int]] = OrderedDict()
        self._cached = 0
        self._lock = threading.Lock()
        self._plane: RangeReader | None = None

    def read(self, name: str, start: int, stop: int) -> Any:
        """Return a column, by parallel requests; the cache is neither asked nor filled."""
        field = self._field(name)
        kind = field.layout.field
        runs = field.runs(start, stop)
        if kind.fixed:
            out = np.empty((stop - start, *kind.shape), kind.dtype)
            run_all(lambda run: self._load(field, run, out, start), runs, THREADS)
            return out
        column: list[Any] = []
        for chunks in run_all(lambda run: self._items(field, run), runs, THREADS):
            for number, items in chunks:
                wanted = range(max(start - number, 0), min(stop - number, len(items)))
                column.extend(from_bytes(name, kind, items[i], number + i) for i in wanted)
        return column

    def sample(self, number: int) -> dict[str, Any]:
        """Return one sample; its chunks are kept for its neighbours."""
        names = list(self._manifest.fields)
        chunks = [self._kept((name, number // self._manifest.fields[name].chunk)) for name in names]
        missing = [name for name, chunk in zip(names, chunks, strict=True) if chunk is None]
        loaded = dict(zip(missing, run_all(partial(self._chunk, number), missing, THREADS), strict=True))
        sample: dict[str, Any] = {}
        for name, kept in zip(names, chunks, strict=True):
            chunk = loaded[name] if kept is None else kept
            row = number % self._manifest.fields[name].chunk
            if isinstance(chunk, Items):
                sample[name] = from_bytes(name, self._manifest.fields[name].field, chunk[row], number)
            else:
                value = chunk[row]
                sample[name] = value.copy() if isinstance(value, np.ndarray) else value
        return sample

    def _chunk(self, number: int, name: str) -> Chunk:
        """Load the chunk that holds a sample, and keep it."""
        field = self._field(name)
        layout = field.layout
        first = number // layout.chunk * layout.chunk
        stop = min(first + layout.chunk, field.num_samples)
        (run,) = field.runs(first, stop)
        if not layout.field.fixed:
            _, items = self._items(field, run)[0]
            self._keep((name, first // layout.chunk), items, items.buffer.nbytes)
            return items
        rows = np.empty((stop - first, *layout.field.shape), layout.field.dtype)
        self._load(field, run, rows, first)
        self._keep((name, first // layout.chunk), rows, rows.nbytes)
        return rows

    def _items(self, field: FieldReader, run: Run) -> list[Placed]:
        """Return each chunk's items with the number of the first sample."""
        return self._load(field, run) or []

    def _load(
        self, field: FieldReader, run: Run, out: NDArray[Any] | None = None, first: int = 0
    ) -> list[Placed] | None:
        """Fetch and decode a run; row 0 is sample `first`."""
        if self._plane is None:
            self._plane = self._store.reader()
        request = partial(field.fetch, self._plane, run)
        return field.load(run, lambda: self._store.retries.call(request), out, first)

    def _field(self, name: str) -> FieldReader:
        with self._lock:
            if name not in self._fields:
                self._fields[name] = field_reader(self._store, self._manifest, name)
            return self._fields[name]

    def _kept(self, key: tuple[str, int]) -> Chunk | None:
        with self._lock:
            if key not in self._chunks:
                return None
            self._chunks.move_to_end(key)
            return self._chunks[key][0]

    def _keep(self, key: tuple[str, int], chunk: Chunk, size: int) -> None:
        with self._lock:
            if key in self._chunks:  # another thread was here first
                return
            self._chunks[key] = chunk, size
            self._cached += size
            while self._cached > CACHE_BYTES and len(self._chunks) > 1:
                self._cached -= self._chunks.popitem(last=False)[1][1]
