"""A store that is away for a while or answers wrongly once: a run goes on, and says what it waits for."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import numbers
from folder_server import FolderServer, folder_server
from servers import free_ports

import streamloader as sl
from streamloader.errors import FormatError, StreamloaderError
from streamloader.options import RetryPolicy
from streamloader.torch_dataset import StreamingDataset

COUNT = 2000
FIELDS = ["x", "label"]
QUICK = RetryPolicy(response_seconds=1.0, min_bytes_per_second=1e6, report_seconds=0.5, probe_seconds=0.2)
PLANES = ["http", "s3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outages")
    datasets.write(path / "data", COUNT, FIELDS)
    return path


@contextlib.contextmanager
def process(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server of the folder as a process of its own until the block ends."""
    program = Path(__file__).with_name("folder_server.py")
    server = subprocess.Popen([sys.executable, str(program), str(folder), str(port)])
    try:
        yield server
    finally:
        server.kill()
        server.wait()


def dataset(endpoint: str, plane: str, retry: RetryPolicy = QUICK, **more: Any) -> StreamingDataset:
    """Open the dataset by obstore ("http") or own sockets ("s3"), once the server answers."""
    s3 = {"key": "k", "secret": "s", "endpoint_url": endpoint, "client_kwargs": {"region_name": "us-east-1"}}
    url, options = ("s3://data", s3) if plane == "s3" else (f"{endpoint}/data", {})
    give_up = time.monotonic() + 20
    while True:
        try:
            return StreamingDataset(
                url, batch_size=20, with_index=True, storage_options={**options, "retry": retry}, **more
            )
        except ConnectionError:
            assert time.monotonic() < give_up
            time.sleep(0.05)


@pytest.mark.parametrize("plane", PLANES)
def test_a_run_outlives_a_restart_and_says_what_it_waits_for(
    folder: Path, plane: str, caplog: pytest.LogCaptureFixture
) -> None:
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        stack.enter_context(process(folder, port))
        ds = dataset(endpoint, plane, memory=1 << 22)
        batches = iter(ds)
        seen = numbers(next(batches))
    waiting: list[str] = []
    back: list[float] = []

    def restart() -> None:
        time.sleep(2.5)
        waiting.append(ds.stats().waiting_for)
        with process(folder, port):
            back.append(time.monotonic())
            done.wait(60)

    done = threading.Event()
    restarter = threading.Thread(target=restart)
    restarter.start()
    try:
        resumed = 0.0
        for batch in batches:
            seen += numbers(batch)
            if back and not resumed:
                resumed = time.monotonic() - back[0]
    finally:
        done.set()
        restarter.join()
    assert sorted(seen) == list(range(COUNT))
    if waiting[0]:  # the rest was not there already
        assert "127.0.0.1" in waiting[0]
        assert "last error: " in waiting[0]
        assert resumed < 5  # a process of Python starts, too
        messages = [record.getMessage() for record in caplog.records if record.name == "streamloader"]
        assert sum("no request has succeeded" in text for text in messages) == 1
        assert sum("requests succeed again" in text for text in messages) == 1
    assert ds.stats().waiting_for == ""


def test_close_wakes_those_who_wait_for_the_end_of_an_outage(folder: Path) -> None:
    with folder_server(folder) as server:
        server.behave, server.spare = "close", "/label/"
        ds = dataset(server.url, "http", RetryPolicy(probe_seconds=60.0))
        failures: list[BaseException] = []

        def consume() -> None:
            try:
                list(ds)
            except StreamloaderError as error:
                failures.append(error)

        consumer = threading.Thread(target=consume)
        consumer.start()
        while not ds.stats().retries:
            time.sleep(0.01)
        time.sleep(1.0)  # now it is an outage
        ds.close()
        for thread in [consumer, *threading.enumerate()]:
            if thread is consumer or thread.name.startswith("streamloader"):
                thread.join(5)
                assert not thread.is_alive()


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("path", ["/zarr.json", "/_streamloader/chunks/", "/x/c/"])
def test_a_run_starts_although_a_response_trickles(folder: Path, plane: str, path: str) -> None:
    with folder_server(folder) as server:
        server.faults[path] = ["trickle"]
        begin = time.monotonic()
        batch = next(iter(dataset(server.url, plane)))
        assert time.monotonic() - begin < QUICK.response_seconds + 5
        assert server.faults[path] == []
        datasets.check_batch(batch, FIELDS)


@pytest.mark.parametrize("path", ["/zarr.json", "/_streamloader/chunks/"])
@pytest.mark.parametrize("fault", ["short", "flip"])
def test_metadata_that_comes_damaged_is_read_three_times_in_all(folder: Path, path: str, fault: str) -> None:
    with folder_server(folder) as server:
        server.faults[path] = [fault, fault]
        seen = [number for batch in dataset(server.url, "s3", fields=["x"]) for number in numbers(batch)]
        assert sorted(seen) == list(range(COUNT))
        server.paths.clear()
        server.faults[path] = [fault] * 99
        with pytest.raises(FormatError):
            sl.open(f"{server.url}/data").read("x", 0, 1)
        assert asked(server, path) == 3


def asked(server: FolderServer, path: str) -> int:
    return sum(path in one for one in server.paths)
