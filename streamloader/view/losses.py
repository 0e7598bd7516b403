"""Reads what `LossLog` wrote: the samples with the largest losses, and the mean loss of each step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from heapq import nlargest
from math import inf
from typing import Any, NamedTuple

from streamloader.errors import StateError
from streamloader.storage import open_store

KEPT = 10_000  # samples with the largest losses
_REMEDY = "give the file or the folder that sl.LossLog wrote"


class Loss(NamedTuple):
    """A loss, infinite if it was not finite. `sample`: the number of its sample, -1 if unknown, in a `source`."""

    loss: float
    epoch: int
    step: int
    rank: int
    row: int
    sample: int = -1
    source: int = 0


class Losses(NamedTuple):
    """`largest`: the samples with the largest losses, these first. `means`: the mean loss by (epoch, step), in order.

    `run`: the description of the last run that was logged, and `state` its state, or None. `others`: the lines of
    earlier runs, which are left out.
    """

    largest: list[Loss]
    means: dict[tuple[int, int], float]
    run: Mapping[str, Any] | None
    state: Mapping[str, Any] | None
    others: int = 0


def read_losses(url: str, storage_options: Mapping[str, Any]) -> Losses:
    """Return the losses of a file, or of all files of a folder. Raises `StateError` for lines of anything else."""
    run, others, last = _last_run(_lines(url, storage_options))  # read twice, since all losses may not fit in memory
    sums: dict[tuple[int, int], list[float]] = {}
    chosen = (line for number, line in enumerate(_lines(url, storage_options)) if last.get(_step(line)) == number)
    largest = nlargest(KEPT, _each(chosen, sums))
    means = {at: total / max(1, count) for at, (total, count) in sorted(sums.items())}
    return Losses(largest, means, run.get("run"), run.get("state"), others)


def _last_run(lines: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], int, dict[tuple[int, int, int], int]]:
    """Return the last run, the number of lines of others before it, and the number of the last line of each step.

    A step that was logged again, after a resume from before it, has its last losses.
    """
    run: Mapping[str, Any] = {}
    others, last = 0, {}
    for number, line in enumerate(lines):
        if "run" not in line:
            last[_step(line)] = number
            continue
        if run and line["run"] != run["run"]:
            others += len(last)
            last = {}
        run = line
    return run, others, last


def _step(line: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return (epoch, step, rank) of a line; of the first line of a run (-1, -1, -1). Raises `StateError` for others."""
    if "run" in line:
        return -1, -1, -1
    try:
        return int(line["epoch"]), int(line["step"]), int(line["rank"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"a line of losses lacks {error}: {str(line)[:60]}", _REMEDY) from error


def _lines(url: str, storage_options: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the lines; the last one of a file may be half-written."""
    folder, _, name = url.rpartition("/")
    store = open_store(url if not name else folder or ("." if "/" not in url else "/"), storage_options)
    paths = [name] if name and store.head(name) else []
    if not paths:
        store = open_store(url, storage_options)
        paths = sorted(info.path for info in store.list() if info.path.endswith(".jsonl"))
    if not paths:
        raise StateError(f"{store.url} has no losses", _REMEDY)
    for path in paths:
        for line in store.get(path).splitlines(keepends=True):
            if not line.endswith(b"\n"):
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise StateError(f"{path} of {store.url} is not JSON lines: {error}", _REMEDY) from error
            if not isinstance(value, dict):
                raise StateError(f"{path} of {store.url} has a line {line[:40]!r}", _REMEDY)
            yield value


def _each(lines: Iterable[Mapping[str, Any]], sums: dict[tuple[int, int], list[float]]) -> Iterator[Loss]:
    for line in lines:
        epoch, step, rank = _step(line)
        try:
            losses = [inf if loss is None else float(loss) for loss in line["loss"]]
            rows = line["row"]
            indexes, sources = (line.get(name) or [unknown] * len(rows) for name, unknown in _UNKNOWN)
            columns = list(zip(losses, rows, indexes, sources, strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"a line of losses lacks {error}: {str(line)[:60]}", _REMEDY) from error
        total = sums.setdefault((epoch, step), [0.0, 0.0])
        total[0] += sum(losses)
        total[1] += len(losses)
        for loss, row, index, source in columns:
            yield Loss(loss, epoch, step, rank, int(row), int(index), int(source))


_UNKNOWN = ("index", -1), ("source", 0)
