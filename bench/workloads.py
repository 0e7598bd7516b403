"""The five workloads: how many samples, in which batches, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = ROOT / "bench" / ".data"


@dataclass(frozen=True)
class Workload:
    """`unit` is what a rate counts; `workers`: with how many `make bench` runs other loaders, the best count of most.

    `variants` are ways to deliver the same data; each is measured on its own.
    """

    name: str
    count: int
    workers: int
    batch: int
    unit: str = "samples"
    variants: tuple[str, ...] = ("",)


WORKLOADS = {
    one.name: one
    for one in (
        Workload("images", 8192, 2, 256),
        Workload("vectors", 4_000_000, 0, 1024),
        Workload("jpeg", 8192, 2, 128),
        Workload("tokens", 196_608, 0, 128, "tokens", ("", "packed")),
        Workload("mixed", 32_768, 2, 256),
    )
}

# for the law of sizes only: just too wide to be held whole in memory, so that every size is streamed
WIDE = Workload("wide", 10_000_000, 0, 1024)
