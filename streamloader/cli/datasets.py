"""`streamloader convert`, `append`, `inspect`, `verify`, `export` and `rm-incomplete`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import click
from click import Choice, IntRange

from streamloader.cli.options import (
    PAIRS,
    by_split,
    counted,
    display,
    fields_option,
    json_option,
    option,
    parse_fill,
    preview_lines,
    print_table,
    quiet_option,
    show_bytes,
    source_option,
    split_option,
    storage_option,
    target_option,
)
from streamloader.errors import UsageError
from streamloader.options import CODECS, CodecChoice, Layout, parse_size

if TYPE_CHECKING:
    from streamloader.conversion.job import Report
    from streamloader.format.dataset import Dataset
    from streamloader.format.manifest import FieldLayout
    from streamloader.maintenance.cleanup import Incomplete
    from streamloader.maintenance.verify import VerifyReport

PROBLEMS = 1  # the exit status of a verification that found some
SKIPPED = 3  # the exit status where bad samples were skipped: the dataset is complete, but look at them
ON_ERROR = ("raise", "skip", "quarantine")
FORMATS = ("webdataset", "parquet", "npz", "zarr")
BAD_SHOWN = 10  # bad samples that are named on the terminal
PATHS_SHOWN = 5
VALUE_SHOWN = 60  # characters of a value
TRANSFORMS = (
    option("--format", metavar="NAME", help="The source's format; detected by default."),
    option("--map", metavar="MODULE:FUNCTION", help="A function of each sample, a dict of its values."),
    option("--map-batch", type=IntRange(min=1), help="Call it with so many samples at once, as columns."),
    option("--resize", metavar="SIDE|HxW", help="Resize images: their shorter side, or height x width, in pixels."),
    option("--quality", type=IntRange(1, 100), help="Encode every image as a JPEG of this quality."),
    option("--shuffle", type=IntRange(min=0), metavar="SEED", help="Write the samples in a random order."),
    option("--engine", default="local", metavar="NAME[=ADDRESS]", help="local, dask, ray or spark."),
    option("--workers", type=IntRange(min=0), help="Processes; default: one per core. 0: this process."),
)


def transform_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that `convert` and `append` share."""
    for add in reversed(TRANSFORMS):
        command = add(command)
    return command


@click.command()
@click.argument("src")
@click.argument("dst")
@transform_options
@option("--fields", multiple=True, metavar="NAME[=TYPE],...", help="Fields to keep, with their types.")
@option("--fill", parse=parse_fill, help="What replaces a missing value. May be repeated.", **PAIRS)
@option("--raw", is_flag=True, help="Keep packed values (scale_factor, add_offset, _FillValue) as stored.")
@option("--split", help="Assign samples to splits at random, say train=0.9,val=0.1.")
@option("--on-error", type=Choice(ON_ERROR), default="raise", help="What to do with bad samples.")
@option(
    "--shard-size",
    default="64MiB",
    parse=lambda text: parse_size(text, "--shard-size "),
    help="Stored bytes of one object of the largest field.",
)
@option("--codec", type=Choice(CODECS), default="auto", help="How chunks are compressed.")
@option("--dry-run", is_flag=True, help="Print what would be written, from a sample of the rows; write nothing.")
@option("--resume", is_flag=True, help="Accept a finished dataset of the same source.")
@option("--overwrite", is_flag=True, help="Replace the dataset that is there, or begin again.")
@storage_option
@source_option
@quiet_option
def convert(*, src: str, dst: str, shard_size: int, codec: CodecChoice, quiet: bool, **options: Any) -> None:
    """Convert SRC into a dataset at the URL DST.

    SRC is a local path or a URL of any store: docs/conversion.md lists the formats. Run the same command again to
    resume an interrupted conversion. Exits with 3 where bad samples were skipped.
    """
    from streamloader.conversion.api import convert as run

    layout, dry_run = Layout(shard_size=shard_size, codec=codec), options["dry_run"]
    interrupted = "interrupted: finished shards are kept, run the same command again to resume"
    with display(quiet or dry_run, interrupted) as shown:
        report = unwrap(run)(src, dst, layout=layout, progress=shown.update, **options)
    if dry_run:
        click.echo("\n".join(preview_lines(report.preview)))
    elif not quiet:
        click.echo(f"{_converted(report)}, {shown.seconds}")
    if report.num_left_out:
        click.echo("\n".join(_skipped(report, options["on_error"])), err=True)
        sys.exit(SKIPPED)


def _skipped(report: Report, on_error: str) -> Iterator[str]:
    """Yield the lines that name the samples that are not in the dataset."""
    from streamloader.conversion.shard_task import QUARANTINE

    yield f"{report.num_left_out:,} of {counted(report.num_left_out + report.num_samples, 'sample')} skipped:"
    bad = [(split, one) for split, some in report.left_out.items() for one in some]
    for split, one in bad[:BAD_SHOWN]:
        yield f"  {f'{split}: ' if split else ''}{one.name}: {one.problem}"
    if len(bad) > BAD_SHOWN:
        yield f"  and {len(bad) - BAD_SHOWN:,} more"
    if on_error == "quarantine" and bad:
        yield f"they are kept in {report.url}/{QUARANTINE}"


def _converted(report: Report) -> str:
    splits = by_split({name: manifest.num_samples for name, manifest in report.manifests.items()})
    layouts = [layout for manifest in report.manifests.values() for layout in manifest.fields.values()]
    stored = show_bytes(sum(layout.stored for layout in layouts))
    what = f"converted {counted(report.num_samples, 'sample')}{splits} to {report.url}"
    return f"{what}: {stored} in {counted(report.shards, 'shard')}{_kept(report.shards_kept)}"


def _kept(shards: int) -> str:
    return f", {shards} of them from before" if shards else ""


@click.command()
@click.argument("url")
@click.argument("src", required=False)
@split_option
@transform_options
@option("--abandon", is_flag=True, help="End an interrupted append; the dataset stays as it was.")
@storage_option
@source_option
@quiet_option
def append(*, url: str, src: str | None, abandon: bool, quiet: bool, **options: Any) -> None:
    """Add the samples of SRC behind those of the finished dataset at URL.

    Readers see the new samples once all of them are there; those who opened the dataset earlier keep reading what it
    had then. Run the same command again to resume an interrupted append.
    """
    from streamloader.maintenance import append as commands

    if abandon == (src is not None):
        raise UsageError("append takes SRC, or --abandon", "give one of them")
    if src is None:
        ended = commands.abandon(url, split=options["split"], storage_options=options["storage_options"])
        text = "ended the append, the dataset is as it was" if ended else "no append is under way"
    else:
        with display(quiet, "interrupted: the dataset is as it was, run the same command again to resume") as shown:
            report = unwrap(commands.append)(url, src, progress=shown.update, **options)
        manifest, written = report.manifest, f"{counted(report.shards, 'shard')} written{_kept(report.shards_kept)}"
        text = f"appended {counted(report.added, 'sample')} to {report.url}: version {manifest.generation} has"
        text = f"{text} {manifest.num_samples:,}, {written}, {shown.seconds}"
        if not report.added:
            text = f"the source has no samples: {report.url} stays as it is"
    if not quiet:
        click.echo(text)


@click.command()
@click.argument("url")
@click.argument("dst")
@option("--format", type=Choice(FORMATS), required=True, help="What to write.")
@fields_option
@split_option
@storage_option
@target_option
@quiet_option
def export(*, url: str, dst: str, quiet: bool, **options: Any) -> None:
    """Write the samples of the dataset at URL, in order, as files of another format to the empty folder or URL DST.

    webdataset: tars. parquet: needs pyarrow. npz: fields of fixed shape only. zarr: a plain Zarr v3 group.
    """
    from streamloader.maintenance.export import export as run
    from streamloader.storage.url import redact

    with display(quiet, f"interrupted: {redact(dst)} is incomplete, remove it") as shown:
        report = unwrap(run)(url, dst, progress=shown.update, **options)
    if not quiet:
        written = f"{show_bytes(report.bytes)} in {counted(report.files, 'file')}, {shown.seconds}"
        click.echo(f"exported {counted(report.num_samples, 'sample')} to {report.url}: {written}")


@click.command()
@click.argument("url")
@option("--split", help="One split only; all of them by default.")
@option("--against", metavar="SRC", help="The source to compare every sample with.")
@option("--format", metavar="NAME", help="The format of SRC; detected by default.")
@storage_option
@source_option
@json_option
@option("--quiet", is_flag=True, help="Show no progress.")
def verify(*, url: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Read all of the dataset at URL, and report everything that is wrong with it.

    Sizes, indexes, checksums, tables, documents, every item; with --against the source too. Nothing is written. The
    exit status is 0 where the dataset is OK, 1 where it is not.
    """
    from streamloader.maintenance.verify import verify as run

    with display(quiet) as shown:
        report = unwrap(run)(url, progress=shown.update, **options)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=1))
    else:
        click.echo("\n".join(_findings(report)) + f", {shown.seconds}")
    if not report.ok:
        sys.exit(PROBLEMS)


def _findings(report: VerifyReport) -> Iterator[str]:
    yield from (f"problem: {one.problem}" for one in report.problems)
    if not report.listed:
        yield "the store does not list its objects: orphaned objects were not looked for"
    if report.appending:
        yield "an append is not finished: documents and the ends of shards were not checked"
    elif report.leftovers:
        yield f"{counted(report.leftovers, 'leftover')} of earlier writers: streamloader rm-incomplete {report.url}"
    if report.others:
        yield f"{counted(report.others, 'other object')} below the same URL, not part of the dataset"
    what = f"{counted(sum(report.samples.values()), 'sample')}{by_split(report.samples)}"
    compared = f", {report.compared:,} compared with the source" if report.compared else ""
    read = f"{show_bytes(report.bytes)} in {counted(report.objects, 'object')}"
    yield f"{report.url}: {'OK' if report.ok else counted(len(report.problems), 'problem')}; {what}{compared}, {read}"


@click.command("rm-incomplete")
@click.argument("url")
@option("--yes", is_flag=True, help="Do not ask.")
@storage_option
def rm_incomplete(*, url: str, yes: bool, storage_options: dict[str, Any]) -> None:
    """Remove the unfinished dataset at URL, or what killed writers left next to a finished one, which stays.

    Only while nothing writes there.
    """
    from streamloader.maintenance.cleanup import find_incomplete, remove_incomplete
    from streamloader.storage import open_store

    store = open_store(url, storage_options)
    found = find_incomplete(store)
    click.echo(found.message)
    if found.kind == "nothing":
        return
    amount = f"{counted(len(found.objects), 'object')}, {show_bytes(found.bytes)}"
    click.echo("\n".join(_to_remove(found, amount)))
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("there is no terminal to ask for confirmation", "give --yes")
        if not click.confirm("Has everything stopped writing there, and shall this be removed?"):
            click.echo("nothing was removed")
            return
    leftovers = remove_incomplete(store, found)
    more = f"; half-written files and unfinished uploads: {leftovers}" if leftovers else ""
    click.echo(f"removed {amount}{more}")


def _to_remove(found: Incomplete, amount: str) -> Iterator[str]:
    if not found.objects:
        yield "no leftovers are listed; half-written files and unfinished uploads will be removed if there are any"
        return
    yield f"to be removed: {amount}"
    yield from (f"  {info.path}, {show_bytes(info.size)}" for info in found.objects[:PATHS_SHOWN])
    if len(found.objects) > PATHS_SHOWN:
        yield f"  ... and {len(found.objects) - PATHS_SHOWN} more"


@click.command()
@click.argument("url")
@option("--split", help="One split only; all of them by default.")
@storage_option
@json_option
def inspect(*, url: str, split: str | None, storage_options: dict[str, Any], as_json: bool) -> None:
    """Show the fields, shapes, sizes, codecs, splits and one sample of the dataset at URL."""
    from streamloader.format.dataset import open as open_dataset
    from streamloader.format.opening import read_root, split_names
    from streamloader.storage import open_store

    store = open_store(url, storage_options)
    names = [split] if split is not None else split_names(read_root(store)) or [None]
    found = [_facts(name, open_dataset(url, split=name, storage_options=storage_options)) for name in names]
    if as_json:
        click.echo(json.dumps({"url": store.url, "datasets": found}, indent=1))
        return
    for facts in found:
        click.echo(f"{store.url}{' split ' + facts['split'] if facts['split'] else ''}\n{_headline(facts)}")
        _print_fields(facts)
        classes = facts["provenance"].get("classes")
        for name, listed in classes.items() if isinstance(classes, dict) else ():
            more = f", ... ({len(listed)})" if len(listed) > 10 else ""
            click.echo(f"classes of {name}: {', '.join(map(str, listed[:10]))}{more}")


def _facts(split: str | None, dataset: Dataset) -> dict[str, Any]:
    manifest = dataset.manifest
    sample = dataset[0] if manifest.num_samples else {}
    return {
        "split": split,
        "num_samples": manifest.num_samples,
        "generation": manifest.generation,
        "digest": manifest.digest,
        "samples_per_shard": manifest.samples_per_shard,
        "order": {key: getattr(manifest.order, key) for key in ("block", "lanes", "window")},
        "fields": {name: _field_facts(layout, manifest.num_samples) for name, layout in manifest.fields.items()},
        "provenance": dict(manifest.provenance),
        "sample": {name: _show(value, manifest.fields[name]) for name, value in sample.items()},
    }


def _field_facts(layout: FieldLayout, num_samples: int) -> dict[str, Any]:
    facts = asdict(layout)
    del facts["skips"]
    return {
        **facts.pop("field"),
        "shape": list(layout.field.shape),
        "spec": str(layout.field),
        **facts,
        "ratio": round(layout.nbytes / layout.stored, 3) if layout.stored else None,
        "chunks": -(-num_samples // layout.chunk),
        "shards": layout.num_shards(num_samples),
    }


def _show(value: Any, layout: FieldLayout) -> str:
    """Return a short text of a value: an image by its format and size, an array by its shape and first values."""
    if isinstance(value, bytes):
        return _show_image(value) or f"{len(value)} bytes"
    if isinstance(value, str):
        return value if len(value) <= VALUE_SHOWN else f"{value[:VALUE_SHOWN]}... ({len(value)} characters)"
    if not layout.field.shape and layout.field.kind == "tensor":
        return str(value)
    first = ", ".join(str(one) for one in value.ravel()[:4])
    more = ", ..." if value.size > 4 else ""
    return f"{value.dtype}{list(value.shape)} [{first}{more}]"


def _show_image(data: bytes) -> str:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            return f"{image.format} {image.width}x{image.height} {image.mode}, {len(data)} bytes"
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""


def _headline(facts: dict[str, Any]) -> str:
    stored, nbytes = (sum(field[key] for field in facts["fields"].values()) for key in ("stored", "nbytes"))
    ratio = f", compression {nbytes / stored:.2f}" if stored else ""
    order = ", ".join(f"{key} {value}" for key, value in facts["order"].items())
    size = f"{show_bytes(nbytes)} decoded, {show_bytes(stored)} stored{ratio}"
    version = f"version {facts['generation']}, " if facts["generation"] > 1 else ""
    return f"{version}{facts['num_samples']:,} samples, {size}; order: {order}; digest {facts['digest']}"


def _print_fields(facts: dict[str, Any]) -> None:
    right = ("decoded", "stored", "ratio")
    titles = ("field", "kind", *right, "codec", "chunks", "shards", "held", "sample 0")
    rows = []
    for name, field in facts["fields"].items():
        ratio, held = f"{field['ratio']:.2f}" if field["ratio"] else "", "in memory" if field["resident"] else ""
        sizes = show_bytes(field["nbytes"]), show_bytes(field["stored"])
        counts = f"{field['chunks']} x {field['chunk']}", f"{field['shards']} x {field['shard']}"
        sample = facts["sample"].get(name, "")
        rows.append((name, field["spec"], *sizes, ratio, field["codec"], *counts, held, sample))
    print_table(titles, rows, right)
