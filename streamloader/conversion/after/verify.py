"""Verification of a finished dataset: every object, every chunk, every item, and nothing too much."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from streamloader.conversion.after.against import Against, compare
from streamloader.conversion.after.check_documents import check_documents, check_split_root
from streamloader.conversion.after.check_shards import ShardCheck
from streamloader.conversion.after.check_tables import TableCheck
from streamloader.conversion.after.extra import Extra
from streamloader.conversion.after.problems import Problem, Problems
from streamloader.conversion.after.stored import split_names
from streamloader.conversion.after.subject import StoredField, Subject
from streamloader.errors import (
    AccessError,
    FormatError,
    IncompleteError,
    NotADatasetError,
    NotFoundError,
    UnsupportedError,
    VersionError,
)
from streamloader.format.manifest import NAME
from streamloader.format.opening import ROOT, Opened, open_root, read_root
from streamloader.format.threads import run_all
from streamloader.storage import open_store
from streamloader.storage.location import parse_location
from streamloader.storage.protocol import Store

THREADS = 16  # each waits for the network, checks and decodes; together they hold about 300 MB
TASKS = 10_000  # shards that are planned at once
# these say that there is nothing to verify; other errors of the format say what is wrong with a dataset
_NOT_OURS = (NotADatasetError, IncompleteError, VersionError)


@dataclass(frozen=True)
class Checked:
    """Where a verification stands: `done` of `total` bytes of shards, or samples where it compares with a source."""

    phase: str
    done: int
    total: int


Listener = Callable[[Checked], None]


@dataclass(frozen=True)
class VerifyReport:
    """What was found. `samples` by split ("" where there are none); `objects` and `bytes` of shards that were read.

    `compared` samples were compared with a source. `leftovers` of killed writers and `others`, objects that are not the
    dataset's, lie below the same URL: they are no problem. `listed` is False where the store does not list, so that
    objects too many are not seen. `appending`: an append is under way or was broken off, so that documents and the ends
    of shards were not looked at. With 1000 `problems` the search ended.
    """

    url: str
    samples: Mapping[str, int]
    objects: int
    bytes: int
    compared: int
    leftovers: int
    others: int
    listed: bool
    appending: bool
    problems: tuple[Problem, ...]

    @property
    def whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**asdict(self), "whole": self.whole}


def verify(
    url: str | os.PathLike[str],
    *,
    split: str | None = None,
    against: Against | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Listener | None = None,
) -> VerifyReport:
    """Read all of the dataset at `url`, or of one split of it, and report everything that is wrong.

    `against` compares every sample with its source as well. Raises `NotADatasetError`, `IncompleteError`,
    `VersionError`, `FieldError` for a split that there is not, and what store and source raise.
    """
    store, problems = open_store(url, storage_options), Problems()
    datasets, names = _open(store, split, problems)
    sizes = _list(store)
    subjects = [Subject(name, opened, sizes, problems) for name, opened in datasets.items()]
    appending = any(subject.appending for subject in subjects)
    for subject in subjects:
        if not subject.appending:
            check_documents(subject)
    extra = Extra.of(subjects, names, sizes)
    for path in extra.objects:
        problems.add(Problem(f"{store.url}/{path} is not an object of the dataset: one too many", path))
    listener = progress or (lambda _: None)
    found_bytes, objects = _check_fields(subjects, listener)
    compared = 0
    if against is not None:
        if against.options is None and parse_location(against.src, None).protocol == parse_location(url, None).protocol:
            against = replace(against, options=storage_options)
        compared = sum(compare(subject, against, _counter("compare", subjects, listener)) for subject in subjects)
    samples = {subject.split: subject.manifest.num_samples for subject in subjects}
    others = extra.leftovers, extra.others, sizes is not None, appending
    return VerifyReport(store.url, samples, objects, found_bytes, compared, *others, problems.found())


def _open(store: Store, split: str | None, problems: Problems) -> tuple[dict[str, Opened], tuple[str, ...]]:
    """Return what can be opened, by split, and the names of all splits; what cannot be opened is a problem."""
    try:
        root = read_root(store)
        names = split_names(root)
    except _NOT_OURS:
        raise
    except FormatError as error:
        problems.add(Problem(error.problem, ROOT))
        return {}, ()
    datasets: dict[str, Opened] = {}
    unfit = VersionError if names else _NOT_OURS  # a split that is none of ours is a damaged root
    for name in names if split is None and names else (split or "",):
        try:
            datasets[name] = open_root(store, name or None)
        except unfit:
            raise
        except FormatError as error:
            problems.add(Problem(error.problem, ROOT, name))
            opened = _open_alone(store.child(name)) if NAME.match(name) else None
            if opened is not None:
                datasets[name] = opened
    wrong = check_split_root(root, {name: one.manifest for name, one in datasets.items()}, names) if names else ""
    if wrong and problems.found() == ():
        problems.add(Problem(f"{store.url}/{ROOT} is not what its splits imply: {wrong}", ROOT))
    return datasets, names


def _open_alone(store: Store) -> Opened | None:
    """Open a split by its own manifest, where the root's is damaged."""
    try:
        return open_root(store)
    except FormatError:
        return None


def _list(store: Store) -> dict[str, int] | None:
    """Return the sizes of all objects by path; None where it does not list them: many web servers, some keys."""
    try:
        found = {info.path: info.size for info in store.list()}
    except (AccessError, NotFoundError, UnsupportedError):
        return None
    return found if ROOT in found else None


def _check_fields(subjects: list[Subject], listener: Listener) -> tuple[int, int]:
    """Check tables, shards and totals of all fields; return the bytes and the number of the shards that were read."""
    fields = [StoredField(subject, name) for subject in subjects for name in subject.manifest.fields]
    tables = [TableCheck(field) for field in fields]
    run_all(lambda table: table.check(), tables, THREADS)
    checks = [ShardCheck(field, table) for field, table in zip(fields, tables, strict=True)]
    count = _Counter("verify", sum(field.layout.stored for field in fields), listener)

    def check(task: tuple[ShardCheck, int]) -> int:
        one, shard = task
        if one.field.subject.problems.full:
            return 0
        size = one.check(shard)
        count.add(size)
        return size

    read = objects = 0
    tasks = ((one, shard) for one in checks for shard in range(one.field.num_shards))
    while some := list(islice(tasks, TASKS)):  # a hostile manifest may promise more shards than memory holds
        sizes = run_all(check, some, THREADS)
        read, objects = read + sum(sizes), objects + sum(size > 0 for size in sizes)
        if subjects[0].problems.full:
            break
    found = subjects[0].problems.found() if subjects else ()
    wrong = {(problem.split, problem.field) for problem in found}
    for one in checks:
        if (one.field.subject.split, one.field.name) not in wrong:
            one.check_totals()
    return read, objects


def _counter(phase: str, subjects: list[Subject], listener: Listener) -> Callable[[int], None]:
    return _Counter(phase, sum(subject.manifest.num_samples for subject in subjects), listener).add


class _Counter:
    """Tells the listener how far it is, from any thread."""

    def __init__(self, phase: str, total: int, listener: Listener) -> None:
        self._phase, self._total, self._listener = phase, total, listener
        self._done = 0
        self._lock = threading.Lock()

    def add(self, more: int) -> None:
        """Count what was done."""
        with self._lock:
            self._done += more
            self._listener(Checked(self._phase, self._done, self._total))
