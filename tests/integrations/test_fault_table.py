"""Each kind of fault, at each rate, on each server and for each task: the same bytes in the same order, or an error.

`make test-integrations` runs a sample of the cells: each kind once, the rest of a cell by a fixed rule. `make
test-faults` runs all of them, and records their figures (promises.py).
"""

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import promises
import pytest
import zarr
from amounts import LONG
from faulty import certified
from promises import ALL_KINDS, RATES, promise, record
from servers import S3Server
from worker_tasks import run_workers

import streamloader as sl
from streamloader.engine.pace import Pace
from streamloader.errors import FormatError, StorageError, StreamloaderError
from streamloader.options import Layout, RetryPolicy
from streamloader.stats import BatchReport
from streamloader.testing.proxy import KINDS, Fault, FaultProxy

COUNT, ADDED = 800, 200
BUCKET = "fault-table"
LAYOUT = Layout(shard_size=1 << 16, block_size=1 << 14, chunk_size=1 << 12, codec="none")
# of the datasets that runs take seconds for, and that memory does not hold
BIG_COUNT, BIG_LAYOUT = 24_000, Layout(shard_size=1 << 20, block_size=1 << 15, chunk_size=1 << 13, codec="none")
# the policy's own times would make the table take days
POLICY = RetryPolicy(
    outage_seconds=6.0, request_seconds=6.0, base_seconds=0.02, probe_seconds=0.2, response_seconds=1.0
)
# from the first failure of a request to the error: the policy's limits, and the last attempt with its repeat
STATED_SECONDS = POLICY.outage_seconds + POLICY.request_seconds + 2 * POLICY.deadline(1 << 16)
CELL_SECONDS = 240.0  # the machine is shared

TASKS = ["read", "arrays", "convert", "append", "verify"]
SERVERS, TRANSPORTS = ("moto", "seaweedfs"), ("plain", "tls")
OF_BODY = {"trickle", "reset-body", "half-open", "truncate", "short", "flip", "wrong-range", "200", "bandwidth"}
OF_RANGE = {"wrong-range", "200"}
MIB = 1 << 20


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
    def writes(self) -> bool:
        """Whether the task writes: most responses that it gets have no body."""
        return self.task in ("convert", "append")

    @property
    def faults(self) -> list[Fault]:
        """The faults: one that certainly happens, to a request for data if these can have it, and those by rate.

        Mixed, each kind has its share of the rate.
        """
        kinds = [*KINDS] if self.kind == "mixed" else [self.kind]
        one = kinds[sum(str(self).encode()) % len(kinds)]
        certain = Fault(
            one,
            times=1,
            method="GET" if one in OF_BODY else "",
            path="" if self.writes and one in OF_BODY else "/c/",
            header="range" if one in OF_RANGE else "",
        )
        by_rate = [Fault(kind, rate=self.rate / len(kinds)) for kind in kinds]
        return [replace(fault, **SHORTER.get(fault.kind, {})) for fault in (certain, *by_rate)]


# what lasts must last longer than the policy waits, not longer than the test
SHORTER: dict[str, dict[str, Any]] = {
    "404": {"first": 1},
    "stall": {"seconds": 20.0},
    "503-retry-after": {"seconds": 0.3},
    "brown-out": {"seconds": 0.5},
}


def places(kind: str) -> list[Cell]:
    """The cells of a kind. Verifying has no workers, and a conversion reads no ranges."""
    every = (Cell(kind, *place) for place in product(RATES, SERVERS, TRANSPORTS, TASKS, (0, 2)))
    impossible = {("verify", 2)} | ({("convert", 0), ("convert", 2)} if kind in OF_RANGE else set())
    return [cell for cell in every if (cell.task, cell.workers) not in impossible]


# how the errors of a kind name their cause
CAUSES = {"403": "credentials have expired", "200": "ignores ranges", "wrong-range": "another range"}
CAUSES |= dict.fromkeys(["301", "307"], "another region or at another endpoint")


def cells() -> list[Any]:
    """All cells; those that are not in the sample are long.

    The sample has cell number 31 i of the kind number i: as 31 has no factor in common with the number of cells, those
    of the kinds differ in all axes. Cells that share the figures of a run without faults are run by one process.
    """
    found = []
    for number, kind in enumerate(ALL_KINDS):
        of_kind = places(kind)
        sampled = of_kind[31 * number % len(of_kind)]
        for cell in of_kind:
            group = pytest.mark.xdist_group(f"{cell.server}-{cell.transport}-{cell.task}")
            found.append(pytest.param(cell, marks=(group,) if cell == sampled else (group, LONG), id=str(cell)))
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
        for name, rows in {"x": values(0, COUNT), "more": values(COUNT, COUNT + ADDED)}.items():
            (folder / name).mkdir()
            np.save(folder / name / "x.npy", rows)
        sl.convert(folder / "x" / "x.npy", folder / "ours", layout=LAYOUT, workers=0)
        # without a checksum nobody could see a flipped bit
        more = {"compressors": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]}
        array = zarr.create_array(folder / "arrays" / "x", data=values(0, COUNT), chunks=(10, 300), **more)
        assert array.nchunks == COUNT // 10
        self.server, self.proxy, self.clean = cache(self._server), cache(self._proxy), cache(self._clean)
        self.big = cache(self._big)

    def _server(self, name: str) -> S3Server:
        """Return a server with a dataset and a Zarr array."""
        server = self._servers(name)
        with closing(server.client()) as client:
            client.create_bucket(Bucket=BUCKET)
        for data in ("ours", "arrays"):
            self._upload(server, data, data)
        return server

    def _upload(self, server: S3Server, data: str, to: str) -> str:
        """Copy a folder to a server, and return its URL."""
        with closing(server.client()) as client:
            for path in (self._folder / data).rglob("*"):
                if path.is_file():
                    key = f"{to}/{path.relative_to(self._folder / data).as_posix()}"
                    client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
        return f"s3://{BUCKET}/{to}"

    def _proxy(self, name: str, transport: str) -> FaultProxy:
        tls = (self.authority, str(self._folder / "key.pem")) if transport == "tls" else None
        return self._stack.enter_context(FaultProxy(self.server(name).endpoint, seed=1, tls=tls, process=True))

    def _big(self, name: str) -> str:
        """Return the URL of a dataset that takes seconds to read."""
        url, options = f"s3://{BUCKET}/big", self.server(name).storage_options
        sl.convert({"x": values(0, BIG_COUNT)}, url, layout=BIG_LAYOUT, workers=0, storage_options=options)
        return url

    def options(self, cell: Cell, policy: RetryPolicy = POLICY) -> dict[str, Any]:
        """The storage options that lead through the proxy."""
        options = self.server(cell.server).storage_options
        proxy, more = self.proxy(cell.server, cell.transport), options["client_kwargs"]
        more = {**more, "verify": self.authority} if cell.transport == "tls" else more
        return {**options, "endpoint_url": proxy.endpoint, "client_kwargs": more, "retry": policy}

    def prepare(self, cell: Cell, number: int) -> str:
        """Return the URL that a run of the task of a cell reads or writes, without faults."""
        if not cell.writes:
            return f"s3://{BUCKET}/arrays/x" if cell.task == "arrays" else f"s3://{BUCKET}/ours"
        path = f"written/{cell}-{number}"
        return (
            self._upload(self.server(cell.server), "ours", path) if cell.task == "append" else f"s3://{BUCKET}/{path}"
        )

    def run(self, cell: Cell, url: str, options: dict[str, Any]) -> str:
        """Do the task of a cell; return a digest of all that it gives, in order."""
        if cell.task in ("read", "arrays"):
            if cell.workers:
                run_workers(cell.workers)
            more = {"sample_axis": 0, "strict": True} if cell.task == "arrays" else {}
            ds = sl.NumpyDataset(
                url, batch_size=50, with_index=True, num_workers=cell.workers, storage_options=options, **more
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
            sl.convert(self._folder / "x" / "x.npy", url, layout=LAYOUT, **more)
        else:
            sl.append(url, self._folder / "more" / "x.npy", **more)
        return "written"

    def check_written(self, cell: Cell, url: str) -> None:
        """Assert that what was written has every row once, read without the proxy."""
        if cell.writes:
            options = self.server(cell.server).storage_options
            rows = sl.NumpyDataset(url, batch_size=100, shuffle=False, remainder="uneven", storage_options=options)
            found = np.concatenate([batch["x"] for batch in rows])
            np.testing.assert_array_equal(found, values(0, COUNT + (ADDED if cell.task == "append" else 0)))

    def _clean(self, task: str, workers: int, server: str, transport: str) -> tuple[str, int]:
        """Return the digest of a task without faults, and the number of its requests.

        It is the smaller one of two runs: where the machine stands still, what is late is sent again.
        """
        cell = Cell("clean", 0.0, server, transport, task, workers)
        proxy, counts = self.proxy(server, transport), []
        proxy.faults = []
        for number in range(2):
            url = self.prepare(cell, number)
            before = proxy.counts["requests"]
            found = self.run(cell, url, self.options(cell))
            counts.append(proxy.counts["requests"] - before)
            self.check_written(cell, url)
        return found, min(counts)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Table]:
    with ExitStack() as stack:
        yield Table(request.getfixturevalue, tmp_path_factory.mktemp("table"), stack)


def outcome_of(table: Table, cell: Cell, number: int) -> dict[str, Any]:
    """Run a cell, check it, and return its figures."""
    expected, requests = table.clean(cell.task, cell.workers, cell.server, cell.transport)
    url, options, proxy = table.prepare(cell, number), table.options(cell), table.proxy(cell.server, cell.transport)
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
        # a request of a brown-out also has the fault that this is for it
        "faults": counts.total() - counts["requests"] - counts["brown-out"],
    }


def check_error(cell: Cell, error: StreamloaderError) -> None:
    """Assert that an error names the object, the attempts unless it was one, and the cause, in the stated time."""
    text = str(error)
    assert re.search(rf"s3://{BUCKET}/(ours|arrays|written)\b", text), text
    assert CAUSES.get(cell.kind, "") in text, text
    if attempts := promises.ATTEMPTS.search(text):
        assert float(attempts[2]) <= STATED_SECONDS <= promise(promises.LATEST), text
    assert isinstance(error, StorageError | FormatError), text


@pytest.mark.quick(7)
@pytest.mark.parametrize("cell", cells())
def test_a_fault_gives_the_same_bytes_or_an_error_that_names_object_attempts_and_cause(cell, table):
    most = promise(promises.FEW_REQUESTS if cell.rate < max(RATES) else promises.MANY_REQUESTS)
    for number in range(2):  # where the machine stands still for a second, what is late is sent again: once more then
        figures = outcome_of(table, cell, number)
        print(json.dumps(figures))
        assert figures["faults"] > 0
        if few := figures["outcome"] != "right" or figures["requests"] <= most * figures["clean_requests"]:
            break
    record(**figures)
    assert few


def test_the_page_says_what_the_results_are():
    """Of each kind: how it ended at 1, 5 and 20 %, in all the cells that are in the results; and each promise."""
    page, results = promises.PAGE.read_text(), promises.RESULTS.read_text()
    assert page == promises.with_results(page, results)
    assert not [name for name, shown in promises.recorded(results).items() if "-" in shown.split(" | ")]


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


PLAIN = Cell("clean", 0.0, "seaweedfs", "plain", "read", 0)


def opened(table: Table, **more: Any) -> sl.NumpyDataset:
    """Open the large dataset without faults, by the default policy, with memory for half of it unless more is given."""
    table.proxy(PLAIN.server, PLAIN.transport).faults = []
    options, shuffle = table.options(PLAIN, RetryPolicy()), sl.Shuffle(window=256, lanes=8)
    given = {"with_index": True, "num_workers": 0, "memory": 16 * MIB, "shuffle": shuffle, "storage_options": options}
    return sl.NumpyDataset(table.big(PLAIN.server), **given | more)


def checked(batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the batches of an epoch of the large dataset; assert that each has the right bytes, and each row comes."""
    seen: list[int] = []
    for batch in batches:
        assert np.array_equal(batch["x"][:, 0], batch["index"].astype(np.float32))
        seen += batch["index"].tolist()
        yield batch
    assert sorted(seen) == list(range(BIG_COUNT))


@pytest.mark.parametrize("outage", outages())
def test_a_run_outlives_an_outage_and_resumes_soon_after_it(outage, table, monkeypatch):
    """The server refuses connections and resets those that it has; the policy is the default one."""
    monkeypatch.setattr(
        "streamloader.engine.engine.Pace", lambda _, **more: Pace(outage.in_flight, first=outage.in_flight, **more)
    )
    proxy, ds = table.proxy(PLAIN.server, PLAIN.transport), opened(table, batch_size=50)
    returned = first_after = 0.0
    down = threading.Timer(outage.seconds, proxy.start)
    for number, _ in enumerate(checked(ds)):
        if number == 0:
            proxy.stop()
            returned = time.monotonic() + outage.seconds
            down.start()
        elif not first_after and time.monotonic() > returned:
            first_after = time.monotonic() - returned
    down.join()
    record(outage=outage.seconds, in_flight=outage.in_flight, resumed=[round(first_after, 2)])
    assert 0 < first_after <= promise(promises.RESUMED)


ROUNDS = 3


@LONG
@pytest.mark.alone
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_the_rate_with_5_percent_of_faults_is_at_least_the_stated_part_of_that_without(kind, table):
    """Of runs with and without faults in turn."""
    proxy, cell = table.proxy(PLAIN.server, PLAIN.transport), replace(PLAIN, kind=kind, rate=0.05)
    rates: list[list[float]] = [[], []]
    try:
        for number in range(2 * ROUNDS):
            which = number % 2
            batches = checked(opened(table, batch_size=200, memory=64 * MIB))
            proxy.faults = cell.faults[1:] if which else []
            begin = time.monotonic()
            samples = sum(len(batch["index"]) for batch in batches)
            rates[which].append(samples / (time.monotonic() - begin))
    except (StorageError, FormatError) as error:
        record(rate_of=kind, ended=error.code)
        assert kind in promises.ENDING
        return
    finally:
        proxy.faults = []
    ratio = median(rates[1]) / median(rates[0])
    record(rate_of=kind, ratio=round(ratio, 2), rates=[[round(rate) for rate in found] for found in rates])
    assert ratio >= promise(promises.RATE) or kind in promises.SLOW


STEP_SECONDS = 0.02


@LONG
@pytest.mark.alone
def test_the_p99_wait_of_a_step_is_short_while_1_percent_of_responses_stall(table):
    """A response that stalls comes after a minute; a step of training lasts 20 ms."""
    proxy = table.proxy(PLAIN.server, PLAIN.transport)
    waits, stalled = [], 0
    for faults in ([], [Fault("stall", rate=0.01)]):
        reports: list[BatchReport] = []
        ds, before = opened(table, batch_size=40, on_batch=reports.append), proxy.counts["stall"]
        proxy.faults = faults
        for _ in checked(ds):
            time.sleep(STEP_SECONDS)
        waits.append(sorted(report.wait_seconds for report in reports[1:]))
        stalled = proxy.counts["stall"] - before
    proxy.faults = []
    without, found = (one[int(0.99 * len(one))] for one in waits)
    figures = {"p99": found, "p99_clean": without, "longest": waits[1][-1]}
    record(**{name: round(seconds, 3) for name, seconds in figures.items()}, steps=len(waits[1]), stalled=stalled)
    assert stalled >= 5
    assert found <= promise(promises.WAIT)
