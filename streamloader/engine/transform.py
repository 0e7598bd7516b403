"""Calls the user's transform, sample by sample, in this process or in other processes.

The engine does not import the framework whose tensors a transform returns. `tensors` is the name of a module that does,
which is loaded where the transform runs; "" without. It has

- `stack_tensors(field, values, sample_numbers)`: the values as one column, or None if they are not tensors;
- `reduce_tensor(value)`, the `reducer_override` of a `pickle.Pickler` that sends tensors by value, as
  `build, (bytes, *args)`: if the bytes of several tensors are the rows of an array, `build(array, *args)` returns these
  tensors, stacked;
- `OwnGenerator()`, a context in which this thread draws random numbers from a generator of its own, which
  `OwnGenerator().seed(number)` seeds.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from itertools import pairwise
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from struct import pack, unpack
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.executor import Executor
from streamloader.engine.messages import caller, script_of_this_process, share_pickle
from streamloader.errors import StreamloaderError, TransformError, UsageError, message
from streamloader.storage.process import finished_before_exit, is_interactive

Transform = Callable[..., Any]
Sample = dict[str, Any]
Stack = Callable[[str, Sequence[Any], Sequence[int]], Any]


class Ragged(NamedTuple):
    """The concatenated ragged samples of a batch: sample i is `values[offsets[i]:offsets[i + 1]]`.

    `values` has shape (sum of lengths, *inner), `offsets` is int64 of shape (samples + 1,). Packed `values` have shape
    (rows, length): offsets refer to the flattened array, and values after the last offset are padding.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]


# The key of a sample's random numbers, (seed, epoch, position): augmentation is the same at any world size.
Key = tuple[int, int, int]
# Of some samples: their keys, their numbers, and which of them are not to be transformed, since they are bad; None if
# an error of the transform ends the pass.
Labels = tuple[Sequence[Key], Sequence[int], Collection[int] | None]
# Transformed samples, with None for those that are bad, and the errors of the transform by row.
Transformed = tuple[list[Sample | None], dict[int, StreamloaderError]]


def seeds_of(key: Key) -> tuple[int, ...]:
    """Return three seeds of 64 bits, for other generators than `rng_of`."""
    return unpack("<3Q", blake2b(pack("<3Q", *key), digest_size=24).digest())


def rng_of(key: Key) -> np.random.Generator:
    """Return a Philox generator with the key (seed, epoch) and a counter that starts at the position."""
    seed, epoch, position = key
    words = np.array([seed, epoch], np.uint64)  # numpy would convert a list of large integers to floats
    return np.random.Generator(np.random.Philox(key=words, counter=np.array([0, 0, 0, position], np.uint64)))


def takes_rng(transform: Transform) -> bool:
    """Return whether the transform has a second positional argument, which gets the random generator."""
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in kinds and (p.default is p.empty or p.name == "rng")]
    return len(required) >= 2


def apply(
    transform: Transform,
    samples: Sequence[Any],
    labels: Labels,
    tensors: str = "",
    *,
    alone: bool = False,
    what: str = "the transform",
) -> Transformed:
    """Return the transformed samples. `what`: what errors call the transform.

    Random numbers of tensors are seeded for each sample, in this thread. Those of numpy and Python belong to the
    process: they are seeded if it does nothing but transform, `alone`, since others would get the same numbers again.

    Raises `TransformError`, which names the sample, for any exception of the transform, unless that is returned. This
    includes SystemExit, which must not end the thread or process that runs the transform.
    """
    (keys, numbers, blank), with_rng = labels, takes_rng(transform)
    out, errors = list[Sample | None](), dict[int, StreamloaderError]()
    own = resolve_name(f"{tensors}:OwnGenerator")() if tensors else None
    with finished_before_exit() as stop_if_ending:
        for row, (sample, key, number) in enumerate(zip(samples, keys, numbers, strict=True)):
            stop_if_ending()
            if blank and row in blank:
                out.append(None)
                continue
            for_tensors, for_numpy, for_python = seeds_of(key)
            if alone:
                np.random.seed(for_numpy >> 32)
                random.seed(for_python)
            if own is not None:
                own.seed(for_tensors)
            try:
                with own or nullcontext():
                    result = transform(sample, rng_of(key)) if with_rng else transform(sample)
            except BaseException as error:
                problem = f"{what} raised {type(error).__name__} on sample {number}: {message(error)}"
                remedy = "fix it, have it return a default for such samples, or give on_error="
                if blank is None:
                    raise TransformError(problem, remedy) from error
                errors[row] = TransformError(problem, remedy)
                out.append(None)
                continue
            if not isinstance(result, dict):
                problem = f"{what} returned {type(result).__name__} for sample {number}"
                raise TransformError(problem, "return a dict from field names to values")
            out.append(result)
    return out, errors


def is_of_tensors(dtype: np.dtype[Any]) -> bool:
    """Return whether tensors have this dtype."""
    return (dtype.kind in "biuf" and dtype.itemsize <= 8) or (dtype.kind == "c" and dtype.itemsize <= 16)


def share_transform(executor: Executor, transform: Transform, *, spawns: bool) -> Transform | None:
    """Return a transform to be called in workers, None if they cannot load it without the script of this process.

    With `spawns` they import the script; raises `UsageError` if that does not suffice.
    """
    try:
        data = pickle.dumps(transform)
        is_of_script = b"__main__" in data
        if is_of_script and is_interactive():
            raise pickle.PicklingError("it is defined in a notebook or an interactive session")
        if is_of_script and not spawns:
            return None
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if not spawns:
            return None
        problem = f"num_workers={executor.workers} with a transform that other processes cannot load ({error})"
        remedy = "define it in a module, a .py file, that you import here, or use num_workers=0"
        raise UsageError(problem, remedy) from error
    return share_pickle(data, script_of_this_process() if is_of_script else None)  # type: ignore[return-value]


def rows_of(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the samples of a batch: dicts of numpy scalars and arrays, bytes and str."""
    split = dict(columns)
    for name, column in columns.items():
        if isinstance(column, Ragged):
            split[name] = [column.values[a:b] for a, b in pairwise(column.offsets.tolist())]
    return [{name: column[i] for name, column in split.items()} for i in range(count)]


# Arrays and tensors of this size are written to the columns of the batch by the worker that has made them.
STACKED_BYTES = 1 << 13

# How to make a value of an array: () for the array itself, (function, *arguments) for a tensor, whose bytes it has. For
# the rows of an array the function returns their tensors, stacked.
Build = tuple[Any, ...]
# The transformed samples of a part of a batch, pickled, with None for the values that are in memory of the parent; how
# to make these, by field; and the errors of the transform, by row.
Part = tuple[bytes, Mapping[str, Build], dict[int, StreamloaderError]]
Allocate = Callable[[Sequence[tuple[str, tuple[int, ...], str]]], Sequence[NDArray[Any]]]


def transform_samples(
    transform: Transform, columns: Mapping[str, Any], labels: Labels, tensors: str, allocate: Allocate
) -> Part:
    """Return the transformed samples of columns: the function of a worker.

    `allocate` returns memory for the values of fields, each given with its
    name, the shape of a value and the dtype.

    The transform gets copies: if it changes its arrays and the worker is killed, the others are as before.
    """
    reduce = resolve_name(f"{tensors}:reduce_tensor") if tensors else None  # imports the package before it draws
    own = [
        {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in sample.items()}
        for sample in rows_of(columns, len(labels[1]))
    ]
    with alone_in_worker():
        done, errors = apply(transform, own, labels, tensors, alone=True)
    good = [row for row, sample in enumerate(done) if sample is not None]
    try:
        large = _large_values([sample for sample in done if sample is not None], reduce)
        samples = _dump([sample and {**sample, **dict.fromkeys(large)} for sample in done] if large else done, reduce)
    except BaseException as error:
        problem = f"the result of the transform for one of {list(labels[1])[:4]}... cannot be sent between processes"
        remedy = "return arrays, tensors, numbers, bytes, str and lists of them, or use num_workers=0"
        raise TransformError(f"{problem} ({type(error).__name__}: {message(error)})", remedy) from error
    wanted = [(name, arrays[0].shape, arrays[0].dtype.name) for name, (arrays, _) in large.items()]
    memory = allocate(wanted) if wanted else ()
    for (arrays, _), rows in zip(large.values(), memory, strict=True):
        if len(good) == len(done):
            np.stack(arrays, out=rows)
            continue
        for row, array in zip(good, arrays, strict=True):
            rows[row] = array
    return samples, {name: build for name, (_, build) in large.items()}, errors


def _large_values(
    samples: Sequence[Sample], reduce: Callable[[Any], Any] | None
) -> dict[str, tuple[list[NDArray[Any]], Build]]:
    """Return the values of the fields that have large arrays or tensors of one shape and dtype in all samples."""
    found = {}
    for name in samples[0] if samples else ():
        arrays: list[NDArray[Any]] = []
        kinds = set()
        for sample in samples:
            array, build = _array_of(sample.get(name), reduce)
            if array is None or array.nbytes < STACKED_BYTES:
                break
            arrays.append(array)
            kinds.add((array.shape, array.dtype, build))
        if len(arrays) == len(samples) and len(kinds) == 1:
            found[name] = arrays, build
    return found


def _array_of(value: Any, reduce: Callable[[Any], Any] | None) -> tuple[NDArray[Any] | None, Build]:
    """Return the array that a value is made of (None for other values than arrays and tensors), and how to make it."""
    if type(value) is np.ndarray:
        return value if value.dtype.isnative and is_of_tensors(value.dtype) else None, ()
    reduced = NotImplemented if reduce is None else reduce(value)
    if reduced is NotImplemented:
        return None, ()
    function, (array, *arguments) = reduced
    return array, (function, *arguments)


def _built(array: NDArray[Any], build: Build) -> Any:
    return build[0](array, *build[1:]) if build else array


def load_parts(
    parts: Sequence[tuple[Part, Mapping[str, NDArray[Any]]]], columns: Mapping[str, NDArray[Any]]
) -> tuple[list[Sample | None], dict[str, Any]]:
    """Return the samples of the parts of a batch, and the columns that are complete, for which the samples have None.

    Each part is given with the memory of its large values. `columns`: the memory of whole columns, of which that of a
    part is a view if its values have the same shape and dtype.
    """
    complete = {}
    for name, column in columns.items():
        found = [(memory[name], builds[name]) for (_, builds, _), memory in parts if name in builds]
        kinds = {(array.shape[1:], array.dtype, build) for array, build in found}
        build = found[0][1] if found else ()
        if len(found) == len(parts) and kinds == {(column.shape[1:], column.dtype, build)}:
            complete[name] = _built(column, build)
    samples: list[Sample | None] = []
    for (data, builds, _), memory in parts:
        own = pickle.loads(data)
        for name, build in builds.items():
            for sample, row in zip(own, memory[name], strict=True) if name not in complete else ():
                if sample is not None:
                    sample[name] = _built(row, build)
        samples += own
    return samples, complete


HUNG_SECONDS = 5


@contextmanager
def alone_in_worker() -> Iterator[None]:
    """Let one transform at a time run in a worker, since the generators of numpy and Python belong to the process.

    One that hangs after its dataset was closed would keep others waiting: then the worker ends, and is replaced.
    """
    waited = 0  # seconds
    while not _TRANSFORMING.acquire(timeout=1):
        # a caller that waits sends nothing, so there is only the end of its connection to read
        waited += all(connection is not None and connection.poll() for connection in _CALLERS)
        if waited >= HUNG_SECONDS:
            os._exit(1)
    _CALLERS[:] = [caller()]
    try:
        yield
    finally:
        _TRANSFORMING.release()


_TRANSFORMING = threading.Lock()
_CALLERS: list[Connection | None] = []  # whose transform is running


class _Pickler(pickle.Pickler):
    reducer_override: Any


def _dump(result: Any, reduce: Callable[[Any], Any] | None = None) -> bytes:
    """Pickle samples by value: multiprocessing would put each tensor into a file in shared memory."""
    out = io.BytesIO()
    pickler = _Pickler(out, pickle.HIGHEST_PROTOCOL)
    if reduce is not None:
        pickler.reducer_override = reduce
    pickler.dump(result)
    return out.getvalue()
