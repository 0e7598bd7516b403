"""From measured lines to bench/results/shuffles.md and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no display
import matplotlib.pyplot as plt

from bench.report import table
from bench.shuffles.learning import LOOK

HEAD = [
    "",
    "held, samples",
    "own units in a batch",
    "runs in a batch",
    "design effect: formula",
    "measured",
    "rank correlation",
    "error, last quarter",
]


def write(lines: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Write the page and the picture; return the page."""
    picture = _draw(lines, folder / "shuffles.png")
    page = folder / "shuffles.md"
    body = [
        [
            f"**{line['name']}**" if line["name"] == "streamloader" else line["name"],
            f"{line['held']:,}",
            f"{line['units']:.1f}",
            f"{line['runs']:.1f}",
            f"{line['formula']:.2f}",
            f"{line['measured']:.2f}",
            f"{line['correlation']:+.3f}",
            f"{fmean(line['errors'][-(len(line['errors']) // 4) :]):.3f}",
        ]
        for line in lines
    ]
    title, shown = "# Shuffles side by side\n", f"![{picture.name}]({picture.name})\n"
    page.write_text("\n".join([title, f"{_about(lines)}\n", table(HEAD, body), shown]))
    return page


def _about(lines: Sequence[dict[str, Any]]) -> str:
    setting, seeds = lines[0]["setting"], lines[0]["seeds"]
    text = [
        f"One epoch of {setting['samples']:,} samples that are stored in the order of {setting['classes']} classes,",
        f"in batches of {setting['batch']}; means over {seeds} seeds. Samples of 128 KiB: streamloader fetches",
        f"blocks of {setting['block']} (4 MiB), the peers shards of {setting['shard']} (64 MB, their defaults).",
        "Each holds about as many samples as streamloader does where it has an option for that; py2s has none, nor",
        "LitData but the size of its chunks, here with items mixed over the whole chunk. Peers deliver their orders",
        "themselves, from their own files.",
        f"A run is {setting['shard']} neighbouring samples, for everybody. Design effect: the variance of a batch's",
        "mean over that of independent draws; by the formula 1 + (others of its run that a sample meets), as if",
        "all of a run were alike, and measured on the share of each class. The curve: a network learns which of",
        "ten photographs a patch of 16 x 16 pixels is from; patches are stored photograph by photograph, and it",
        "is tested on others.",
    ]
    versions = ", ".join(sorted({line["version"] for line in lines if line["version"]}))
    return fill(" ".join(text), 120) + "\n\n" + fill(f"Measured {lines[0]['time'][:10]} with {versions}.", 120)


def _draw(lines: Sequence[dict[str, Any]], path: Path) -> Path:
    figure, axis = plt.subplots(figsize=(9, 5))
    for line in lines:
        errors = line["errors"]
        steps = range(LOOK, LOOK * len(errors) + 1, LOOK)
        own = line["name"] == "streamloader"
        axis.plot(steps, errors, label=line["name"], linewidth=2.5 if own else 1.2, zorder=3 if own else 2)
    axis.set(xlabel="steps", ylabel="error on unseen patches", ylim=(0, 1))
    axis.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
