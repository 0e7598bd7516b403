"""What is being verified, as values: a dataset with its objects, and one field of it with its cuts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from streamloader.conversion.after.problems import Problem, Problems
from streamloader.format.destination import OURS
from streamloader.format.manifest import FieldLayout, Manifest
from streamloader.format.opening import ROOT, Opened
from streamloader.format.publish import CLAIM
from streamloader.format.table import TABLES, page_path, rows_per_page, tables_path
from streamloader.storage.protocol import Store

_TABLES = re.compile(rf"{re.escape(TABLES)}(\.(?P<generation>[1-9][0-9]{{0,18}}))?/")
_NUMBERED = re.compile(r"(?P<name>[a-z][a-z0-9_]*)/c/(?P<number>0|[1-9][0-9]{0,18})(/0)*")


@dataclass(frozen=True, eq=False)
class Subject:
    """A dataset, or the split `split` of a root. `sizes` has the bytes of every object below the root, by path; None
    where the store does not list what it holds.
    """

    split: str
    opened: Opened
    sizes: Mapping[str, int] | None
    problems: Problems

    @property
    def manifest(self) -> Manifest:
        """What the dataset says of itself."""
        return self.opened.manifest

    @property
    def store(self) -> Store:
        """Where its objects lie."""
        return self.opened.store

    @property
    def appending(self) -> bool:
        """Whether an append is under way or was broken off: then shards and documents may be ahead of the manifest."""
        return self.size(CLAIM) is not None

    def below_root(self, path: str) -> str:
        """Return a path of the dataset as one below the root."""
        return f"{self.split}/{path}" if self.split else path

    def size(self, path: str) -> int | None:
        """Return the bytes of an object, None where it is missing."""
        if self.sizes is not None:
            return self.sizes.get(self.below_root(path))
        info = self.store.head(path)
        return None if info is None else info.size

    def add(
        self,
        problem: str,
        path: str,
        field: str = "",
        *,
        chunk: int | None = None,
        samples: tuple[int, int] | None = None,
    ) -> None:
        """Note a problem with one of the dataset's objects."""
        self.problems.add(Problem(problem, self.below_root(path), self.split, field, chunk, samples))

    def promises(self, path: str) -> bool:
        """Return whether the manifest promises an object at this path. A hostile one may promise more than can be."""
        tables = tables_path(self.manifest.generation)
        inner = path.removeprefix(f"{tables}/")
        if path.endswith(f"/{ROOT}"):
            folder = path.removesuffix(f"/{ROOT}")
            return folder in (OURS, tables) or folder.removeprefix(f"{tables}/") in self.manifest.fields
        found = _NUMBERED.fullmatch(inner)
        if found is None or found["name"] not in self.manifest.fields:
            return path == ROOT
        field, number = StoredField(self, found["name"]), int(found["number"])
        if inner != path:
            return number < field.num_pages and path == field.page_path(number)
        return number < field.num_shards and path == field.layout.shard_key(field.name, number)

    def keeps(self, path: str) -> bool:
        """Return whether it belongs to the tables of an earlier version, which stay for those who have that open."""
        found = _TABLES.match(path)
        return found is not None and int(found["generation"] or 1) < self.manifest.generation


@dataclass(frozen=True, eq=False)
class StoredField:
    """One field of a dataset: how it is cut, in samples, chunks, shards and pages of its chunk table."""

    subject: Subject
    name: str

    @property
    def layout(self) -> FieldLayout:
        """Its layout."""
        return self.subject.manifest.fields[self.name]

    @property
    def num_shards(self) -> int:
        """The number of its shard objects."""
        return self.layout.num_shards(self.subject.manifest.num_samples)

    @property
    def page_shards(self) -> int:
        """The shards that a page of its table tells of."""
        return rows_per_page(self.layout, self.subject.manifest.num_samples)

    @property
    def num_pages(self) -> int:
        """The pages of its table."""
        return -(-self.num_shards // self.page_shards)

    def samples(self, first: int, stop: int) -> tuple[int, int]:
        """Return the samples of the shards [first, stop), as [first, stop) too."""
        return first * self.layout.shard, min(stop * self.layout.shard, self.subject.manifest.num_samples)

    def chunks(self, shard: int) -> int:
        """Return how many inner chunks of a shard hold a sample."""
        first, stop = self.samples(shard, shard + 1)
        return -(-(stop - first) // self.layout.chunk)

    def page_path(self, page: int) -> str:
        """Return the path of a page of its table."""
        return page_path(self.name, page, self.subject.manifest.generation)

    def url(self, path: str) -> str:
        """Return the URL of an object of the dataset."""
        return f"{self.subject.store.url}/{path}"

    def add(self, problem: str, path: str, *, chunk: int | None = None, samples: tuple[int, int] | None = None) -> None:
        """Note a problem with an object of the field."""
        self.subject.add(problem, path, self.name, chunk=chunk, samples=samples)
