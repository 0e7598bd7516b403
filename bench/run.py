"""The cells of a run: contestants in turns, one line for each process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench import contestants
from bench.contestants import OURS, Contestant, ContestError
from bench.context import Bench, counts, described, specification
from bench.figures import rate, rates_in_words
from bench.machine import touch_memory
from bench.objects import BUCKET, counted, make_bucket, recall
from bench.plan import Settings, Step, cells, expected_seconds, steps
from bench.servers import Endpoint, Front, nginx
from bench.storing import store_all

EPOCHS = 2  # at least
TIMEOUT = 600.0
QUICK_PEER_TIMEOUT = 90.0  # one was seen to need 36 s for its first batch, and 106 for that of the second epoch


def begin(bench: Bench) -> None:
    """Record the first line of a run: what was asked for, and what memory costs here."""
    bench.record({"kind": "run", "settings": vars(bench.settings), "fresh_memory": touch_memory(bench.settings.touch)})


def run_cells(bench: Bench, peers: list[Contestant], workloads: Sequence[str]) -> None:
    """Measure every cell of these workloads."""
    make_bucket(bench.place.writable)
    for number, cell in enumerate(cells(bench.settings)):
        if cell.workload.name not in workloads:
            continue
        first = 2 * number % max(1, len(peers))  # where time runs out, not the same ones are left out in each cell
        turns = peers[first:] + peers[:first]
        bench.show.begin(f"{cell.name}: data")
        store_all(bench, cell, [OURS, *peers])
        with fronts(bench, bench.settings.fronts) as endpoints:
            for step in steps(bench.settings, cell, turns):
                take(bench, step, endpoints)


@contextlib.contextmanager
def fronts(bench: Bench, names: tuple[Front, ...]) -> Iterator[dict[str, Endpoint]]:
    """Run nginx once for each front, over the folder or before the server; "" is the server that is measured."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Endpoint] = {"": bench.place.endpoint, "store": bench.place.writable}
        for name in names:
            if name != "store":
                found[name] = stack.enter_context(
                    nginx(bench.place.folder or bench.place.endpoint, name, bench.place.writable)
                )
        yield found


def take(bench: Bench, step: Step, endpoints: Mapping[str, Endpoint]) -> None:
    """Run one step unless its contestant cannot."""
    peer = step.contestant.kind == "peer"
    if step.key in bench.out:
        return
    expected = expected_seconds(bench.settings, step)
    rates = bench.best.get(step.key, {})
    if step.workers is None and not rates:
        return
    workers = step.workers if step.workers is not None else max(rates, key=lambda n: rates[n], default=0)
    label = f"{step.cell.name} {step.contestant.name}{f' workers={workers}' if peer else ''} {step.front}".rstrip()
    line = {**described(step.cell, step.contestant), "kind": "read", "repeat": step.repeat, "workers": workers}
    owner = OURS.name if step.contestant.kind == "ceiling" else step.contestant.name
    line |= {"front": step.front, "stored_bytes": bench.sizes.get((step.cell.name, owner), 0)}
    line |= counts(bench, step.cell, step.contestant)
    bench.show.begin(label)
    spec = specification(bench, step.cell, step.contestant, endpoints[step.front])
    spec |= {"workers": workers, "epochs": 1 if step.front == "count" else EPOCHS}
    spec["seconds"] = 0.0 if step.front == "count" else bench.settings.seconds
    folder = None if step.front == "store" else bench.place.folder
    recall(bench.place.writable, spec["url"].removeprefix(f"s3://{BUCKET}/"), folder)
    try:
        result = measured(step.contestant, spec, endpoints[step.front], timeout(bench.settings, step.contestant))
    except ContestError as error:
        result = {"failed": str(error)}
    done = bench.record({**line, **result})
    if "unsupported" in result:
        bench.out.add(step.key)
    if "failed" in result or "unsupported" in result:
        bench.show.end(f"{label}: {result.get('failed') or 'unsupported: ' + result['unsupported']}", expected)
        return
    if not step.front:
        bench.best.setdefault(step.key, {})[workers] = rate(done["epochs"][0])
    bench.show.end(f"{label}: {rates_in_words(done, step.cell.workload.unit)}", expected)


def timeout(settings: Settings, contestant: Contestant) -> float:
    """Return after how many seconds a process is given up."""
    return QUICK_PEER_TIMEOUT if settings.quick and contestant.kind == "peer" else TIMEOUT


def measured(contestant: Contestant, spec: Mapping[str, Any], endpoint: Endpoint, most: float) -> dict[str, Any]:
    """Run a reading contestant and return what is to be recorded. Raises `ContestError`."""
    offset = endpoint.log.stat().st_size if endpoint.log and endpoint.log.exists() else 0
    lines = contestants.run(contestant, "read", spec, most)
    result: dict[str, Any] = {"epochs": [line for line in lines if "epoch" in line]}
    for line in lines:
        result |= {name: line[name] for name in ("stats", "unsupported") if name in line}
    if not result["epochs"] and "unsupported" not in result:
        raise ContestError(f"{contestant.name}: no epoch was printed")
    if endpoint.log is not None:
        found = counted(endpoint.log, offset)
        result["requests"] = {"gets": found.gets, "others": found.others, "bytes": found.bytes}
    return result
