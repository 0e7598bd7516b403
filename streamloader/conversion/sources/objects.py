"""Python objects with a length and indexed samples: torch datasets, lists of dicts. See formats/python/MAPPING.md.

Images and other media in datasets of Hugging Face and torchvision stay encoded, and their class names are kept.
"""

import hashlib
import inspect
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources.arrow_types import class_names
from streamloader.conversion.sources.base import BadSample, OnBad, RowSource, spread_rows, take_rows
from streamloader.conversion.sources.fields import FieldSelection, choose, flatten
from streamloader.conversion.sources.files import field_names
from streamloader.conversion.sources.records import PROBED, RecordFragment, Sample, SampleFields, open_records
from streamloader.errors import SourceError, UsageError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field
from streamloader.storage.objects import ObjectInfo
from streamloader.storage.process import is_interactive

NAME = "python"

_BATCH = 64  # samples that one call of `__getitems__` returns, and that are held in memory
_ITERABLE = "torch.utils.data.dataset.IterableDataset"
_LOADER = "torch.utils.data.dataloader.DataLoader"


@dataclass(frozen=True, eq=False)
class Columns:
    """A dict of columns, as a sequence of samples."""

    columns: Mapping[str, Any]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {name: column[number] for name, column in self.columns.items()}


def as_samples(given: Any) -> Any:
    """Return the samples to convert: the columns of a dict, the result of a generator function, else the object itself.

    Raises `UsageError` for a dict of other values, for columns of different lengths, and for a generator function
    that cannot be called without arguments.
    """
    if type(given) is dict and given:
        for name, column in given.items():
            if not isinstance(name, str) or not _is_column(column):
                problem = f"the dict's entry {name!r} is a value of type {type(column).__name__}"
                raise UsageError(problem, "give names as text, and for each an array or list with one value a sample")
        columns = {name: column.to_numpy() if hasattr(column, "to_numpy") else column for name, column in given.items()}
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise UsageError(f"the columns have different lengths: {lengths}", "give one value of each for each sample")
        return Columns(columns)
    if inspect.isgeneratorfunction(given):
        try:
            return given()
        except TypeError as error:
            name = getattr(given, "__name__", "")
            problem = f"the generator function {name} cannot be called without arguments: {error}"
            raise UsageError(problem, "give what it returns, or functools.partial of it") from error
    return keep_encoded(given)


def _is_column(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return True
    array = hasattr(value, "__array__") or hasattr(value, "__dlpack__")
    return array and hasattr(value, "__len__") and getattr(value, "shape", None) != ()


def map_style(samples: Any) -> bool:
    """Return whether an object has a length and indexed samples; False if it can only be iterated.

    A torch `IterableDataset` inherits a `__getitem__` that does not work. Raises `UsageError` for an object that is
    neither, and for common mistakes: text, a mapping, a torch `DataLoader`.
    """
    samples = samples.rows if isinstance(samples, Encoded) else samples
    classes = class_path(samples)
    if _LOADER in classes:
        raise UsageError(f"{qualified_name(samples)} gives batches, not samples", "give its dataset")
    indexed, iterable = (hasattr(type(samples), name) for name in ("__getitem__", "__iter__"))
    if isinstance(samples, Mapping | str | bytes) or not (indexed or iterable):
        remedy = "give a dataset, a list, an iterable or a generator function of samples, or a dict of arrays or lists"
        raise UsageError(f"a {qualified_name(samples)} has no samples to convert", remedy)
    if hasattr(samples, "columns") and hasattr(samples, "to_dict"):  # a frame of pandas or polars
        remedy = "give {name: frame[name] for name in frame.columns}"
        raise UsageError(f"a {qualified_name(samples)} has columns, not samples", remedy)
    return indexed and hasattr(type(samples), "__len__") and _ITERABLE not in classes


def qualified_name(samples: Any) -> str:
    """Return the name of an object's class, with its module."""
    if isinstance(samples, Encoded):
        return samples.name
    return class_path(samples.columns if isinstance(samples, Columns) else samples)[0]


def open_object(samples: Any, selection: FieldSelection, workers: int = 0) -> RowSource:
    """Return the source of a map-style object; fields are inferred from some of its samples, as for records.

    An object has no files: `files` has one entry with its length and a digest of some samples, so that an interrupted
    conversion is not resumed with another object. The object must return the same sample for an index each time. With
    `workers` it is pickled once for other processes; fragments of a list or tuple contain only their own samples.
    Raises `UsageError` if it cannot be pickled, `SourceError` if it is empty, and what `open_records` raises.
    """
    name, count = qualified_name(samples), len(samples)
    if not count:
        raise SourceError(f"the {name} has no sample", "give at least one")
    selection = replace(selection, max_decoded=sys.maxsize)  # nothing is decompressed that others wrote
    probed = spread_rows(count, PROBED)
    if isinstance(samples, Columns) and (arrays := _as_arrays(samples)):
        keys = {field: key for key, field in field_names(list(arrays), f"the {name}").items()}
        columns = {field: arrays[key] for field, key in keys.items()}
        fields = {field: Field("tensor", array.dtype.name, array.shape[1:]) for field, array in columns.items()}
        notes = {"object": name, **SampleFields(keys, fields).notes}
        url = f"{NAME}:{name}"
        source = RowSource(url, (), fields, count, notes, lambda rows: partial(_keep, take_rows(columns, rows)))
        return choose(replace(source, files=(_identity(source, probed),)), selection)
    by_value = type(samples) in (list, tuple, Columns)
    probe = [samples[row] for row in probed.tolist()] if by_value else samples
    pickled = pack(probe, name) if workers else b""  # raises now rather than during the conversion
    shared = SharedObject(samples, name, pickled)

    def cut(rows: NDArray[np.int64]) -> RecordFragment:
        used = SharedObject({row: samples[row] for row in rows.tolist()}, name) if by_value else shared
        return partial(_read_samples, used, rows.tolist())

    source = open_records(f"{NAME}:{name}", (), count, cut, selection, notes={"object": name})
    notes = {**source.notes, **class_notes(samples, source.fields, source.notes)}
    return replace(source, files=(_identity(source, probed),), notes=notes)


def _keep(columns: dict[str, Column], _on_bad: OnBad) -> dict[str, Column]:
    return columns


def _as_arrays(samples: Columns) -> dict[str, NDArray[Any]]:
    """Return all columns as arrays that fields can hold; nothing if any of them is not such an array."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, column in samples.columns.items():
        try:
            array = np.asanyarray(column) if hasattr(column, "__array__") else None
        except Exception:  # noqa: BLE001 - another library's; its values are then read one by one
            array = None
        if array is None or array.dtype.kind not in "biuf" or array.itemsize > 8 or 0 in array.shape[1:]:
            return {}
        if np.ma.is_masked(array):  # each masked sample is filled, or bad
            return {}
        arrays[name] = np.asarray(array).astype(array.dtype.newbyteorder("="), copy=False)
    return arrays


def _identity(source: RowSource, rows: NDArray[np.int64]) -> ObjectInfo:
    """Return the entry for `files`: its size is the number of samples, its etag a digest of the samples `rows`."""
    digest = hashlib.sha256()
    for name, column in source.fragment(rows)(lambda _: None).items():
        digest.update(f"{name} {source.fields[name]} {len(column)}\n".encode())
        for item in [column.tobytes()] if isinstance(column, np.ndarray) else column:
            data = item.tobytes() if isinstance(item, np.ndarray) else item
            data = data if isinstance(data, bytes) else repr(data).encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return ObjectInfo("samples", source.num_samples, digest.hexdigest())


@dataclass(frozen=True, eq=False)
class SharedObject:
    """The user's object, of the class `name`; in another process `samples` is None, and `pickled` is the object.

    It is pickled here, since multiprocessing's pickler passes torch tensors in shared memory, which workers that are
    not its children cannot open; and so that the fragment reports an object that cannot be loaded.
    """

    samples: Any
    name: str
    pickled: bytes = b""

    def get(self) -> Any:
        """Return the object. Raises `UsageError` if this process cannot load it."""
        if self.samples is not None:
            return self.samples
        try:
            return pickle.loads(self.pickled)
        except Exception as error:  # raised by the object's code, or by imports
            problem = f"the {self.name} cannot be loaded in another process: {type(error).__name__}: {error}"
            raise UsageError(problem, "make its module importable there, or use workers=0") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedObject, (None, self.name, self.pickled or pack(self.samples, self.name))


class _Pickler(pickle.Pickler):
    """A pickler that rejects objects of `__main__`, which is another module in a worker."""

    def reducer_override(self, value: Any) -> Any:
        """Raise for a class or function of `__main__`; leave all other values to pickle."""
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            where = "a notebook or an interactive session" if is_interactive() else "the program that runs, __main__"
            raise pickle.PicklingError(f"{value.__qualname__} is defined in {where}")
        return NotImplemented


def pack(samples: Any, name: str) -> bytes:
    """Return the pickle of an object of the class `name`. Raises `UsageError` if other processes cannot load it."""
    out = BytesIO()
    try:
        _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(samples)
    except Exception as error:  # raised by the object's code
        problem = f"the {name} cannot be given to other processes: {type(error).__name__}: {error}"
        remedy = "define its classes and functions in a module, a .py file, that you import here, or use workers=0"
        raise UsageError(problem, remedy) from error
    return out.getvalue()


def _read_samples(shared: SharedObject, rows: Sequence[int], on_bad: OnBad) -> Iterator[Sample]:
    """Yield each sample of the rows as a mapping; a sample for which the object raises is bad.

    Raises `UsageError` if this process cannot load the object.
    """
    samples = shared.get()
    get_batch = getattr(samples, "__getitems__", None)
    size = _BATCH if callable(get_batch) else 1
    for first in range(0, len(rows), size):
        numbers, batch = rows[first : first + size], list[Any]()
        if callable(get_batch):
            with suppress(Exception):  # raised by the object's code: indexing below finds the bad sample
                batch = list(get_batch(numbers))
        for position, row in enumerate(numbers, first):
            name = f"{shared.name}[{row}]"
            try:
                sample = batch[position - first] if len(batch) == len(numbers) else samples[row]
            except Exception as error:  # noqa: BLE001 - raised by the object's code
                problem = f"it cannot be read: {type(error).__name__}: {error}"
                on_bad(BadSample(position, name, problem, "fix the object's __getitem__"))
            else:
                yield position, name, flatten(sample)


_SUBSET = "torch.utils.data.dataset.Subset"
_FOLDER = "torchvision.datasets.folder"
_HUGGING_FACE = frozenset(["datasets.arrow_dataset.Dataset", "datasets.iterable_dataset.IterableDataset"])


def class_path(samples: Any) -> list[str]:
    """Return the names of an object's class and its bases, each with its module."""
    return [f"{cls.__module__}.{cls.__qualname__}" for cls in type(samples).__mro__]


@dataclass(frozen=True, eq=False)
class Encoded:
    """A dataset of the class `name`. `media` has the feature of each column of encoded media, None for local files."""

    name: str
    rows: Any
    media: Mapping[str, Any]
    classes: Mapping[str, Sequence[str]]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._sample, self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._sample(self.rows[number])

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        get_rows = getattr(self.rows, "__getitems__", None)
        return list(map(self._sample, get_rows(numbers) if get_rows else [self.rows[number] for number in numbers]))

    def _sample(self, row: Any) -> dict[str, Any]:
        if isinstance(row, tuple):  # of a folder
            row = {"image": {"bytes": None, "path": row[0]}, "label": row[1]}
        return {**row, **{name: _read(row[name], self.media[name]) for name in self.media.keys() & row.keys()}}


def _read(value: Mapping[str, Any] | None, feature: Any) -> Any:
    if value is None or value["bytes"] is not None:
        return value and value["bytes"]
    if feature is None:
        return Path(value["path"]).read_bytes()
    import pyarrow as pa

    return feature.embed_storage(pa.array([value], feature.pa_type))[0]["bytes"].as_py()  # also of a URL


def keep_encoded(samples: Any) -> Any:
    """Return the samples of a dataset with encoded media; the object itself if it has another class, or a transform.

    A subclass that may return other samples than its base class has another class.
    """
    classes = class_path(samples)
    if classes[0] == _SUBSET:
        subset = copy(samples)
        subset.dataset = keep_encoded(samples.dataset)
        return subset
    if f"{_FOLDER}.DatasetFolder" in classes:
        kind: Any = type(samples)
        folder = kind.__mro__[classes.index(f"{_FOLDER}.DatasetFolder")]
        own = (kind.__getitem__, kind.__len__) != (folder.__getitem__, folder.__len__)
        if own or not samples.transform is samples.target_transform is None:
            return samples
        loader = samples.loader
        if f"{loader.__module__}.{getattr(loader, '__name__', '')}" != f"{_FOLDER}.default_loader":
            return samples
        return Encoded(classes[0], samples.samples, {"image": None}, {"label": _names(samples)})
    if classes[0] not in _HUGGING_FACE or getattr(samples, "format", {}).get("type") == "custom":
        return samples
    features: Any = samples.features or {}
    media = {column: feature for column, feature in features.items() if getattr(feature, "decode", False)}
    for column, feature in media.items():
        samples = samples.cast_column(column, replace(feature, decode=False))
    names = {column: class_names(features.to_dict(), [column]) for column in features}
    return Encoded(classes[0], samples, media, names)


def class_notes(samples: Any, fields: Mapping[str, Any], notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class names of the `fields`, which have their keys in `notes`, as notes.

    Those of torchvision's datasets are the classes of the second item of a sample.
    """
    while _SUBSET in class_path(samples):
        samples = samples.dataset
    plain = getattr(samples, "target_transform", samples) is None
    classes = samples.classes if isinstance(samples, Encoded) else {"1": _names(samples)} if plain else {}
    keys = notes.get("keys", {})
    named = {name: names for name in fields if (names := classes.get(keys.get(name, name)))}
    return {"classes": named} if named else {}


def _names(samples: Any) -> list[str]:
    """Return the class names of a dataset of torchvision; ImageNet has several for a class."""
    return [name if isinstance(name, str) else ", ".join(name) for name in getattr(samples, "classes", [])]
