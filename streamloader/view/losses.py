"""Reads what `LossLog` wrote: the samples with the largest losses, and the mean loss of each step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from heapq import nlargest
from math import inf, isfinite
from typing import Any, NamedTuple

from streamloader.errors import NotFoundError, StateError
from streamloader.storage import Store, open_store, split_url

KEPT = 10_000  # samples with the largest losses
PIECE = 16 << 20  # bytes of one request
MOST_LINE = 256 << 20  # bytes
MOST_DAMAGED = 100  # lines at the beginning of a file
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
    earlier runs, which are left out. `damaged`: lines that are no JSON, such as those of a process that was killed.
    """

    largest: list[Loss]
    means: dict[tuple[int, int], float]
    run: Mapping[str, Any] | None
    state: Mapping[str, Any] | None
    others: int = 0
    damaged: int = 0


def read_losses(url: str, storage_options: Mapping[str, Any]) -> Losses:
    """Return the losses of a file, or of all files of a folder. Raises `StateError` for lines of anything else."""
    files = _files(url, storage_options)
    found = _Lines(*files)
    run, others, last = _last_run(found)  # read twice, since all losses may not fit in memory
    sums: dict[tuple[int, int], list[float]] = {}
    chosen = (line for number, line in enumerate(_Lines(*files)) if last.get(_step(line)) == number)
    largest = nlargest(KEPT, _each(chosen, sums))
    means = {at: total / max(1, count) for at, (total, count) in sorted(sums.items())}
    return Losses(largest, means, run.get("run"), run.get("state"), others, found.damaged)


def _last_run(lines: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], int, dict[tuple[int, int, int], int]]:
    """Return the last run, the number of lines of others before it, and the number of the last line of each step.

    A step that was logged again, after a resume from before it, has its last losses.
    """
    run: Mapping[str, Any] = {}
    others, last = 0, {}
    for number, line in enumerate(lines):
        if (step := _step(line))[0] >= 0:
            last[step] = number
            continue
        if run and line["run"] != run["run"]:
            others += len(last)
            last = {}
        run = line
    return run, others, last


def _step(line: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return (epoch, step, rank) of a line; of the first line of a run (-1, -1, -1). Raises `StateError` for others."""
    if isinstance(line.get("run"), dict) and isinstance(line.get("state"), dict | None):
        return -1, -1, -1
    try:
        return int(line["epoch"]), int(line["step"]), int(line["rank"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateError(f"a line of losses lacks {error}: {str(line)[:60]}", _REMEDY) from error


def _files(url: str, storage_options: Mapping[str, Any]) -> tuple[Store, dict[str, int]]:
    """Return the store of a log, and the sizes of its files by path. Raises `NotFoundError` if there are none."""
    folder, name = split_url(url)
    store = open_store(folder, storage_options)
    info = store.head(name) if name else None
    if info is not None:
        return store, {name: info.size}
    store = open_store(url, storage_options)
    found = sorted((info.path, info.size) for info in store.list() if info.path.endswith(".jsonl"))
    if not found:
        raise NotFoundError(f"there is no log of losses at {store.url}", _REMEDY)
    return store, dict(found)


class _Lines:
    """The lines of files. `damaged` counts those that are no JSON, and that are left out.

    The end of a file may be half of a line, and, after a process was killed or a disk was full, any line. Raises
    `StateError` for a file of anything else.
    """

    def __init__(self, store: Store, sizes: Mapping[str, int]) -> None:
        self._store, self._sizes, self.damaged = store, sizes, 0

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        for path, size in self._sizes.items():
            good, bad, where = 0, 0, f"{path} of {self._store.url}"
            for line in self._split(path, size):
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    bad += 1
                    if not good and bad > MOST_DAMAGED:
                        raise StateError(f"{where} is not JSON lines: {error}", _REMEDY) from error
                    continue
                if not isinstance(value, dict):
                    raise StateError(f"{where} has a line {line[:40]!r}", _REMEDY)
                good += 1
                yield value
            if bad and not good:
                raise StateError(f"{where} is not JSON lines", _REMEDY)
            self.damaged += bad

    def _split(self, path: str, size: int) -> Iterator[bytes]:
        """Yield the lines of a file that are not empty, without one that has no end."""
        rest: list[bytes] = []
        for start in range(0, size, PIECE):
            *lines, last = self._store.get_range(path, start, min(start + PIECE, size)).split(b"\n")
            for line in lines:
                whole, rest = b"".join((*rest, line)), []
                if whole.strip():
                    yield whole
            rest.append(last)
            if len(rest) * PIECE > MOST_LINE:
                raise StateError(f"{path} of {self._store.url} has a line of over {MOST_LINE >> 20} MiB", _REMEDY)


def _each(lines: Iterable[Mapping[str, Any]], sums: dict[tuple[int, int], list[float]]) -> Iterator[Loss]:
    for line in lines:
        epoch, step, rank = _step(line)
        try:
            given = (inf if loss is None else float(loss) for loss in line["loss"])
            losses, rows = [loss if isfinite(loss) else inf for loss in given], line["row"]
            indexes, sources = (line.get(name) or [unknown] * len(rows) for name, unknown in _UNKNOWN)
            places = zip(*(map(int, each) for each in (rows, indexes, sources)), strict=True)
            columns = list(zip(losses, places, strict=True))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise StateError(f"a line of losses lacks {error}: {str(line)[:60]}", _REMEDY) from error
        total = sums.setdefault((epoch, step), [0.0, 0.0])
        total[0] += sum(losses)
        total[1] += len(losses)
        for loss, place in columns:
            yield Loss(loss, epoch, step, rank, *place)


_UNKNOWN = ("index", -1), ("source", 0)
