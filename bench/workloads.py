"""The five workloads: how many samples, in which batches, and what is counted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = ROOT / "bench" / ".data"


@dataclass(frozen=True)
class Workload:
    """`count` samples in `make bench-full`, `quick` in `make bench`; `unit` is what a rate counts.

    `variants` are ways to deliver the same data; each is measured on its own.
    """

    name: str
    count: int
    quick: int
    batch: int
    unit: str = "samples"
    variants: tuple[str, ...] = ("",)


WORKLOADS = {
    one.name: one
    for one in (
        Workload("images", 8192, 2048, 256),
        Workload("vectors", 4_000_000, 1_000_000, 1024),
        Workload("jpeg", 8192, 2048, 128),
        Workload("tokens", 196_608, 32_768, 128, "tokens", ("", "packed")),
        Workload("mixed", 32_768, 8192, 256),
    )
}

# for the law of sizes only: just too wide to be held whole in memory, so that every size is streamed
WIDE = Workload("wide", 10_000_000, 1_000_000, 1024)
