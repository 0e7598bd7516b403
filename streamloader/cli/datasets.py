"""The commands that make, change and inspect datasets, from `streamloader convert` to `rm-incomplete`, and caches."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click import Choice, IntRange

from streamloader.cli import options as shared
from streamloader.cli.arrays import inspect_arrays, parse_extent, sampling_options, take_sampling
from streamloader.cli.options import option, several
from streamloader.cli.show import (
    by_split,
    counted,
    display,
    preview_lines,
    print_json,
    print_result,
    print_table,
    printable,
    say,
    show_bytes,
    show_classes,
)
from streamloader.cli.terminal import echo, paint
from streamloader.errors import FormatError, NotADatasetError, StreamloaderError, UsageError
from streamloader.options import CODECS, CodecChoice, Layout

if TYPE_CHECKING:
    from streamloader.conversion.job import Report
    from streamloader.format.dataset import Dataset
    from streamloader.format.manifest import FieldLayout
    from streamloader.maintenance.append import AppendReport
    from streamloader.maintenance.cleanup import Incomplete
    from streamloader.maintenance.verify import VerifyReport
    from streamloader.storage import Store

PROBLEMS = 1  # the exit status of a verification that found problems
SKIPPED = 3  # the exit status if bad samples were skipped: the dataset is complete without them
ON_ERROR = ("raise", "skip", "quarantine")
FORMATS = ("webdataset", "parquet", "npz", "zarr")
BAD_SHOWN = 10  # skipped samples that are named
PROBLEMS_SHOWN = 1000  # of a verification
PATHS_SHOWN = 5  # objects to remove that are named
DIGEST_SHOWN = 12  # characters
VALUE_SHOWN = 60  # characters of a text value
MOST_LENGTHS = 10_000_000  # samples whose lengths `inspect` reads: about 20 MB
transform_options = several(  # those that `convert` and `append` share
    option("--format", metavar="NAME", help="Format of SRC; detected by default."),
    option("--map", metavar="MODULE:FUNCTION", help="Function that maps a sample, a dict of its values, to another."),
    option("--map-batch", type=IntRange(min=1), help="Call the function with this many samples at once, as columns."),
    option("--cache-key", metavar="TEXT", help="Change it if what the function uses changes, to not resume with it."),
    option("--resize", metavar="SIDE|HxW", help="Resize images: the shorter side, or height x width, in pixels."),
    option("--quality", type=IntRange(1, 100), help="Encode every image as JPEG of this quality."),
    option("--shuffle", type=IntRange(min=0), metavar="SEED", help="Write the samples in a random order."),
    option("--engine", default="local", metavar="NAME[=ADDRESS]", help="Executor: local, dask, ray or spark."),
    option("--workers", type=IntRange(min=0), help="Number of processes; default: one per core. 0: this process."),
)


@click.command()
@shared.place("src")
@shared.place("dst")
@transform_options
@option("--fields", multiple=True, metavar="NAME[=TYPE],...", help="Fields to keep, optionally with types.")
@option("--columns", metavar="NAME[=TYPE],...", help="Fields of SRC to read for --map; --fields chooses of its result.")
@shared.fill_option
@option("--raw", is_flag=True, help="Keep packed values (scale_factor, add_offset, _FillValue) as stored.")
@option("--rechunk", metavar="NAME[@VALUE],...", help="Arrays of a Zarr store, and slices of them: t2m,z@500.")
@option("--sample-axis", parse=parse_extent, help="The dimension of their samples; default: their first.")
@option("--split", help="Assign samples to splits at random, say train=0.9,val=0.1.")
@option("--on-error", type=Choice(ON_ERROR), default="raise", help="How to handle bad samples.")
@shared.size_option("--shard-size", default="64MiB", help="Stored size of a shard of the largest field.")
@option("--codec", type=Choice(CODECS), default="auto", help="Compression of chunks.")
@option("--dry-run", is_flag=True, help="Print what would be written, estimated from some rows; write nothing.")
@option("--resume", is_flag=True, help="Succeed if DST is a finished dataset of the same source.")
@option("--overwrite", is_flag=True, help="Replace an existing dataset, or discard an unfinished one.")
@shared.storage_option
@shared.source_option
@shared.quiet_option
@shared.json_option
def convert(
    *, src: str, dst: str, shard_size: int, codec: CodecChoice, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Convert SRC into a dataset at the URL DST.

    SRC is a local path or a URL of any store: docs/conversion.md lists the formats. Run the same command again to
    resume an interrupted conversion. Exits with 3 if bad samples were skipped.
    """
    from streamloader.conversion.api import convert as run

    layout, dry_run = Layout(shard_size=shard_size, codec=codec), options["dry_run"]
    interrupted = "interrupted: finished shards are kept, run the same command again to resume"
    with display(quiet or dry_run, interrupted) as shown:
        report = run(src, dst, layout=layout, progress=shown.update, **options)
    if as_json:
        print_json({**report.to_dict(), "dry_run": dry_run, "seconds": shown.elapsed})
    elif dry_run:
        say("\n".join(preview_lines(report.preview)))
    elif not quiet:
        say(f"{_converted(report)}, {shown.seconds}")
    if report.num_left_out:
        say("\n".join(_skipped(report, options["on_error"])), err=True)
        sys.exit(SKIPPED)


def _skipped(report: Report, on_error: str) -> Iterator[str]:
    """Yield lines that name the samples that are not in the dataset."""
    from streamloader.conversion.shard_task import QUARANTINE

    yield f"{report.num_left_out:,} of {counted(report.num_left_out + report.num_samples, 'sample')} skipped:"
    bad = [(split, sample) for split, samples in report.left_out.items() for sample in samples]
    for split, sample in bad[:BAD_SHOWN]:
        yield f"  {f'{split}: ' if split else ''}{sample.name}: {sample.problem}"
    if len(bad) > BAD_SHOWN:
        yield f"  and {len(bad) - BAD_SHOWN:,} more"
    if on_error == "quarantine" and bad:
        yield f"they are saved in {report.url}/{QUARANTINE}"


def _converted(report: Report) -> str:
    splits = by_split({name: manifest.num_samples for name, manifest in report.manifests.items()})
    converted = f"converted {counted(report.num_samples, 'sample')}{splits} to {report.url}"
    return f"{converted}: {show_bytes(report.stored)} in {counted(report.shards, 'shard')}{_kept(report.shards_kept)}"


def _kept(shards: int) -> str:
    return f", {shards} of them from before" if shards else ""


@click.command()
@shared.place("url")
@shared.place("src", required=False)
@shared.split_option
@transform_options
@option("--fields", metavar="NAME[=TYPE],...", help="Add these columns of the file SRC as new fields instead.")
@option("--on", metavar="KEY", help="Join the columns by this field; without it, by row. index: by sample number.")
@option("--abandon", is_flag=True, help="Discard an interrupted append; the dataset stays as it was.")
@shared.storage_option
@shared.source_option
@shared.quiet_option
@shared.json_option
def append(*, url: str, src: str | None, abandon: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Append samples, or with --fields new fields, to a dataset.

    The finished dataset at URL gets the samples of SRC, or columns of SRC as fields. Readers see them when the append
    is complete; those that opened the dataset before keep reading the earlier version. Run the same command again to
    resume an interrupted append.
    """
    from streamloader.format.opening import manifest_json, read_root
    from streamloader.maintenance.append import abandon as abandon_append
    from streamloader.maintenance.append import append as run
    from streamloader.storage import open_store
    from streamloader.storage.url import redact

    fields, on = options.pop("fields"), options.pop("on")
    if abandon == (src is not None):
        raise UsageError("append takes SRC, or --abandon", "give one of them")
    if src is None:
        discarded = abandon_append(url, split=options["split"], storage_options=options["storage_options"])
        text = "ended the append, the dataset is as it was" if discarded else "no append is under way"
        print_result({"url": redact(url), "abandoned": discarded}, text, as_json=as_json, quiet=quiet)
        return
    with display(quiet, "interrupted: the dataset is as it was, run the same command again to resume") as shown:
        try:
            if fields is not None or on is not None:
                report = _add_fields(url, src, fields, on, progress=shown.update, **options)
            else:
                report = run(url, src, progress=shown.update, **options)
        except NotADatasetError as error:
            with suppress(StreamloaderError):
                root = read_root(open_store(src, options["source_options"] or options["storage_options"]))
                if manifest_json(root):
                    error.remedy = f"{src} is a dataset: to append to it, give it before the source"
            raise
    document = {**report.to_dict(), "seconds": shown.elapsed}
    print_result(document, _appended(report, shown.seconds), as_json=as_json, quiet=quiet)


def _appended(report: AppendReport, seconds: str) -> str:
    if not report.added and not report.fields:
        return f"the source has no samples: {report.url} is unchanged"
    what = f"added the fields {', '.join(report.fields)}"
    what = f"appended {counted(report.added, 'sample')}" if report.added else what
    version = f"version {report.manifest.generation} has {report.manifest.num_remaining:,}"
    shards = f"{counted(report.shards, 'shard')} written{_kept(report.shards_kept)}"
    return f"{what} to {report.url}: {version}, {shards}, {seconds}"


def _add_fields(url: str, src: str, fields: str | None, on: str | None, **options: Any) -> AppendReport:
    from streamloader.conversion.executors import parse_engine
    from streamloader.conversion.job import RunOptions
    from streamloader.conversion.sources.fields import parse_selection
    from streamloader.maintenance.columns import ColumnOptions, run_addition

    if not fields:
        raise UsageError("--on without --fields", "name the columns to add with --fields")
    for name in ("map", "map_batch", "cache_key", "resize", "quality", "shuffle"):
        if options.pop(name) is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} with --fields", "add columns that are computed with sl.add_columns"
            )
    kinds = parse_selection(fields).fields
    columns = {f"{name}={kind}" if kind else name: src for name, kind in kinds.items()}
    run_options = RunOptions(
        options.pop("workers"), "raise", options.pop("progress"), parse_engine(options.pop("engine"))
    )
    column_options = ColumnOptions(on, options.pop("format"), options.pop("source_options"))
    return run_addition(url, columns, column_options, run_options, **options)


@click.command()
@shared.place("url")
@option("--where", metavar="CONDITION", help="The samples for which this is true, say 'label == 3'.")
@option("--ids", metavar="FILE", help="The samples in this file of numbers, or in the files of a folder with a slash.")
@option("--version", type=int, help="The version whose numbers --ids has; a later one is an error, not changed.")
@option("--erase", is_flag=True, help="Overwrite the bytes of all deleted samples, and remove earlier versions.")
@shared.split_option
@shared.storage_option
@shared.quiet_option
@shared.json_option
def delete(*, url: str, quiet: bool, as_json: bool, **options: Any) -> None:
    """Delete samples of a dataset: a new version leaves them out.

    Those that opened the dataset at URL before keep reading the earlier version, for which the shards still have the
    samples. Run the same command again to resume an interrupted deletion; streamloader append --abandon ends it. With
    --erase, no version has the bytes afterwards; --where and --ids may then be left out. End the runs that read the
    dataset before: they go on with what they hold in memory.
    """
    from streamloader.maintenance.delete import delete as run

    with display(quiet, "interrupted: run the same command again to resume") as shown:
        report = run(url, **options)
    text = f"no sample matches: {report.url} is unchanged"
    if report.deleted or report.erased:
        version = f"version {report.manifest.generation} has {report.manifest.num_remaining:,}"
        what = f"deleted {counted(report.deleted, 'sample')} from {report.url}"
        erased = f", the bytes of {counted(report.erased, 'deleted sample')} are erased" if report.erased else ""
        text = f"{what}: {version}{erased}, {shown.seconds}"
    print_result({**report.to_dict(), "seconds": shown.elapsed}, text, as_json=as_json, quiet=quiet)


@click.command()
@shared.place("url")
@option("--split", help="One split; default: all.")
@shared.storage_option
@shared.quiet_option
@shared.json_option
def lengths(*, url: str, split: str | None, storage_options: dict[str, Any], quiet: bool, as_json: bool) -> None:
    """Add the tables of lengths that the dataset at URL lacks.

    Datasets of release 0.1 lack them. The dataset gets a new version. Reads the fields of bytes, text and ragged arrays
    without a table once. Those that opened the dataset before keep reading the earlier version. Run the same command
    again to resume an interrupted one; streamloader append --abandon ends it.
    """
    from streamloader.format.opening import read_root, split_names
    from streamloader.maintenance.lengths import add_lengths
    from streamloader.storage import open_store

    names = [split] if split is not None else split_names(read_root(open_store(url, storage_options))) or [None]
    reports = []
    for name in names:
        with display(quiet, "interrupted: run the same command again to resume") as shown:
            report = add_lengths(url, split=name, storage_options=storage_options, progress=shown.update)
        text = f"no table of lengths is missing: {report.url} is unchanged"
        if report.fields:
            version = f"version {report.manifest.generation} has {counted(report.manifest.num_remaining, 'sample')}"
            text = f"added the lengths of {', '.join(report.fields)} to {report.url}: {version}, {shown.seconds}"
        reports.append({**report.to_dict(), "seconds": shown.elapsed})
        if not quiet and not as_json:
            say(text)
    if as_json:
        print_json(reports)


@click.command()
@shared.place("url")
@shared.split_option
@shared.storage_option
@shared.json_option
def log(*, url: str, split: str | None, storage_options: dict[str, Any], as_json: bool) -> None:
    """List the versions of the dataset at URL, the newest first."""
    from streamloader.maintenance.versions import log as run

    versions = run(url, split=split, storage_options=storage_options)
    if as_json:
        print_json([version.to_dict() for version in versions])
        return
    rows = []
    for version in versions:
        samples = "" if version.num_samples is None else f"{version.num_samples:,}"
        stored = "" if version.stored is None else show_bytes(version.stored)
        published = f"{version.published:%Y-%m-%d %H:%M}" if version.published else ""
        rows.append((version.number, samples, stored, published, version.change, ", ".join(version.fields)))
    titles = ("version", "samples", "stored", "published (UTC)", "change", "fields")
    print_table(titles, rows, ("version", "samples", "stored"))


@click.command()
@shared.place("url")
@click.argument("a", type=IntRange(min=1))
@click.argument("b", type=IntRange(min=1))
@shared.split_option
@shared.storage_option
@shared.json_option
def diff(*, url: str, a: int, b: int, split: str | None, storage_options: dict[str, Any], as_json: bool) -> None:
    """Show what changed from version A to version B of a dataset."""
    from streamloader.maintenance.versions import diff as run

    difference = run(url, a, b, split=split, storage_options=storage_options)
    if as_json:
        print_json(difference.to_dict())
        return
    size = f"{'-' if difference.bytes < 0 else '+'}{show_bytes(abs(difference.bytes))} stored"
    say(f"version {a} to {b}: {difference}; {size}")


@click.command()
@shared.place("url")
@shared.place("dst")
@option("--format", type=Choice(FORMATS), required=True, help="Format to write.")
@shared.fields_option
@shared.split_option
@shared.storage_option
@shared.target_option
@shared.quiet_option
@shared.json_option
def export(*, url: str, dst: str, quiet: bool, as_json: bool, **options: Any) -> None:
    """Export the samples of a dataset to files of another format.

    Reads the dataset at URL in order, and writes to DST, an empty folder or URL.

    webdataset: tar files. parquet: needs pyarrow. npz: fields of fixed shape only. zarr: a plain Zarr v3 group.
    """
    from streamloader.maintenance.export import export as run
    from streamloader.storage.url import redact

    with display(quiet, f"interrupted: {redact(dst)} is incomplete, remove it") as shown:
        report = run(url, dst, progress=shown.update, **options)
    size = f"{show_bytes(report.bytes)} in {counted(report.files, 'file')}"
    text = f"exported {counted(report.num_samples, 'sample')} to {report.url}: {size}, {shown.seconds}"
    print_result({**report.to_dict(), "seconds": shown.elapsed}, text, as_json=as_json, quiet=quiet)


@click.command()
@shared.place("url")
@option("--split", help="One split; default: all.")
@option("--decode", is_flag=True, help="Also decode every image, and check every value, as training does.")
@option("--bad", metavar="FILE", help="Write the samples with problems to this file, for exclude= of training.")
@option("--against", metavar="SRC", help="Source to compare every sample with.")
@option("--format", metavar="NAME", help="Format of SRC; detected by default.")
@shared.storage_option
@shared.source_option
@shared.json_option
@option("--quiet", is_flag=True, help="Show no progress.")
def verify(*, url: str, bad: str | None, as_json: bool, quiet: bool, **options: Any) -> None:
    """Check the whole dataset at URL, and report every problem.

    Reads all objects and checks sizes, indexes, checksums, tables, documents and values; with --decode, decodes all
    images; with --against, compares every sample with the source. Nothing but --bad is written. Exits with 0 if the
    dataset is OK, else with 1.
    """
    from streamloader.maintenance.verify import verify as run
    from streamloader.storage.url import redact

    if bad is not None and bad.endswith("/"):
        raise UsageError(f"--bad {redact(bad)} is a folder", "give the path or the URL of a file")
    with display(quiet) as shown:
        report = run(url, progress=shown.update, **options)
    written = report.bad if bad is None else report.write_bad(bad, options["storage_options"])
    if as_json:
        print_json({**report.to_dict(), "seconds": shown.elapsed})
    else:
        echo("\n".join(_findings(report)) + f", {shown.seconds}", sys.stdout)
    if bad is not None and (written < report.bad or not report.complete):
        problem = f"the list of bad samples is not complete, it has {counted(written, 'line')}"
        warning = paint("warning:", sys.stderr, fg="yellow")
        echo(f"{warning} {problem}; repair what is damaged, and verify again", sys.stderr)
    if not report.ok:
        sys.exit(PROBLEMS)


def _findings(report: VerifyReport) -> Iterator[str]:
    problem = paint("problem:", sys.stdout, fg="red")
    yield from (f"{problem} {printable(finding.problem)}" for finding in report.problems[:PROBLEMS_SHOWN])
    if len(report.problems) > PROBLEMS_SHOWN:
        yield f"... and {counted(len(report.problems) - PROBLEMS_SHOWN, 'problem')} more, which --json prints"
    if not report.complete:
        yield "there may be more problems: only so many are collected"
    if not report.listed:
        yield "the store cannot list objects: orphaned objects were not checked"
    if report.appending:
        yield "an append is not finished: documents and the ends of shards were not checked"
    elif report.leftovers:
        left = counted(report.leftovers, "leftover")
        yield f"{left} of earlier writers: streamloader rm-incomplete {printable(report.url)}"
    if report.others:
        yield f"{counted(report.others, 'other object')} below the same URL, not part of the dataset"
    verdict = "OK" if report.ok else counted(len(report.problems), "problem")
    verdict = paint(verdict, sys.stdout, fg="green" if report.ok else "red", bold=True)
    samples = f"{counted(sum(report.samples.values()), 'sample')}{by_split(report.samples)}"
    compared = f", {counted(report.decoded, 'image')} decoded" if report.decoded else ""
    compared += f", {report.compared:,} compared with the source" if report.compared else ""
    read = f"{show_bytes(report.bytes)} in {counted(report.objects, 'object')}"
    yield f"{printable(report.url)}: {verdict}; {samples}{compared}, {read}"


@click.command("rm-incomplete")
@shared.place("url")
@option("--yes", is_flag=True, help="Do not ask for confirmation.")
@shared.storage_option
@shared.json_option
def rm_incomplete(*, url: str, yes: bool, storage_options: dict[str, Any], as_json: bool) -> None:
    """Remove an unfinished dataset, or what killed writers left.

    At URL is the unfinished dataset, or a finished one with leftovers beside it. Finished datasets are kept. Run it
    only while nothing writes to URL. --json needs --yes if there is anything.
    """
    from streamloader.maintenance.cleanup import find_incomplete, remove_incomplete
    from streamloader.storage import open_store

    store = open_store(url, storage_options)
    incomplete = find_incomplete(store)
    found = incomplete.kind != "nothing"
    size = f"{counted(len(incomplete.objects), 'object')}, {show_bytes(incomplete.bytes)}"
    if not as_json:
        say(printable(incomplete.message))
        if found:
            say("\n".join(_to_remove(incomplete, size)))
    removes = found and (yes or _confirmed(can_ask=not as_json and sys.stdin.isatty()))
    unlisted = remove_incomplete(store, incomplete) if removes else 0
    more = f"; half-written files and unfinished uploads: {unlisted}" if unlisted else ""
    text = f"removed {size}{more}" if removes else "nothing was removed"
    document = {**incomplete.to_dict(), "removed": removes, "unlisted": unlisted}
    print_result(document, text, as_json=as_json, quiet=not found)


def _confirmed(*, can_ask: bool) -> bool:
    if not can_ask:
        raise UsageError("there is no terminal to ask for confirmation", "give --yes")
    return click.confirm("Has every writer to this URL stopped, and do you want to remove this?")


def _to_remove(incomplete: Incomplete, size: str) -> Iterator[str]:
    if not incomplete.objects:
        yield "no leftovers are listed; half-written files and unfinished uploads will be removed if there are any"
        return
    yield f"to be removed: {size}"
    yield from (f"  {info.path}, {show_bytes(info.size)}" for info in incomplete.objects[:PATHS_SHOWN])
    if len(incomplete.objects) > PATHS_SHOWN:
        yield f"  ... and {len(incomplete.objects) - PATHS_SHOWN} more"


@click.command()
@shared.place("path")
@option("--clear", metavar="DIGEST|all", help="Delete the dataset whose digest begins so, or the cache.")
@shared.json_option
def cache(*, path: str, clear: str | None, as_json: bool) -> None:
    """List the datasets in a cache, or clear it.

    PATH is that of sl.Cache. Loaders that read through it go on, with requests to their store. Nothing is deleted but
    what a cache has written.
    """
    from streamloader.storage import cache as caches

    if clear is not None:
        count, size = caches.clear(path, "" if clear == "all" else clear)
        text = f"removed {counted(count, 'range')}, {show_bytes(size)}"
        print_result({"removed": count, "bytes": size}, text, as_json=as_json)
        return
    found = caches.entries(path)
    if as_json:
        print_json([entry._asdict() for entry in found])
    elif not found:
        say("the cache is empty")
    else:
        rows = [
            (each.digest[:DIGEST_SHOWN], each.url, f"{each.ranges:,}", show_bytes(each.bytes), _when(each.last_read))
            for each in found
        ]
        print_table(("digest", "dataset", "ranges", "bytes", "last read"), rows, ("ranges", "bytes"))


def _when(seconds: float) -> str:
    """Format a time in seconds since 1970, in local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""


@click.command()
@shared.place("url")
@option("--split", help="One split; default: all.")
@shared.storage_option
@shared.json_option
@sampling_options
def inspect(*, url: str, split: str | None, storage_options: dict[str, Any], as_json: bool, **options: Any) -> None:
    """Show the fields, sizes and splits of the dataset at URL.

    Also shapes, codecs, lengths and one sample. Of another Zarr store, show the arrays, and with --sample-axis what
    their samples read.
    """
    from streamloader.format.dataset import open as open_dataset
    from streamloader.format.opening import split_names
    from streamloader.storage import open_store, references_url

    sampling = take_sampling(options)
    store = open_store(references_url(url), storage_options)
    root = None if sampling.used else _dataset_root(store)
    if root is None:
        if split is not None:
            raise UsageError(f"--split {split} of arrays in place", "give the URL of the group that has them")
        inspect_arrays(url, storage_options, sampling, as_json=as_json)
        return
    names = [split] if split is not None else split_names(root) or [None]
    datasets = [_facts(name, open_dataset(url, split=name, storage_options=storage_options)) for name in names]
    if as_json:
        print_json({"url": store.url, "datasets": datasets})
        return
    for facts in datasets:
        say(f"{store.url}{' split ' + facts['split'] if facts['split'] else ''}\n{_headline(facts)}")
        _print_fields(facts)
        for name, orientation in facts["orientation"].items():
            say(f"EXIF orientation of {name}: {orientation}")
        classes = facts["provenance"].get("classes")
        for name, class_names in classes.items() if isinstance(classes, dict) else ():
            say(show_classes(name, class_names))


def _dataset_root(store: Store) -> dict[str, Any] | None:
    """Return the root document of a dataset, None for other Zarr. Raises `NotADatasetError` for anything else."""
    from streamloader.format.opening import manifest_json, read_root
    from streamloader.zarr.metadata import read_group

    try:
        root = read_root(store)
    except NotADatasetError:
        with suppress(StreamloaderError):
            if read_group(store).arrays:
                return None
        raise
    return None if manifest_json(root) is None and read_group(store).arrays else root


def _facts(split: str | None, dataset: Dataset) -> dict[str, Any]:
    manifest = dataset.manifest
    sample = dataset[0] if len(dataset) else {}
    images = [name for name, value in sample.items() if isinstance(value, bytes) and _show_image(value)]
    orientation = "applied by the conversion" if "images" in manifest.provenance else "stored, applied by decoding"
    return {
        "split": split,
        "num_samples": len(dataset),
        "deleted": manifest.num_samples - len(dataset),
        "version": manifest.generation,
        **{key: getattr(manifest, key) for key in ("generation", "digest", "samples_per_shard")},
        "order": {key: getattr(manifest.order, key) for key in ("block", "lanes", "window")},
        "fields": {
            name: {**_field_facts(layout, manifest.num_samples), "lengths": _length_facts(name, dataset)}
            for name, layout in manifest.fields.items()
        },
        "orientation": dict.fromkeys(images, orientation),
        "provenance": dict(manifest.provenance),
        "sample": {name: _show_value(value, manifest.fields[name]) for name, value in sample.items()},
    }


def _field_facts(layout: FieldLayout, num_samples: int) -> dict[str, Any]:
    facts = asdict(layout)
    del facts["skips"]
    field = {**facts.pop("field"), "shape": list(layout.field.shape), "spec": str(layout.field)}
    ratio = round(layout.nbytes / layout.stored, 3) if layout.stored else None
    counts = {"chunks": -(-num_samples // layout.chunk), "shards": layout.num_shards(num_samples)}
    return {**field, **facts, "ratio": ratio, **counts}


def _length_facts(name: str, dataset: Dataset) -> dict[str, float] | str | None:
    """Return the least, the median and the largest length of a field's samples, or "damaged" if its table is.

    None if the lengths are not stored, or are those of more than `MOST_LENGTHS` samples.
    """
    import numpy as np

    if name not in dataset.manifest.lengths or not 0 < len(dataset) <= MOST_LENGTHS:
        return None
    try:
        lengths = dataset.lengths(name)
    except FormatError:
        return "damaged"
    least, largest = int(lengths.min()), int(lengths.max())
    return {"min": least, "median": float(np.median(lengths, overwrite_input=True)), "max": largest}


def _show_value(value: Any, layout: FieldLayout) -> str:
    """Format a value briefly: an image by its format and size, an array by its shape and first elements."""
    if isinstance(value, bytes):
        return _show_image(value) or f"{len(value)} bytes"
    if isinstance(value, str):
        return value if len(value) <= VALUE_SHOWN else f"{value[:VALUE_SHOWN]}... ({len(value)} characters)"
    if not layout.field.shape and layout.field.kind == "tensor":
        return str(value)
    first = ", ".join(map(str, value.ravel()[:4]))
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
    deleted = f" and {facts['deleted']:,} deleted" if facts["deleted"] else ""
    return f"{version}{facts['num_samples']:,} samples{deleted}, {size}; order: {order}; digest {facts['digest']}"


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
    for name, field in facts["fields"].items():
        if lengths := field["lengths"]:
            text, unit = "the table is damaged", "rows" if field["kind"] == "ragged" else "bytes"
            if lengths != "damaged":
                text = f"{lengths['min']} to {lengths['max']} {unit}, median {lengths['median']:.16g}"
            say(f"lengths of {name}: {text}")
