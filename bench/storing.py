"""The datasets of all contestants: written once, and remembered while the store keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bench import contestants, venvs
from bench.contestants import LISTING, OURS, Contestant, ContestError
from bench.context import Bench, counts, described, specification
from bench.data import prepare
from bench.objects import BUCKET, erase, mirror, stored, stored_in
from bench.plan import Cell, part_of

WRITE_TIMEOUT = 1200.0
KEPT = {OURS.name, *LISTING}  # in the store also where a mirror is read: one is read from both, the others list it
QUICK_WRITERS = 2  # at once, where nothing but reading is measured


def store_all(bench: Bench, cell: Cell, those: Sequence[Contestant]) -> None:
    """Write the datasets of all contestants that are not there yet, after the raw data, whole or a part for some."""
    for part in {1, *(part_of(bench.settings, cell, one) for one in those)}:
        prepare(cell.workload.name, bench.settings.count(cell.workload) // part, bench.data)
    pool = ThreadPoolExecutor(QUICK_WRITERS if bench.settings.quick else 1)
    try:
        list(pool.map(partial(store, bench, cell), those))
    finally:  # an interrupted run begins no further one
        pool.shutdown(cancel_futures=True)


def store(bench: Bench, cell: Cell, contestant: Contestant) -> None:
    """Write the contestant's dataset unless it is there, and remember its size."""
    spec = specification(bench, cell, contestant, bench.place.writable)
    prefix = spec["url"].removeprefix(f"s3://{BUCKET}/")
    index = Index(bench.data / "stored.json")
    fingerprint = f"{contestant.fingerprint()} {bench.place.writable.name}"
    label = f"{cell.name} {contestant.name} written"
    folder, place = bench.place.folder, bench.place.writable
    size = stored_in(folder, prefix) if folder else stored(place, prefix)[1]
    if index.get(prefix) == fingerprint and size:
        bench.sizes[cell.name, contestant.name] = size
        return
    bench.show.begin(label)
    if contestant.kind == "peer":
        problem = venvs.make(contestant.name, bench.show.begin)
        if problem:
            bench.out.add((cell.name, contestant.name))
            bench.record({**described(cell, contestant), "kind": "write", "failed": problem})
            bench.show.end(f"{label}: {problem}")
            return
    erase(place, prefix)
    try:
        lines = contestants.run(contestant, "write", spec, WRITE_TIMEOUT)
        result = lines[-1] if lines else {"failed": "it printed nothing"}
    except ContestError as error:
        result = {"failed": str(error)}
    objects, size = stored(place, prefix)
    bench.sizes[cell.name, contestant.name] = size
    line = {**described(cell, contestant), "kind": "write", **counts(bench, cell, contestant), **result}
    bench.record({**line, "objects": objects, "stored_bytes": size})
    if "failed" in result or "unsupported" in result:
        bench.out.add((cell.name, contestant.name))
        bench.show.end(f"{label}: {result.get('failed') or 'unsupported: ' + result['unsupported']}")
        return
    if folder is not None:
        mirror(place, prefix, folder)
        if bench.settings.quick and contestant.name not in KEPT:
            erase(place, prefix)
    with bench.lock:
        index.set(prefix, fingerprint)
    bench.show.end(f"{label}: {result['seconds']:.1f} s, {size / 1e6:.0f} MB in {objects} objects")


class Index:
    """Which datasets are in the store, and from which program: they are written once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, prefix: str) -> str:
        """Return the fingerprint of a dataset, or nothing."""
        return str(self._read().get(prefix, ""))

    def set(self, prefix: str, fingerprint: str) -> None:
        """Remember a dataset."""
        self._path.write_text(json.dumps({**self._read(), prefix: fingerprint}, indent=1, sort_keys=True))

    def _read(self) -> dict[str, str]:
        return dict(json.loads(self._path.read_text())) if self._path.exists() else {}
