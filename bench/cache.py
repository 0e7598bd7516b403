"""`python -m bench.cache`: caches on local disk that have room for a part of the data; bench/results/cache.md.

The project's cache, Mosaic's and LitData's, each in a process of its own that reads the same number of epochs from the
same server. The peers' shards have a quarter of their default size, since caches for a quarter of the data would not
hold the few shards that their workers need at once. Where all of the data has room the peers' caches have no limit,
since they hold more files than the data. What all of them ask of the server is in nginx's log: two epochs are measured
with an empty cache, and all epochs in another process, so that the difference is that of the later ones. Both end while
the next epoch is read ahead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.__main__ import alone, place
from bench.contestants import OURS, Contestant, ContestError, peers
from bench.context import RESULTS, Bench, counts, specification
from bench.objects import make_bucket
from bench.plan import Cell, Settings
from bench.progress import showing
from bench.report import last_run, table
from bench.run import fronts, measured
from bench.servers import Endpoint
from bench.storing import store_all
from bench.workloads import DATA, WORKLOADS

SHARES = (0.25, 0.5, 1.0)
MARGIN = 1.05  # of the whole data: for files that are larger than what they hold
PEERS = ("mosaic", "litdata")
TIMEOUT = 180.0  # of a process: an epoch that takes a minute is too slow, though it may end


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the page; 1 where a run failed."""
    options = parser().parse_args(arguments)
    cell, data = Cell(WORKLOADS[options.workload], "small-shards"), Path(options.data)
    settings = Settings(quick=False, name="cache", server=options.server, samples=options.samples, peers=options.peers)
    those = [OURS, *(one for one in peers() if one.name in options.peers)]
    with alone(data), place(settings, data) as where, showing(0.0) as show:
        bench = Bench(settings, where, show, data, Path(options.results))
        make_bucket(where.writable)
        store_all(bench, cell, those)
        with fronts(bench, ("count",) if options.server == "nginx" else ()) as endpoints:
            at = endpoints.get("count", endpoints[""])
            runs = [(contestant, share) for contestant in those for share in options.shares]
            results = [take(bench, cell, run, at, options) for run in runs]
    source = Path(options.results) / "cache.jsonl"
    source.with_suffix(".md").write_text(page(last_run(source)))
    return 0 if all(results) else 1


def take(bench: Bench, cell: Cell, run: tuple[Contestant, float], at: Endpoint, options: argparse.Namespace) -> bool:
    """Do one run, with a cache for a share of the data, and record it; return whether it went as it must."""
    contestant, share = run
    size = bench.sizes.get((cell.name, contestant.name), 0)
    spec = specification(bench, cell, contestant, at) | {"workers": options.workers * (contestant.kind == "peer")}
    if share < 1 or contestant.kind != "peer":
        spec["extra"] = {"cache_bytes": round(size * share * (MARGIN if share == 1 else 1))}
    line: dict[str, Any] = {"kind": "cache", "contestant": contestant.name, "share": share, "stored_bytes": size}
    label = f"{contestant.name} with room for {share:.0%}"
    bench.show.begin(label)
    try:
        line["two"] = measured(contestant, spec | {"epochs": 2}, at, TIMEOUT)
        line["all"] = measured(contestant, spec | {"epochs": options.epochs}, at, TIMEOUT)
    except ContestError as error:
        line["failed"] = str(error)
    bench.record(line | counts(bench, cell, contestant))
    bench.show.end(f"{label}: {line.get('failed') or in_words(line)}")
    return "failed" not in line


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found = argparse.ArgumentParser("python -m bench.cache", description=__doc__)
    found.add_argument("--workload", choices=list(WORKLOADS), default="images")
    found.add_argument("--samples", type=int, default=0, help="fewer than the workload has, to try it")
    found.add_argument("--epochs", type=int, default=6)
    found.add_argument(
        "--shares", nargs="*", type=float, default=list(SHARES), help="of the data, that the cache holds"
    )
    found.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    found.add_argument("--workers", type=int, default=2, help="DataLoader workers of the peers")
    found.add_argument("--server", default="nginx", help="others do not count what is asked of them")
    found.add_argument("--data", default=str(DATA))
    found.add_argument("--results", default=str(RESULTS))
    return found


def later(line: Mapping[str, Any]) -> tuple[float, float]:
    """Return the samples/s of the epochs after two, and the share of the data that each asked of the server."""
    epochs = line["all"]["epochs"][2:]
    rate = sum(one["samples"] for one in epochs) / sum(one["seconds"] for one in epochs)
    asked = [line[name].get("requests", {}).get("bytes", float("nan")) for name in ("two", "all")]
    return rate, (asked[1] - asked[0]) / len(epochs) / max(1, line["stored_bytes"])


def in_words(line: Mapping[str, Any]) -> str:
    """Return the figures of a run in words."""
    rate, asked = later(line)
    return f"{rate:,.0f} samples/s in later epochs, which fetch {asked:.1%} of the data"


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of a run."""
    body = []
    for line in lines:
        if line.get("kind") != "cache":
            continue
        name = [line["contestant"], f"{line['share']:.0%}"]
        if "failed" in line or not line["all"]["epochs"]:
            body.append([*name, line.get("failed", "unsupported"), "", ""])
            continue
        (rate, asked), first = later(line), line["all"]["epochs"][0]
        body.append([*name, f"{first['samples'] / first['seconds']:,.0f}", f"{rate:,.0f}", f"{asked:.1%}"])
    head = ["loader", "room for", "samples/s, first epoch", "later epochs", "fetched in each, of the data"]
    about = str(__doc__).split("\n", 2)[2].strip()
    return f"# Caches on local disk\n\n`python -m bench.cache`. {about}\n\n{table(head, body)}"


if __name__ == "__main__":
    sys.exit(main())
