"""The versions of a dataset: `sl.log` lists them, `sl.diff` compares two. Reads manifests only."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from streamloader.errors import UsageError
from streamloader.format.manifest import Field, Manifest, tables_path
from streamloader.format.opening import ROOT, Opened, open_root, read_version
from streamloader.maintenance.delete import erased_by
from streamloader.storage import open_store
from streamloader.storage.process import run_all

THREADS = 16  # for manifests: they are small, so reading one takes a round trip
CREATED = "created"
NOT_KEPT = "its manifest was not kept, so it cannot be opened"


@dataclass(frozen=True)
class VersionDiff:
    """The difference of two versions of a dataset, which have the numbers `before` and `after`.

    `fields_changed` has the earlier and the later type of fields with the same name. `classes_added` are the new class
    names by field, and `lengths_added` the earlier fields that got a table of lengths. `bytes` is the difference of the
    stored sizes of all fields.
    """

    before: int
    after: int
    samples_added: int
    samples_deleted: int
    fields_added: Mapping[str, Field]
    fields_removed: Mapping[str, Field]
    fields_changed: Mapping[str, tuple[Field, Field]]
    classes_added: Mapping[str, tuple[str, ...]]
    bytes: int
    lengths_added: tuple[str, ...] = ()

    def __str__(self) -> str:
        samples = {"appended": self.samples_added, "deleted": self.samples_deleted}
        texts = [f"{verb} {count:,} sample{'' if count == 1 else 's'}" for verb, count in samples.items() if count]
        for verb, names in (("added", self.fields_added), ("removed", self.fields_removed)):
            texts += [f"columns {verb}: {', '.join(names)}"] if names else []
        texts += [f"{name} changed from {old} to {new}" for name, (old, new) in self.fields_changed.items()]
        texts += [f"classes added to {name}: {', '.join(names)}" for name, names in self.classes_added.items()]
        texts += [f"tables of lengths added: {', '.join(self.lengths_added)}"] if self.lengths_added else []
        return "; ".join(texts) or "no change"

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        changed = {name: [str(old), str(new)] for name, (old, new) in self.fields_changed.items()}
        classes = {name: list(names) for name, names in self.classes_added.items()}
        fields = {key: _texts(getattr(self, key)) for key in ("fields_added", "fields_removed")}
        lengths = list(self.lengths_added)
        return {**vars(self), **fields, "fields_changed": changed, "classes_added": classes, "lengths_added": lengths}


@dataclass(frozen=True)
class Version:
    """One version of a dataset; `manifest` is None if an earlier release of streamloader did not keep it.

    `published` is when the store wrote its documents, or None if the store does not tell; a copy of the dataset has the
    times of the copy. `diff` is the difference from the version before, or None if that is unknown or there is none.
    """

    number: int
    manifest: Manifest | None
    published: datetime | None = None
    diff: VersionDiff | None = None

    @property
    def change(self) -> str:
        """What the version changed, as text."""
        if self.manifest is None:
            return NOT_KEPT
        deleted, erased = erased_by(self.manifest)
        if self.diff is None and erased:
            text = f"deleted {deleted:,} sample{'' if deleted == 1 else 's'}; " if deleted else ""
            return f"{text}erased {erased:,} deleted sample{'' if erased == 1 else 's'}, and all earlier versions"
        if self.diff is None:
            return CREATED if self.number == 1 else f"unknown: the manifest of version {self.number - 1} was not kept"
        return str(self.diff)

    @property
    def fields(self) -> dict[str, Field]:
        """The fields by name; empty if the manifest was not kept."""
        return _fields(self.manifest) if self.manifest else {}

    @property
    def num_samples(self) -> int | None:
        """The number of samples, or None if the manifest was not kept."""
        return self.manifest.num_remaining if self.manifest else None

    @property
    def stored(self) -> int | None:
        """The stored bytes of all fields, or None if the manifest was not kept. Versions share most of them."""
        return _stored(self.manifest) if self.manifest else None

    def to_dict(self) -> dict[str, Any]:
        """Return the version as JSON values."""
        return {
            "version": self.number,
            "num_samples": self.num_samples,
            "fields": _texts(self.fields),
            "stored": self.stored,
            "digest": self.manifest.digest if self.manifest else None,
            "published": self.published.isoformat() if self.published else None,
            "change": self.change,
            "diff": self.diff.to_dict() if self.diff else None,
        }


def compare(before: Manifest, after: Manifest) -> VersionDiff:
    """Return the difference of two manifests."""
    old, new = _fields(before), _fields(after)
    classes = {
        name: [n for n in names if n not in before.classes.get(name, ())] for name, names in after.classes.items()
    }
    stored = after.num_samples - before.num_samples
    deleted = stored - (after.num_remaining - before.num_remaining)
    return VersionDiff(
        before.generation,
        after.generation,
        samples_added=max(0, stored) + max(0, -deleted),
        samples_deleted=max(0, deleted) + max(0, -stored),
        fields_added={name: field for name, field in new.items() if name not in old},
        fields_removed={name: field for name, field in old.items() if name not in new},
        fields_changed={name: (old[name], new[name]) for name in old if new.get(name, old[name]) != old[name]},
        classes_added={name: tuple(names) for name, names in classes.items() if names and name in old},
        bytes=_stored(after) - _stored(before),
        lengths_added=tuple(name for name in after.lengths if name in old.keys() - before.lengths.keys()),
    )


def log(
    url: str | os.PathLike[str], *, split: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> list[Version]:
    """Return the versions of the dataset at `url`, or of one `split` of it, the newest first.

    Each has its `number`, `num_samples`, `fields`, `stored` bytes, what it `change`d, and when it was `published` if
    the store tells. Of a version whose manifest was not kept, only the number and the time are known.

    Raises the errors of `open`.
    """
    opened = open_root(open_store(url, storage_options), split)
    numbers = range(1, opened.manifest.generation + 1)
    manifests = dict(zip(numbers, run_all(lambda number: _manifest(opened, number), numbers, THREADS), strict=True))
    documents = [f"{tables_path(number)}/{ROOT}" for number in numbers]  # each written right before its version
    times = run_all(opened.store.modified, documents, THREADS)
    versions: list[Version] = []
    for number, time in zip(numbers, times, strict=True):
        before, manifest = manifests.get(number - 1), manifests[number]
        difference = compare(before, manifest) if before and manifest else None
        versions.append(Version(number, manifest, time, difference))
    return versions[::-1]


def diff(
    url: str | os.PathLike[str],
    a: int,
    b: int,
    *,
    split: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> VersionDiff:
    """Return what changed from version `a` to version `b` of the dataset at `url`, or of one `split` of it.

    It has the samples added and deleted, the fields added, removed and changed, the classes added, and the difference
    of the stored bytes.

    Raises `UsageError` for a version that does not exist or whose manifest was not kept, and the errors of `open`.
    """
    opened = open_root(open_store(url, storage_options), split)
    return compare(*(_read(opened, number) for number in (a, b)))


def _read(opened: Opened, number: int) -> Manifest:
    return opened.manifest if number == opened.manifest.generation else read_version(opened, number)


def _manifest(opened: Opened, number: int) -> Manifest | None:
    """Return the manifest of an existing version, or None if it was not kept."""
    try:
        return _read(opened, number)
    except UsageError:
        return None


def _fields(manifest: Manifest) -> dict[str, Field]:
    return {name: layout.field for name, layout in manifest.fields.items()}


def _texts(fields: Mapping[str, Field]) -> dict[str, str]:
    return {name: str(field) for name, field in fields.items()}


def _stored(manifest: Manifest) -> int:
    return sum(layout.stored for layout in manifest.fields.values())
