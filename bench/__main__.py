"""`python -m bench`: measure, and report in bench/results. From the repository's root, in the project's environment."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import report
from bench.contestants import BLOCK_READERS, Contestant, ContestError, peers
from bench.context import RESULTS, Bench, Place
from bench.laws import measure_laws
from bench.plan import Settings, cells, expected_seconds, steps
from bench.progress import showing
from bench.run import begin, run_cells
from bench.servers import NGINX_HELP, endpoint, nginx
from bench.workloads import DATA, WORKLOADS


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; 0 where every process of the project did its work."""
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an orderly end: no process and no folder stays
    if options.report:
        report.write(options.out, Path(options.results))
        return 0
    settings = settings_of(options)
    return measure(settings, Path(options.data), Path(options.results))


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser("python -m bench", description=__doc__)
    found.add_argument("--quick", action="store_true", help="the loaders alone, one worker count each, fewer rounds")
    found.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    found.add_argument("--peers", nargs="*", metavar="PEER", help="default: all; none given: no peer")
    found.add_argument("--server", choices=["nginx", "seaweedfs", "moto"], default="nginx")
    found.add_argument("--endpoint", metavar="URL", help="any S3 server, with the AWS keys of the environment")
    found.add_argument("--repeats", type=int, help="rounds of the project and its ceilings (quick: 1, full: 3)")
    found.add_argument("--samples", type=int, default=0, help="of every workload, instead of its own count")
    found.add_argument("--seconds", type=float, default=10.0, help="that the epochs after the first take, at least")
    found.add_argument("--no-laws", action="store_true", help="leave out the figures that are the project's alone")
    found.add_argument("--no-fronts", action="store_true", help="no TLS and no counting of requests: needs no nginx")
    found.add_argument("--touch", type=float, default=1.0, metavar="GB", help="memory to touch and free first")
    found.add_argument("--out", metavar="NAME", help="results/NAME.jsonl and so on (default: quick or full)")
    found.add_argument("--report", action="store_true", help="measure nothing: make the page from the lines of NAME")
    found.add_argument("--data", default=str(DATA), help="where raw data is kept")
    found.add_argument("--results", default=str(RESULTS))
    return found


def settings_of(options: argparse.Namespace) -> Settings:
    """Return what the command line asks for. Exits where it names what is not there."""
    known = {peer.name for peer in peers()}
    usual = known - BLOCK_READERS if options.quick else known
    wanted = usual if options.peers is None else set(options.peers)
    if wanted - known:
        sys.exit(f"no such peer: {', '.join(sorted(wanted - known))}; there are {', '.join(sorted(known)) or 'none'}")
    nginx_needed = not options.no_fronts or options.server == "nginx" or not (options.quick or options.no_laws)
    if nginx_needed and not shutil.which("nginx"):
        sys.exit(f"{NGINX_HELP}, --no-fronts and --no-laws")
    return Settings(
        quick=options.quick,
        name=options.out or ("quick" if options.quick else "full"),
        server=options.endpoint or options.server,
        workloads=tuple(options.workloads),
        peers=tuple(sorted(wanted)),
        workers=() if options.quick else (2, 0, 1),
        repeats=options.repeats or (1 if options.quick else 3),
        peer_repeats=1 if options.quick else 2,
        seconds=options.seconds,
        samples=options.samples,
        touch=options.touch,
        laws=not options.quick and not options.no_laws,
        fronts=()
        if options.no_fronts
        else ("count", "tls", *(("delay", "store") if options.server == "nginx" else ())),
    )


def measure(settings: Settings, data: Path, results: Path) -> int:
    """Run everything, and write the report, of what there is when it is interrupted, too."""
    chosen = [peer for peer in peers() if peer.name in settings.peers]
    # a full run has a new server for each workload: all datasets together would fill the disk
    parts: list[tuple[str, ...]] = [settings.workloads] if settings.quick else [(name,) for name in settings.workloads]
    parts = [part for part in parts if part] + ([()] if settings.laws else [])
    with alone(data), showing(expected(settings, chosen)) as show:
        try:
            bench: Bench | None = None
            for part in parts:
                with place(settings, data) as where:
                    if bench is None:
                        bench = Bench(settings, where, show, data, results)
                        begin(bench)
                    bench.place = where
                    run_cells(bench, chosen, part)
                    if not part:
                        measure_laws(bench)
        except ContestError as error:
            show.end(str(error))
            return 1
        finally:
            if (results / f"{settings.name}.jsonl").exists():
                show.end(f"report: {report.write(settings.name, results)}")
    return 0


@contextlib.contextmanager
def alone(data: Path) -> Iterator[None]:
    """Hold the data folder: two runs at once would disturb each other. Exits where another one does."""
    data.mkdir(parents=True, exist_ok=True)
    with (data / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another run uses {data}: wait for its end, or choose another --data")
        yield


def expected(settings: Settings, chosen: list[Contestant]) -> float:
    """Return about how many seconds the steps take."""
    return sum(expected_seconds(settings, step) for cell in cells(settings) for step in steps(settings, cell, chosen))


@contextlib.contextmanager
def place(settings: Settings, data: Path) -> Iterator[Place]:
    """Run the server. A quick run keeps what was written, for the next one."""
    keep = data / "seaweedfs" if settings.server in ("nginx", "seaweedfs") and settings.quick else None
    if settings.server != "nginx":
        with endpoint(settings.server, keep) as found:
            yield Place(found, found)
        return
    with endpoint("seaweedfs", keep) as writable, contextlib.ExitStack() as stack:
        if settings.quick:
            folder = data / "static"
            folder.mkdir(exist_ok=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamloader-static-")))
        yield Place(stack.enter_context(nginx(folder, "plain", writable)), writable, folder)


if __name__ == "__main__":
    sys.exit(main())
