"""Sample selection (`where=`, `exclude=`): the order covers selected samples as if they were the dataset. No I/O."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import MemoryBudgetError, SelectionError
from streamloader.options import as_array, in_range
from streamloader.samples import AllBut

Ints = NDArray[np.int64]


def select(choice: Any, num_samples: int, memory: int | None = None) -> Ints:
    """Return the selected samples of a slice, a mask of bools with shape (num_samples,), or an array of sample numbers.

    They are ascending and distinct. Orders, plans and states count them: sample i of an order is the i-th of them.

    Numbers may be in any order, which does not change the order of the epoch. Raises `SelectionError` for other values,
    a number that is out of range or given twice, and an empty selection; and as `check_fits`.
    """
    if isinstance(choice, slice):
        try:
            numbers = range(*choice.indices(num_samples))
        except (TypeError, ValueError) as error:
            remedy = "give slice(start, stop, step) of numbers, or a condition"
            raise SelectionError(f"where={choice} is invalid: {error}", remedy) from error
        check_fits(len(numbers), memory)
        ascending = numbers if numbers.step > 0 else numbers[::-1]
        samples = np.arange(ascending.start, ascending.stop, ascending.step, dtype=np.int64)
        return check_some(samples, num_samples)
    values = as_array(choice, "where", "give a slice, one bool for each sample, or sample numbers")
    if values.dtype.kind not in "biu" and values.size:
        problem = f"where= has the dtype {values.dtype}"
        raise SelectionError(problem, "give a condition as text, a slice, bools, or whole numbers")
    check_fits(int(np.count_nonzero(values)) if values.dtype == np.bool_ else values.size, memory)
    if values.dtype != np.bool_:
        return check_some(_sort_numbers(values, num_samples), num_samples)
    if values.size != num_samples:
        problem = f"where= is a mask of {values.size} bools, the dataset has {num_samples} samples"
        raise SelectionError(problem, "give one bool for each sample")
    return check_some(np.flatnonzero(values), num_samples)


def exclude(selection: Ints | None, excluded: Ints, num_samples: int) -> Ints | AllBut | None:
    """Return a selection (None: all samples) without the `excluded` samples, which are ascending and distinct.

    Raises `SelectionError` if no sample is left.
    """
    if not excluded.size:
        return selection
    left: Ints | AllBut = AllBut(num_samples, excluded)
    if selection is not None:
        at = np.searchsorted(selection, excluded)
        at = at[np.append(selection, -1)[at] == excluded]
        left = np.delete(selection, at) if at.size else selection
    if not len(left):
        chosen = num_samples if selection is None else len(selection)
        raise SelectionError(f"exclude= leaves none of {chosen} samples", "exclude fewer")
    return left


def check_some(samples: Ints, num_samples: int) -> Ints:
    """Return the selected samples. Raises `SelectionError` if there is none."""
    if not samples.size:
        raise SelectionError(f"where= selects none of {num_samples} samples", "select at least one")
    return samples


def check_fits(count: int, memory: int | None) -> None:
    """Raise `MemoryBudgetError` if the numbers of `count` selected samples take more than `memory` bytes."""
    size = count * np.dtype(np.int64).itemsize
    if memory is not None and size > memory:
        problem = f"where= selects {count} samples, whose numbers take {size} bytes, but memory={memory}"
        raise MemoryBudgetError(problem, f"give memory={size + size // 4} or more, or select fewer samples")


def _sort_numbers(numbers: NDArray[Any], num_samples: int) -> Ints:
    samples = np.sort(in_range(numbers, num_samples, "where"))
    repeated = samples[1:][samples[1:] == samples[:-1]]
    if repeated.size:
        raise SelectionError(f"where= has sample {repeated[0]} more than once", "give each sample once")
    return samples
