"""What collation, buckets and masked errors cost, against batches without them: python -m bench.collation

Documents of 200 to 2,000 tokens in batches of 64, and JPEGs of 500x375 that keep their size in batches of 32, from
local files. All variants of a row are open at once and take turns of `--seconds`, `--rounds` times, so that each meets
the same machine. Prints for each the median rate, and its ratio to that of the first one, by rounds; and the processor
time of a sample in the process and in it with its workers, with the ratio of the latter, which other programs disturb
less. Adds a JSON line for each row to bench/results/collation.jsonl.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

import streamloader as sl
from bench import machine
from bench.context import RESULTS
from bench.workloads import DATA

TOKENS: dict[str, dict[str, Any]] = {
    "concatenated": {},
    "pad": {"collate": "pad"},
    "pad, mask": {"collate": sl.Pad(mask=True)},
    "list": {"collate": "list"},
    "nested": {"collate": "nested"},
    "buckets": {"bucket_by": "tokens"},
    "buckets, pad": {"bucket_by": "tokens", "collate": "pad"},
    "on_error=mask": {"on_error": "mask"},
}
IMAGES: dict[str, dict[str, Any]] = {"stacked": {}, "pad": {"collate": "pad"}, "list": {"collate": "list"}}
ROWS: dict[str, tuple[dict[str, dict[str, Any]], dict[str, Any]]] = {
    "tokens": (TOKENS, {"batch_size": 64}),
    "images": (IMAGES, {"batch_size": 32, "decode": True}),
}
COUNTS = {"tokens": 200_000, "images": 2_000}
Measured = tuple[float, float, float]  # samples a second, us of the process for each, us of it and its workers


def write(folder: Path, row: str) -> None:
    """Write the dataset of a row, unless it is there."""
    if folder.exists():
        return
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, 200_000).astype(np.uint16)
    colors = rng.integers(0, 255, (64, 12, 16, 3), dtype=np.uint8)

    def document(number: int) -> Any:
        first, length = number * 104_729 % 190_000, 200 + number * 7_919 % 1_800
        return tokens[first : first + length]

    def image(number: int) -> Any:
        data = io.BytesIO()
        Image.fromarray(colors[number % 64]).resize((500, 375), Image.Resampling.BICUBIC).save(data, "JPEG", quality=90)
        return data.getvalue()

    field, make = {"tokens": ("ragged:uint16", document), "images": ("bytes:jpeg", image)}[row]
    with sl.Writer(folder, {row: field}, num_samples=COUNTS[row]) as out:
        for number in range(COUNTS[row]):
            out.write({row: make(number)})


def batches(dataset: Any) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from dataset


def tree_seconds() -> float:
    """Return the processor time of this process and of all below it."""
    stats: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    found = [os.getpid()]
    for above in found:  # grows while it is walked
        found += [pid for pid, stat in stats.items() if int(stat[1]) == above]
    return sum(int(stats[pid][11]) + int(stats[pid][12]) for pid in found) / os.sysconf("SC_CLK_TCK")


def measure(stream: Iterator[Any], batch: int, seconds: float) -> Measured:
    """Take batches for some seconds."""
    count, begin, own, tree = 0, time.perf_counter(), time.process_time(), tree_seconds()
    while (passed := time.perf_counter() - begin) < seconds:
        next(stream)
        count += batch
    return count / passed, (time.process_time() - own) / count * 1e6, (tree_seconds() - tree) / count * 1e6


def take_turns(
    url: Path, variants: Mapping[str, dict[str, Any]], options: dict[str, Any], rounds: int, seconds: float
) -> dict[str, list[Measured]]:
    """Return what each variant of a row measured in each round."""
    datasets = {name: sl.StreamingDataset(url, **options, **each) for name, each in variants.items()}
    streams = {name: batches(dataset) for name, dataset in datasets.items()}
    found: dict[str, list[Measured]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, stream in streams.items():
            time.sleep(0.2)  # until the variant before has made the batches that it keeps ready
            one = measure(stream, options["batch_size"], seconds)
            if number:  # the first round starts threads and workers
                found[name].append(one)
    for dataset in datasets.values():
        dataset.close()
    return found


def summary(found: Mapping[str, Sequence[Measured]]) -> list[dict[str, Any]]:
    """Return a row of the table for each variant."""
    first = next(iter(found.values()))

    def middle(of: Sequence[Measured], at: int) -> float:
        return median(one[at] for one in of)

    return [
        {
            "variant": name,
            "samples/s": round(middle(each, 0)),
            "ratio": round(median(one[0] / other[0] for one, other in zip(each, first, strict=True)), 2),
            "process us": round(middle(each, 1), 2),
            "all us": round(middle(each, 2), 2),
            "ratio of all": round(middle(first, 2) / middle(each, 2), 2),
        }
        for name, each in found.items()
    ]


def main() -> int:
    """Measure and print every row that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--variants", nargs="+", help="besides the first one of a row; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--data", type=Path, default=DATA / "collation")
    given = parser.parse_args()
    for row in given.rows:
        variants, options = ROWS[row]
        chosen = [name for name in variants if name in (given.variants or variants) or name == next(iter(variants))]
        write(given.data / row, row)
        for workers in given.workers:
            arguments = given.data / row, {name: variants[name] for name in chosen}, options | {"num_workers": workers}
            table = summary(take_turns(*arguments, given.rounds, given.seconds))
            print(f"{row}, num_workers={workers}, load {machine.load()}")
            for line in table:
                print("  ", *(f"{value:>14}" for value in line.values()), flush=True)
            line = machine.describe() | {"row": row, "workers": workers, "load": machine.load(), "variants": table}
            with (RESULTS / "collation.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
