"""`streamloader convert`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from streamloader.cli.options import INTERRUPTED, parse_options, show_bytes
from streamloader.options import CODECS, CodecChoice, Layout, parse_size

if TYPE_CHECKING:
    from streamloader.conversion import Progress, Report

    Listener = Callable[[Progress], None]

LINE_SECONDS = 5.0  # how often a line is printed where there is no terminal

_OPTION_HELP = "An option of the store, as its fsspec package calls it; JSON values are read as such. May be repeated."


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--split", help="Deal samples out at random, say train=0.9,val=0.1.")
@click.option(
    "--shard-size", default="64MiB", show_default=True, help="Stored bytes of one object of the largest field."
)
@click.option(
    "--codec", type=click.Choice(CODECS), default="auto", show_default=True, help="How chunks are compressed."
)
@click.option("--workers", type=click.IntRange(min=0), help="Processes; one a core by default, 0 works in this one.")
@click.option("--format", "format_name", help="imagefolder, webdataset or npy; found out by default.")
@click.option("--overwrite", is_flag=True, help="Replace the dataset that is there, or begin anew.")
@click.option("--storage-option", "storage", multiple=True, metavar="NAME=VALUE", help=_OPTION_HELP)
@click.option(
    "--source-option", "source", multiple=True, metavar="NAME=VALUE", help="The same for SRC, where it differs."
)
@click.option("--quiet", is_flag=True, help="Say nothing but errors.")
def convert(
    *,
    src: str,
    dst: str,
    split: str | None,
    shard_size: str,
    codec: CodecChoice,
    workers: int | None,
    format_name: str | None,
    overwrite: bool,
    storage: tuple[str, ...],
    source: tuple[str, ...],
    quiet: bool,
) -> None:
    """Convert SRC into a dataset at the URL DST.

    SRC is a folder with a sub-folder of images for each class, WebDataset tars (one, a folder, a glob, or
    {000..099}), an .npy, an .npz, or a folder of .npy. Both may be local paths or URLs. An interrupted
    conversion goes on when the same command is run again.
    """
    layout = Layout(shard_size=parse_size(shard_size), codec=codec)
    storage_options, source_options = parse_options(storage), parse_options(source)
    from streamloader.conversion import convert as run

    begin = time.monotonic()
    try:
        with _listener(quiet) as listen:
            report = run(
                src,
                dst,
                format=format_name,
                split=split,
                layout=layout,
                workers=workers,
                overwrite=overwrite,
                storage_options=storage_options,
                source_options=source_options or None,
                progress=listen,
            )
    except KeyboardInterrupt:
        click.echo("interrupted: finished shards are kept, run the same command again to go on", err=True)
        sys.exit(INTERRUPTED)
    if not quiet:
        click.echo(_summary(report, time.monotonic() - begin))


def _summary(report: Report, seconds: float) -> str:
    sizes = ", ".join(f"{name} {manifest.num_samples:,}" for name, manifest in report.manifests.items() if name)
    layouts = [layout for manifest in report.manifests.values() for layout in manifest.fields.values()]
    stored = show_bytes(sum(layout.stored for layout in layouts))
    kept = f", {report.shards_kept} of them from before" if report.shards_kept else ""
    what = f"converted {report.num_samples:,} samples{f' ({sizes})' if sizes else ''} to {report.url}"
    return f"{what}: {stored} in {report.shards} shards{kept}, {seconds:.1f} s"


@contextmanager
def _listener(quiet: bool) -> Iterator[Listener | None]:
    """Give what shows the progress on stderr: a bar on a terminal, else a line now and then."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar() as listen:
            yield listen
    else:
        yield _Lines()


class _Lines:
    """Plain lines: at the start of a phase, every few seconds, and at its end."""

    def __init__(self) -> None:
        self._begin = self._said = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "scan":
            click.echo(f"scan: {progress.detail}", err=True)
            return
        now = time.monotonic()
        if progress.phase == "write" and progress.done == progress.kept:
            self._begin = now
        if progress.phase == "write" and now - self._said < LINE_SECONDS and progress.done < progress.total:
            return
        self._said = now
        rate = (progress.done - progress.kept) / max(now - self._begin, 1e-3)
        kept = f", {progress.kept} kept from before" if progress.kept else ""
        told = f", {rate:,.0f} samples/s" if progress.phase == "write" else ""
        click.echo(f"{progress.phase}: {progress.done} of {progress.total} samples{told}{kept}", err=True)


@contextmanager
def _bar() -> Iterator[Listener]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    console = Console(stderr=True)
    with Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        row = bar.add_task("scan", total=None, rate="samples")

        def listen(progress: Progress) -> None:
            if progress.phase == "scan":
                bar.console.print(f"scan: {progress.detail}", markup=False, highlight=False, soft_wrap=True)
                return
            if bar.tasks[0].total is None:
                bar.reset(row, total=progress.total, completed=progress.done)
            speed = bar.tasks[0].speed
            rate = f"{speed:,.0f} samples/s" if speed else "samples"
            bar.update(row, completed=progress.done, description=progress.phase, rate=rate)

        yield listen
