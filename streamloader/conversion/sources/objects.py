"""Python objects with a length and samples by number: torch datasets, lists of dicts. See formats/python/MAPPING.md."""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.base import BadSample, OnBad, Source, spread_rows, take_rows
from streamloader.conversion.sources.fields import FieldSelection, choose, flatten
from streamloader.conversion.sources.files import field_names
from streamloader.conversion.sources.records import PROBED, RecordPart, Sample, SampleFields, open_records
from streamloader.errors import SourceError, UsageError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.storage.store import ObjectInfo

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
        for name, one in given.items():
            if not isinstance(name, str) or not _is_column(one):
                problem = f"the dict's entry {name!r} is a value of type {type(one).__name__}"
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
        remedy = "give a dataset, a list, an iterable or a generator function of samples, or a dict of arrays or lists"
        raise UsageError(f"a {qualified_name(samples)} has no samples to convert", remedy)
    if all(hasattr(samples, name) for name in ("columns", "to_dict")):  # of pandas or polars
        remedy = "give {name: frame[name] for name in frame.columns}"
        raise UsageError(f"a {qualified_name(samples)} has columns, not samples", remedy)
    return numbered and hasattr(type(samples), "__len__") and _ITERABLE not in kinds


def qualified_name(samples: Any) -> str:
    """Return the name of an object's class, with its module."""
    if isinstance(samples, Columns):
        samples = samples.columns
    return f"{type(samples).__module__}.{type(samples).__qualname__}"


def open_object(samples: Any, selection: FieldSelection, workers: int = 0) -> Source:
    """Return the source of a map-style object; the fields of some of its samples are inferred, as for records.

    An object has no files: `files` is one entry that stands for its length and the values of some samples, so that an
    interrupted conversion is not resumed with another object. It must give the same sample for a number each time.
    With `workers` it is pickled, once, for other processes; parts of a list or tuple take only their own samples.
    Raises `UsageError` where it cannot be pickled, `SourceError` where it is empty, and what `open_records` raises.
    """
    name, count = qualified_name(samples), len(samples)
    if not count:
        raise SourceError(f"the {name} has no sample", "give at least one")
    probed = spread_rows(count, PROBED)
    if isinstance(samples, Columns) and (arrays := _as_arrays(samples)):
        keys = {field: key for key, field in field_names(list(arrays), f"the {name}").items()}
        columns = {field: arrays[key] for field, key in keys.items()}
        fields = {field: Field("tensor", array.dtype.name, array.shape[1:]) for field, array in columns.items()}
        notes = {"object": name, **SampleFields(keys, fields).notes}
        source = Source(
            f"{NAME}:{name}", (), fields, count, notes, lambda rows: partial(_given, take_rows(columns, rows))
        )
        return choose(replace(source, files=(_identity(source, probed),)), selection)
    by_value = type(samples) in (list, tuple, Columns)
    few = [samples[row] for row in probed.tolist()] if by_value else samples
    packed = pack(few, name) if workers else b""  # fails now, not in the middle
    held = Held(samples, name, packed)

    def cut(rows: NDArray[np.int64]) -> RecordPart:
        own = Held({row: samples[row] for row in rows.tolist()}, name) if by_value else held
        return partial(_read_samples, own, rows.tolist())

    source = open_records(f"{NAME}:{name}", (), count, cut, selection, notes={"object": name})
    return replace(source, files=(_identity(source, probed),))


def _given(columns: dict[str, Column], _on_bad: OnBad) -> dict[str, Column]:
    return columns


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
    for name, column in source.part(rows)(lambda _: None).items():
        digest.update(f"{name} {source.fields[name]} {len(column)}\n".encode())
        for item in [column.tobytes()] if isinstance(column, np.ndarray) else column:
            digest.update(len(item).to_bytes(8, "little"))
            digest.update(item)
    return ObjectInfo("samples", source.num_samples, digest.hexdigest())


@dataclass(frozen=True, eq=False)
class Held:
    """The caller's object, of the class `name`; in another process None, and `packed` is its pickle.

    Plain pickle, by value: multiprocessing's own would hand torch's tensors over as shared memory, which our workers
    cannot open, being no children of it; and an object that cannot be loaded there is an error of the part.
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
        except Exception as error:  # the object's own code, and imports
            problem = f"the {self.name} cannot be loaded in another process: {type(error).__name__}: {error}"
            raise UsageError(problem, "make its module importable there, or use workers=0") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, (None, self.name, self.packed or pack(self.samples, self.name))


class _Pickler(pickle.Pickler):
    """Rejects what a worker cannot load: the main module of this program is another one there."""

    def reducer_override(self, found: Any) -> Any:
        """Leave everything else to pickle."""
        if isinstance(found, type | FunctionType) and found.__module__ == "__main__":
            raise pickle.PicklingError(f"{found.__qualname__} is defined in the program that runs, __main__")
        return NotImplemented


def pack(samples: Any, name: str) -> bytes:
    """Return the pickle of an object of the class `name`. Raises `UsageError` where other processes cannot load it."""
    out = BytesIO()
    try:
        _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(samples)
    except Exception as error:  # the object's own code
        problem = f"the {name} cannot be given to other processes: {type(error).__name__}: {error}"
        remedy = "define its classes and functions in a module that this program imports, or use workers=0"
        raise UsageError(problem, remedy) from error
    return out.getvalue()


def _read_samples(held: Held, rows: Sequence[int], on_bad: OnBad) -> Iterator[Sample]:
    """Yield each sample of these rows as a mapping; one for which the object raises is bad.

    Raises `UsageError` where this process cannot load the object.
    """
    samples = held.get()
    several = getattr(samples, "__getitems__", None)
    size = _BATCH if callable(several) else 1
    for first in range(0, len(rows), size):
        some, batch = rows[first : first + size], list[Any]()
        if callable(several):
            with suppress(Exception):  # the caller's code: one by one tells which sample it is
                batch = list(several(some))
        for position, row in enumerate(some, first):
            name = f"{held.name}[{row}]"
            try:
                sample = batch[position - first] if len(batch) == len(some) else samples[row]
            except Exception as error:  # noqa: BLE001 - the caller's code
                problem = f"it cannot be read: {type(error).__name__}: {error}"
                on_bad(BadSample(position, name, problem, "fix the object's __getitem__"))
            else:
                yield position, name, flatten(sample)
