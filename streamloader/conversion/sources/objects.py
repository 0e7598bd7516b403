"""Python objects with a length and samples by number: torch datasets, lists of dicts. See formats/python/MAPPING.md."""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, Refuse, Source, spread_rows
from streamloader.conversion.sources.choose import choose
from streamloader.conversion.sources.files import field_names
from streamloader.conversion.sources.infer import flatten
from streamloader.conversion.sources.records import PROBED, Origin, open_records
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError, UsageError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.storage.protocol import ObjectInfo

NAME = "python"

_BATCH = 64  # samples that are asked for at once, and so held, where an object gives several
_ITERABLE = "torch.utils.data.dataset.IterableDataset"
_LOADER = "torch.utils.data.dataloader.DataLoader"


@dataclass(frozen=True, eq=False)
class Columns:
    """A dict of columns, each with one value a sample, as samples by number."""

    columns: Mapping[str, Any]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: column[number] for name, column in self.columns.items()}


def as_samples(given: Any) -> Any:
    """Return what to convert of a Python object: the columns of a dict, what a generator function yields, or itself.

    Raises `UsageError` for a dict of something else, for columns of different lengths, and for a generator function
    that cannot be called without arguments.
    """
    if type(given) is dict and given:
        wrong = next((name for name, one in given.items() if not isinstance(name, str) or not _is_column(one)), None)
        if wrong is not None:
            problem = f"the dict's entry {wrong!r} is a value of type {type(given[wrong]).__name__}"
            raise UsageError(problem, "give names as text, and for each an array or list with one value a sample")
        given = {name: one.to_numpy() if hasattr(one, "to_numpy") else one for name, one in given.items()}
        lengths = {name: len(column) for name, column in given.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(f"the columns have different lengths: {lengths}", "give one value of each for each sample")
        return Columns(given)
    if inspect.isgeneratorfunction(given):
        try:
            return given()
        except TypeError as error:
            name = getattr(given, "__name__", "")
            problem = f"the generator function {name} cannot be called without arguments: {error}"
            raise UsageError(problem, "give what it returns, or functools.partial of it") from error
    return given


def _is_column(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return True
    arrays = any(hasattr(value, one) for one in ("__array__", "__dlpack__"))
    return arrays and hasattr(value, "__len__") and getattr(value, "shape", None) != ()


def map_style(samples: Any) -> bool:
    """Return whether an object has a length and samples by number; False for one that can only be iterated.

    A torch `IterableDataset` inherits a `__getitem__` that does not work. Raises `UsageError` for what is neither, and
    for what people give by mistake: text, a mapping, a torch `DataLoader`.
    """
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(samples).__mro__}
    if _LOADER in kinds:
        raise UsageError(f"{qualified_name(samples)} gives batches, not samples", "give its dataset")
    numbered, iterated = (hasattr(type(samples), name) for name in ("__getitem__", "__iter__"))
    if isinstance(samples, Mapping | str | bytes) or not (numbered or iterated):
        remedy = (
            "give a dataset, a list, an iterable or a generator function of samples, or a dict with an array or list"
        )
        raise UsageError(f"a {qualified_name(samples)} has no samples to convert", f"{remedy} for each field")
    if all(hasattr(samples, name) for name in ("columns", "to_dict")):  # of pandas or polars
        raise UsageError(
            f"a {qualified_name(samples)} has columns, not samples",
            "give {name: frame[name] for name in frame.columns}",
        )
    return numbered and hasattr(type(samples), "__len__") and _ITERABLE not in kinds


def qualified_name(samples: Any) -> str:
    """Return the name of an object's class, with its module."""
    if isinstance(samples, Columns):
        samples = samples.columns
    return f"{type(samples).__module__}.{type(samples).__qualname__}"


def open_object(samples: Any, wish: Wish, workers: int = 0) -> Source:
    """Return the source of a map-style object; the fields of some of its samples are inferred, as for records.

    An object has no files: `files` is one entry that stands for its length and the values of some samples, so that an
    interrupted conversion does not go on with another object. It must give the same sample for a number each time.
    With `workers` it is pickled, once, for other processes; parts of a list or tuple take only their own samples.
    Raises `UsageError` where it cannot be pickled, `SourceError` where it is empty, and what `open_records` raises.
    """
    name, count = qualified_name(samples), len(samples)
    if not count:
        raise SourceError(f"the {name} has no sample", "give at least one")
    probed = spread_rows(count, PROBED)
    if isinstance(samples, Columns) and (arrays := _as_arrays(samples)):
        names = field_names(list(arrays), f"the {name}")
        held_arrays = {names[key]: array for key, array in arrays.items()}
        keys = {field: key for key, field in names.items() if field != key}
        columns = ArraysSource(f"{NAME}:{name}", held_arrays, {"object": name, **({"keys": keys} if keys else {})})
        return choose(replace(columns, files=(_identity(columns, probed),)), wish)
    if type(samples) in (list, tuple, Columns):

        def cut(rows: NDArray[np.int64]) -> ObjectPart:
            return ObjectPart(Held([samples[row] for row in rows.tolist()], name), range(len(rows)), rows)

        if workers:
            pack([samples[row] for row in probed.tolist()], name)  # to be told now
    else:
        held = Held(samples, name, pack(samples, name) if workers else b"")

        def cut(rows: NDArray[np.int64]) -> ObjectPart:
            return ObjectPart(held, rows.tolist(), rows)

    source = open_records(Origin(f"{NAME}:{name}", (), count, {"object": name}), cut, wish)
    return replace(source, origin=replace(source.origin, files=(_identity(source, probed),)))


@dataclass(frozen=True, eq=False)
class ArraysSource:
    """Arrays of one length, one for each field."""

    url: str
    arrays: Mapping[str, NDArray[Any]]
    notes: Mapping[str, Any]
    files: Sequence[ObjectInfo] = ()

    @property
    def fields(self) -> Mapping[str, Field]:
        """One tensor for each array."""
        return {name: Field("tensor", array.dtype.name, array.shape[1:]) for name, array in self.arrays.items()}

    @property
    def num_samples(self) -> int:
        """The length of each array."""
        return len(next(iter(self.arrays.values())))

    def part(self, rows: NDArray[np.int64]) -> ArraysPart:
        """Return these rows, without the others."""
        return ArraysPart({name: array[rows] for name, array in self.arrays.items()})


@dataclass(frozen=True, eq=False)
class ArraysPart:
    """Some rows of all arrays."""

    columns: Mapping[str, NDArray[Any]]

    def read(self, refuse: Refuse) -> dict[str, Column]:  # noqa: ARG002 - no row of an array is bad
        """Return one column a field."""
        return dict(self.columns)


def _as_arrays(samples: Columns) -> dict[str, NDArray[Any]]:
    """Return all columns as arrays that fields hold as they are; nothing where one of them is something else."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, column in samples.columns.items():
        try:
            array = np.asarray(column) if hasattr(column, "__array__") else None
        except Exception:  # noqa: BLE001 - of another library: its samples are asked for one by one
            array = None
        if array is None or array.dtype.kind not in "biuf" or array.itemsize > 8 or 0 in array.shape[1:]:
            return {}
        arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
    return arrays


def _identity(source: Source, rows: NDArray[np.int64]) -> ObjectInfo:
    """Return what stands for files: the number of samples as its size, a digest of some of them as its etag."""
    digest = hashlib.sha256()
    for name, column in source.part(rows).read(_pass_over).items():
        digest.update(f"{name} {source.fields[name]} {len(column)}\n".encode())
        for item in [column.tobytes()] if isinstance(column, np.ndarray) else column:
            digest.update(len(item).to_bytes(8, "little"))
            digest.update(item)
    return ObjectInfo("samples", source.num_samples, digest.hexdigest())


def _pass_over(_: BadSample) -> None:
    """Leave a bad sample to the shard that it belongs to."""


@dataclass(frozen=True, eq=False)
class Held:
    """The caller's object, of the class `name`; in another process None, and `packed` is its pickle.

    Plain pickle, by value: multiprocessing's own would hand torch's tensors over as shared memory, which our workers
    cannot open, being no children of it; and an object that cannot be loaded there is told as an error of the part.
    """

    samples: Any
    name: str
    packed: bytes = b""

    def get(self) -> Any:
        """Return the object. Raises `UsageError` where this process cannot load it."""
        if self.samples is not None:
            return self.samples
        try:
            return pickle.loads(self.packed)
        except Exception as error:
            raise UsageError(
                f"the {self.name} cannot be loaded in another process: {type(error).__name__}: {error}",
                "let its module be importable there, or use workers=0",
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, (None, self.name, self.packed or pack(self.samples, self.name))


class _Pickler(pickle.Pickler):
    """Refuses what only the program that runs can load: its main module is another one in a worker."""

    def reducer_override(self, found: Any) -> Any:
        """Return that everything else is pickled as usual."""
        if isinstance(found, type | FunctionType) and found.__module__ == "__main__":
            raise pickle.PicklingError(f"{found.__qualname__} is defined in the program that runs, __main__")
        return NotImplemented


def pack(samples: Any, name: str) -> bytes:
    """Return the pickle of an object of the class `name`. Raises `UsageError` where other processes cannot load it."""
    out = BytesIO()
    try:
        _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(samples)
    except Exception as error:
        raise UsageError(
            f"the {name} cannot be given to other processes: {type(error).__name__}: {error}",
            "define its classes and functions in a module that this program imports, or use workers=0",
        ) from error
    return out.getvalue()


@dataclass(frozen=True, eq=False)
class ObjectPart:
    """Some samples of an object: `numbers` are theirs in `held`, `rows` in the source."""

    held: Held
    numbers: Sequence[int]
    rows: NDArray[np.int64]

    def name(self, position: int) -> str:
        """Return the class and the number of a sample."""
        return f"{self.held.name}[{self.rows[position]}]"

    def read(self, refuse: Refuse) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield each sample as a mapping; one for which the object raises is refused. Raises `UsageError`."""
        samples = self.held.get()
        several = getattr(samples, "__getitems__", None)
        size = _BATCH if callable(several) else 1
        for first in range(0, len(self.numbers), size):
            positions = range(first, min(first + size, len(self.numbers)))
            batch = self._batch(several, positions) if callable(several) else None
            if batch is not None:
                yield from zip(positions, map(flatten, batch), strict=True)
                continue
            for position in positions:
                try:
                    sample = samples[self.numbers[position]]
                except Exception as error:  # noqa: BLE001 - the caller's code
                    problem = f"it cannot be read: {type(error).__name__}: {error}"
                    refuse(BadSample(position, self.name(position), problem, "fix the object's __getitem__"))
                else:
                    yield position, flatten(sample)

    def _batch(self, several: Callable[[list[int]], Any], positions: range) -> list[Any] | None:
        """Return the samples at these positions; None where they are better asked for one by one."""
        try:
            batch = list(several([self.numbers[position] for position in positions]))
        except Exception:  # noqa: BLE001 - the caller's code: one by one tells which sample it is
            return None
        return batch if len(batch) == len(positions) else None
