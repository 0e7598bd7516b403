"""`streamloader append`."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from streamloader.cli.options import INTERRUPTED, counted, parse_options
from streamloader.cli.progress import Display, Step, display
from streamloader.errors import UsageError

if TYPE_CHECKING:
    from streamloader.conversion.after.append import AppendReport
    from streamloader.conversion.progress import Progress

_OPTION_HELP = "An option of the store, as its fsspec package calls it; JSON values are read as such. May be repeated."


@click.command()
@click.argument("url")
@click.argument("src", required=False)
@click.option("--split", help="The split that is added to, where the dataset has splits.")
@click.option("--format", metavar="NAME", help="The source's format; found out by default.")
@click.option("--map", metavar="MODULE:FUNCTION", help="A function of each sample, a dict of its values.")
@click.option("--map-batch", type=click.IntRange(min=1), help="Give the function so many samples at once, as columns.")
@click.option("--resize", metavar="SIDE|HxW", help="Resize images: their shorter side, or height x width, in pixels.")
@click.option("--quality", type=click.IntRange(1, 100), help="Encode every image as a JPEG of this quality.")
@click.option("--shuffle", type=click.IntRange(min=0), metavar="SEED", help="Put the new samples in a random order.")
@click.option("--engine", default="local", show_default=True, metavar="NAME[=ADDRESS]", help="As convert has it.")
@click.option("--workers", type=click.IntRange(min=0), help="Processes; one a core by default, 0 works in this one.")
@click.option("--abandon", is_flag=True, help="End an append that was interrupted; the dataset stays as it was.")
@click.option("--storage-option", "storage", multiple=True, metavar="NAME=VALUE", help=_OPTION_HELP)
@click.option(
    "--source-option", "source", multiple=True, metavar="NAME=VALUE", help="The same for SRC, where it differs."
)
@click.option("--quiet", is_flag=True, help="Say nothing but errors.")
def append(
    *,
    url: str,
    src: str | None,
    split: str | None,
    engine: str,
    workers: int | None,
    abandon: bool,
    storage: tuple[str, ...],
    source: tuple[str, ...],
    quiet: bool,
    **wishes: Any,
) -> None:
    """Add the samples of SRC behind those of the finished dataset at URL.

    Readers see the new samples at once, when all are there; who has opened the dataset goes on with what it had then.
    An interrupted append goes on when the same command is run again.
    """
    storage_options, source_options = parse_options(storage), parse_options(source) or None
    from streamloader.conversion.after import append as commands

    if abandon == (src is not None):
        raise UsageError("append takes SRC, or --abandon", "give one of them")
    if src is None:
        ended = commands.abandon(url, split=split, storage_options=storage_options)
        if not quiet:
            click.echo("ended the append, the dataset is as it was" if ended else "no append is under way")
        return
    begin = time.monotonic()
    asked = commands.Wishes(source_options=source_options, **wishes)
    try:
        with nullcontext() if quiet else display() as shown:
            report = commands.append(
                url,
                src,
                split=split,
                wishes=asked,
                engine=engine,
                workers=workers,
                storage_options=storage_options,
                progress=_Told(shown) if shown else None,
            )
    except KeyboardInterrupt:
        click.echo("interrupted: the dataset is as it was, run the same command again to go on", err=True)
        sys.exit(INTERRUPTED)
    if not quiet:
        click.echo(_summary(report, time.monotonic() - begin))


def _summary(report: AppendReport, seconds: float) -> str:
    if not report.added:
        return f"the source has no samples: {report.url} stays as it is"
    kept = f", {report.shards_kept} of them from before" if report.shards_kept else ""
    what = f"appended {counted(report.added, 'sample')} to {report.url}: version {report.manifest.generation} has"
    return f"{what} {report.manifest.num_samples:,}, {counted(report.shards, 'shard')} written{kept}, {seconds:.1f} s"


class _Told:
    """Turns what an append tells into steps."""

    def __init__(self, shown: Display) -> None:
        self._shown = shown

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "scan":
            self._shown.say(f"scan: {progress.detail}")
            return
        rate = f"{progress.bytes / 1e6:,.1f} MB written"
        self._shown.show(Step(progress.phase, progress.done, progress.total, "samples", rate, progress.kept))
