"""The targets, and what a run reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.contestants import CEILINGS, OURS
from bench.figures import Line, Spread, best_peer, cell_of, first_rate, later_rate, ratio, reads, rows, traffic

OURSELVES = OURS.name
FETCH_DECODE, IMAGE_DECODE = CEILINGS[1].name, CEILINGS[2].name
# how much faster than the fastest peer of the cell, first epoch
OVER_PEERS = {"images": 3.0, "vectors": 20.0, "jpeg": 1.3, "tokens": 5.0, "tokens packed": 5.0, "mixed": 2.0}


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
    return [*_ceilings(lines), *_peers(lines), *_laws(lines), *_traffic(lines), *_first_batch(lines), *_cpu(lines)]


def _ceilings(lines: Sequence[Line]) -> list[Reached]:
    found = []
    for cell, under, bound in (("images", FETCH_DECODE, 0.85), ("jpeg", IMAGE_DECODE, 0.90)):
        first, later = (ratio(lines, cell, OURSELVES, under, take) for take in (first_rate, later_rate))
        if first and later:
            note = f"later epochs {later.median:.2f} ({_range(later)})"
            found.append(Reached(f"{cell} over {under}", bound, False, first.median, _range(first), note))
    return found


def _peers(lines: Sequence[Line]) -> list[Reached]:
    ours = {row.cell: row for row in rows(lines) if row.contestant == OURSELVES}
    found = []
    if "vectors" in ours:
        rates = ours["vectors"].rates[0]
        found.append(Reached("vectors, samples/s", 1e6, False, rates.median, _range(rates)))
    for cell, bound in OVER_PEERS.items():
        peer, later = best_peer(lines, cell), best_peer(lines, cell, 1)
        if cell in ours and peer and later:
            mine = ours[cell].rates
            value = mine[0].median / peer.rates[0].median
            note = f"later epochs {mine[1].median / later.rates[1].median:.1f} over {later.contestant}"
            found.append(Reached(f"{cell} over the best peer, {peer.contestant}", bound, False, value, "", note))
    return found


def _laws(lines: Sequence[Line]) -> list[Reached]:
    laws = {line["name"]: line for line in lines if line["kind"] == "law" and "value" in line}
    found = []
    if "delay" in laws:
        law = laws["delay"]
        note = f"first epoch {law['first_epoch']:.2f}"
        found.append(Reached("images through the delay proxy over without", 0.85, False, law["value"], "", note))
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
        Reached("images, time to the first batch, s", 0.3, True, row.first_batch.median, _range(row.first_batch))
        for row in found
    ]


def _cpu(lines: Sequence[Line]) -> list[Reached]:
    """CPU seconds for each GB over fetch+decode, all epochs together; images."""

    def cost(contestant: str, epochs: slice) -> float:
        lines_of = [line for line in reads(lines) if cell_of(line) == "images" and line["contestant"] == contestant]
        seen = [epoch for line in lines_of for epoch in line["epochs"][epochs]]
        return float(sum(e["cpu_seconds"] for e in seen) / max(1, sum(e["samples"] for e in seen)))

    below = cost(FETCH_DECODE, slice(None))
    if not below or not cost(OURSELVES, slice(None)):
        return []
    first, later = (cost(OURSELVES, part) / cost(FETCH_DECODE, part) for part in (slice(0, 1), slice(1, None)))
    note = f"first epochs {first:.2f}, later ones {later:.2f}"
    return [
        Reached("images, CPU for each GB over fetch+decode", 1.3, True, cost(OURSELVES, slice(None)) / below, "", note)
    ]


def _range(spread: Spread) -> str:
    digits = 2 if spread.greatest < 100 else 0
    return f"{spread.least:,.{digits}f} - {spread.greatest:,.{digits}f}"
