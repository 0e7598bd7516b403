"""Two pictures of a run: the rates of each cell, and what the laws show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no display
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from bench.figures import Line, Row, rows

COLOURS = {"ceiling": "#9aa5b1", "ours": "#0b6e99", "peer": "#d08c60"}


def draw(lines: Sequence[Line], folder: Path, name: str) -> list[Path]:
    """Draw what there is and return the files."""
    found = []
    if rows(lines):
        found.append(_rates(lines, folder / f"{name}-rates.png"))
    laws = {line["name"]: line for line in lines if line["kind"] == "law" and "value" in line}
    if {"memory", "sizes"} <= set(laws):
        found.append(_laws(laws, folder / f"{name}-laws.png"))
    return found


def _rates(lines: Sequence[Line], path: Path) -> Path:
    """One panel for each cell: bars of the first epoch, the spread as a line, the later ones as a diamond."""
    every = rows(lines)
    cells = list(dict.fromkeys(row.cell for row in every))
    columns = min(2, len(cells))
    height = -(-len(cells) // columns)
    figure, axes = plt.subplots(height, columns, figsize=(6.5 * columns, 3.1 * height), squeeze=False)
    for axis, cell in zip(axes.flat, cells, strict=False):
        _panel(axis, [row for row in every if row.cell == cell], cell)
    for axis in list(axes.flat)[len(cells) :]:
        axis.axis("off")
    figure.suptitle("bar: first epoch, least to greatest; diamond: later epochs", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _panel(axis: Any, found: list[Row], cell: str) -> None:
    found = sorted(found, key=lambda row: row.rates[0].median)
    places = list(range(len(found)))
    medians = [row.rates[0].median for row in found]
    errors = [
        [row.rates[0].median - row.rates[0].least for row in found],
        [row.rates[0].greatest - row.rates[0].median for row in found],
    ]
    axis.barh(places, medians, xerr=errors, color=[COLOURS[row.kind] for row in found], ecolor="#333333")
    axis.plot([row.rates[1].median for row in found], places, "D", color="#222222", markersize=4)
    axis.set_yticks(places, [row.contestant for row in found])
    greatest = max(max(row.rates[0].greatest, row.rates[1].median) for row in found)
    for place, row in zip(places, found, strict=True):
        end = max(row.rates[0].greatest, row.rates[1].median)
        axis.text(
            end + 0.025 * greatest,
            place,
            f"{_short(row.rates[0].median)} / {_short(row.rates[1].median)}",
            va="center",
            fontsize=8,
        )
    axis.set_xlim(0, greatest * 1.3)
    axis.set_title(f"{cell}, {found[0].unit}/s", fontsize=10)
    axis.xaxis.set_major_formatter(lambda value, _: _short(value))
    axis.xaxis.set_major_locator(MaxNLocator(5))
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _short(value: float) -> str:
    return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{value:,.0f}"


def _laws(laws: dict[str, Line], path: Path) -> Path:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.6))
    peaks = [peak / 1e6 for peak in laws["memory"]["peaks"]]
    left.plot(range(1, len(peaks) + 1), peaks, "o-", color=COLOURS["ours"], label="peak of the process")
    left.axhline(laws["memory"]["memory"] / 1e6, color="#555555", linestyle="--", label="memory=")
    left.set(
        title="images, peak memory of each epoch",
        xlabel="epoch",
        ylabel="MB",
        ylim=(0, max(*peaks, laws["memory"]["memory"] / 1e6) * 1.15),
    )
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend(loc="lower right")
    sizes = {int(count): value / 1e6 for count, value in laws["sizes"]["rates"].items()}
    right.semilogx(list(sizes), list(sizes.values()), "o-", color=COLOURS["ours"])
    right.set(title="rows of 1 KB, rate by size", xlabel="samples of the dataset", ylabel="million samples/s")
    right.set_ylim(0, max(sizes.values()) * 1.2)
    for axis in (left, right):
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
