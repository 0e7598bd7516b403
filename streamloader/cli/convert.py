"""`streamloader convert`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from streamloader.cli.options import INTERRUPTED, parse_options, show_bytes
from streamloader.cli.progress import Display, Step, display
from streamloader.options import CODECS, CodecChoice, Layout, parse_size

if TYPE_CHECKING:
    from streamloader.conversion import Progress, Report

    Listener = Callable[[Progress], None]

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
    """Give what shows the progress on stderr, or None where nothing is to be shown."""
    if quiet:
        yield None
        return
    with display() as shown:
        yield _Told(shown)


class _Told:
    """Turns what a conversion tells into steps with rates."""

    def __init__(self, shown: Display) -> None:
        self._shown = shown
        self._begin = 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "scan":
            self._shown.say(f"scan: {progress.detail}")
            return
        now = time.monotonic()
        self._begin = self._begin or now
        elapsed = max(now - self._begin, 1e-3)
        rate = f"{(progress.done - progress.kept) / elapsed:,.0f} samples/s, {progress.bytes / elapsed / 1e6:,.1f} MB/s"
        kept = f", {progress.kept} kept from before" if progress.kept else ""
        step = Step(progress.phase, progress.done, progress.total, "samples", rate + kept, progress.kept)
        self._shown.show(step)
