"""The targets, and what a run reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.contestants import CEILINGS, OURS
from bench.figures import Line, Spread, best_peer, first_rate, later_rate, ratio, rows, traffic

OURSELVES = OURS.name
FETCH_DECODE, IMAGE_DECODE = CEILINGS[1].name, CEILINGS[2].name
# (first epoch, later ones) over a ceiling
OVER_CEILINGS = {
    ("images", FETCH_DECODE): (0.85, 0.95),
    ("vectors", FETCH_DECODE): (None, 0.75),
    ("jpeg", IMAGE_DECODE): (None, 0.95),
    ("tokens", FETCH_DECODE): (None, 0.8),
    ("tokens packed", FETCH_DECODE): (None, 0.8),
    ("mixed", FETCH_DECODE): (None, 0.95),
}
# how much faster than the fastest loader that mixes as well, first epoch
OVER_PEERS = {"images": 3.0, "vectors": 5.0, "jpeg": 1.3, "tokens": 3.0, "mixed": 2.0}
EQUAL_MIXING = 1.1  # design effects up to so much larger count as equal: they are measured on some batches
CPU = {"images": 1.15, "vectors": 1.5}  # seconds for each GB over fetch+decode


@dataclass(frozen=True)
class Reached:
    """One target. `bound` is a least value, or a greatest where `most`; `note` says what else belongs to it."""

    figure: str
    bound: float
    most: bool
    value: float
    spread: str = ""
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the value keeps the bound."""
        return self.value <= self.bound if self.most else self.value >= self.bound


def reached(lines: Sequence[Line]) -> list[Reached]:
    """Return what the lines say of each target; those that were not measured are left out."""
    parts = (_ceilings, _cpu, _peers, _first_batch, _delay, _laws, _traffic)
    return [target for part in parts for target in part(lines)]


def _ceilings(lines: Sequence[Line]) -> list[Reached]:
    found = []
    for (cell, under), bounds in OVER_CEILINGS.items():
        for bound, take, name in zip(bounds, (first_rate, later_rate), ("first epoch", "later epochs"), strict=True):
            value = ratio(lines, cell, OURSELVES, under, take)
            if value and bound:
                found.append(Reached(f"{cell} over {under}, {name}", bound, False, value.median, _range(value)))
    return found


def _peers(lines: Sequence[Line]) -> list[Reached]:
    ours = {row.cell: row for row in rows(lines) if row.contestant == OURSELVES}
    found = []
    if "vectors" in ours:
        rates = ours["vectors"].rates[1]
        found.append(Reached("vectors, samples/s, later epochs", 3e6, False, rates.median, _range(rates)))
    for cell, bound in OVER_PEERS.items():
        mine = ours.get(cell)
        any_mixing = best_peer(lines, cell)
        equal = best_peer(lines, cell, 0, EQUAL_MIXING * ((mine and mine.design_effect) or math.inf))
        if mine is None or any_mixing is None:
            continue
        rival = equal or any_mixing
        value, whatever = (mine.rates[0].median / row.rates[0].median for row in (rival, any_mixing))
        figure, note = f"{cell} over {rival.contestant}, the best", "no other loader mixes as well"
        if equal:
            figure, note = f"{figure} at equal mixing", f"at any mixing {whatever:.1f} over {any_mixing.contestant}"
        found.append(Reached(figure, bound, False, value, "", note))
    return found


def _laws(lines: Sequence[Line]) -> list[Reached]:
    laws = {line["name"]: line for line in lines if line["kind"] == "law" and "value" in line}
    found = []
    if "plan" in laws:
        found.append(Reached("start of a plan over 10^10 samples, s", 0.05, True, laws["plan"]["value"]))
    if "memory" in laws:
        law = laws["memory"]
        found.append(Reached("peak memory above memory=, MB", 300, True, law["value"] / 1e6))
        found.append(Reached("growth of the peak in 20 epochs", 0.02, True, law["growth"]))
    if "sizes" in laws:
        rates = ", ".join(f"{int(count):,}: {value:,.0f}/s" for count, value in laws["sizes"]["rates"].items())
        found.append(
            Reached("rows of 1 KB, all sizes, slowest below fastest", 0.10, True, laws["sizes"]["value"], "", rates)
        )
    if "ranks" in laws:
        each = ", ".join(f"{count} ranks {value:.3f}" for count, value in laws["ranks"]["ranks"].items())
        found.append(Reached("2 and 4 ranks, bytes fetched over stored", 1.02, True, laws["ranks"]["value"], "", each))
    return found


def _traffic(lines: Sequence[Line]) -> list[Reached]:
    found = []
    for (cell, contestant), seen in traffic(lines).items():
        if contestant == OURSELVES and cell == "images":
            found.append(Reached("images, requests for each GB", 280, True, seen.requests_per_gigabyte))
        if contestant == OURSELVES:
            found.append(Reached(f"{cell}, bytes fetched over needed", 1.02, True, seen.fetched_over_needed))
    return found


def _first_batch(lines: Sequence[Line]) -> list[Reached]:
    found = [row for row in rows(lines) if row.contestant == OURSELVES and row.cell == "images"]
    return [
        Reached("images, time to the first batch, s", 0.15, True, row.first_batch.median, _range(row.first_batch))
        for row in found
    ]


def _cpu(lines: Sequence[Line]) -> list[Reached]:
    found = []
    for cell, bound in CPU.items():
        costs = {row.contestant: row.cpu_per_gigabyte[1].median for row in rows(lines) if row.cell == cell}
        if costs.get(FETCH_DECODE) and OURSELVES in costs:
            value = costs[OURSELVES] / costs[FETCH_DECODE]
            found.append(Reached(f"{cell}, CPU for each GB over fetch+decode, later epochs", bound, True, value))
    return found


def _delay(lines: Sequence[Line]) -> list[Reached]:
    found = []
    for cell in ("images", "vectors"):
        rates = [
            next((row.rates for row in rows(lines, front) if (row.cell, row.contestant) == (cell, OURSELVES)), None)
            for front in ("delay", "")
        ]
        if rates[0] and rates[1]:
            first, later = (slow.median / plain.median for slow, plain in zip(*rates, strict=True))
            found.append(Reached(f"{cell} with cloud latency over without, first epoch", 0.8, False, first))
            found.append(Reached(f"{cell} with cloud latency over without, later epochs", 0.95, False, later))
    return found


def _range(spread: Spread) -> str:
    digits = 2 if spread.greatest < 100 else 0
    return f"{spread.least:,.{digits}f} - {spread.greatest:,.{digits}f}"
