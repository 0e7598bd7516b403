"""Datasets of Hugging Face and torchvision, whose images and other media stay encoded, with their class names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamloader.conversion.sources.arrow_types import class_names

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
