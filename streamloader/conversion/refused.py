"""Bad samples: what a shard that holds some leaves behind instead of its objects, and the quarantine."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from streamloader.format.destination import BAD
from streamloader.format.opening import read_lines, read_pieces
from streamloader.format.threads import run_all
from streamloader.storage.protocol import Store

QUARANTINE = "_streamloader/quarantine.jsonl"  # further files are quarantine-1.jsonl, quarantine-2.jsonl, ...
QUARANTINE_BYTES = 32 << 20  # of one file, unless one sample is larger
MAX_DATA = 16 << 20  # bytes kept of one bad sample
MAX_LINE = 2 * MAX_DATA  # in base64 a third more, beside its name and problem
_THREADS = 16


@dataclass(frozen=True, slots=True)
class RefusedSample:
    """One sample that was left out: its row in the source, which it is, and why.

    `data` is what was stored, in base64, where it was at hand and is not over 16 MiB.
    """

    row: int
    name: str
    problem: str
    data: str = ""

    def without_data(self) -> RefusedSample:
        """Return what is kept in memory of a sample: of those of one problem the text of it once."""
        return RefusedSample(self.row, self.name, sys.intern(self.problem))

    def to_json(self) -> dict[str, Any]:
        """Return the sample as JSON values."""
        return {"row": self.row, "name": self.name, "problem": self.problem, "data": self.data}


@dataclass(frozen=True)
class Refusal:
    """A shard that was read but not written, since samples of it are bad."""

    shard: int
    samples: tuple[RefusedSample, ...]
    job: str = ""

    def write(self, store: Store) -> Refusal:
        """Keep it at the destination for a later run, and return it without data; the same samples, the same bytes."""
        documents = ({"shard": self.shard, "job": self.job}, *(one.to_json() for one in self.samples))
        lines = [json.dumps(one, sort_keys=True).encode() + b"\n" for one in documents]
        store.put(f"{BAD}/{self.shard}.json", lines)
        return replace(self, samples=tuple(one.without_data() for one in self.samples))


def packed(data: bytes) -> str:
    """Return the data as `RefusedSample` keeps them."""
    return base64.b64encode(data).decode() if len(data) <= MAX_DATA else ""


def read_refusals(store: Store, job: str, most: int) -> dict[int, RefusedSample]:
    """Return the bad samples that earlier runs of the job found, by row, without data; of each shard `most` at most.

    What does not parse is found again. Raises `FormatError` for a longer line than those of a sample.
    """

    def read(path: str) -> list[RefusedSample]:
        return [one.without_data() for one in islice(_samples(store, path, job), most)]

    return {one.row: one for samples in run_all(read, _paths(store), _THREADS) for one in samples}


def _paths(store: Store) -> list[str]:
    paths = [info.path for info in store.list(BAD) if info.path.endswith(".json")]
    return sorted(paths, key=lambda path: (len(path), path))  # shards ascending


def _samples(store: Store, path: str, job: str) -> Iterator[RefusedSample]:
    """Yield what a shard of the job left, of which there may be gigabytes: a piece at a time, until it does not parse.

    Raises `FormatError` for a line that is too long.
    """
    try:
        lines = read_lines(read_pieces(store, path), MAX_LINE, f"{store.url}/{path}")
        if json.loads(next(lines))["job"] == job:
            yield from (RefusedSample(**json.loads(line)) for line in lines)
    except (KeyError, TypeError, ValueError, RecursionError, StopIteration):
        return


class Quarantine:
    """Writes a line of JSON for each sample that `job` left out, to files of about 32 MiB, one in memory at a time."""

    def __init__(self, store: Store, job: str = "") -> None:
        self._store, self._job = store, job
        self._lines: list[bytes] = []
        self._bytes = self._files = 0

    def add(self, sample: RefusedSample, split: str = "") -> None:
        """Add a sample of a split ("" where there is none)."""
        line = json.dumps({"split": split, **sample.to_json()}, sort_keys=True).encode() + b"\n"
        if self._lines and self._bytes + len(line) > QUARANTINE_BYTES:
            self.flush()
        self._lines.append(line)
        self._bytes += len(line)

    def add_all(self, split: str, store: Store, refused: Mapping[int, RefusedSample]) -> None:
        """Add the samples of a split: with data where its `store` has what their shards left there."""
        left = dict(refused)
        for path in _paths(store):
            for sample in _samples(store, path, self._job):
                if left.pop(sample.row, None) is not None:
                    self.add(sample, split)
        for _, sample in sorted(left.items()):
            self.add(sample, split)

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._lines:
            name = QUARANTINE if not self._files else QUARANTINE.replace(".", f"-{self._files}.")
            self._store.put(name, self._lines)
            self._lines, self._bytes, self._files = [], 0, self._files + 1
