"""`python -m bench.device`: training on a GPU fed by the loader, as a share of training from the GPU's own memory.

Each run is a process of its own, which trains a model first with a batch that is on the device already (the bound),
then with batches from the loader. Data is read from nginx on the same machine, or from local files where that is not
installed. The most important runs come first, and the script ends within `--limit` seconds, with the page of what it
has: bench/results/device.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench import contestants, cores, device_page, device_trace
from bench.__main__ import alone
from bench.contestants import Contestant, ContestError
from bench.context import Bench, Place
from bench.objects import recall
from bench.photos import photographs
from bench.plan import Settings
from bench.progress import showing
from bench.servers import Endpoint, nginx

LIMIT_SECONDS = 345.0
RUN_SECONDS = 18.0  # about what a run takes, its start included
LEAST_SECONDS = 14.0  # no run begins later before the end
TIMEOUT = 75.0
AHEAD = 2
COUNTS = {"images": 16_384, "jpeg": 24_576, "tokens": 98_304}
FEW = {"images": 64, "jpeg": 64, "tokens": 512}  # of a quick run
BATCH = {"resnet50": 256, "resnet18": 256, "transformer": 16, "": 256}
ROW, SHORT_ROW = 2049, 65
TRAINER = Contestant("device", "ours", "ours_device.py")


@dataclass(frozen=True)
class Run:
    """What one process measures: "train" with a model and what feeds it, "copies" or "nvjpeg"."""

    kind: str
    model: str = ""
    feed: str = ""
    traced: bool = False

    @property
    def name(self) -> str:
        """Like "resnet50 raw"."""
        return f"{self.model} {self.feed}".strip() or self.kind


RUNS = (
    Run("train", "resnet50", "raw", traced=True),
    Run("train", "resnet50", "jpeg", traced=True),
    Run("train", "resnet50", "nvjpeg", traced=True),
    Run("train", "resnet18", "raw"),
    Run("train", "resnet18", "nvjpeg"),
    Run("train", "transformer", "tokens", traced=True),
    Run("train", "resnet18", "jpeg"),
    Run("copies"),
    Run("nvjpeg"),
    Run("train", "resnet50", "raw .to(device)"),
    Run("train", "resnet50", "raw to_device(DataLoader)"),
    Run("train", "resnet18", "raw .to(device)"),
    Run("train", "resnet50", "jpeg .to(device)"),
    Run("train", "resnet18", "raw to_device(DataLoader)"),
    Run("train", "transformer", "tokens .to(device)"),
    Run("train", "resnet18", "jpeg .to(device)"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the page; 1 where a run failed."""
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results, stop = Path(options.results), time.monotonic() + options.limit
    if options.page:
        print(device_page.write(options.out, results))
        return 0
    if options.device == "cuda" and not is_cuda_available():
        sys.exit("torch finds no CUDA device: run this where there is one, or try it with --device cpu --quick")
    with alone(Path(options.data)), contextlib.ExitStack() as stack:
        options.counts = FEW if options.quick else COUNTS
        make_all(options, stop)
        if options.prepare:
            return 0
        server = Endpoint("files", "")
        if shutil.which("nginx"):
            server = stack.enter_context(nginx(Path(options.data) / "cores", "plain"))
        chosen = [run for run in RUNS if not options.only or run.name in options.only]
        show = stack.enter_context(showing(min(options.limit, RUN_SECONDS * len(chosen))))
        bench = Bench(Settings(True, options.out), Place(server, server), show, Path(options.data), results)
        spec = specification(options, server, results)
        try:
            good = measure(bench, spec, chosen, stop, together=options.quick)
        finally:
            if (results / f"{options.out}.jsonl").exists():
                show.end(f"page: {device_page.write(options.out, results)}")
    return 0 if good else 1


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser("python -m bench.device", description=__doc__)
    found.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    found.add_argument("--seconds", type=float, default=3.0, help="that each run measures, after half as long")
    found.add_argument("--quick", action="store_true", help="small models and data, all in one process")
    found.add_argument("--only", nargs="*", metavar="RUN", choices=[run.name for run in RUNS], help="default: all")
    found.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for everything, data included")
    found.add_argument("--page", action="store_true", help="measure nothing: make the page and the pictures again")
    cores.add_data_options(found, "device")
    found.set_defaults(here=True)
    return found


def is_cuda_available() -> bool:
    """Whether torch has a device; asked in a process of its own, since this one forks."""
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return not subprocess.run(command, check=False).returncode


def make_all(options: argparse.Namespace, stop: float) -> None:
    """Make the raw data and write the datasets, those that are not there yet, until `stop`. Exits where one fails.

    A quick run only makes the raw data: its one process writes the datasets.
    """
    photographs(Path(options.data) / "photos")  # once, before several processes need them
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as processes:
        list(processes.map(partial(cores.make, options), options.counts))
    if options.quick:
        return
    store = partial(cores.store, options, "streamloader", timeout=max(1.0, stop - time.monotonic()))
    with ThreadPoolExecutor() as threads:
        problems = "; ".join(filter(None, threads.map(store, options.counts)))
    if problems:
        sys.exit(problems)


def specification(options: argparse.Namespace, server: Endpoint, results: Path) -> dict[str, Any]:
    """Return what each process is told, without its runs."""
    place = server if server.url else None
    found = {
        name: cores.specification(options, cores.Run("", name, "streamloader", 0), place) for name in options.counts
    }
    for name in options.counts if server.url and not options.quick else ():
        recall(server, cores.dataset(options, "streamloader", name), Path(options.data) / "cores")
    extra = {
        "device": options.device,
        "small": options.quick,
        "ahead": AHEAD,
        "row": SHORT_ROW if options.quick else ROW,
        "urls": {name: spec["url"] for name, spec in found.items()},
        "sources": {name: spec["source"] for name, spec in found.items()},
        "write": [{"source": one["source"], "url": one["extra"]["folder"]} for one in found.values() if options.quick],
        "traces": str((results / f"{options.out}-traces").absolute()),
    }
    return {**found["images"], "seconds": options.seconds, "extra": extra, "batch": 8}


def measure(bench: Bench, spec: dict[str, Any], runs: Sequence[Run], stop: float, together: bool) -> bool:
    """Do the runs that there is time for, each in a process of its own or all in one; return whether none failed."""
    good = True
    for group in [list(runs)] if together else [[run] for run in runs]:
        left = stop - time.monotonic()
        names = ", ".join(run.name for run in group)
        if left < LEAST_SECONDS:
            bench.show.end(f"{names}: no time left")
            continue
        bench.show.begin(names)
        given = {**spec, "extra": {**spec["extra"], "runs": [asdict(run) for run in group]}}
        if not together:
            given["batch"] = BATCH[group[0].model]
        try:
            lines = contestants.run(TRAINER, "read", given, left if together else min(TIMEOUT, left))
        except ContestError as error:
            lines = [{**asdict(run), "failed": str(error)} for run in group]
        for line in lines:
            for name in line.keys() & {"trace", "bound_trace"}:
                line[name] = analysed(Path(line[name]), keep=name == "trace")
            bench.record(line)
            good &= "failed" not in line
            bench.show.end(told(line), RUN_SECONDS)
    return good


def analysed(file: Path, keep: bool) -> dict[str, Any]:
    """Return what a trace says, and its file, which is deleted unless it is to be kept."""
    try:
        return {**device_trace.summary(device_trace.read(file)), "file": file.name}
    except (OSError, ValueError, LookupError) as error:
        return {"failed": f"{type(error).__name__}: {error}", "file": file.name}
    finally:
        if not keep:
            file.unlink(missing_ok=True)


def told(line: dict[str, Any]) -> str:
    """Return a line for whoever waits."""
    name = f"{line['model']} {line['feed']}".strip() or line["kind"]
    if "bound_rate" in line:
        share = line["rate"] / line["bound_rate"]
        trace = json.dumps(line["trace"]) if line.get("trace") else ""
        return f"{name}: {line['rate']:,.0f} of {line['bound_rate']:,.0f} {line['unit']}/s, {share:.2f} {trace}".strip()
    known = ("failed", "unsupported", "gigabytes_per_second", "rate")
    return f"{name}: {next((line[key] for key in known if key in line), '')}"


if __name__ == "__main__":
    sys.exit(main())
