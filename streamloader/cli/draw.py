"""A forecast as a picture: from which blocks the rows of the first steps come, and how many blocks each step has."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamloader.errors import UsageError

if TYPE_CHECKING:
    from streamloader.measure.forecast import Forecast

DOTS = 20_000  # more are no longer told apart
PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 14px sans-serif; margin: 2em auto; max-width: 75em }}
svg {{ max-width: 100%; height: auto }}
</style>
<h1>{title}</h1>
<pre>{text}</pre>
{picture}
"""


def draw(found: Forecast, text: Sequence[str], path: Path) -> None:
    """Write a .png, or a .html that needs nothing else. Raises `UsageError` where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib", "pip install matplotlib") from None
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    _blocks(left, found)
    _counts(right, found)
    figure.suptitle(f"{found.num_samples:,} samples, {found.world_size} ranks, {found.batch_size} a batch")
    if path.suffix == ".png":
        figure.savefig(path, dpi=120)
        return
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    title = html.escape(f"Plan of {found.url}")
    path.write_text(PAGE.format(title=title, text=html.escape("\n".join(text)), picture=svg[svg.index("<svg") :]))


def _blocks(axis: Any, found: Forecast) -> None:
    dots = [(step, block) for step, blocks in enumerate(found.drawn) for block in sorted(set(blocks))]
    every = -(-len(dots) // DOTS)
    shown = dots[:: max(1, every)]
    axis.scatter([step for step, _ in shown], [block for _, block in shown], s=4, color="#0b6e99", linewidths=0)
    axis.set(title="blocks that each global batch takes rows from", xlabel="step", ylabel="block, as stored")
    axis.set_ylim(-0.5, max(1, found.blocks) - 0.5)


def _counts(axis: Any, found: Forecast) -> None:
    counts = [len(set(blocks)) for blocks in found.drawn]
    axis.plot(range(len(counts)), counts, color="#0b6e99")
    axis.set(title="distinct blocks in it", xlabel="step", ylim=(0, max([1, *counts]) * 1.1))
