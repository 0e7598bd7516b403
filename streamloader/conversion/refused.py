"""Bad samples: what a shard that holds some leaves behind instead of its objects, and the quarantine."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from streamloader.format.destination import BAD
from streamloader.format.threads import run_all
from streamloader.storage.protocol import Store

QUARANTINE = "_streamloader/quarantine.jsonl"
MAX_DATA = 16 << 20  # bytes kept of one bad sample
_THREADS = 16


@dataclass(frozen=True)
class RefusedSample:
    """One sample that was left out: its row in the source, which it is, and why.

    `data` is what was stored, in base64, where it was at hand and is not over 16 MiB.
    """

    row: int
    name: str
    problem: str
    data: str = ""

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
        """Keep it at the destination for a later run, and return it; the same samples give the same bytes."""
        document = {"shard": self.shard, "job": self.job, "samples": [one.to_json() for one in self.samples]}
        store.put(f"{BAD}/{self.shard}.json", json.dumps(document, sort_keys=True).encode())
        return self


def packed(data: bytes) -> str:
    """Return the data as `RefusedSample` keeps them."""
    return base64.b64encode(data).decode() if len(data) <= MAX_DATA else ""


def read_refusals(store: Store, job: str) -> dict[int, RefusedSample]:
    """Return the bad samples that earlier runs of the job found, by row; what does not parse is found again."""
    paths = [info.path for info in store.list(BAD)]
    found = run_all(lambda path: _parse(store.get(path), job), paths, _THREADS)
    return {one.row: one for samples in found for one in samples}


def _parse(data: bytes, job: str) -> list[RefusedSample]:
    try:
        found = json.loads(data)
        return [RefusedSample(**one) for one in found["samples"]] if found["job"] == job else []
    except (KeyError, TypeError, ValueError):
        return []


def write_quarantine(store: Store, refused: Mapping[str, Iterable[RefusedSample]]) -> None:
    """Write one line of JSON for each sample that was left out, by split ("" where there is none)."""
    lines = [
        json.dumps({"split": split, **one.to_json()}, sort_keys=True) for split, some in refused.items() for one in some
    ]
    store.put(QUARANTINE, "".join(f"{line}\n" for line in lines).encode())
