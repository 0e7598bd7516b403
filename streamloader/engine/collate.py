"""Batches of values of different sizes: padded to one size, as lists, or made by a function of the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.transform import Labels, Ragged, Sample, Transform, alone_in_worker, apply, is_of_tensors
from streamloader.errors import DecodeError, TransformError, message
from streamloader.format.values import as_array
from streamloader.options import Collate, Pad

Ints = NDArray[np.int64]
LENGTHS, MASK = "_lengths", "_mask"
Lease = Callable[[tuple[int, ...], str], NDArray[Any]]
Stack = Callable[[str, Sequence[Any], Sequence[int]], Any]


def collate(
    samples: Sequence[Sample],
    numbers: Sequence[int],
    stack: Stack | None = None,
    ragged: Sequence[str] = (),
    complete: Mapping[str, Any] = MappingProxyType({}),
    *,
    rules: Mapping[str, Collate] = MappingProxyType({}),
    lease: Lease = np.empty,
) -> dict[str, Any]:
    """Return samples as batch columns: arrays, tensors and numbers are stacked, other values become lists.

    Arrays of the fields `ragged` are concatenated. `numbers`: the sample numbers. `stack`: that of the tensors.
    `complete`: the columns that exist. `rules`: how fields whose values differ in size form columns, padded ones in
    memory of `lease(shape, dtype)`.
    Raises `TransformError`, which names the field and, if known, the sample.
    """
    names = list(samples[0]) if samples else []
    for sample, number in zip(samples, numbers, strict=True):
        if list(sample) != names:
            problem = f"the transform returned keys {list(sample)} for sample {number} after {names}"
            raise TransformError(problem, "return the same keys, in the same order, for every sample")
    columns = {name: [sample[name] for sample in samples] for name in names if name not in complete}
    out: dict[str, Any] = {}
    for name in names:
        rule = rules.get(name) if samples else None
        if name in complete:
            out[name] = complete[name]
        elif isinstance(rule, Pad):
            out |= pad_arrays(name, _to_arrays(name, columns[name], numbers), numbers, rule, lease)
        elif rule == "list":
            out[name] = columns[name]
        elif rule == "nested":
            out[name] = _concatenate(name, columns[name], numbers)
        else:
            out[name] = _column(name, columns[name], numbers, stack, name in ragged)
    return out


def _column(name: str, values: list[Any], numbers: Sequence[int], stack: Stack | None, ragged: bool) -> Any:
    if isinstance(values[0], (str, bytes, list, dict, tuple)) or values[0] is None:
        return values
    try:
        if ragged and all(isinstance(value, np.ndarray) for value in values):
            return _concatenate(name, values, numbers)
        column = None if stack is None else stack(name, values, numbers)
        return _stack(name, values, numbers) if column is None else column
    except TransformError:
        raise
    except BaseException as error:
        problem = f"field {name!r} of samples {numbers[0]}, ... cannot be stacked"
        problem += f" ({type(error).__name__}: {message(error):.200})"
        raise TransformError(problem, "return arrays or numbers of one shape and dtype, or a list") from error


def _concatenate(name: str, values: list[Any], numbers: Sequence[int]) -> Ragged:
    arrays = _to_arrays(name, values, numbers)
    for array, number in zip(arrays, numbers, strict=True):
        _check_dtype(name, array.dtype, number)
        if array.dtype != arrays[0].dtype:
            problem = f"the transform returned {name!r} of sample {number} as an array of {array.dtype}"
            problem += f" after one of {arrays[0].dtype}"
            raise TransformError(problem, "return one dtype for every sample, also where an array is empty")
    return Ragged(np.concatenate(arrays), np.cumsum([0, *map(len, arrays)], dtype=np.int64))


def _stack(name: str, values: list[Any], numbers: Sequence[int]) -> Any:
    if any(value is np.ma.masked for value in values):  # the others tell its dtype
        values = list(as_array(values))
    arrays = _to_arrays(name, values, numbers)
    for value, array, number in zip(values, arrays, numbers, strict=True):
        if array.dtype.kind in "OUS" and not isinstance(value, np.ndarray):  # None, a text or another object
            return values
        _check_dtype(name, array.dtype, number)
    check_shapes(name, arrays)
    return np.stack(arrays)


def _to_arrays(name: str, values: list[Any], numbers: Sequence[int]) -> list[NDArray[Any]]:
    arrays = []
    for value, number in zip(values, numbers, strict=True):
        try:
            arrays.append(as_array(value))
        except BaseException as error:
            problem = f"the transform returned {type(value).__name__} as {name!r} of sample {number}"
            problem += f", which is not an array ({type(error).__name__}: {message(error)})"
            raise TransformError(problem, "return arrays, tensors or numbers, or a list") from error
    return arrays


def _check_dtype(name: str, dtype: np.dtype[Any], number: int) -> None:
    """Raise `TransformError` for a dtype that torch does not have."""
    if is_of_tensors(dtype):
        return
    kinds = {"M": "value.astype('int64')", "m": "value.astype('int64')", "f": "value.astype('float64')"}
    remedy = f"return {kinds.get(dtype.kind, 'value.tolist(), which is returned as a list')}"
    problem = f"the transform returned {name!r} of sample {number} as an array of {dtype}, which tensors do not have"
    raise TransformError(problem, remedy)


def check_shapes(name: str, values: Sequence[Any]) -> None:
    """Raise `TransformError` if the arrays or tensors of a field differ in shape."""
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        shown = ", ".join(map(str, sorted(shapes)[:3]))
        raise TransformError(f"the transform returned {name!r} in shapes {shown}", "return one shape, or a list")


def padded_sizes(name: str, pad: Pad, sizes: Ints, numbers: Sequence[int]) -> list[int]:
    """Return what values are padded to along each axis. `sizes`: of the values, shape (values, axes).

    `numbers`: the sample numbers. Raises `DecodeError` for a value that is longer than the last of the edges.
    """
    longest = sizes.max(axis=0, initial=0).tolist()
    found = [pad.padded(size) for size in longest]
    for axis, size in enumerate(found):
        if size is None:
            row = int(sizes[:, axis].argmax())
            problem = f"{name!r} of sample {numbers[row]} has length {longest[axis]}, and to={pad.to} ends before that"
            raise DecodeError(problem, "add a longer edge, or give Pad(truncate=True)")
    return [size for size in found if size is not None]


def padded_widths(pad: Pad, lengths: Ints, step_rows: int) -> list[int | None]:
    """Return what values are padded to in each step, along their one axis, None beyond the last of the edges."""
    longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), step_rows)).tolist() if len(lengths) else [0]
    return [pad.padded(size) for size in longest]


def divided(array: NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[NDArray[Any]]:
    """Return parts of an array, one after another, each with its first axis in one of these shapes."""
    ends = list(accumulate(map(math.prod, shapes)))
    begins = [0, *ends][: len(ends)]
    parts = [array[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return [part.reshape(*shape, *array.shape[1:]) for part, shape in zip(parts, shapes, strict=True)]


def padded_columns(name: str, out: NDArray[Any], sizes: Ints, pad: Pad) -> dict[str, Any]:
    """Return the columns of padded values: the values, their lengths, and whether each element is one of a value.

    `out`: of shape (values, *padded, ...). `sizes`: of the values in it, shape (values, axes); the lengths have the
    shape (values,) for one axis.
    """
    columns = {name: out, name + LENGTHS: sizes[:, 0].copy() if pad.axes == 1 else sizes}
    if pad.mask:
        mask = np.ones(out.shape[: 1 + pad.axes], np.bool_)
        for axis in range(pad.axes):
            places = np.arange(out.shape[1 + axis])
            size = sizes[:, axis, None]
            inside = places < size if pad.side == "right" else places >= out.shape[1 + axis] - size
            mask &= np.expand_dims(inside, tuple(1 + other for other in range(pad.axes) if other != axis))
        columns[name + MASK] = mask
    return columns


def pad_arrays(
    name: str, arrays: Sequence[NDArray[Any]], numbers: Sequence[int], pad: Pad, lease: Lease
) -> dict[str, Any]:
    """Return the columns of arrays of one dtype that differ along their first axes, in memory of `lease(shape, dtype)`.

    Raises `TransformError` for arrays that differ otherwise, and as `padded_sizes`.
    """
    kinds = {(array.dtype, array.ndim, array.shape[pad.axes :]) for array in arrays}
    ((dtype, ndim, inner),) = kinds if len(kinds) == 1 else [(np.dtype("V1"), 0, ())]
    if ndim < pad.axes:
        shown = ", ".join(sorted({f"{array.dtype}{list(array.shape)}" for array in arrays})[:3])
        problem = f"{name!r} cannot be padded along {pad.axes} axes: it is {shown}"
        raise TransformError(
            problem, "return arrays of one dtype that differ along these axes only, or give Pad(axes=)"
        )
    shapes = np.array([array.shape[: pad.axes] for array in arrays], np.int64).reshape(len(arrays), pad.axes)
    padded = padded_sizes(name, pad, shapes, numbers)
    sizes = np.minimum(shapes, padded)
    out = lease((len(arrays), *padded, *inner), dtype.name)
    out[...] = pad.value
    for row, array, size in zip(out, arrays, sizes.tolist(), strict=True):
        cut = tuple(map(slice, size))
        row[place(pad, size, padded)] = array[cut]
    return padded_columns(name, out, sizes, pad)


def place(pad: Pad, size: Sequence[int], padded: Sequence[int]) -> tuple[slice, ...]:
    """Return where a value of some size is in a padded one."""
    first = [0] * len(size) if pad.side == "right" else [whole - part for part, whole in zip(size, padded, strict=True)]
    return tuple(slice(begin, begin + part) for begin, part in zip(first, size, strict=True))


def collate_rows(function: Transform, rows: Sequence[Sample], labels: Labels, tensors: str) -> dict[Any, Any]:
    """Return the batch that a function of the user makes of samples: the function of a worker.

    `labels`: of the batch. Tensors are returned as what makes them: see `made`.
    """
    reduce = resolve_name(f"{tensors}:reduce_tensor") if tensors else None
    with alone_in_worker():
        (batch,), _ = apply(function, [list(rows)], labels, tensors, alone=True, what="collate")
    return {name: _reduced(value, reduce) for name, value in (batch or {}).items()}


def _reduced(value: Any, reduce: Callable[[Any], Any] | None) -> Any:
    """Return a value with `partial(function, array, ...)` for each tensor, also in lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        return type(value)(_reduced(item, reduce) for item in value) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {name: _reduced(item, reduce) for name, item in value.items()}
    reduced = NotImplemented if reduce is None else reduce(value)
    return value if reduced is NotImplemented else partial(reduced[0], *reduced[1])


def made(value: Any) -> Any:
    """Return a value of `collate_rows` with its tensors."""
    if isinstance(value, partial):
        return value()
    if type(value) in (list, tuple):
        return type(value)(map(made, value))
    return {name: made(item) for name, item in value.items()} if isinstance(value, dict) else value
