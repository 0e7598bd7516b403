"""`streamloader plan` and `streamloader bench`: what training on a dataset takes, and what limits the loader."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import IntRange

from streamloader.cli.options import (
    Step,
    display,
    fields_option,
    json_option,
    option,
    print_table,
    show_bytes,
    split_option,
    storage_option,
)
from streamloader.errors import UsageError
from streamloader.options import Shuffle, parse_size

if TYPE_CHECKING:
    from streamloader.measure.bench import BenchProgress
    from streamloader.measure.ceiling import Ceiling
    from streamloader.measure.forecast import Forecast

DOTS = 20_000  # more cannot be distinguished
PAGE = """<!doctype html><meta charset="utf-8"><title>{title}</title>
<body style="font: 14px sans-serif"><h1>{title}</h1><pre>{text}</pre>{picture}
"""
OUTPUT = click.Path(path_type=Path, dir_okay=False)


def parse_memory(text: str | None) -> int | None:
    """Return the bytes of `2GiB`."""
    return None if text is None else parse_size(text, "--memory ")


def parse_image_size(text: str) -> tuple[int, int] | None:
    """Return the (height, width) of `192x256` or `224`; None for 0."""
    height, by, width = text.lower().partition("x")
    if not height.isdigit() or (by and not width.isdigit()):
        raise UsageError(f"--image-size {text!r}", "write it as 224, as 192x256 (height x width), or 0")
    size = (int(height), int(width if by else height))
    return size if all(size) else None


@click.command()
@click.argument("url")
@option("--world-size", type=int, default=1, help="Ranks that share an epoch.")
@option("--batch-size", type=int, default=256, help="Samples of a rank's batch.")
@fields_option
@split_option
@option("--where", help='Which samples to read: "label in (1, 2) and width >= 256".')
@option("--block", type=int, help="Samples fetched at once, instead of the dataset's own.")
@option("--lanes", type=int, help="Streams of blocks that are mixed, instead of the dataset's own.")
@option("--window", type=int, help="Samples of a lane that are mixed, instead of the dataset's own.")
@option("--no-shuffle", is_flag=True, help="In the order that samples are stored in.")
@option("--memory", parse=parse_memory, help="What the loader of a rank may use, say 2GiB; default: what it needs.")
@option("--ranks-per-machine", "ranks_here", type=int, default=1, help="They share its memory.")
@option("--get-price", type=float, default=0.4, help="USD for a million GETs.")
@storage_option
@json_option
@option("--plot", type=OUTPUT, help="Draw it into this .png or .html (needs matplotlib).")
def plan(*, url: str, no_shuffle: bool, get_price: float, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Plan the training on the dataset at URL: memory, requests, cost, and how well batches mix.

    Reads no samples; with --where it reads the small fields that the condition names.
    """
    from streamloader.measure.forecast import ForecastOptions, forecast

    if plot is not None and plot.suffix not in (".png", ".html"):
        raise UsageError(f"--plot {plot}", "name a file that ends with .png or .html")
    order = {name: options.pop(name) for name in ("block", "lanes", "window")}
    if no_shuffle and any(order.values()):
        raise UsageError("--no-shuffle with --block, --lanes or --window", "leave one of them out")
    shuffle = not no_shuffle and Shuffle(**order)
    found = forecast(url, ForecastOptions(shuffle=shuffle, dollars_for_a_get=get_price / 1e6, **options))
    click.echo(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(sentences(found)))
    if plot is not None:
        draw(found, sentences(found), plot)


def sentences(found: Forecast) -> list[str]:
    """Return the forecast as lines of text."""
    together = found.world_size * found.batch_size
    each = show_bytes(found.bytes / found.requests) if found.requests else "0 B"
    mixed = [
        f"({one.rows:,} rows) comes from {one.blocks:,.0f} blocks; the variance of its mean is at most "
        f"{one.design_effect(1.0):.2f} times that of independent rows"
        for one in (found.rank, found.together)
    ]
    held = f"; {', '.join(found.held)} held in memory" if found.held else ""
    return [
        f"{found.url}: {found.num_samples:,} samples",
        f"steps     {found.steps:,} an epoch, of {found.batch_size:,} samples on each of {found.world_size:,} ranks "
        f"({together:,} together)",
        f"order     blocks of {found.block:,} samples, {found.lanes} lanes, a window of {found.window:,} in each",
        *_more_lanes(found),
        f"memory    {show_bytes(found.memory)} for each rank, at least {show_bytes(found.least_memory)}{held}",
        f"requests  {found.requests:,} an epoch over all ranks, of {each}: {show_bytes(found.bytes)}, "
        f"{found.dollars:.2g} USD",
        f"reading   {_reading(found)}",
        f"mixing    the batch of a rank {mixed[0]}",
        f"          the global batch {mixed[1]}",
    ]


def _more_lanes(found: Forecast) -> Iterator[str]:
    if found.lanes != found.pinned_lanes:
        yield (
            f"          the dataset has {found.pinned_lanes} lanes: a run begun on {found.world_size:,} ranks takes"
            f" {found.lanes:,} and keeps them; a single rank that resumes it needs {show_bytes(found.memory_alone)}"
        )


def _reading(found: Forecast) -> str:
    ranks, lanes, factor = found.world_size, found.lanes, f"{found.read_factor:.1f}"
    if found.read_factor == 1:
        return "each block once"
    if not found.shuffle:
        return f"each chunk by about {factor} ranks; take a --batch-size of {found.block} or a multiple"
    if ranks > found.blocks // 4:
        return f"each block about {factor} times, since {ranks} ranks share {found.blocks:,} blocks"
    better = f"take --lanes {-(-lanes // ranks) * ranks}"
    return f"each block about {factor} times, since {ranks} ranks do not divide {lanes} lanes; {better}"


def draw(found: Forecast, text: Sequence[str], path: Path) -> None:
    """Write a .png, or a .html that needs nothing else. Raises `UsageError` where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib", "pip install matplotlib") from None
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    dots = [(step, block) for step, blocks in enumerate(found.drawn) for block in sorted(set(blocks))]
    dots = dots[:: max(1, -(-len(dots) // DOTS))]
    left.scatter([step for step, _ in dots], [block for _, block in dots], s=4, color="#0b6e99", linewidths=0)
    left.set(title="blocks that each global batch takes rows from", xlabel="step", ylabel="block, as stored")
    left.set_ylim(-0.5, max(1, found.blocks) - 0.5)
    counts = [len(set(blocks)) for blocks in found.drawn]
    right.plot(range(len(counts)), counts, color="#0b6e99")
    right.set(title="distinct blocks in it", xlabel="step", ylim=(0, max([1, *counts]) * 1.1))
    figure.suptitle(f"{found.num_samples:,} samples, {found.world_size} ranks, {found.batch_size} a batch")
    if path.suffix == ".png":
        figure.savefig(path, dpi=120)
        return
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg, title = picture.getvalue(), html.escape(f"Plan of {found.url}")
    path.write_text(PAGE.format(title=title, text=html.escape("\n".join(text)), picture=svg[svg.index("<svg") :]))


@click.command()
@click.argument("url")
@option("--batch-size", type=IntRange(min=1), help="Samples per batch; 256, or all of a smaller dataset.")
@fields_option
@split_option
@option("--seconds", type=float, default=10.0, help="How long each stage runs.")
@option("--workers", type=IntRange(min=0), default=0, help="DataLoader workers.")
@option("--memory", parse=parse_memory, help="What the loader may use, say 2GiB; what its window needs by default.")
@option(
    "--image-size",
    default="224",
    parse=parse_image_size,
    help="Decode images to 224 or 192x256 pixels; 0: do not decode.",
)
@storage_option
@json_option
@option("--trace", type=OUTPUT, help="Write a JSON line for each batch to this file.")
def bench(*, url: str, as_json: bool, **options: Any) -> None:
    """Measure the endpoint of the dataset at URL, the loader on it, and what limits it.

    The stages: fetching alone, fetching and unpacking, decoding images alone, the loader. Nothing is written.
    """
    from streamloader.measure.bench import BenchOptions
    from streamloader.measure.bench import bench as run

    chosen = BenchOptions(**options)
    with display() as shown:

        def listen(progress: BenchProgress) -> None:
            rates = {"samples/s": progress.samples_per_second, "MB/s": progress.megabytes_per_second}
            rate = ", ".join(f"{value:,.0f} {unit}" for unit, value in rates.items() if value)
            shown.show(Step(progress.stage, progress.done_seconds, progress.total_seconds, "s", rate))

        result = run(url, chosen, listen)
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=1))
        return
    what = f"{result.url}: {result.num_samples:,} samples, batches of {result.batch_size}"
    click.echo(f"{what}, the first after {result.first_batch_seconds:.2f} s")
    right = ("samples/s", "MB/s", "CPU s/GB", "requests", "per request")
    print_table(("stage", *right), map(_cells, (*result.ceilings, result.loader)), right)
    click.echo(result.verdict)


def _cells(row: Ceiling) -> list[str]:
    cpu = f"{row.cpu_seconds_per_gigabyte:.2f}" if row.cpu_seconds and row.bytes else ""
    requests, size = (f"{row.requests:,}", show_bytes(row.bytes / row.requests)) if row.requests else ("", "")
    return [row.name, f"{row.samples_per_second:,.0f}", f"{row.megabytes_per_second:,.1f}", cpu, requests, size]
