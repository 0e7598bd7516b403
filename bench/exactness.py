"""`python -m bench.exactness`: whether loaders repeat their order, also with two ranks and after a resume.

Every loader reads a small dataset of images from nginx, shuffled, without workers: the whole epoch twice, with two
ranks, and interrupted after a third of it and resumed by one rank and by two. Two minutes; bench/results/exactness.json
has the results, from which the pages are made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from bench import contestants, venvs
from bench.__main__ import alone, place
from bench.contestants import BLOCK_READERS, OURS, Contestant, ContestError, peers
from bench.context import RESULTS, Bench, specification
from bench.objects import make_bucket
from bench.plan import Cell, Settings, cells
from bench.progress import showing
from bench.servers import free_ports
from bench.storing import store_all
from bench.workloads import DATA

SAMPLES, BATCH, STOP = 2048, 64, 11
TIMEOUT = 120.0
RANKS = 2

Order = list[list[int]]  # the numbers of the samples of each global batch


class Reading(NamedTuple):
    """What one or more ranks read: the samples of each step, and the state of rank 0 at the end of a part."""

    order: Order
    state: Any


def main() -> int:
    """Ask every loader, and write down the answers."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    settings = Settings(quick=True, name="exactness", workloads=("images",), samples=SAMPLES)
    (cell,) = cells(settings)
    chosen = [OURS, *(peer for peer in peers() if peer.name not in BLOCK_READERS)]
    found: dict[str, Any] = {}
    with alone(DATA), showing(0.0) as show, place(settings, DATA) as where, tempfile.TemporaryDirectory() as results:
        bench = Bench(settings, where, show, results=Path(results))
        make_bucket(where.writable)
        store_all(bench, cell, chosen)
        for one in chosen:
            try:
                found[one.name] = answers(bench, cell, one)
            except ContestError as error:
                found[one.name] = {"failed": str(error)}
            show.end(f"{one.name}: {found[one.name]}")
    about = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "samples": SAMPLES, "stop": STOP * BATCH}
    versions = {one.name: venvs.versions(one.name) for one in chosen if one.kind == "peer"}
    page = {**about, "loaders": found, "versions": versions}
    (RESULTS / "exactness.json").write_text(json.dumps(page, indent=1) + "\n")
    return 0


def answers(bench: Bench, cell: Cell, loader: Contestant) -> dict[str, str]:
    """Return what each reading is like, compared with that of a whole epoch by one rank."""
    ask = partial(read, bench, cell, loader)
    whole = ask().order
    begun = ask(stop=STOP)
    found = {"again": compared(whole, ask().order), "ranks": compared(whole, ask(ranks=RANKS).order)}
    for name, ranks in (("resumed", 1), ("resumed by ranks", RANKS)):
        if begun.state is None:
            found[name] = "no state"
            continue
        try:
            found[name] = compared(whole, begun.order + ask(ranks=ranks, state=begun.state).order)
        except ContestError as error:
            found[name] = f"refused: {str(error).rpartition(' | ')[2]}"
    return found


def read(
    bench: Bench, cell: Cell, loader: Contestant, *, ranks: int = 1, stop: int | None = None, state: Any = None
) -> Reading:
    """Return what the ranks of a loader read. Raises `ContestError`."""
    base = {**specification(bench, cell, loader, bench.place.endpoint), "batch": BATCH // ranks}
    base |= {"world": ranks, "port": free_ports(1)[0], "stop": stop, "state": state, "seed": 1}
    # ranks of one node share its folder, where Mosaic's look for each other; LitData's states name it
    cache = Path(tempfile.gettempdir()) / f"slbench-exact-{loader.name}"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    with ThreadPoolExecutor(ranks) as pool:
        specs = [{**base, "rank": rank, "cache": str(cache)} for rank in range(ranks)]
        lines = list(pool.map(lambda spec: contestants.run(loader, "order", spec, TIMEOUT)[-1], specs))
    shutil.rmtree(cache, ignore_errors=True)
    steps = zip_longest(*(line["ids"] for line in lines), fillvalue=())
    return Reading([list(chain.from_iterable(step)) for step in steps], lines[0]["state"])


def compared(expected: Order, found: Order) -> str:
    """Return how `found` differs from an epoch: samples may stand elsewhere in the batch of a step."""
    if list(map(sorted, expected)) == list(map(sorted, found)):
        return "the same"
    every, read = set(chain.from_iterable(expected)), list(chain.from_iterable(found))
    lost, repeated = len(every - set(read)), len(read) - len(set(read))
    return f"differs: {lost} lost, {repeated} repeated of {len(every)}" if lost or repeated else "another order"


if __name__ == "__main__":
    sys.exit(main())
