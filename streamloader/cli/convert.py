"""`streamloader convert`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import click

from streamloader.cli.options import INTERRUPTED, counted, parse_fill, parse_options, show_bytes
from streamloader.cli.progress import Display, Step, display
from streamloader.options import CODECS, CodecChoice, Layout, parse_size

if TYPE_CHECKING:
    from streamloader.conversion.progress import Preview, Progress, Report

    Listener = Callable[[Progress], None]

LEFT_OUT = 3  # the exit status where bad samples are not in the dataset: it is whole, but look
ON_ERROR = ("raise", "skip", "quarantine")
QUARANTINE = "_streamloader/quarantine.jsonl"
CLASSES_SHOWN = 12
SHOWN = 10  # bad samples that are named on the terminal
_OPTION_HELP = "An option of the store, as its fsspec package calls it; JSON values are read as such. May be repeated."


@click.command()
@click.argument("src")
@click.argument("dst")
@click.option("--format", "format_name", metavar="NAME", help="The source's format; found out by default.")
@click.option("--fields", multiple=True, metavar="NAME[=TYPE],...", help="Fields to keep, with their types.")
@click.option("--fill", multiple=True, metavar="NAME=VALUE", help="What stands for a missing value. May be repeated.")
@click.option("--raw", is_flag=True, help="Keep packed values (scale_factor, add_offset, _FillValue) as stored.")
@click.option("--map", "function", metavar="MODULE:FUNCTION", help="A function of each sample, a dict of its values.")
@click.option("--map-batch", type=click.IntRange(min=1), help="Give the function so many samples at once, as columns.")
@click.option("--resize", metavar="SIDE|HxW", help="Resize images: their shorter side, or height x width, in pixels.")
@click.option("--quality", type=click.IntRange(1, 100), help="Encode every image as a JPEG of this quality.")
@click.option("--split", help="Deal samples out at random, say train=0.9,val=0.1.")
@click.option("--shuffle", type=click.IntRange(min=0), metavar="SEED", help="Write the samples in a random order.")
@click.option(
    "--on-error", type=click.Choice(ON_ERROR), default="raise", show_default=True, help="What becomes of bad samples."
)
@click.option(
    "--shard-size", default="64MiB", show_default=True, help="Stored bytes of one object of the largest field."
)
@click.option(
    "--codec", type=click.Choice(CODECS), default="auto", show_default=True, help="How chunks are compressed."
)
@click.option(
    "--engine", default="local", show_default=True, metavar="NAME[=ADDRESS]", help="Or dask, ray, spark: who works."
)
@click.option("--workers", type=click.IntRange(min=0), help="Processes; one a core by default, 0 works in this one.")
@click.option("--dry-run", is_flag=True, help="Say what would be written, from a sample of the rows; write nothing.")
@click.option("--resume", is_flag=True, help="Take a finished dataset of the same source as done.")
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
    function: str | None,
    format_name: str | None,
    fields: tuple[str, ...],
    fill: tuple[str, ...],
    shard_size: str,
    codec: CodecChoice,
    storage: tuple[str, ...],
    source: tuple[str, ...],
    quiet: bool,
    **wishes: Any,
) -> None:
    """Convert SRC into a dataset at the URL DST.

    SRC is a local path or a URL of any store: docs/conversion.md lists the formats. An interrupted conversion goes on
    when the same command is run again. Ends with 3 where bad samples were left out.
    """
    layout = Layout(shard_size=parse_size(shard_size), codec=codec)
    storage_options, source_options = parse_options(storage), parse_options(source)
    from streamloader.conversion.job import convert as convert_here

    begin = time.monotonic()
    try:
        with _listener(quiet or wishes["dry_run"]) as listen:
            report = unwrap(convert_here)(
                src,
                dst,
                format=format_name,
                fields=fields or None,
                fill=parse_fill(fill),
                map=function,
                layout=layout,
                storage_options=storage_options,
                source_options=source_options or None,
                progress=listen,
                **wishes,
            )
    except KeyboardInterrupt:
        click.echo("interrupted: finished shards are kept, run the same command again to go on", err=True)
        sys.exit(INTERRUPTED)
    if wishes["dry_run"]:
        click.echo("\n".join(_preview(report.preview)))
    elif not quiet:
        click.echo(_summary(report, time.monotonic() - begin))
    if report.num_left_out:
        click.echo("\n".join(_left_out(report, wishes["on_error"])), err=True)
        sys.exit(LEFT_OUT)


def _preview(preview: Preview) -> Iterator[str]:
    """Yield the lines that tell what is going to be written."""
    what = f"{counted(preview.num_samples, 'sample')} in {counted(preview.files, 'file')}"
    yield f"{preview.format}: {what} at {preview.url}"
    names = max(map(len, preview.fields))
    types = max(len(str(field)) for field in preview.fields.values())
    for name, field in preview.fields.items():
        size = f"{show_bytes(preview.sizes[name])} a sample"
        detail = f"  ({preview.details[name]})" if name in preview.details else ""
        yield f"  {name:{names}}  {field!s:{types}}  {preview.codecs[name]:4}  {size}{detail}"
    for name, classes in preview.classes.items():
        noun = "class" if len(classes) == 1 else "classes"
        some = classes if len(classes) <= CLASSES_SHOWN else [*classes[: CLASSES_SHOWN - 2], "...", classes[-1]]
        yield f"  {name}: {len(classes):,} {noun}: {', '.join(some)}"
    splits = ", ".join(f"{name} {count:,}" for name, count in preview.splits.items() if name)
    yield f"about {show_bytes(preview.stored)} in {counted(preview.shards, 'shard')}{f' ({splits})' if splits else ''}"


def _left_out(report: Report, on_error: str) -> Iterator[str]:
    """Yield the lines that tell which samples are not in the dataset."""
    yield f"left out {counted(report.num_left_out, 'bad sample')} of {report.num_left_out + report.num_samples:,}:"
    bad = [(split, one) for split, some in report.left_out.items() for one in some]
    for split, one in bad[:SHOWN]:
        yield f"  {f'{split}: ' if split else ''}{one.name}: {one.problem}"
    if len(bad) > SHOWN:
        yield f"  and {len(bad) - SHOWN:,} more"
    if on_error == "quarantine" and bad:
        yield f"they are kept in {report.url}/{QUARANTINE}"


def _summary(report: Report, seconds: float) -> str:
    sizes = ", ".join(f"{name} {manifest.num_samples:,}" for name, manifest in report.manifests.items() if name)
    layouts = [layout for manifest in report.manifests.values() for layout in manifest.fields.values()]
    stored = show_bytes(sum(layout.stored for layout in layouts))
    kept = f", {report.shards_kept} of them from before" if report.shards_kept else ""
    what = f"converted {counted(report.num_samples, 'sample')}{f' ({sizes})' if sizes else ''} to {report.url}"
    return f"{what}: {stored} in {counted(report.shards, 'shard')}{kept}, {seconds:.1f} s"


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
            for line in _preview(progress.preview) if progress.preview else [progress.detail]:
                self._shown.say(f"scan: {line}")
            return
        now = time.monotonic()
        self._begin = self._begin or now
        elapsed = max(now - self._begin, 1e-3)
        rate = f"{(progress.done - progress.kept) / elapsed:,.0f} samples/s, {progress.bytes / elapsed / 1e6:,.1f} MB/s"
        kept = f", {progress.kept} kept from before" if progress.kept else ""
        step = Step(progress.phase, progress.done, progress.total, "samples", rate + kept, progress.kept)
        self._shown.show(step)
