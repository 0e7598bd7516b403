"""Calls the user's transform, sample by sample, in this process or in other processes."""

from __future__ import annotations

import inspect
import io
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from itertools import pairwise
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from struct import pack, unpack
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.executor import Executor
from streamloader.engine.messages import caller, script_of_this_process, share_pickle
from streamloader.errors import TransformError, UsageError, message
from streamloader.format.values import as_array
from streamloader.storage.process import is_interactive

Transform = Callable[..., Any]
Sample = dict[str, Any]


class Ragged(NamedTuple):
    """The concatenated ragged samples of a batch: sample i is `values[offsets[i]:offsets[i + 1]]`.

    `values` has shape (sum of lengths, *inner), `offsets` is int64 of shape (samples + 1,). Packed `values` have shape
    (rows, length): offsets refer to the flattened array, and values after the last offset are padding.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]


class Tensors(NamedTuple):
    """How to handle the tensors of a framework, which the engine does not import.

    `stack(field, values, sample_numbers)` returns the values as one column, or None if they are not tensors.
    Two names are loaded where the transform runs, "module:name": `reducer` is the `reducer_override` of a
    `pickle.Pickler` that sends tensors by value, as `build, (bytes, *args)`: if the bytes of several tensors are the
    rows of an array, `build(array, *args)` returns these tensors, stacked. `generator()` is a context in which this
    thread draws random numbers from a generator of its own, which `generator().seed(number)` seeds.
    """

    stack: Callable[[str, Sequence[Any], Sequence[int]], Any]
    reducer: str
    generator: str


class RngKey(NamedTuple):
    """The key of a sample's random numbers: augmentation is the same at any world size."""

    seed: int
    epoch: int
    position: int

    def seeds(self) -> tuple[int, ...]:
        """Return three seeds of 64 bits, for other generators than `rng`."""
        return unpack("<3Q", blake2b(pack("<3Q", *self), digest_size=24).digest())

    def rng(self) -> np.random.Generator:
        """Return a Philox generator with the key (seed, epoch) and a counter that starts at the position."""
        key = np.array([self.seed, self.epoch], np.uint64)  # numpy would convert a list of large integers to floats
        return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, self.position], np.uint64)))


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
    samples: Sequence[Sample],
    keys: Sequence[RngKey],
    numbers: Sequence[int],
    generator: str = "",
    *,
    alone: bool = False,
) -> list[Sample]:
    """Return the transformed samples. `generator`: that of `Tensors`.

    Random numbers of tensors are seeded for each sample, in this thread. Those of numpy and Python belong to the
    process: they are seeded if it does nothing but transform, `alone`, since others would get the same numbers again.

    Raises `TransformError`, which names the sample, for any exception of the transform. This includes SystemExit,
    which must not end the thread or process that runs the transform.
    """
    out, with_rng = [], takes_rng(transform)
    own = resolve_name(generator)() if generator else None
    for sample, key, number in zip(samples, keys, numbers, strict=True):
        for_tensors, for_numpy, for_python = key.seeds()
        if alone:
            np.random.seed(for_numpy >> 32)
            random.seed(for_python)
        if own is not None:
            own.seed(for_tensors)
        try:
            with own or nullcontext():
                result = transform(sample, key.rng()) if with_rng else transform(sample)
        except BaseException as error:
            problem = f"the transform raised {type(error).__name__} on sample {number}: {message(error)}"
            raise TransformError(problem, "fix it, or have it return a default for such samples") from error
        if not isinstance(result, dict):
            problem = f"the transform returned {type(result).__name__} for sample {number}"
            raise TransformError(problem, "return a dict from field names to values")
        out.append(result)
    return out


def collate(
    samples: Sequence[Sample],
    numbers: Sequence[int],
    tensors: Tensors | None = None,
    ragged: Sequence[str] = (),
    complete: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return samples as batch columns: arrays, tensors and numbers are stacked, other values become lists.

    Arrays of the fields `ragged` are concatenated. `numbers`: the sample numbers. `complete`: the columns that exist.
    Raises `TransformError`, which names the field and, if known, the sample.
    """
    names = list(samples[0]) if samples else []
    for sample, number in zip(samples, numbers, strict=True):
        if list(sample) != names:
            problem = f"the transform returned keys {list(sample)} for sample {number} after {names}"
            raise TransformError(problem, "return the same keys, in the same order, for every sample")
    columns = {name: [sample[name] for sample in samples] for name in names if name not in complete}
    return {
        name: complete[name] if name in complete else _column(name, columns[name], numbers, tensors, name in ragged)
        for name in names
    }


def _column(name: str, values: list[Any], numbers: Sequence[int], tensors: Tensors | None, ragged: bool) -> Any:
    if isinstance(values[0], (str, bytes, list, dict, tuple)) or values[0] is None:
        return values
    try:
        if ragged and all(isinstance(value, np.ndarray) for value in values):
            return _concatenate(name, values, numbers)
        column = None if tensors is None else tensors.stack(name, values, numbers)
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
    if _is_of_tensors(dtype):
        return
    kinds = {"M": "value.astype('int64')", "m": "value.astype('int64')", "f": "value.astype('float64')"}
    remedy = f"return {kinds.get(dtype.kind, 'value.tolist(), which is returned as a list')}"
    problem = f"the transform returned {name!r} of sample {number} as an array of {dtype}, which tensors do not have"
    raise TransformError(problem, remedy)


def _is_of_tensors(dtype: np.dtype[Any]) -> bool:
    return (dtype.kind in "biuf" and dtype.itemsize <= 8) or (dtype.kind == "c" and dtype.itemsize <= 16)


def check_shapes(name: str, values: Sequence[Any]) -> None:
    """Raise `TransformError` if the arrays or tensors of a field differ in shape."""
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        shown = ", ".join(map(str, sorted(shapes)[:3]))
        raise TransformError(f"the transform returned {name!r} in shapes {shown}", "return one shape, or a list")


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


class Raw(NamedTuple):
    """An array, or the bytes of a tensor and how to build it. Values of several samples are the rows of one."""

    array: NDArray[Any]
    build: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()

    def value(self) -> Any:
        """Return the array or the tensor."""
        return self.array if self.build is None else self.build(self.array, *self.args)

    def kind(self) -> tuple[Any, ...]:
        """Return what the rows of parts of a column have in common."""
        return self.array.shape[1:], self.array.dtype, self.build, self.args


class TransformedPart(NamedTuple):
    """The transformed samples of a part of a batch, pickled.

    They have None for the fields of `builds`, whose values are in memory of the parent: the `build` and `args` of each.
    """

    samples: bytes
    builds: Mapping[str, tuple[Any, ...]]


Allocate = Callable[[Sequence[tuple[str, tuple[int, ...], str]]], Sequence[NDArray[Any]]]


def transform_samples(
    transform: Transform,
    columns: Mapping[str, Any],
    labels: tuple[Sequence[RngKey], Sequence[int]],
    tensors: Tensors | None,
    allocate: Allocate,
) -> TransformedPart:
    """Return the transformed samples of columns: the function of a worker.

    `labels`: `keys` and `numbers` of `apply`. `allocate` returns memory for the values of fields, each given with its
    name, the shape of a value and the dtype.

    The transform gets copies: if it changes its arrays and the worker is killed, the others are as before.
    """
    reduce = None if tensors is None else resolve_name(tensors.reducer)  # imports the package before it draws
    own = [
        {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in sample.items()}
        for sample in rows_of(columns, len(labels[1]))
    ]
    with _alone():
        generator = "" if tensors is None else tensors.generator
        done = apply(transform, own, *labels, generator, alone=True)
    try:
        large = _large_values(done, reduce)
        samples = _dump([{**sample, **dict.fromkeys(large)} for sample in done] if large else done, reduce)
    except BaseException as error:
        problem = f"the result of the transform for one of {list(labels[1])[:4]}... cannot be sent between processes"
        remedy = "return arrays, tensors, numbers, bytes, str and lists of them, or use num_workers=0"
        raise TransformError(f"{problem} ({type(error).__name__}: {message(error)})", remedy) from error
    wanted = [(name, values[0].array.shape, values[0].array.dtype.name) for name, values in large.items()]
    memory = allocate(wanted) if wanted else ()
    for values, rows in zip(large.values(), memory, strict=True):
        np.stack([value.array for value in values], out=rows)
    return TransformedPart(samples, {name: values[0][1:] for name, values in large.items()})


def _large_values(samples: Sequence[Sample], reduce: Callable[[Any], Any] | None) -> dict[str, list[Raw]]:
    """Return the values of the fields that have large arrays or tensors of one shape and dtype in all samples."""
    found = {}
    for name in samples[0]:
        values: list[Raw] = []
        for sample in samples:
            raw = _raw(sample.get(name), reduce)
            if raw is None or raw.array.nbytes < STACKED_BYTES:
                break
            values.append(raw)
        if len(values) == len(samples) and len({(raw.array.shape, raw.array.dtype, *raw[1:]) for raw in values}) == 1:
            found[name] = values
    return found


def _raw(value: Any, reduce: Callable[[Any], Any] | None) -> Raw | None:
    if type(value) is np.ndarray:
        return Raw(value) if value.dtype.isnative and _is_of_tensors(value.dtype) else None
    reduced = NotImplemented if reduce is None else reduce(value)
    if reduced is NotImplemented:
        return None
    build, (data, *args) = reduced
    return Raw(data, build, tuple(args))


def load_parts(
    parts: Sequence[tuple[TransformedPart, Mapping[str, NDArray[Any]]]], columns: Mapping[str, NDArray[Any]]
) -> tuple[list[Sample], dict[str, Any]]:
    """Return the samples of the parts of a batch, and the columns that are complete, for which the samples have None.

    Each part is given with the memory of its large values. `columns`: the memory of whole columns, of which that of a
    part is a view if its values have the same shape and dtype.
    """
    stacked = [{name: Raw(memory[name], *build) for name, build in part.builds.items()} for part, memory in parts]
    complete = {}
    for name, column in columns.items():
        kinds = {part[name].kind() if name in part else None for part in stacked}
        whole = stacked[0].get(name, Raw(column))._replace(array=column)
        if kinds == {whole.kind()}:
            complete[name] = whole.value()
    samples: list[Sample] = []
    for (part, _), large in zip(parts, stacked, strict=True):
        own = pickle.loads(part.samples)
        for name, raw in large.items():
            for sample, row in zip(own, raw.array, strict=True) if name not in complete else ():
                sample[name] = raw._replace(array=row).value()
        samples += own
    return samples, complete


HUNG_SECONDS = 5


@contextmanager
def _alone() -> Iterator[None]:
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
