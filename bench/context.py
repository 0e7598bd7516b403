"""A run under way, and what every line and process of it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import venvs
from bench.contestants import OURS, Contestant
from bench.machine import describe, load
from bench.objects import BUCKET
from bench.plan import Cell, Settings, part_of
from bench.progress import Show
from bench.servers import Endpoint
from bench.workloads import DATA, ROOT

RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Place:
    """Where data is read, and where it is written. `folder`: what nginx serves; written objects are copied there."""

    endpoint: Endpoint
    writable: Endpoint
    folder: Path | None = None


@dataclass
class Bench:
    """A run under way.

    `best`: workers -> samples/s of each (cell,
    contestant); `sizes`: bytes stored for each; `out`: those that cannot go on; `lock`: held while a file is written.
    """

    settings: Settings
    place: Place
    show: Show
    data: Path = DATA
    results: Path = RESULTS
    best: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    sizes: dict[tuple[str, str], int] = field(default_factory=dict)
    out: set[tuple[str, str]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    about: dict[str, Any] = field(default_factory=describe)
    number: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y%m%d-%H%M%S"))

    def record(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line that can be understood by itself, and return it."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        full = {
            "run": self.number,
            "time": now,
            "server": self.place.endpoint.name,
            "load": load(),
            **line,
            **self.about,
        }
        self.results.mkdir(parents=True, exist_ok=True)
        with self.lock, (self.results / f"{self.settings.name}.jsonl").open("a") as file:
            file.write(json.dumps(full) + "\n")
        return full


def specification(bench: Bench, cell: Cell, contestant: Contestant, endpoint: Endpoint) -> dict[str, Any]:
    """Return what every process of the cell is told."""
    count = bench.settings.count(cell.workload) // part_of(bench.settings, cell, contestant)
    # a ceiling reads what the project wrote, and the project packs when it reads
    owner = OURS.name if contestant.kind == "ceiling" else contestant.name
    written = f"-{cell.variant}" if cell.variant in ("packed", "small-shards") and contestant.kind == "peer" else ""
    return {
        "workload": cell.workload.name,
        "source": str(bench.data / f"{cell.workload.name}-{count}"),
        "url": f"s3://{BUCKET}/{owner}/{cell.workload.name}-{count}{written}",
        "endpoint": endpoint.url,
        "key": endpoint.key,
        "secret": endpoint.secret,
        "ca": endpoint.ca,
        "batch": cell.workload.batch,
        "variant": cell.variant,
    }


def counts(bench: Bench, cell: Cell, contestant: Contestant) -> dict[str, int]:
    """Return how much a whole epoch is: samples, what is counted, raw bytes; and which part of the data."""
    part = part_of(bench.settings, cell, contestant)
    count = bench.settings.count(cell.workload) // part
    meta = json.loads((bench.data / f"{cell.workload.name}-{count}" / "meta.json").read_text())
    units = meta["bytes"] // 4 if cell.workload.unit == "tokens" else count
    return {"samples": count, "units": units, "raw_bytes": meta["bytes"], "part": part}


def described(cell: Cell, contestant: Contestant) -> dict[str, Any]:
    what = {"workload": cell.workload.name, "variant": cell.variant, "unit": cell.workload.unit}
    return {**what, "contestant": contestant.name, "contestant_kind": contestant.kind, **_peer_versions(contestant)}


def _peer_versions(contestant: Contestant) -> dict[str, str]:
    return {"peer_versions": venvs.versions(contestant.name)} if contestant.kind == "peer" else {}
