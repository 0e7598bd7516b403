"""Figures that are the project's alone: memory, growth, size, ranks, the start of a plan."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import contestants
from bench.contestants import OURS, Contestant, ContestError
from bench.context import Bench, specification
from bench.data import prepare
from bench.figures import rate
from bench.objects import BUCKET, counted, recall, stored
from bench.plan import Cell
from bench.run import TIMEOUT, measured
from bench.servers import Endpoint, nginx
from bench.storing import store
from bench.workloads import ROOT, WIDE, WORKLOADS

GROWTH_EPOCHS = 20
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
QUICK_SIZES = SIZES[:2]
SAMPLES_EACH = 2_000_000  # small datasets are streamed again and again, so that each size is measured as long
MOST_EPOCHS = 200
PLAN_SAMPLES = 10**10

# a plan over so many samples, from nothing to the samples of the first batch
PLAN = """
import time
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.schedule import Share, World
begin = time.perf_counter()
order = EpochOrder({samples}, OrderParams(block=1024, lanes=64, window=4096), 7, 0)
next(iter(Share(order, 256, World(0, 1), "pad").plans({start})))
print(time.perf_counter() - begin)
"""


def measure_laws(bench: Bench) -> None:
    """Measure each and record a line for it."""
    images = Cell(WORKLOADS["images"], "")
    prepare("images", bench.settings.count(images.workload), bench.data)
    store(bench, images, OURS)
    laws: dict[str, Callable[[], dict[str, Any]]] = {
        "plan": plan_start,
        "memory": lambda: peak_memory(bench, images),
        "ranks": lambda: ranks(bench, images),
        "sizes": lambda: sizes(bench),
    }
    for name, law in laws.items():
        bench.show.begin(f"law: {name}")
        try:
            line = law()
        except ContestError as error:
            line = {"failed": str(error)}
        bench.record({"kind": "law", "name": name, **line})
        bench.show.end(f"law {name}: {line.get('value', line.get('failed'))}")


def plan_start() -> dict[str, Any]:
    """Return the seconds until a plan names its first batch, at the start and in the middle of the epoch."""
    found = []
    for start in (0, PLAN_SAMPLES // 2):
        code = PLAN.format(samples=PLAN_SAMPLES, start=start)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"failed": done.stderr.strip()[-300:]}
        found.append(float(done.stdout))
    return {"value": max(found), "samples": PLAN_SAMPLES, "seconds": found}


def peak_memory(bench: Bench, cell: Cell) -> dict[str, Any]:
    """Return the peak above `memory=`, and how much the peak of the last epoch is above that of the second.

    `memory=` is the least that the loader accepts, so that it has nothing to spare.
    """
    memory = least_memory(bench, cell)
    spec = _spec(bench, cell, bench.place.endpoint, epochs=GROWTH_EPOCHS, extra={"memory": memory})
    epochs = measured(OURS, spec, bench.place.endpoint, TIMEOUT)["epochs"]
    peaks = [epoch["peak_bytes"] for epoch in epochs]
    return {"value": max(peaks) - memory, "growth": peaks[-1] / peaks[1] - 1, "memory": memory, "peaks": peaks}


def least_memory(bench: Bench, cell: Cell) -> int:
    """Return the bytes that the loader asks for when it gets one. Raises `ContestError` where it names none."""
    try:
        contestants.run(OURS, "read", _spec(bench, cell, bench.place.endpoint, extra={"memory": 1}), TIMEOUT)
    except ContestError as error:
        found = re.search(r"give memory=(\d+)", str(error))
        if found:
            return int(found[1])
        raise
    raise ContestError(f"{OURS.name}: it accepts memory=1")


def ranks(bench: Bench, cell: Cell) -> dict[str, Any]:
    """Return the bytes that 2 and 4 ranks fetch together in one epoch, over those stored."""
    spec = _spec(bench, cell, bench.place.endpoint)
    _, size = stored(bench.place.writable, spec["url"].removeprefix(f"s3://{BUCKET}/"))
    found = {}
    for count in (2, 4):
        with nginx(bench.place.endpoint, "count") as counting, ThreadPoolExecutor(count) as pool:
            one = _spec(bench, cell, counting, epochs=1)
            specs = [{**one, "rank": rank, "world": count} for rank in range(count)]
            list(pool.map(lambda one: contestants.run(OURS, "read", one, TIMEOUT), specs))
            found[str(count)] = counted(_log(counting)).bytes / size
    return {"value": max(found.values()), "ranks": found}


def sizes(bench: Bench) -> dict[str, Any]:
    """Return how far the rates of datasets of different sizes are apart, first epochs aside: 1 - least / greatest."""
    rates: dict[str, float] = {}
    cell = Cell(WIDE, "")
    for count in QUICK_SIZES if bench.settings.quick else SIZES:
        prepare(cell.workload.name, count, bench.data)
        sized = replace(bench, settings=replace(bench.settings, samples=count))
        store(sized, cell, OURS)
        epochs = min(MOST_EPOCHS, max(3, SAMPLES_EACH // count + 1))
        spec = _spec(sized, cell, bench.place.endpoint, epochs=epochs)
        recall(bench.place.writable, spec["url"].removeprefix(f"s3://{BUCKET}/"), bench.place.folder)
        rates[str(count)] = statistics.median(_rates(OURS, spec, bench.place.endpoint)[2:])
    return {"value": 1 - min(rates.values()) / max(rates.values()), "rates": rates}


def _rates(contestant: Contestant, spec: Mapping[str, Any], where: Endpoint) -> list[float]:
    return [rate(epoch) for epoch in measured(contestant, spec, where, TIMEOUT)["epochs"]]


def _spec(
    bench: Bench, cell: Cell, where: Endpoint, epochs: int = 2, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {**specification(bench, cell, OURS, where), "epochs": epochs, "extra": dict(extra or {})}


def _log(counting: Endpoint) -> Path:
    assert counting.log is not None
    return counting.log
