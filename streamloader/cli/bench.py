"""`streamloader bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamloader.cli.options import INTERRUPTED, parse_options, show_bytes
from streamloader.cli.progress import Step, display
from streamloader.errors import UsageError
from streamloader.options import parse_size

if TYPE_CHECKING:
    from streamloader.measure.ceiling import Ceiling
    from streamloader.measure.meter import BenchProgress
    from streamloader.measure.values import BenchResult


@click.command()
@click.argument("url")
@click.option("--batch-size", type=click.IntRange(min=1), help="Samples of a batch; 256, or all of a smaller dataset.")
@click.option("--fields", help="Fields to fetch, say image,label; all by default.")
@click.option("--split", help="The split, where the dataset has splits.")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="How long each stage runs.")
@click.option("--workers", type=click.IntRange(min=0), default=0, show_default=True, help="DataLoader workers.")
@click.option("--memory", help="What the loader may use, say 2GiB; what its window needs by default.")
@click.option(
    "--image-size", default="224", show_default=True, help="Decode images to 224 or 192x256 pixels; 0 leaves them."
)
@click.option(
    "--storage-option", "storage", multiple=True, metavar="NAME=VALUE", help="An option of the store; repeat."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--trace", type=click.Path(path_type=Path, dir_okay=False), help="Write a JSON line for each batch to this file."
)
def bench(
    *,
    url: str,
    batch_size: int | None,
    fields: str | None,
    split: str | None,
    seconds: float,
    workers: int,
    memory: str | None,
    image_size: str,
    storage: tuple[str, ...],
    as_json: bool,
    trace: Path | None,
) -> None:
    """Measure what the endpoint of the dataset at URL gives, what the loader makes of it, and what limits it.

    The stages: fetching alone, fetching and unpacking, decoding images alone, the loader. Nothing is written.
    """
    from streamloader.measure.run import bench as run
    from streamloader.measure.values import BenchOptions

    options = BenchOptions(
        batch_size=batch_size,
        fields=tuple(name.strip() for name in fields.split(",")) if fields is not None else None,
        split=split,
        seconds=seconds,
        workers=workers,
        memory=parse_size(memory) if memory is not None else None,
        image_size=_parse_image_size(image_size),
        storage_options=parse_options(storage),
        trace=trace,
    )
    try:
        with _listener() as listen:
            result = run(url, options, listen)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=1))
    else:
        _print(result)


def _parse_image_size(text: str) -> tuple[int, int] | None:
    height, by, width = text.lower().partition("x")
    if not height.isdigit() or (by and not width.isdigit()):
        raise UsageError(f"--image-size {text!r}", "write it as 224, as 192x256 (height x width), or 0")
    size = (int(height), int(width if by else height))
    return size if all(size) else None


@contextmanager
def _listener() -> Iterator[Callable[[BenchProgress], None]]:
    with display() as shown:

        def listen(progress: BenchProgress) -> None:
            rates = {"samples/s": progress.samples_per_second, "MB/s": progress.megabytes_per_second}
            rate = ", ".join(f"{value:,.0f} {unit}" for unit, value in rates.items() if value)
            shown.show(Step(progress.stage, progress.done_seconds, progress.total_seconds, "s", rate))

        yield listen


def _print(result: BenchResult) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # a pipe has no width: do not fold columns at 80
    what = f"{result.url}: {result.num_samples:,} samples, batches of {result.batch_size}"
    console.print(f"{what}, the first after {result.first_batch_seconds:.2f} s", markup=False, soft_wrap=True)
    table = Table()
    table.add_column("stage")
    for title in ("samples/s", "MB/s", "CPU s/GB", "requests", "a request"):
        table.add_column(title, justify="right")
    for row in (*result.ceilings, result.loader):
        table.add_row(*(Text(cell) for cell in _cells(row)))
    console.print(table)
    console.print(result.verdict, markup=False, soft_wrap=True)


def _cells(row: Ceiling) -> list[str]:
    cpu = f"{row.cpu_seconds_per_gigabyte:.2f}" if row.cpu_seconds and row.bytes else ""
    requests, size = (f"{row.requests:,}", show_bytes(row.bytes / row.requests)) if row.requests else ("", "")
    return [row.name, f"{row.samples_per_second:,.0f}", f"{row.megabytes_per_second:,.1f}", cpu, requests, size]
