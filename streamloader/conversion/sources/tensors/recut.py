"""A streamloader dataset as a source: to cut, split, choose or encode it anew. See formats/zarr/MAPPING.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import READ_THREADS
from streamloader.conversion.sources.tensors.arrays import Into, Note
from streamloader.format.manifest import Field, Manifest
from streamloader.format.reader import FieldReader, Run, field_reader
from streamloader.format.runs import Placed
from streamloader.format.threads import run_all
from streamloader.storage.protocol import Store


@dataclass(frozen=True)
class Recut:
    """The samples of a dataset. What it promises is checked as when it is streamed: nothing missing becomes fill."""

    store: Store
    manifest: Manifest
    names: tuple[str, ...]

    @property
    def where(self) -> str:
        """The URL, for messages."""
        return self.store.url

    @property
    def num_samples(self) -> int:
        """The samples of the dataset."""
        return self.manifest.num_samples

    @property
    def fields(self) -> Mapping[str, Field]:
        """The fields that are read."""
        return {name: self.manifest.fields[name].field for name in self.names}

    def read(self, rows: NDArray[np.int64], into: Into, _note: Note) -> None:
        """Fill the columns; see `Container`. Raises a `FormatError` for what is damaged or missing."""
        plane = self.store.reader()
        for name in self.names:
            reader = field_reader(self.store, self.manifest, name)
            column = into[name]
            out = column if isinstance(column, np.ndarray) else None

            def load(run: Run, reader: FieldReader = reader, out: NDArray[Any] | None = out) -> list[Placed]:
                fetch = partial(self.store.retries.call, lambda: reader.fetch(plane, run))
                return reader.load(run, fetch, out, 0) or []

            runs = reader.runs_of(rows)
            for first in range(0, len(runs), READ_THREADS):  # bounds the memory
                for placed in run_all(load, runs[first : first + READ_THREADS], READ_THREADS):
                    if isinstance(column, list):
                        column.extend(bytes(items[i]) for _, items in placed for i in range(len(items)))
