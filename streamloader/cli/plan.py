"""`streamloader plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamloader.cli.options import parse_options, show_bytes
from streamloader.errors import UsageError
from streamloader.options import Shuffle, parse_size

if TYPE_CHECKING:
    from streamloader.measure.forecast import Forecast


@click.command()
@click.argument("url")
@click.option("--world-size", type=int, default=1, show_default=True, help="Ranks that share an epoch.")
@click.option("--batch-size", type=int, default=256, show_default=True, help="Samples of a rank's batch.")
@click.option("--fields", help="Fields to fetch, say image,label; all by default.")
@click.option("--split", help="The split, where the dataset has splits.")
@click.option("--where", help='Which samples take part: "label in (1, 2) and width >= 256".')
@click.option("--block", type=int, help="Samples fetched at once, instead of the dataset's own.")
@click.option("--lanes", type=int, help="Streams of blocks that are mixed, instead of the dataset's own.")
@click.option("--window", type=int, help="Samples of a lane that are mixed, instead of the dataset's own.")
@click.option("--no-shuffle", is_flag=True, help="In the order that samples are stored in.")
@click.option("--memory", help="What the loader of a rank may use, say 2GiB; what it asks for by default.")
@click.option("--ranks-per-machine", type=int, default=1, show_default=True, help="They share its memory.")
@click.option("--get-price", type=float, default=0.4, show_default=True, help="USD for a million GETs.")
@click.option(
    "--storage-option", "storage", multiple=True, metavar="NAME=VALUE", help="An option of the store; repeat."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of sentences.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw it into this .png or .html (needs matplotlib).",
)
def plan(
    *,
    url: str,
    world_size: int,
    batch_size: int,
    fields: str | None,
    split: str | None,
    where: str | None,
    block: int | None,
    lanes: int | None,
    window: int | None,
    no_shuffle: bool,
    memory: str | None,
    ranks_per_machine: int,
    get_price: float,
    storage: tuple[str, ...],
    as_json: bool,
    plot: Path | None,
) -> None:
    """Tell what training on the dataset at URL will take: memory, requests, cost, and how well batches mix.

    No sample is read, but with --where the small fields that it names.
    """
    from streamloader.measure.forecast import ForecastOptions, forecast

    if plot is not None and plot.suffix not in (".png", ".html"):
        raise UsageError(f"--plot {plot}", "name a file that ends with .png or .html")
    if no_shuffle and (block or lanes or window):
        raise UsageError("--no-shuffle with --block, --lanes or --window", "leave one of them out")
    options = ForecastOptions(
        world_size=world_size,
        batch_size=batch_size,
        fields=tuple(name.strip() for name in fields.split(",")) if fields is not None else None,
        split=split,
        where=where,
        shuffle=not no_shuffle and Shuffle(window=window, lanes=lanes, block=block),
        memory=parse_size(memory) if memory is not None else None,
        ranks_here=ranks_per_machine,
        dollars_for_a_get=get_price / 1e6,
        storage_options=parse_options(storage),
    )
    found = forecast(url, options)
    click.echo(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(sentences(found)))
    if plot is not None:
        from streamloader.cli.draw import draw

        draw(found, sentences(found), plot)


def sentences(found: Forecast) -> list[str]:
    """Return what was found, a line for each matter."""
    together = found.world_size * found.batch_size
    each = show_bytes(found.bytes / found.requests) if found.requests else "0 B"
    mixed = [
        f"({one.rows:,} rows) comes from {one.blocks:,.0f} blocks; the variance of its mean is at most "
        f"{one.design_effect(1.0):.2f} times that of independent rows"
        for one in (found.rank, found.together)
    ]
    held = f"; {', '.join(found.held)} held whole" if found.held else ""
    return [
        f"{found.url}: {found.num_samples:,} samples",
        f"steps     {found.steps:,} an epoch, of {found.batch_size:,} samples on each of {found.world_size:,} ranks "
        f"({together:,} together)",
        f"order     blocks of {found.block:,} samples, {found.lanes} lanes, a window of {found.window:,} in each",
        *_more_lanes(found),
        f"memory    {show_bytes(found.memory)} for each rank, at least {show_bytes(found.least_memory)}{held}",
        f"requests  {found.requests:,} an epoch over all ranks, of {each}: {show_bytes(found.bytes)}, "
        f"{found.dollars:.2g} USD",
        _reading(found),
        f"mixing    the batch of a rank {mixed[0]}",
        f"          the global batch {mixed[1]}",
    ]


def _more_lanes(found: Forecast) -> list[str]:
    if found.lanes == found.pinned_lanes:
        return []
    return [
        f"          the dataset has {found.pinned_lanes} lanes: a run that begins on {found.world_size:,} ranks takes "
        f"{found.lanes:,} and keeps them; a single rank that goes on with it needs {show_bytes(found.memory_alone)}"
    ]


def _reading(found: Forecast) -> str:
    if found.read_factor == 1:
        return "reading   each block once"
    if not found.shuffle:
        what = f"each chunk by about {found.read_factor:.1f} ranks"
        return f"reading   {what}; take a --batch-size of {found.block} or a multiple"
    few = f"reading   each block about {found.read_factor:.1f} times, since "
    if found.world_size > found.blocks // 4:
        return few + f"{found.world_size} ranks share {found.blocks:,} blocks"
    return (
        f"{few}{found.world_size} ranks do not divide {found.lanes} lanes; "
        f"take --lanes {-(-found.lanes // found.world_size) * found.world_size}"
    )
