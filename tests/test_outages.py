"""A store that is away for a while or answers wrongly once: a run continues, and reports what it waits for."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import pytest
from conversions import wait_for
from datasets import numbers
from folder_server import FolderServer, folder_server, location
from servers import free_ports

import streamloader as sl
from streamloader.engine.engine import AHEAD
from streamloader.engine.pace import FIRST
from streamloader.errors import EngineError, FormatError
from streamloader.options import RetryPolicy
from streamloader.pytorch.dataset import StreamingDataset

pytestmark = pytest.mark.usefixtures("patient")

COUNT = 2000
FIELDS = ["x", "label"]
QUICK = RetryPolicy(report_seconds=0.5, probe_seconds=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("outages")
    datasets.write(path / "data", COUNT, FIELDS)
    datasets.write(path / "raw", COUNT, ["raw"])
    return path


@contextlib.contextmanager
def process(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server of the folder as a process of its own until the block ends."""
    program = Path(__file__).with_name("folder_server.py")
    with subprocess.Popen([sys.executable, str(program), str(folder), str(port)]) as server:
        try:
            yield server
        finally:
            server.kill()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def dataset(endpoint: str, plane: str, retry: RetryPolicy = QUICK, name: str = "data", **more: Any) -> StreamingDataset:
    """Open the dataset by obstore ("http"), own sockets ("s3") or fsspec, once the server answers."""
    url, options = location(endpoint, plane, name)
    options["retry"] = retry
    give_up = time.monotonic() + 300
    while True:
        try:
            return StreamingDataset(url, batch_size=20, with_index=True, storage_options=options, **more)
        except ConnectionError:
            assert time.monotonic() < give_up
            time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("plane", ["http", "s3"])
def test_a_run_continues_after_a_restart_and_reports_what_it_waits_for(folder, plane, caplog):
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        stack.enter_context(process(folder, port))
        ds = dataset(endpoint, plane, memory=1 << 22)
        batches = iter(ds)
        seen = numbers(next(batches))
    waiting: list[str] = []
    back: list[float] = []

    def messages(text: str) -> int:
        return sum(text in record.getMessage() for record in caplog.records if record.name == "streamloader")

    def restart() -> None:
        while not messages("no request to") and not done.wait(0.05):
            pass
        waiting.append(ds.stats().waiting_for)
        with process(folder, port):
            wait_for(lambda: listens(port))
            back.append(time.monotonic())
            done.wait(300)

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
        assert resumed < 5
        assert (messages("no request to"), messages("succeed again")) == (1, 1)
    assert ds.stats().waiting_for == ""


WAITS = [
    ("/x/c/", "close", "probe_seconds"),
    ("/x/c/", "close", "base_seconds"),
    ("/chunks/x/", "close", "probe_seconds"),
    ("/chunks/x/", "iter", "probe_seconds"),
    ("/chunks/raw/", "close", "probe_seconds"),  # by the thread that admits blocks
    ("/label/c/", "close", "probe_seconds"),  # held in memory
    ("/chunks/label/", "close", "probe_seconds"),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("path", "how", "waits"), WAITS)
def test_threads_that_wait_to_try_again_end_with_their_pass(folder, path, how, waits):
    with folder_server(folder) as server, ThreadPoolExecutor(1) as pool:
        policy = RetryPolicy(**{"cap_seconds": 6000.0, waits: 6000.0})
        ds = dataset(server.url, "s3", policy, name="raw" if "raw" in path else "data")
        server.faults[path] = ["close", "503"] * 10**6
        consumer = pool.submit(list, ds)
        wait_for(lambda: asked(server, path))
        time.sleep(0.8)  # now it is an outage
        waiting = [thread for thread in threading.enumerate() if thread.name.startswith("streamloader")]
        assert not consumer.done()
        if how == "close":
            ds.close()
        else:
            server.faults.clear()
            iter(ds)
        for thread in waiting:
            thread.join(60)
            assert not thread.is_alive(), thread
        assert isinstance(consumer.exception(60), EngineError)


def test_reading_ahead_goes_on_while_a_request_waits_until_it_is_repeated(folder):
    with folder_server(folder) as server, ThreadPoolExecutor(1) as pool:
        policy = RetryPolicy(base_seconds=6000, cap_seconds=6000)
        ds = dataset(server.url, "s3", policy, fields=["x"], shuffle=False)
        server.faults["/data/x/c/"] = [*[""] * 20, "503"]
        batches = iter(ds)
        next(batches)
        wait_for(lambda: ds.stats().retries)  # before a batch waits for it
        consumer = pool.submit(list, batches)
        wait_for(lambda: asked(server, "/data/x/c/") > 20 + AHEAD * FIRST + 8)
        ds.close()
        assert isinstance(consumer.exception(60), EngineError)


OPEN = """
import signal, sys
import streamloader as sl
signal.signal(signal.SIGINT, signal.default_int_handler)
policy = sl.RetryPolicy(base_seconds=6000, cap_seconds=6000, probe_seconds=6000)
try:
    sl.StreamingDataset(sys.argv[1], batch_size=20, where="label >= 0", storage_options={"retry": policy})
except KeyboardInterrupt:
    sys.exit(77)
"""


@pytest.mark.long
@pytest.mark.parametrize("path", ["/zarr.json", "/label/c/"])
def test_ctrl_c_ends_an_opening_that_waits_for_the_end_of_an_outage(folder, path):
    with folder_server(folder) as server:
        server.faults[path] = ["503"] * 10**6
        with subprocess.Popen([sys.executable, "-c", OPEN, f"{server.url}/data"]) as opening:
            wait_for(lambda: asked(server, path))
            opening.send_signal(signal.SIGINT)
            assert opening.wait(300) == 77


DAMAGED = [
    *(("s3", path, fault) for path in ("/zarr.json", "/_streamloader/chunks/") for fault in ("short", "flip")),
    *(("fsspec", path, "shift") for path in ("/zarr.json", "/_streamloader/chunks/", "/data/x/c/")),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("plane", "path", "fault"), DAMAGED)
def test_a_damaged_response_is_read_three_times_in_all(folder, plane, path, fault):
    with folder_server(folder) as server:
        server.faults[path] = [fault] if path == "/data/x/c/" else [fault, fault]
        seen = [number for batch in dataset(server.url, plane, fields=["x"]) for number in numbers(batch)]
        assert sorted(seen) == list(range(COUNT))
        assert not server.faults[path]
        url, options = location(server.url, plane)
        opened = sl.open(url, storage_options=options)
        server.paths.clear()
        server.faults[path] = [fault] * 999
        with pytest.raises(FormatError):
            if path == "/data/x/c/":
                opened.read("x", 0, 1)
            else:  # by all threads of a run together
                list(dataset(server.url, plane, fields=["x"]))
        # with each damaged chunk, the shard's index is asked for too
        assert asked(server, path) == (6 if path == "/data/x/c/" else 3)


def asked(server: FolderServer, path: str) -> int:
    return sum(path in one for one in server.paths)
