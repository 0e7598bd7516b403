"""The project on many cores: the rate of later epochs, what the process that trains spends, first batches, memory.

Nothing is set but the batch size. `spec.extra`: `num_workers`, left out for a version without it; `profile`: a file for
what py-spy sees meanwhile; `compare`: numbers of workers whose batches are compared instead of measured.
"""

from __future__ import annotations

import hashlib
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from common import Spec, emit, main
from measuring import processes, proportional_set, tree_usage
from ours import open_dataset, write

from streamloader import StreamingDataset

WARM_SECONDS = 6.0  # of the first epoch, at most
MOST = 2  # times the seconds to measure, after which an epoch is not completed
PROFILE_SECONDS = 3


@dataclass
class Delivered:
    """What some passes delivered: `bytes` of the tensors, and the seconds to the first batch of each pass."""

    samples: int = 0
    bytes: int = 0
    first: list[float] = field(default_factory=list)

    def take(self, dataset: StreamingDataset, stop: float) -> None:
        """Take an epoch, or what of it comes before the time `stop`."""
        begin, first = time.perf_counter(), True
        for batch in dataset:
            now = time.perf_counter()
            if first:
                self.first.append(now - begin)
                first = False
            self.samples += len(batch["valid"])
            self.bytes += sum(column.nbytes for column in batch.values())
            if now > stop:
                break


def read(spec: Spec) -> None:
    """Measure whole epochs after a first one, until they take `spec.seconds`; or compare."""
    if "compare" in spec.extra:
        emit({"digests": {str(workers): digest(spec, workers) for workers in spec.extra["compare"]}})
        return
    opening = time.perf_counter()
    with closing(open_dataset(spec, shuffle=True)) as dataset:
        opened = time.perf_counter() - opening
        warm, later = Delivered(), Delivered()
        warm.take(dataset, time.perf_counter() + WARM_SECONDS)
        if "profile" in spec.extra:
            profile(dataset, spec.extra["profile"])
            return
        own, (tree, _), begin = own_seconds(), tree_usage(), time.perf_counter()
        while (seconds := time.perf_counter() - begin) < spec.seconds:
            later.take(dataset, begin + MOST * spec.seconds)
        emit(
            {
                "samples": later.samples,
                "bytes": later.bytes,
                "seconds": round(seconds, 4),
                "parent_cpu_seconds": round(own_seconds() - own, 4),
                "cpu_seconds": round(tree_usage()[0] - tree, 2),
                "open_seconds": round(opened, 4),
                "first_batch_seconds": round(warm.first[0], 4),
                "later_first_batch_seconds": round(statistics.median(later.first), 4),
                **memory_while(dataset),
                "stats": {**asdict(dataset.stats()), "verdict": dataset.stats().verdict},
            }
        )


def own_seconds() -> float:
    """Return the CPU seconds of this process alone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def memory_while(dataset: StreamingDataset) -> dict[str, int]:
    """Return the proportional set sizes of this process and of all below it, within a pass."""
    iterator = iter(dataset)
    next(iterator)
    mine, *others = processes()
    sizes = [proportional_set(pid) for pid in others]
    return {"parent_bytes": proportional_set(mine), "children_bytes": sum(sizes), "children": len(others)}


def digest(spec: Spec, workers: int) -> str:
    """Return a hash of all batches of an epoch."""
    found = hashlib.sha1()
    with closing(open_dataset(replace(spec, extra={"num_workers": workers}), shuffle=True)) as dataset:
        for batch in dataset:
            update(found, batch)
    return found.hexdigest()


def update(found: Any, batch: Mapping[str, Any]) -> None:
    """Add the names, types, shapes and values of the columns."""
    for name, column in sorted(batch.items()):
        if isinstance(column, list):
            found.update(repr((name, column)).encode())
        else:
            found.update(f"{name} {column.dtype} {tuple(column.shape)}".encode())
            found.update(column.contiguous().numpy().ravel())


def profile(dataset: StreamingDataset, file: str) -> None:
    """Let py-spy look at this process, native code included, while batches are taken."""
    options = ["--duration", str(PROFILE_SECONDS), "--rate", "100", "--format", "raw", "--threads", "--native"]
    command = ["py-spy", "record", "--pid", str(os.getpid()), *options, "--output", file]
    with subprocess.Popen(command, stdout=2) as spy:
        while spy.poll() is None:
            Delivered().take(dataset, time.perf_counter() + 1)
    emit({"profile": file, "returned": spy.returncode})


if __name__ == "__main__":
    main(write=write, read=read)
