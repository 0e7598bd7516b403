"""Measuring epochs: rate, order, processor time, page faults and peak memory of this process and of all below it."""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from common import FIRST_TOKEN, Source, Spec, emit
from numpy.typing import NDArray

SAMPLING_SECONDS = 0.5
EVERY = 8  # so many batches of the first epoch, one is looked at for its order: reading the numbers takes time
CLASSES = 128
HELD = 1 / 4  # of the data that a loader may hold to shuffle or ahead: what it holds is no longer streamed
# At most about what the project takes for the largest window. No contestant takes more than some times its dataset.
WARM_BYTES = 2_500_000_000
WARM_BASE = 500_000_000
WARM_TIMES = 4


def warm_memory(source: str) -> None:
    """Touch memory and give it back: what is taken next is then memory that the machine has handed out just now.

    A virtual machine may provide memory that it has not used for seconds at 0.2 GB/s, twenty times slower than memory
    in use: a first epoch in it measures the hypervisor. It has to be done here and now: memory that another process
    held ready was cold again, or not what this process got.
    """
    raw = json.loads((Path(source) / "meta.json").read_text())["bytes"]
    with mmap.mmap(-1, min(WARM_BYTES, WARM_BASE + WARM_TIMES * raw)) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)  # as numpy asks for its arrays: what is given back must fit them
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1


def measure_epochs(
    make_epoch_iterator: Callable[[int], Iterable[Any]],
    spec: Spec,
    count_of: Callable[[Any], int],
    ids_of: Callable[[Any], NDArray[np.int64]] | None = None,
) -> None:
    """Consume whole epochs, as many as `spec` asks for, and print one line for each.

    Import the peer before, and construct its dataset in `make_epoch_iterator(0)`, which is `open_seconds`: the clock of
    an epoch begins with `iter()`. `make_epoch_iterator(epoch)` returns what is iterated once; `count_of(batch)` the
    samples of a batch (tokens for the tokens workload), without rows that only fill it up; `ids_of(batch)` the numbers
    of its samples, asked of some batches of the first epoch.
    """
    warm_memory(spec.source)
    with Memory() as memory:
        for epoch in Epochs(spec):
            asked = time.perf_counter()
            batches = make_epoch_iterator(epoch.number)
            opened = time.perf_counter() - asked
            memory.begin_epoch()
            (cpu, faults), begin = tree_usage(), time.perf_counter()
            samples, first, ids = 0, 0.0, []
            for step, batch in enumerate(batches):
                touch(batch)
                samples += count_of(batch)
                if not step:
                    first = time.perf_counter() - begin
                if ids_of and not epoch.number and not step % EVERY:
                    ids.append(ids_of(batch))
            epoch.seconds = time.perf_counter() - begin
            cpu_end, faults_end = tree_usage()
            emit(
                {
                    "epoch": epoch.number,
                    "samples": samples,
                    "seconds": round(epoch.seconds, 4),
                    "open_seconds": round(opened, 4),
                    "first_batch_seconds": round(first, 4),
                    "cpu_seconds": round(cpu_end - cpu, 3),
                    "faults": faults_end - faults,
                    "peak_bytes": memory.peak(),
                    **mixing_of(ids, spec),
                }
            )


@dataclass
class Epoch:
    """One epoch; `seconds` is set when it was measured."""

    number: int
    seconds: float = 0.0


class Epochs:
    """The epochs to measure, until there are as many and they take as long as the specification says."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def __iter__(self) -> Iterator[Epoch]:
        done: list[Epoch] = []
        while len(done) < self._spec.epochs or sum(one.seconds for one in done[1:]) < self._spec.seconds:
            done.append(Epoch(len(done)))
            yield done[-1]


def mixing_of(ids: Sequence[NDArray[np.int64]], spec: Spec) -> dict[str, Any]:
    """Return the design effect of some batches, given by the numbers of their samples.

    Of data that was stored in the order of `CLASSES` classes of one size: the variance of the share that a class has of
    a batch, over that of independent draws (Kish, Survey Sampling, 1965). 1: batches mix as independent draws do.
    """
    if not ids:
        return {}
    total = len(Source(spec.source))
    ratios = []
    for batch in ids:
        counts = np.bincount(batch * CLASSES // total, minlength=CLASSES)
        expected = len(batch) / CLASSES
        ratios.append(((counts - expected) ** 2).sum() / (len(batch) * (1 - 1 / CLASSES)))
    return {"design_effect": round(float(np.mean(ratios)), 3)}


def measure_loader(make: Callable[[], Any], spec: Spec, names: Sequence[str] = ()) -> Any:
    """Measure the epochs of one loader, which `make` makes in the first of them; return it.

    `names`: the columns of a batch, where it is a tuple.
    """
    made: list[Any] = []

    def epoch(_: int) -> Iterable[Any]:
        if not made:
            made.append(make())
        loader: Iterable[Any] = made[0]
        return loader

    def named(batch: Any) -> dict[str, Any]:
        return batch if isinstance(batch, dict) else dict(zip(names, batch, strict=True))

    measure_epochs(epoch, spec, lambda batch: count_of(named(batch)), lambda batch: ids_of(named(batch)))
    return made[0]


def emit_order(
    batches: Iterable[Any], spec: Spec, state: Callable[[], Any] | None = None, names: Sequence[str] = ()
) -> None:
    """Print the numbers of the samples of each batch, and `state()` after `spec.stop` batches."""
    iterator = iter(batches)  # held until the state is asked for
    named = (batch if isinstance(batch, dict) else dict(zip(names, batch, strict=True)) for batch in iterator)
    ids = [ids_of(batch).tolist() for batch in islice(named, spec.stop)]
    emit({"ids": ids, "state": state() if state and spec.stop else None})


def ids_of(batch: dict[str, Any]) -> NDArray[np.int64]:
    """Return the numbers of the samples of a batch: its labels, or what its documents begin with."""
    if "label" in batch:
        return np.asarray(batch["label"], np.int64)
    tokens = batch["tokens"]
    parts = [np.asarray(part).ravel() for part in (tokens if isinstance(tokens, list) else [tokens])]
    flat = np.concatenate(parts)
    return flat[flat >= FIRST_TOKEN].astype(np.int64) - FIRST_TOKEN


def count_of(batch: dict[str, Any]) -> int:
    """Return the samples of a batch; its tokens, where it has tokens: lists of documents, or packed rows."""
    tokens = batch.get("tokens")
    if tokens is None:
        return len(next(iter(batch.values())))
    return sum(map(len, tokens)) if isinstance(tokens, list) else int(tokens.numel())


def touch(batch: Any) -> None:
    """Read one element of each column. Raises `TypeError` for a column that is no tensor, list, bytes or text."""
    for column in batch.values() if isinstance(batch, dict) else batch:
        ends = (column[0], column[-1]) if isinstance(column, (list, tuple)) and column else (column,)
        for item in ends:
            if hasattr(item, "data_ptr"):
                if item.numel():  # not through `flatten`, which copies images whose channels are last in memory
                    item[(-1,) * item.ndim].item()
            elif not isinstance(item, (str, bytes, list, tuple)):
                raise TypeError(f"a batch holds {type(item).__name__}: deliver torch tensors")


def processes() -> list[int]:
    """Return this process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(entry.name))
        if stat:
            parents[int(entry.name)] = int(stat[1])
    found = [os.getpid()]
    for parent in found:  # grows while it is walked
        found.extend(pid for pid, above in parents.items() if above == parent)
    return found


def tree_usage() -> tuple[float, int]:
    """Return the CPU seconds and page faults of this process and of all below it, the dead ones too once reaped."""
    stats = [stat for stat in map(_stat, processes()) if stat]
    ticks = sum(sum(map(int, stat[11:15])) for stat in stats)
    return ticks / os.sysconf("SC_CLK_TCK"), sum(sum(map(int, stat[7:11])) for stat in stats)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on; none where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class Memory:
    """The peak memory of this process and those below it, for each epoch.

    Alone, the kernel's own peak of the resident set; with others, their proportional set sizes (a shared page counts
    once), looked at twice a second. Mapped files count.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._sampled = 0

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def begin_epoch(self) -> None:
        """Forget the peak."""
        self._sampled = 0
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Return the bytes of the peak since the epoch began."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return max(self._sampled, int(status["VmHWM"].split()[0]) * 1024)

    def look(self) -> None:
        """Take what all processes hold now into account."""
        tree = processes()
        if len(tree) > 1:
            self._sampled = max(self._sampled, sum(map(proportional_set, tree)))

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLING_SECONDS):
            self.look()


def proportional_set(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
