"""What the lines of a run say, as numbers with their spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.contestants import BLOCK_READERS

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """The median of some measurements, the least and the greatest."""

    median: float
    least: float
    greatest: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value."""
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1], len(found))


@dataclass(frozen=True)
class Row:
    """One contestant of one cell, at its best worker count; rates in units (samples, or tokens) for each second.

    `workers` and `rates` are of the first epoch, and of all later ones together; `cpu_per_gigabyte` and
    `faults_per_gigabyte` (page faults) too. `design_effect`: how well its batches mix, 1 at best, if it was seen.
    `part`: of how many parts of the data it got one.
    """

    cell: str
    unit: str
    contestant: str
    kind: str
    workers: tuple[int, int]
    rates: tuple[Spread, Spread]
    unit_bytes: float
    cpu_per_gigabyte: tuple[Spread, Spread]
    faults_per_gigabyte: Spread
    peak: Spread
    first_batch: Spread
    design_effect: float | None
    part: int


def rate(epoch: Mapping[str, Any]) -> float:
    """Return what an epoch delivered for each second, from `iter()` to its last sample."""
    return float(epoch["samples"] / max(1e-9, epoch["seconds"]))


def first_rate(line: Line) -> float:
    """Return the rate of a line's first epoch."""
    return rate(line["epochs"][0])


def later_rate(line: Line) -> float:
    """Return the rate of all epochs after the first together; of a single one, its own."""
    later = line["epochs"][1:] or line["epochs"]
    return float(sum(epoch["samples"] for epoch in later) / max(1e-9, sum(epoch["seconds"] for epoch in later)))


def rates_in_words(line: Line, unit: str) -> str:
    """Return the rates of all epochs."""
    return ", ".join(f"{rate(epoch):,.0f}" for epoch in line["epochs"]) + f" {unit}/s"


def cell_of(line: Line) -> str:
    """Return the cell of a line, like "tokens packed"."""
    return f"{line['workload']} {line['variant']}".strip()


def reads(lines: Iterable[Line], front: str = "") -> list[Line]:
    """Return the lines that measured reading through this front."""
    return [line for line in lines if line["kind"] == "read" and line.get("front") == front and line.get("epochs")]


def rows(lines: Iterable[Line], front: str = "") -> list[Row]:
    """Return a row for each contestant of each cell, in the order of their first lines."""
    groups: dict[tuple[str, str], dict[int, list[Line]]] = {}
    for line in reads(lines, front):
        key = (cell_of(line), line["contestant"])
        groups.setdefault(key, {}).setdefault(line["workers"], []).append(line)
    return [_row(by_workers) for by_workers in groups.values()]


def _row(by_workers: Mapping[int, Sequence[Line]]) -> Row:
    spreads = [{n: Spread.of(map(take, found)) for n, found in by_workers.items()} for take in (first_rate, later_rate)]
    best = [max(spread, key=lambda n: spread[n].median) for spread in spreads]
    found = by_workers[best[0]]
    line = found[0]
    size = line["raw_bytes"] / line["units"]
    first = [line["epochs"][0] for line in found]
    later = [epoch for line in by_workers[best[1]] for epoch in line["epochs"][1:] or line["epochs"]]
    effects = [epoch["design_effect"] for epoch in first if "design_effect" in epoch]

    def each(name: str, epochs: Sequence[Mapping[str, Any]]) -> Spread:
        return Spread.of(e.get(name, 0) / max(1, e["samples"]) / size * 1e9 for e in epochs)

    return Row(
        cell=cell_of(line),
        unit=line["unit"],
        contestant=line["contestant"],
        kind=line["contestant_kind"],
        workers=(best[0], best[1]),
        rates=(spreads[0][best[0]], spreads[1][best[1]]),
        unit_bytes=size,
        cpu_per_gigabyte=(each("cpu_seconds", first), each("cpu_seconds", later)),
        faults_per_gigabyte=each("faults", later),
        peak=Spread.of(epoch["peak_bytes"] for line in found for epoch in line["epochs"]),
        first_batch=Spread.of(epoch["first_batch_seconds"] for epoch in first),
        design_effect=statistics.mean(effects) if effects else None,
        part=line.get("part", 1),
    )


def by_round(lines: Iterable[Line], cell: str, contestant: str, take: Callable[[Line], float]) -> dict[int, float]:
    """Return the rate of each round."""
    found = [line for line in reads(lines) if cell_of(line) == cell and line["contestant"] == contestant]
    return {line["repeat"]: take(line) for line in found}


def ratio(
    lines: Sequence[Line], cell: str, over: str, under: str, take: Callable[[Line], float] = first_rate
) -> Spread | None:
    """Return the ratio of two contestants round by round; nothing where they never met."""
    above, below = (by_round(lines, cell, name, take) for name in (over, under))
    both = [above[turn] / below[turn] for turn in above if below.get(turn)]
    return Spread.of(both) if both else None


def best_peer(lines: Iterable[Line], cell: str, epoch: int = 0, effect: float = math.inf) -> Row | None:
    """Return the fastest loader of others in the cell whose design effect is at most `effect`, or was not seen."""
    found = [row for row in rows(lines) if row.cell == cell and is_loader(row)]
    mixing = [row for row in found if row.design_effect is None or row.design_effect <= effect]
    return max(mixing, key=lambda row: row.rates[epoch].median, default=None)


def is_loader(row: Row) -> bool:
    """Whether a row is of another loader, not of blocks that are read by hand."""
    return row.kind == "peer" and row.contestant not in BLOCK_READERS


@dataclass(frozen=True)
class Traffic:
    """Requests for each GB delivered, and bytes fetched over the stored bytes of what was delivered."""

    requests_per_gigabyte: float
    fetched_over_needed: float


def traffic(lines: Iterable[Line]) -> dict[tuple[str, str], Traffic]:
    """Return what was asked of the server, by cell and contestant; one epoch of each."""
    found = {}
    for line in reads(lines, "count"):
        part = line["epochs"][0]["samples"] / line["units"]
        requests = line["requests"]
        if part and line["stored_bytes"]:
            found[cell_of(line), line["contestant"]] = Traffic(
                (requests["gets"] + requests["others"]) / (part * line["raw_bytes"] / 1e9),
                requests["bytes"] / (part * line["stored_bytes"]),
            )
    return found
