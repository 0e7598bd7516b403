"""What iteration yields: finished batches as dicts of arrays, or their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.stages import Batch
from streamloader.engine.transform import Ragged
from streamloader.order.schedule import BatchPlan, Ints

OFFSETS = "_offsets"
Columns = dict[Any, Any]


def split_rows(values: NDArray[Any], offsets: Ints) -> list[NDArray[Any]]:
    """Return the rows of a ragged column, as views. numpy's `split` takes four times as long."""
    return [values[begin:end] for begin, end in pairwise(offsets.tolist())]


class BatchFormat(NamedTuple):
    """What iteration yields: single `samples` or batches, and the columns other than fields.

    `firsts`: the number of the first sample of each source of a mixture; the columns are then `source` and `index`, the
    number within the source. `indexes`: for each source of arrays, its function from sample numbers to the columns of
    `with_index`. `channels_first`: the columns of images that become (channels, height, width), without a copy.
    `lists`: the columns that become lists of arrays; `nested`: those that become nested tensors. `convert` makes values
    of a framework of the arrays of a dict, and `split` a list of the rows of a ragged column, given its values and
    offsets.
    """

    samples: bool
    with_index: bool
    with_valid: bool
    firsts: tuple[int, ...] = ()
    indexes: tuple[Callable[[Ints], dict[str, Ints]] | None, ...] = ()
    channels_first: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    nested: frozenset[str] = frozenset()
    convert: Callable[[Columns], Columns] = dict
    split: Callable[[NDArray[Any], Ints], list[Any]] = split_rows

    def batch(self, columns: Mapping[str, Any], plan: BatchPlan) -> Columns:
        """Return the columns of a batch.

        Arrays share their memory, a ragged field `name` becomes `name` (concatenated values) and `name_offsets`, and
        lists stay lists. `index` is int64 and `valid` bool, both of shape (samples,).
        """
        out: Columns = {}
        for name, column in columns.items():
            if name in self.lists:
                out[name] = self._each(name, column)
            elif isinstance(column, Ragged):
                if name in self.nested:
                    out[name] = column
                else:
                    out[name], out[name + OFFSETS] = column
            else:
                turned = name in self.channels_first and not isinstance(column, list)
                out[name] = column.swapaxes(-1, -2).swapaxes(-2, -3) if turned else column  # also of a tensor
        if self.with_index:
            out |= self.numbers(plan.samples)
        if self.with_valid:
            out["valid"] = _copied(plan.valid)
        return self.convert(out)

    def _each(self, name: str, column: Any) -> list[Any]:
        """Return the values of a column, of which arrays are views."""
        if isinstance(column, Ragged):
            return self.split(*column)
        turned = name in self.channels_first
        arrays = {
            row: value.transpose(2, 0, 1) if turned else value
            for row, value in enumerate(column)
            if isinstance(value, np.ndarray)
        }
        return [*(dict(enumerate(column)) | self.convert(arrays)).values()]

    def each_sample(self, batch: Batch) -> list[Columns]:
        """Return the samples of a batch: columns without the batch axis, and elements of lists."""
        columns, plan = batch.columns, batch.plan
        if batch.singles is not None:
            others, alone = self.batch(columns, plan), BatchFormat(True, False, False, convert=self.convert)
            return [
                {name: column[0] for name, column in alone.batch(single, plan).items()}
                | {name: column[i] for name, column in others.items()}
                for i, single in enumerate(batch.singles)
            ]
        out = self.batch(columns, plan)
        for name, column in columns.items():
            if isinstance(column, Ragged):
                edges = out.pop(name + OFFSETS).tolist()
                out[name] = [out[name][a:b] for a, b in pairwise(edges)]
            elif isinstance(column, list) and column and isinstance(column[0], np.ndarray):
                out[name] = self._each(name, column)
        return [{name: column[i] for name, column in out.items()} for i in range(len(plan.samples))]

    def numbers(self, samples: Ints) -> dict[str, Ints]:
        """Return `index` and, of a mixture, `source`, int64 of shape (samples,); of patches `index_y` and so on."""
        firsts = self.firsts
        source = np.searchsorted(firsts, samples, side="right") - 1 if firsts else np.zeros(samples.shape, np.int64)
        local = samples - np.array(firsts)[source] if firsts else samples
        columns: dict[str, Ints] = {"source": source} if firsts else {}
        if not any(self.indexes):
            return {**columns, "index": _copied(local)}
        for number, convert in enumerate(self.indexes):
            rows = source == number
            for name, values in ({"index": local[rows]} if convert is None else convert(local[rows])).items():
                columns.setdefault(name, np.zeros(samples.shape, np.int64))[rows] = values
        return columns


def _copied(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of a small array.

    numpy's copy releases the GIL, and then waits for it: 0.1 ms while other threads need it.
    """
    return np.frombuffer(bytearray(array), array.dtype)
