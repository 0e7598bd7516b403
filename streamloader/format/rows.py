"""Samples that wait to become a shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.format.codecs import Column
from streamloader.format.manifest import Field


class Rows:
    """Samples that wait to become a shard. Memory is taken when rows are written, not when it is reserved."""

    def __init__(self, fields: Mapping[str, Field], capacity: int, *, fixed: bool = False) -> None:
        self._capacity = capacity
        self._fixed = fixed
        self._count = 0
        self._arrays = {
            name: np.empty((capacity, *field.shape), field.dtype) for name, field in fields.items() if field.fixed
        }
        self._lists: dict[str, list[bytes]] = {name: [] for name, field in fields.items() if not field.fixed}

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        """Whether this is a whole shard; never, unless the capacity is fixed."""
        return self._fixed and self._count == self._capacity

    @property
    def room(self) -> int:
        """How many samples fit without growing."""
        return self._capacity - self._count

    def add(self, values: Mapping[str, NDArray[Any] | bytes]) -> None:
        """Copy one sample."""
        self._reserve(1)
        for name, array in self._arrays.items():
            array[self._count] = values[name]
        for name, items in self._lists.items():
            items.append(values[name])  # type: ignore[arg-type]
        self._count += 1

    def extend(self, columns: Mapping[str, Column], start: int, stop: int) -> None:
        """Copy the samples [start, stop) of the columns."""
        self._reserve(stop - start)
        for name, array in self._arrays.items():
            array[self._count : self._count + stop - start] = columns[name][start:stop]
        for name, items in self._lists.items():
            items.extend(columns[name][start:stop])
        self._count += stop - start

    def columns(self) -> dict[str, Column]:
        """Return the samples as columns; arrays are views."""
        columns: dict[str, Column] = {name: array[: self._count] for name, array in self._arrays.items()}
        return columns | self._lists

    def _reserve(self, more: int) -> None:
        if self._count + more <= self._capacity:
            return
        self._capacity = max(2 * self._capacity, self._count + more)
        for name, old in self._arrays.items():
            self._arrays[name] = np.empty((self._capacity, *old.shape[1:]), old.dtype)
            self._arrays[name][: self._count] = old[: self._count]
