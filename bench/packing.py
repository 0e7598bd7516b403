"""Compares packing by best fit: padding and time of streamloader, TRL and OLMo-core on the same lengths.

    python bench/packing.py [--documents 100000] [--large 100000000 [--balance]] [--json]

The lengths are lognormal, with means that are published, and deviations of the logarithm that are assumed here:

- WikiText-103: 103,227,021 tokens in 28,475 articles (Merity et al. 2016, table 1), a mean of 3,625; deviation 0.7;
- code: files of The Stack, 3.1 TB in 546 million files (Kocetkov et al. 2022), 5.7 kB, at 3.3 bytes for each token a
  mean of 1,720; deviation 1.4, since most files are short and some very long;
- dialogues: LMSYS-Chat-1M, 2.0 turns of 69.5 and 214.5 tokens (Zheng et al. 2023, table 1), a mean of 568; deviation 1.

TRL's `pack_dataset(strategy="bfd_split")` and OLMo-core's `InstancePacker` run if they are installed. The first
concatenates tokens too, so its inner function gets a table of lists that share one array. OLMo-core cuts documents into
rows before it packs them, which is done here by numpy and not counted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.order.packing import Packed

LENGTH = 2048  # OLMo-core packs into powers of two only
DISTRIBUTIONS = {
    "WikiText-103": (103_227_021 / 28_475, 0.7),
    "code": (3.1e12 / 546e6 / 3.3, 1.4),
    "dialogues": (568, 1.0),
}
PIECE = 1 << 20


def lengths_of(name: str, count: int) -> NDArray[np.uint32]:
    """Return lengths of a distribution, at least 1."""
    mean, deviation = DISTRIBUTIONS[name]
    drawn = np.random.default_rng(1).lognormal(np.log(mean) - deviation**2 / 2, deviation, count)
    return np.maximum(drawn, 1).astype(np.uint32)


def streamloader_rows(lengths: NDArray[np.uint32]) -> Callable[[], int]:
    """Return what packs by streamloader, and returns the number of rows."""
    return lambda: len(Packed([lengths], LENGTH))


def trl_rows(lengths: NDArray[np.uint32]) -> Callable[[], int]:
    """Return what packs by TRL. Raises `ImportError` where it is not installed."""
    trl, pa = importlib.import_module("trl.data_utils"), importlib.import_module("pyarrow")
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(offsets[-1], np.uint8)))
    table = pa.table({"input_ids": tokens})
    return lambda: int(trl._pack_bfd(table, LENGTH, on_seq_length_overflow="split").num_rows)


def olmo_rows(lengths: NDArray[np.uint32]) -> Callable[[], int]:
    """Return what packs by OLMo-core. Raises `ImportError` where it is not installed."""
    packer = importlib.import_module("olmo_core.data.utils").InstancePacker(LENGTH)
    counts = -(-lengths.astype(np.int64) // LENGTH)
    sizes = np.full(counts.sum(), LENGTH)
    sizes[np.cumsum(counts) - 1] = lengths - (counts - 1) * LENGTH
    ends = np.cumsum(sizes)
    pieces = np.stack([ends - sizes, ends], axis=1)
    return lambda: len(packer.pack_documents(pieces)[0])


def compare(name: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield padding and time of each packer."""
    lengths = lengths_of(name, count)
    for packer in (streamloader_rows, trl_rows, olmo_rows):
        line: dict[str, Any] = {"lengths": name, "documents": count, "packer": packer.__name__.removesuffix("_rows")}
        try:
            run = packer(lengths)
        except ImportError as error:
            yield line | {"missing": str(error)}
            continue
        start, cpu = time.perf_counter(), time.process_time()
        rows = run()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        padding = 1 - int(lengths.sum(dtype=np.int64)) / (rows * LENGTH)
        yield line | {
            "padding_percent": round(100 * padding, 3),
            "wall_s": round(wall, 3),
            "cpu_ns_per_document": round(cpu / count * 1e9),
        }


def large(name: str, count: int, balance: bool = False) -> dict[str, Any]:
    """Return time and memory of many documents, whose lengths come in pieces, and the time to find items.

    `balance`: with the costs of rows, as `Pack(balance="attention")` needs them.
    """
    pool = lengths_of(name, PIECE)

    def pieces() -> Iterator[NDArray[np.uint32]]:
        for start in range(0, count, PIECE):
            yield pool[: min(PIECE, count - start)]

    start, cpu = time.perf_counter(), time.process_time()
    found = Packed(pieces(), LENGTH, costs=balance)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1e3
    times = []
    for seed in range(20):
        rows = np.random.default_rng(seed).integers(0, len(found), 512)
        start = time.process_time()
        found.items(rows)
        times.append(time.process_time() - start)
    return {
        "lengths": name,
        "documents": count,
        "balance": balance,
        "rows": len(found),
        "padding_percent": round(100 * (1 - found.real / (len(found) * LENGTH)), 3),
        "start_wall_s": round(wall, 1),
        "start_cpu_s": round(cpu, 1),
        "peak_mb": round(peak),  # of the process, with the interpreter and numpy
        "kept_mb": round(found.nbytes / 1e6),
        "items_of_512_rows_cpu_ms": round(sorted(times)[10] * 1e3, 2),
        "items_worst_cpu_ms": round(max(times) * 1e3, 2),
    }


def main() -> None:
    """Print a line for each measurement."""
    parser = argparse.ArgumentParser(description="Padding and time of packing by best fit.")
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=0, help="the documents of the measurement of many")
    parser.add_argument("--balance", action="store_true", help="that measurement with the costs of rows")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    lines = [line for name in DISTRIBUTIONS for line in compare(name, given.documents)]
    if given.large:
        # a process for each, since a process keeps its peak
        with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
            lines += pool.map(partial(large, count=given.large, balance=given.balance), DISTRIBUTIONS)
    for line in lines:
        print(json.dumps(line) if given.json else "  ".join(f"{name} {value}" for name, value in line.items()))


if __name__ == "__main__":
    main()
