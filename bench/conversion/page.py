"""From measured lines to bench/results/conversion.md and its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no display
import matplotlib.pyplot as plt

from bench.report import table

OURS, PLAIN = "streamloader", "plain objects"
TARGETS = {"images": 2.0, "vectors": 2.0, "jpeg": 1.0, "tokens": 2.0}  # over the best of the other writers
PLAIN_TARGETS = {"npy": 0.6}  # over the same bytes as plain objects
HEAD = [
    "",
    "MB/s",
    "least to greatest",
    "of the best writer",
    "of plain objects",
    "objects",
    "stored MB",
    "peak / shard",
]

Line = Mapping[str, Any]


def rates(lines: Sequence[Line], workload: str) -> dict[str, list[float]]:
    """Return the MB/s of raw data of each contestant's runs of a workload, ascending."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if line["workload"] == workload and "seconds" in line:
            found.setdefault(line["contestant"], []).append(line["raw_bytes"] / 1e6 / line["seconds"])
    return {name: sorted(runs) for name, runs in found.items()}


def ratio(lines: Sequence[Line], workload: str, *, plain: bool = False) -> float:
    """Return the median of the project over the best median of the other writers, or over that of plain objects."""
    found = rates(lines, workload)
    others = [median(runs) for name, runs in found.items() if name != OURS and (name == PLAIN) == plain]
    return median(found[OURS]) / max(others) if OURS in found and others else float("nan")


def _told(value: float, target: float | None) -> str:
    """Return a ratio with its target, as the page has it."""
    if isnan(value):
        return ""
    return f"{value:.2f}" if target is None else f"{value:.2f} (target {target:g})"


def write(lines: Sequence[Line], folder: Path) -> Path:
    """Write the page and the picture; return the page."""
    workloads = list(dict.fromkeys(line["workload"] for line in lines))
    picture = _draw(lines, workloads, folder / "conversion.png")
    parts = ["# Writing side by side\n", f"{_about(lines)}\n", f"![{picture.name}]({picture.name})\n"]
    for workload in workloads:
        parts += [f"## {workload}\n", table(HEAD, _rows(lines, workload))]
    failed = [f"- {one['workload']}, {one['contestant']}: {one['failed']}" for one in lines if "failed" in one]
    parts += ["## Left out\n", *(failed or ["Nothing."]), ""]
    page = folder / "conversion.md"
    page.write_text("\n".join(parts))
    return page


def _rows(lines: Sequence[Line], workload: str) -> list[list[str]]:
    found, rows = rates(lines, workload), []
    for name, runs in sorted(found.items(), key=lambda item: -median(item[1])):
        own = name == OURS
        last = [one for one in lines if one["workload"] == workload and one["contestant"] == name and "seconds" in one][
            -1
        ]
        peak = f"{last['peak_bytes'] / last['shard_bytes']:.1f}" if last.get("shard_bytes") else ""
        rows.append(
            [
                f"**{name}**" if own else name,
                f"{median(runs):,.0f}",
                f"{runs[0]:,.0f} to {runs[-1]:,.0f}",
                _told(ratio(lines, workload), TARGETS.get(workload)) if own else "",
                _told(ratio(lines, workload, plain=True), PLAIN_TARGETS.get(workload)) if own else "",
                f"{last['objects']:,}",
                f"{last['stored_bytes'] / 1e6:,.0f}",
                peak,
            ]
        )
    return rows


def _about(lines: Sequence[Line]) -> str:
    first, machine = lines[0], lines[0]["machine"]
    text = [
        f"{machine['cores']} cores of {machine['processor']}, {machine['memory_bytes'] / 1e9:.0f} GB; SeaweedFS on the",
        "same cores, its objects in memory. Everybody writes the same samples with a process for each core, in turns,",
        "each time a new process that has imported its packages; the start of the writing processes, and what those",
        "import, is part of the time. MB/s are of raw data (of JPEGs as encoded); medians. streamloader converts .npy",
        "files, a folder of JPEGs, and tokens through a map-style dataset; it measures how well the data compress,",
        "checks every image, and writes checksums. The peers' writers are fed as their documentation advises",
        "(bench/peers). Plain objects: the raw bytes as they are, put by obstore in objects of 64 MiB: what the",
        "server takes beside a client that does nothing. npy: 1 GB in rows of 8 KiB that do not compress. Peak /",
        "shard: the largest resident memory of a writing process, in decoded shards, with Python and packages.",
        f"Commit {first['commit']}, {first['time'][:10]}.",
    ]
    versions = "; ".join(sorted({line["peer_versions"] for line in lines if line["peer_versions"]}))
    return fill(" ".join(text), 120) + (f"\n\n{fill(f'Versions: {versions}.', 120)}" if versions else "")


def _draw(lines: Sequence[Line], workloads: Sequence[str], path: Path) -> Path:
    figure, axes = plt.subplots(1, len(workloads), figsize=(2.6 * len(workloads), 3.6), squeeze=False)
    for axis, workload in zip(axes[0], workloads, strict=True):
        found = rates(lines, workload)
        names = sorted(found, key=lambda name: median(found[name]))
        middles = [median(found[name]) for name in names]
        below = [middle - found[name][0] for name, middle in zip(names, middles, strict=True)]
        above = [found[name][-1] - middle for name, middle in zip(names, middles, strict=True)]
        colors = [{OURS: "#1f5fa8", PLAIN: "#e3e7eb"}.get(name, "#b9c2cc") for name in names]
        axis.barh(names, middles, xerr=[below, above], color=colors, error_kw={"linewidth": 0.8})
        axis.set(title=workload, xlabel="MB/s")
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
