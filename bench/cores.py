"""`python -m bench.cores`: how the loader scales with the cores of this machine; bench/results/cores.md.

Each run is a process of its own that may use so many cores; nginx may use all of them. The data is in the page cache.
The most important runs come first: when the time is over, the page is made of what there is.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import streamloader as sl
from bench import contestants, cores_page, venvs
from bench.__main__ import alone
from bench.contestants import Contestant, ContestError
from bench.context import RESULTS, Bench, Place
from bench.data import prepare
from bench.objects import BUCKET, recall
from bench.photos import photographs
from bench.plan import Settings
from bench.progress import showing
from bench.servers import Endpoint, nginx
from bench.storing import WRITE_TIMEOUT
from bench.workloads import DATA, WORKLOADS

COUNTS = {"images": 16_384, "jpeg": 8192, "vectors": 4_000_000, "tokens": 196_608}
CORES = (1, 2, 4, 8, 16)
OF_PEERS = ("jpeg", "images")  # LitData would need minutes for an epoch of the others
SHARDS = 64  # of other loaders, whose workers then have as many each
COMPARED = (0, 5)
TIMEOUT = 40.0
RUN_SECONDS = 8.0  # about what a run takes
LEAST_SECONDS = 5.0  # no run begins later before the end

CONTESTANTS = {
    one.name: one
    for one in (
        Contestant("streamloader", "ours", "ours_scaled.py"),
        Contestant("bound", "ceiling", "ceiling_cores.py"),
        Contestant("webdataset", "peer", "peer_webdataset.py"),
        Contestant("litdata", "peer", "peer_litdata.py"),
    )
}


@dataclass(frozen=True)
class Run:
    """One process; `kind` is "loader", "bound", "compare", "profile" or "peer", and `place` "nginx" or "files"."""

    kind: str
    workload: str
    contestant: str
    cores: int
    workers: int | str = 0
    place: str = "nginx"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the page; 1 where batches depend on the number of workers, or a run of the loader failed."""
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    data, names = Path(options.data), options.workloads
    with alone(data), contextlib.ExitStack() as stack:
        if {"images", "jpeg"} & set(names):
            photographs(data / "photos")  # once, before several processes need them
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as processes:
            list(processes.map(partial(make, options), names))
        with ThreadPoolExecutor() as threads:
            problems = "; ".join(filter(None, threads.map(partial(store, options, "streamloader"), names)))
        if problems:
            sys.exit(problems)
        if options.prepare:
            return 0
        server = Endpoint("files", "")
        if shutil.which("nginx"):
            server = stack.enter_context(nginx(data / "cores", "plain"))
        chosen = list(runs(options, "nginx" if server.url else "files"))
        show = stack.enter_context(showing(min(options.seconds, RUN_SECONDS * len(chosen))))
        bench = Bench(Settings(True, options.out), Place(server, server), show, data, Path(options.results))
        stop, good = time.monotonic() + options.seconds, True
        try:
            for run in chosen:
                if stop - time.monotonic() > LEAST_SECONDS:
                    good &= take(bench, run, options, stop)
        finally:
            if (bench.results / f"{options.out}.jsonl").exists():
                show.end(f"page: {cores_page.write(options.out, bench.results)}")
    return 0 if good else 1


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser("python -m bench.cores", description=__doc__)
    allowed = len(os.sched_getaffinity(0))
    cores = [count for count in CORES if count < allowed] + [allowed]
    found.add_argument("--workloads", nargs="*", choices=list(COUNTS), default=list(COUNTS))
    found.add_argument("--cores", nargs="*", type=int, default=cores, help="default: 1, 2, 4, 8, 16 and all")
    found.add_argument("--more-workers", nargs="*", type=int, default=[], help="besides 0 and auto, on most cores")
    found.add_argument("--peers", nargs="*", choices=["webdataset", "litdata"], default=["webdataset", "litdata"])
    found.add_argument("--here", action="store_true", help="peers are installed in this environment")
    found.add_argument("--compare", action="store_true", help="also compare the batches of 0 and 5 workers")
    found.add_argument("--profile", metavar="FOLDER", help="also record the stacks of images and vectors with py-spy")
    found.add_argument("--seconds", type=float, default=540.0, help="for all runs, once the data is there")
    found.add_argument("--each", type=float, default=3.0, help="seconds that a run measures, after its first epoch")
    add_data_options(found, "cores")
    found.set_defaults(counts=COUNTS)
    return found


def add_data_options(found: argparse.ArgumentParser, out: str) -> None:
    """Add the options that say where data and results are; results are called `out` by default."""
    found.add_argument("--part", type=int, default=1, help="the data is so many times smaller")
    found.add_argument("--prepare", action="store_true", help="make the data only")
    found.add_argument("--out", metavar="NAME", default=out, help="results/NAME.jsonl and NAME.md")
    found.add_argument("--data", default=str(DATA))
    found.add_argument("--results", default=str(RESULTS))


def runs(options: argparse.Namespace, place: str) -> Iterator[Run]:
    """Yield the runs, the most important ones first."""
    most, names = max(options.cores), options.workloads
    has_workers = "num_workers" in inspect.signature(sl.StreamingDataset.__init__).parameters
    usual: tuple[int | str, ...] = ("auto", 0) if has_workers else (0,)
    more = [count for count in options.more_workers if has_workers]
    loader = partial(Run, "loader", contestant="streamloader")
    for workers in (*usual[:1], *more[:1], *usual[1:]):
        yield from (loader(workload=name, cores=most, workers=workers, place=place) for name in names)
    yield from bounds(most, names, place)
    if has_workers and options.compare:
        yield from (Run("compare", name, "streamloader", most, place=place) for name in names)
    if options.profile:
        profiled = [name for name in ("images", "vectors") if name in names]
        yield from (Run("profile", name, "streamloader", most, usual[0], place) for name in profiled)
    others = sorted(set(options.cores) - {most}, reverse=True)
    for cores in others:
        yield from (loader(workload=name, cores=cores, workers=n, place=place) for n in usual for name in names)
    yield from peer_runs(options, most)
    yield from (loader(workload=name, cores=most, workers=n, place=place) for n in more[1:] for name in names)
    if place != "files":
        for cores in (most, *others):
            yield from (loader(workload=name, cores=cores, workers=usual[0], place="files") for name in names)
    for cores in others:
        yield from bounds(cores, names, place)
        yield from peer_runs(options, cores)
    if place != "files" and has_workers:
        for cores in (most, *others):
            yield from (loader(workload=name, cores=cores, workers=0, place="files") for name in names)


def bounds(cores: int, names: Sequence[str], place: str) -> Iterator[Run]:
    """Yield what the cores do without a loader: decoding, and plain GETs where there is a server."""
    if "jpeg" in names:
        yield Run("bound", "jpeg", "bound", cores)
    if place == "nginx":
        yield from (Run("bound", name, "bound", cores) for name in names if name != "jpeg")


def peer_runs(options: argparse.Namespace, cores: int) -> Iterator[Run]:
    """Yield the runs of other loaders, with a worker for each core, two at least; they read files."""
    for workload in OF_PEERS:
        if workload in options.workloads:
            yield from (Run("peer", workload, peer, cores, max(2, cores), "files") for peer in options.peers)


def make(options: argparse.Namespace, workload: str) -> Path:
    """Make the raw data unless it is there; return its folder."""
    return prepare(workload, options.counts[workload] // options.part, Path(options.data))


def dataset(options: argparse.Namespace, name: str, workload: str) -> str:
    """Return the folder of a contestant's dataset, within the bucket."""
    return f"{name}/{workload}-{options.counts[workload] // options.part}"


def store(options: argparse.Namespace, name: str, workload: str, timeout: float = WRITE_TIMEOUT) -> str:
    """Write the dataset of a contestant unless it is there; return what went wrong, or nothing."""
    contestant = installed(name, options.here)
    folder = Path(options.data) / "cores" / BUCKET / dataset(options, name, workload)
    stamp, fingerprint = folder.with_name(f"{folder.name}.fingerprint"), contestant.fingerprint()
    if stamp.exists() and stamp.read_text() == fingerprint:
        return ""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if contestant.kind == "peer" and (problem := venvs.make(name, print)):
        return problem
    try:
        contestants.run(contestant, "write", specification(options, Run("", workload, name, 0), None), timeout)
    except ContestError as error:
        return str(error)
    stamp.write_text(fingerprint)
    return ""


def installed(name: str, here: bool) -> Contestant:
    """Return the contestant; `here`: it runs in this environment."""
    found = CONTESTANTS[name]
    return Contestant(name, "guest", found.file) if here and found.kind == "peer" else found


def specification(options: argparse.Namespace, run: Run, server: Endpoint | None) -> dict[str, Any]:
    """Return what the process is told; without a server, it works on files."""
    prefix = dataset(options, "streamloader" if run.contestant == "bound" else run.contestant, run.workload)
    folder = str(Path(options.data) / "cores" / BUCKET / prefix)
    address = {"endpoint": server.url, "key": server.key, "secret": server.secret} if server else {}
    return {
        "workload": run.workload,
        "source": str(make(options, run.workload)),
        "url": f"s3://{BUCKET}/{prefix}" if server else folder,
        **address,
        "batch": WORKLOADS[run.workload].batch,
        "variant": "uint8" if run.workload == "jpeg" else "",
        "extra": {"folder": folder, "shards": SHARDS},
    }


def take(bench: Bench, run: Run, options: argparse.Namespace, stop: float) -> bool:
    """Do one run and record it, all before the time `stop`; return whether it went as it must."""
    spec = specification(options, run, bench.place.endpoint if run.place == "nginx" else None)
    spec |= {"seconds": options.each, "epochs": 2, "workers": run.workers if run.kind == "peer" else 0}
    extra = spec["extra"]
    if (
        run.kind in ("loader", "profile")
        and "num_workers" in inspect.signature(sl.StreamingDataset.__init__).parameters
    ):
        extra["num_workers"] = run.workers
    if run.kind == "bound":
        extra["bound"] = "decode" if run.workload == "jpeg" else "gets"
    if run.kind == "compare":
        extra["compare"] = COMPARED
    if run.kind == "profile":
        extra["profile"] = str(Path(options.profile) / f"profile-{run.workload}.txt")
    problem = ""
    if run.kind == "peer":
        problem = store(options, run.contestant, run.workload, stop - time.monotonic())
        if stop - time.monotonic() < LEAST_SECONDS:
            return True
    recall(bench.place.endpoint, dataset(options, run.contestant, run.workload), bench.data / "cores")
    result: dict[str, Any] = (
        {"failed": problem} if problem else measured(run, spec, options.here, min(TIMEOUT, stop - time.monotonic()))
    )
    if "digests" in result:
        result["equal"] = len(set(result["digests"].values())) == 1
    bench.record({**asdict(run), **result})
    brief = {name: value for name, value in result.items() if name != "stats"}
    bench.show.end(
        json.dumps({**asdict(run), **brief, "verdict": result.get("stats", {}).get("verdict", "")}), RUN_SECONDS
    )
    return result.get("equal", True) and ("failed" not in result or run.kind == "peer")


def measured(run: Run, spec: dict[str, Any], here: bool, timeout: float) -> dict[str, Any]:
    """Return what the process printed, which may use the cores of the run."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[: run.cores])
    try:
        lines = contestants.run(installed(run.contestant, here), "read", spec, timeout)
    except ContestError as error:
        return {"failed": str(error)}
    finally:
        os.sched_setaffinity(0, allowed)
    return lines[0] if len(lines) == 1 else {"parts": lines}


if __name__ == "__main__":
    sys.exit(main())
