"""Proves from the logs of the ranks that every epoch had every sample once, across a kill and a new world size."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from streamloader.errors import EngineError


@dataclass(frozen=True)
class Taken:
    """What one rank took for one step: sample numbers, without those that only fill up a batch."""

    epoch: int
    step: int
    index: tuple[int, ...]


def read_log(folder: Path, run: str) -> list[Taken]:
    """Return the lines of every rank of a run; one that a kill cut short is left out."""
    taken = []
    for path in sorted(folder.glob(f"{run}-rank*.jsonl")):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                entry = json.loads(line)
                taken.append(Taken(entry["epoch"], entry["step"], tuple(entry["index"])))
    return taken


def check_exactly_once(taken: Iterable[Taken], num_samples: int, epochs: int) -> None:
    """Raise `EngineError` unless each of the epochs took each sample number below `num_samples` once."""
    counts = [Counter[int]() for _ in range(epochs)]
    for part in taken:
        if part.epoch >= epochs:
            raise EngineError(f"step {part.step} belongs to epoch {part.epoch} of {epochs}", "report this")
        counts[part.epoch].update(part.index)
    for epoch, count in enumerate(counts):
        missing = sorted(set(range(num_samples)) - set(count))
        often = sorted(number for number, times in count.items() if times > 1)
        foreign = sorted(number for number in count if not 0 <= number < num_samples)
        for what, numbers in (("missed", missing), ("repeated", often), ("invented", foreign)):
            if numbers:
                shown = ", ".join(map(str, numbers[:4]))
                raise EngineError(
                    f"epoch {epoch} {what} {len(numbers)} of {num_samples} samples ({shown}, ...)", "report this"
                )


def repeated_steps(before: Iterable[Taken], after: Iterable[Taken], resumed_at: int) -> int:
    """Return how many steps after the checkpoint the killed run had taken.

    Raises `EngineError` where a rank of it took samples that the resumed run gives to another step: the global
    batches must not depend on the number of ranks.
    """
    again: dict[int, set[int]] = {}
    for part in after:
        again.setdefault(part.step, set()).update(part.index)
    lost = [part for part in before if part.step >= resumed_at]
    for part in lost:
        if not set(part.index) <= again.get(part.step, set()):
            raise EngineError(f"step {part.step} was another batch after the resume", "report this")
    return len({part.step for part in lost})
