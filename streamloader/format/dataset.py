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

from streamloader.errors import FieldError, UsageError
from streamloader.format.codecs import Items
from streamloader.format.manifest import Field, Manifest
from streamloader.format.opening import Opened, open_root
from streamloader.format.reader import FieldReader
from streamloader.format.values import from_bytes
from streamloader.storage import open_store
from streamloader.storage.process import PerProcess, run_all
from streamloader.storage.store import Store

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
        self._process = PerProcess[_Process]()

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
        """The manifest: fields, layout, order and provenance."""
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
                raise UsageError(f"a slice of step {step}", "read with step 1, and select from the result")
            names = list(self.fields)
            process, stop = self._here(), max(start, stop)
            columns = run_all(lambda name: process.read(name, start, stop), names, len(names))
            return dict(zip(names, columns, strict=True))
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return self._here().sample(number % len(self))

    def read(self, field: str, start: int, stop: int) -> Any:
        """Return the column of one field's samples [start, stop). Raises `FieldError`, `IndexError` and as `[]`."""
        if field not in self.fields:
            raise FieldError(f"{self.url} has no field {field!r}", f"its fields are {', '.join(self.fields)}")
        return self._here().read(field, start, stop)

    def _here(self) -> _Process:
        """Return this process' readers and cache: a fork's child must not use its parent's locks and clients."""
        return self._process.get(lambda: _Process(self._opened.store, self._opened.manifest))


class _Process:
    """What a dataset holds in one process: the data plane, a reader for each field, the latest decoded chunks."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._fields = {name: FieldReader(store, manifest, name) for name in manifest.fields}
        self._chunks: OrderedDict[tuple[str, int], tuple[Chunk, int]] = OrderedDict()
        self._cached = 0
        self._lock = threading.Lock()

    def read(self, name: str, start: int, stop: int) -> Any:
        """Return a column, by parallel requests; the cache is neither read nor filled."""
        field = self._fields[name]
        found = field.read(start, stop, threads=THREADS)
        if isinstance(found, np.ndarray):
            return found
        return [
            from_bytes(name, field.layout.field, items[i], number + i)
            for number, items in found
            for i in range(max(start - number, 0), min(stop - number, len(items)))
        ]

    def sample(self, number: int) -> dict[str, Any]:
        """Return one sample; its chunks are kept for its neighbours."""
        chunks = {name: self._kept((name, number // field.layout.chunk)) for name, field in self._fields.items()}
        missing = [name for name, chunk in chunks.items() if chunk is None]
        chunks |= zip(missing, run_all(partial(self._chunk, number), missing, THREADS), strict=True)
        sample: dict[str, Any] = {}
        for name, chunk in chunks.items():
            layout = self._fields[name].layout
            row = number % layout.chunk
            if isinstance(chunk, Items):
                sample[name] = from_bytes(name, layout.field, chunk[row], number)
            else:
                assert chunk is not None
                sample[name] = chunk[row].copy()
        return sample

    def _chunk(self, number: int, name: str) -> Chunk:
        """Load the chunk that holds a sample, and keep it."""
        field = self._fields[name]
        index = number // field.layout.chunk
        first = index * field.layout.chunk
        found = field.read(first, min(first + field.layout.chunk, field.num_samples))
        chunk = found if isinstance(found, np.ndarray) else found[0][1]
        size = chunk.nbytes if isinstance(chunk, np.ndarray) else chunk.buffer.nbytes
        with self._lock:
            if (name, index) not in self._chunks:  # else another thread was here first
                self._chunks[name, index] = chunk, size
                self._cached += size
            while self._cached > CACHE_BYTES and len(self._chunks) > 1:
                self._cached -= self._chunks.popitem(last=False)[1][1]
        return chunk

    def _kept(self, key: tuple[str, int]) -> Chunk | None:
        with self._lock:
            if key not in self._chunks:
                return None
            self._chunks.move_to_end(key)
            return self._chunks[key][0]
