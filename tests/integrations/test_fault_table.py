"""Each kind of fault, at each rate, on each server and for each task: the same bytes in the same order, or an error.

`make test-integrations` runs a sample of the cells: each kind once, the rest of a cell by a fixed rule. `make
test-faults` runs all of them.
"""

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from amounts import LONG
from faulty import certified
from servers import S3Server
from worker_tasks import run_workers

import streamloader as sl
from streamloader.engine.pace import Pace
from streamloader.errors import FormatError, StorageError, StreamloaderError
from streamloader.options import Layout, RetryPolicy
from streamloader.storage import open_store
from streamloader.testing.proxy import KINDS, Fault, FaultProxy

COUNT, ADDED = 2000, 500
BUCKET = "fault-table"
LAYOUT = Layout(shard_size=1 << 16, block_size=1 << 14, chunk_size=1 << 12, codec="none")
# the policy's own times would make the table take days
POLICY = RetryPolicy(
    outage_seconds=6.0, request_seconds=6.0, base_seconds=0.02, probe_seconds=0.2, response_seconds=1.0
)
# from the first failure of a request to the error: the policy's limits, and the last attempt with its repeat
STATED_SECONDS = POLICY.outage_seconds + POLICY.request_seconds + 2 * POLICY.deadline(1 << 16)
CELL_SECONDS = 240.0  # the machine is shared

TASKS = ["read", "arrays", "convert", "append", "verify"]
AXES = [(0.01, 0.05, 0.2), ("moto", "seaweedfs"), ("plain", "tls"), TASKS, (0, 2)]
PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"
RESULTS = PAGE.parent.parent / "bench" / "results" / "faults.jsonl"
MIB = 1 << 20


@cache
def promise(name: str) -> float:
    """The figure of a row of the page's table of promises."""
    (figure,) = re.findall(rf"^\| {re.escape(name)} \| [^|\d]*([\d.]+)", PAGE.read_text(), re.M)
    return float(figure)


def record(figures: dict[str, Any]) -> None:
    """Append figures to the file that the environment names: `make test-faults` does."""
    if file := os.environ.get("STREAMLOADER_FAULT_RESULTS"):
        with Path(file).open("a") as out:
            print(json.dumps(figures), file=out)


@dataclass(frozen=True)
class Cell:
    """One place of the table."""

    kind: str
    rate: float
    server: str
    transport: str
    task: str
    workers: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.rate}-{self.server}-{self.transport}-{self.task}-{self.workers}"

    @property
    def faults(self) -> list[Fault]:
        """The faults; mixed, each kind has its share of the rate."""
        kinds = [*KINDS] if self.kind == "mixed" else [self.kind]
        share = self.rate / len(kinds)
        return [replace(Fault(kind, rate=share), **SHORTER.get(kind, {})) for kind in kinds]


# what lasts must last longer than the policy waits, not longer than the test
SHORTER: dict[str, dict[str, Any]] = {
    "404": {"first": 1},
    "stall": {"seconds": 20.0},
    "503-retry-after": {"seconds": 0.3},
    "brown-out": {"seconds": 0.5},
}


def cells() -> list[Any]:
    """All cells; those that are not in the sample are long.

    The sample has cell number 31 i (mod 120) of the kind number i: as 31 has no factor in common with 120, the cells
    of the kinds differ in all axes.
    """
    found = []
    for number, kind in enumerate([*KINDS, "mixed"]):
        others = list(product(*AXES))
        sampled = others[31 * number % len(others)]
        for place in others:
            cell = Cell(kind, *place)
            found.append(pytest.param(cell, marks=() if place == sampled else LONG, id=str(cell)))
    return found


def values(start: int, stop: int) -> np.ndarray[Any, Any]:
    """The rows of the field x: each has its number in its content."""
    return np.arange(start, stop, dtype=np.float32)[:, None] + np.arange(300, dtype=np.float32) / 512


class Table:
    """The servers, each with its data and a proxy in front, in a process of its own."""

    def __init__(self, servers: Callable[[str], S3Server], folder: Path, stack: ExitStack) -> None:
        self._servers, self._folder, self._stack = servers, folder, stack
        certified(folder, ["127.0.0.1"])
        self.authority = str(folder / "ca.pem")
        np.save(folder / "x.npy", values(0, COUNT))
        (folder / "more").mkdir()
        np.save(folder / "more" / "x.npy", values(COUNT, COUNT + ADDED))
        self.server, self.proxy = cache(self._server), cache(self._proxy)
        self.clean = cache(self._clean)

    def _server(self, name: str) -> S3Server:
        """Return a server with a dataset and a Zarr array."""
        server = self._servers(name)
        with closing(server.client()) as client:
            client.create_bucket(Bucket=BUCKET)
        options = server.storage_options
        sl.convert(self._folder / "x.npy", f"s3://{BUCKET}/ours", layout=LAYOUT, workers=0, storage_options=options)
        array = zarr.create_array(self._folder / f"{name}.zarr/x", data=values(0, COUNT), chunks=(10, 300))
        assert array.nchunks == COUNT // 10
        store = open_store(f"s3://{BUCKET}/arrays", options)
        zarr.open_group(self._folder / f"{name}.zarr")
        for path in (self._folder / f"{name}.zarr").rglob("*"):
            if path.is_file():
                store.put(path.relative_to(self._folder / f"{name}.zarr").as_posix(), path.read_bytes())
        return server

    def _proxy(self, name: str, transport: str) -> FaultProxy:
        tls = (self.authority, str(self._folder / "key.pem")) if transport == "tls" else None
        return self._stack.enter_context(FaultProxy(self.server(name).endpoint, seed=1, tls=tls, process=True))

    def options(self, cell: Cell) -> dict[str, Any]:
        """The storage options that lead through the proxy."""
        options = self.server(cell.server).storage_options
        proxy, more = self.proxy(cell.server, cell.transport), options["client_kwargs"]
        more = {**more, "verify": self.authority} if cell.transport == "tls" else more
        return {**options, "endpoint_url": proxy.endpoint, "client_kwargs": more, "retry": POLICY}

    def prepare(self, cell: Cell) -> str:
        """Return the URL that the task of a cell reads or writes, without faults."""
        if cell.task in ("read", "verify"):
            return f"s3://{BUCKET}/ours"
        if cell.task == "arrays":
            return f"s3://{BUCKET}/arrays/x"
        url = f"s3://{BUCKET}/written/{cell}"
        if cell.task == "append":
            options = self.server(cell.server).storage_options
            sl.convert(self._folder / "x.npy", url, layout=LAYOUT, workers=0, storage_options=options)
        return url

    def run(self, cell: Cell, url: str, options: dict[str, Any]) -> str:
        """Do the task of a cell; return a digest of all that it gives, in order."""
        if cell.task in ("read", "arrays"):
            if cell.workers:
                run_workers(cell.workers)
            ds = sl.NumpyDataset(
                url,
                batch_size=50,
                with_index=True,
                num_workers=cell.workers,
                storage_options=options,
                sample_axis=0 if cell.task == "arrays" else None,
            )
            found = hashlib.sha256()
            for batch in ds:
                for name in ("index", "x"):
                    found.update(np.ascontiguousarray(batch[name]).tobytes())
            return found.hexdigest()
        if cell.task == "verify":
            report = sl.verify(url, storage_options=options)
            if report.problems:
                raise FormatError("; ".join(map(str, report.problems)), "it is a problem of the transfer")
            return f"{report.samples} {report.objects} {report.bytes}"
        more = {"workers": cell.workers, "storage_options": options}
        if cell.task == "convert":
            sl.convert(self._folder / "x.npy", url, layout=LAYOUT, **more)
        else:
            sl.append(url, self._folder / "more" / "x.npy", **more)
        return "written"

    def check_written(self, cell: Cell, url: str) -> None:
        """Assert that what was written has every row once, read without the proxy."""
        if cell.task in ("convert", "append"):
            rows = sl.NumpyDataset(
                url,
                batch_size=100,
                shuffle=False,
                remainder="uneven",
                storage_options=self.server(cell.server).storage_options,
            )
            found = np.concatenate([batch["x"] for batch in rows])
            np.testing.assert_array_equal(found, values(0, COUNT + (ADDED if cell.task == "append" else 0)))

    def _clean(self, task: str, workers: int, server: str, transport: str) -> tuple[str, int]:
        """Return the digest of a task without faults, and the number of its requests."""
        cell = Cell("clean", 0.0, server, transport, task, workers)
        url, proxy = self.prepare(cell), self.proxy(server, transport)
        proxy.faults = []
        before = proxy.counts["requests"]
        found = self.run(cell, url, self.options(cell))
        self.check_written(cell, url)
        return found, proxy.counts["requests"] - before


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    with ExitStack() as stack:
        yield Table(request.getfixturevalue, tmp_path_factory.mktemp("table"), stack)


def outcome_of(table: Table, cell: Cell) -> dict[str, Any]:
    """Run a cell, check it, and return its figures."""
    expected, requests = table.clean(cell.task, cell.workers, cell.server, cell.transport)
    url, options, proxy = table.prepare(cell), table.options(cell), table.proxy(cell.server, cell.transport)
    proxy.faults = cell.faults
    before, begin, error = proxy.counts, time.monotonic(), None
    try:
        found = table.run(cell, url, options)
    except StreamloaderError as caught:
        error = caught
    seconds = time.monotonic() - begin
    counts = proxy.counts - before
    proxy.faults = []
    assert seconds < CELL_SECONDS
    if error is None:
        assert found == expected
        table.check_written(cell, url)
    else:
        check_error(cell, error)
    return {
        **vars(cell),
        "outcome": "right" if error is None else error.code,
        "error": str(error or ""),
        "seconds": round(seconds, 1),
        "requests": counts["requests"],
        "clean_requests": requests,
        "faults": sum(count for name, count in counts.items() if name != "requests"),
    }


def check_error(cell: Cell, error: StreamloaderError) -> None:
    """Assert that an error names the object, the attempts unless it was one, and the cause, in the stated time."""
    text = str(error)
    assert f"{BUCKET}/" in text, text
    attempts = re.search(r"\((\d+) attempts in ([\d.]+) s\)", text)
    if attempts:
        assert float(attempts[2]) <= STATED_SECONDS, text
    assert isinstance(error, StorageError | FormatError), text


@pytest.mark.parametrize("cell", cells())
def test_a_fault_gives_the_same_bytes_or_an_error_that_names_object_attempts_and_cause(cell, table):
    figures = outcome_of(table, cell)
    print(json.dumps(figures))
    record(figures)
    # the machine is shared, and where it stands still for a second, what is late for this policy is repeated too
    most = promise("requests with faults, of those without and the faults") * (
        figures["clean_requests"] + figures["faults"]
    )
    assert figures["outcome"] != "right" or figures["requests"] <= most


def test_the_page_says_what_the_results_are():
    """Of each kind: how it ended at 1, 5 and 20 %, in all the cells that are in the results."""
    found: dict[str, dict[float, set[str]]] = {}
    for line in RESULTS.read_text().splitlines():
        cell = json.loads(line)
        if "outcome" in cell:
            found.setdefault(cell["kind"], {}).setdefault(cell["rate"], set()).add(cell["outcome"])
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", PAGE.read_text(), re.M))
    assert set(rows) == {*KINDS, "mixed"}
    for kind, row in rows.items():
        shown = [", ".join(sorted(found.get(kind, {}).get(rate, ()))) or "-" for rate in (0.01, 0.05, 0.2)]
        assert [part.strip() for part in row.split("|")][-3:] == shown, kind


@dataclass
class Outage:
    """A run whose store is down for a while, and how many requests it may have in flight."""

    seconds: float
    in_flight: int


def outages() -> list[Any]:
    """One outage of a second in `make test-integrations`, all others in `make test-faults`."""
    every = [Outage(seconds, count) for seconds, count in product((1.0, 10.0, 60.0, 120.0), (1, 8, 64))]
    return [
        pytest.param(one, marks=() if one == Outage(1.0, 8) else LONG, id=f"{one.seconds:g}s-{one.in_flight}")
        for one in every
    ]


@pytest.mark.parametrize("outage", outages())
def test_a_run_outlives_an_outage_and_resumes_soon_after_it(outage, table, monkeypatch):
    """The server refuses connections and resets those that it has; the policy is the default one."""
    monkeypatch.setattr(
        "streamloader.engine.engine.Pace", lambda _, **more: Pace(outage.in_flight, first=outage.in_flight, **more)
    )
    proxy = table.proxy("seaweedfs", "plain")
    proxy.faults = []
    cell = Cell("outage", 0.0, "seaweedfs", "plain", "read", 0)
    options = {**table.options(cell), "retry": RetryPolicy()}
    ds = sl.NumpyDataset(
        table.prepare(cell), batch_size=10, with_index=True, num_workers=0, memory=8 * MIB, storage_options=options
    )
    seen: list[int] = []
    returned = first_after = 0.0
    down = threading.Timer(outage.seconds, proxy.start)
    for number, batch in enumerate(ds):
        assert np.array_equal(batch["x"][:, 0], batch["index"].astype(np.float32))
        seen += batch["index"].tolist()
        if number == 0:
            proxy.stop()
            returned = time.monotonic() + outage.seconds
            down.start()
        elif not first_after and time.monotonic() > returned:
            first_after = time.monotonic() - returned
    down.join()
    record({"outage": outage.seconds, "in_flight": outage.in_flight, "resumed": round(first_after, 2)})
    assert sorted(seen) == list(range(COUNT))
    assert 0 < first_after <= promise("seconds from the server's return to the next right batch")
