"""Which samples take part: the order is made over them as if they were the dataset. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import SelectionError

__all__ = ["Selection"]


@dataclass(frozen=True, eq=False)
class Selection:
    """The selected `samples` of a dataset of `num_samples`: their numbers, ascending, each once; never empty.

    The i-th of them is called i in an order, in the blocks of a plan, and in a cursor's position.
    """

    samples: NDArray[np.int64]
    num_samples: int

    @classmethod
    def of(cls, choice: Any, num_samples: int) -> Selection:
        """Return what a slice, a mask (num_samples,) of bools, or an array of sample numbers selects.

        Numbers may come in any order: they say which samples, not when. Raises `SelectionError` for anything else, a
        number that is not there or comes twice, and where nothing is selected.
        """
        if isinstance(choice, slice):
            found = _of_slice(choice, num_samples)
        else:
            values = _as_array(choice)
            if values.ndim != 1:
                raise SelectionError(
                    f"where= has the shape {values.shape}", "give one bool for each sample, or the samples' numbers"
                )
            if values.dtype == np.bool_:
                found = _of_mask(values, num_samples)
            elif values.dtype.kind in "iu" or not values.size:
                found = _of_numbers(values, num_samples)
            else:
                raise SelectionError(
                    f"where= has the dtype {values.dtype}", "give a condition as text, a slice, bools, or whole numbers"
                )
        return cls(found, num_samples)

    def __post_init__(self) -> None:
        if not self.samples.size:
            raise SelectionError(f"where= selects none of {self.num_samples} samples", "select at least one")

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def digest(self) -> str:
        """What a saved state is checked against: the same for the same samples, however they were chosen."""
        return hashlib.sha256(self.samples.astype("<i8", copy=False).data).hexdigest()


def _as_array(choice: Any) -> NDArray[Any]:
    try:
        return np.asarray(choice)
    except (TypeError, ValueError) as error:  # rows of different lengths, a tensor of a GPU
        raise SelectionError(f"where= is no array: {error}", "give a slice, bools, or sample numbers") from error


def _of_slice(choice: slice, num_samples: int) -> NDArray[np.int64]:
    try:
        start, stop, step = choice.indices(num_samples)
    except (TypeError, ValueError) as error:
        raise SelectionError(f"where={choice} cannot be: {error}", "give slice(start, stop, step)") from error
    found = np.arange(start, stop, step, dtype=np.int64)
    return found if step > 0 else found[::-1].copy()


def _of_mask(mask: NDArray[np.bool_], num_samples: int) -> NDArray[np.int64]:
    if mask.size != num_samples:
        raise SelectionError(
            f"where= is a mask of {mask.size} bools, the dataset has {num_samples} samples", "give one for each sample"
        )
    return np.flatnonzero(mask)


def _of_numbers(numbers: NDArray[Any], num_samples: int) -> NDArray[np.int64]:
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < num_samples:
        raise SelectionError(
            f"where= names the samples {numbers.min()} to {numbers.max()}, the dataset has {num_samples}",
            f"give numbers of [0, {num_samples})",
        )
    found = numbers.astype(np.int64)
    found.sort()
    twice = np.flatnonzero(found[1:] == found[:-1])
    if twice.size:
        raise SelectionError(f"where= names sample {found[twice[0]]} more than once", "name each sample once")
    return found
