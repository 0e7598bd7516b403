"""Eight ranks, each with 64 requests in flight, outlive a minute without their server.

Run as a script, this file is one rank: URL, JSON of the storage options, rank, log file.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import datasets
import pytest
from servers import SEAWEEDFS_PORTS, S3Server, free_ports, seaweedfs_server
from torchrun import environment

from streamloader.engine import engine
from streamloader.engine.pace import Pace
from streamloader.options import Layout, RetryPolicy
from streamloader.pytorch.dataset import StreamingDataset

RANKS = 8
IN_FLIGHT = 64
COUNT = 60_000  # 72 MB: every rank needs far more than 64 requests after the first batch
OUTAGE_SECONDS = 60.0
RESUME_SECONDS = 3.0
REPORT_SECONDS = RetryPolicy().report_seconds
LAYOUT = Layout(shard_size=1 << 20, block_size=1 << 14, chunk_size=1 << 12, codec="none")

Event = dict[str, Any]


def run_rank(url: str, options: dict[str, Any], rank: int, log: Path) -> None:
    """Read this rank's part of an epoch; log each batch, and what the loader waits for, with the time of each."""
    # from the start, not only where the measured rate asks for so many
    engine.Pace = lambda _, **more: Pace(IN_FLIGHT, first=IN_FLIGHT, **more)  # type: ignore[assignment,misc]
    ds = StreamingDataset(
        url, batch_size=25, with_index=True, storage_options=options, world=(rank, RANKS), memory="256MiB"
    )
    ended = threading.Event()
    with log.open("w") as out:

        def record(**values: Any) -> None:
            print(json.dumps({"at": time.monotonic(), **values}), file=out, flush=True)

        def watch() -> None:
            while not ended.wait(0.2):
                record(waiting_for=ds.stats().waiting_for)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for number, batch in enumerate(ds):
            record(samples=datasets.numbers(batch))
            if number == 0:
                sys.stdin.readline()
        ended.set()
        watcher.join()


def events(log: Path) -> list[Event]:
    """What a rank has logged, apart from a line that it is just writing."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_first_batches(logs: list[Path], ranks: list[subprocess.Popen[bytes]]) -> None:
    give_up = time.monotonic() + 300
    while not all(any("samples" in event for event in events(log)) for log in logs):
        assert all(rank.poll() is None for rank in ranks)
        assert time.monotonic() < give_up
        time.sleep(0.1)


def connections(port: int) -> int:
    """The clients' ends of the connections to a port of this machine."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[2].endswith(f":{port:04X}") for line in lines)


def wait_until_it_serves(url: str) -> float:
    """Return when a data file could be read again."""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=0.5) as response:
                response.read()
            return time.monotonic()
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.02)


def write(server: S3Server) -> tuple[str, str]:
    """Return the URL of a dataset, and one of a file of its data that needs no credentials."""
    url = server.url("data")
    datasets.write(url, COUNT, ["x"], LAYOUT, server.storage_options)
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    with closing(server.client()) as client:
        files = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/x/c/")["Contents"]
        target = {"Bucket": bucket, "Key": files[0]["Key"]}
        return url, client.generate_presigned_url("get_object", Params=target, ExpiresIn=3600)


def check_reports(logs: list[Path], errors: list[Path], endpoint: str, silent: float) -> None:
    """Assert that each rank said once, soon after 10 s of silence, what it waits for."""
    for log, error in zip(logs, errors, strict=True):
        reports = [event for event in events(log) if event.get("waiting_for")]
        assert endpoint in reports[0]["waiting_for"]
        assert REPORT_SECONDS - 4 <= reports[0]["at"] - silent <= REPORT_SECONDS + 2
        text = error.read_text()
        assert text.count("has succeeded for 10 s") == 1, text
        assert endpoint in text


@pytest.mark.long
def test_eight_ranks_outlive_a_minute_without_their_server(tmp_path):
    faulthandler.cancel_dump_traceback_later()  # it lasts longer than a test that hangs
    ports = free_ports(SEAWEEDFS_PORTS)
    logs = [tmp_path / f"rank{rank}.jsonl" for rank in range(RANKS)]
    errors = [tmp_path / f"rank{rank}.stderr" for rank in range(RANKS)]
    with ExitStack() as stack:
        with seaweedfs_server(tmp_path / "store", ports=ports) as server:
            url, file = write(server)
            ranks = []
            for number, (log, error) in enumerate(zip(logs, errors, strict=True)):
                command = [sys.executable, __file__, url, json.dumps(server.storage_options), str(number), str(log)]
                with error.open("w") as out:
                    rank = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=out, env=environment())
                ranks.append(stack.enter_context(rank))
                stack.callback(rank.kill)
            wait_for_first_batches(logs, ranks)
            for rank in ranks:
                assert rank.stdin is not None
                rank.stdin.close()
            time.sleep(0.3)
            os.kill(server.pid, signal.SIGSTOP)  # it answers nothing: the ranks send as much as they may
            time.sleep(3)
            assert connections(ports[0]) >= RANKS * IN_FLIGHT
            silent = time.monotonic()
        time.sleep(OUTAGE_SECONDS)
        assert all(rank.poll() is None for rank in ranks)
        check_reports(logs, errors, f"127.0.0.1:{ports[0]}", silent)
        with ThreadPoolExecutor(1) as background:
            serves = background.submit(wait_until_it_serves, file)
            stack.enter_context(seaweedfs_server(tmp_path / "store", ports=ports))
            returned = serves.result(300)
        for rank, error in zip(ranks, errors, strict=True):
            assert rank.wait(300) == 0, error.read_text()
    found = [events(log) for log in logs]
    assert sorted(number for one in found for event in one for number in event.get("samples", ())) == list(range(COUNT))
    after = [
        min(event["at"] for event in one if "samples" in event and event["at"] > silent) - returned for one in found
    ]
    print("seconds from the server's return to the next batch of each rank:", *(f"{seconds:.2f}" for seconds in after))
    assert all(seconds <= RESUME_SECONDS for seconds in after), after
    for one, error in zip(found, errors, strict=True):
        assert [event["waiting_for"] for event in one if "waiting_for" in event][-1] == ""
        assert error.read_text().count("succeed again") == 1


if __name__ == "__main__":
    run_rank(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
