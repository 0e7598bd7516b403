"""`streamloader ls` lists the datasets below a URL; `streamloader cp` copies one to another store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from streamloader.cli import options as shared
from streamloader.cli.show import by_split, counted, display, print_json, print_result, print_table, say, show_bytes

if TYPE_CHECKING:
    from streamloader.maintenance.copy import CopyReport
    from streamloader.maintenance.listing import Listed


@click.command()
@shared.place("url")
@shared.storage_option
@shared.json_option
def ls(*, url: str, storage_options: dict[str, Any], as_json: bool) -> None:
    """List the datasets at URL and in folders below it.

    Of each: samples, size, version, splits. Looks into folders that are no datasets, at most 4 deep. Shows Zarr that
    others wrote as such, and unfinished datasets.
    """
    from streamloader.maintenance.listing import list_datasets
    from streamloader.storage import open_store

    found, shown = list_datasets(url, storage_options), open_store(url, storage_options).url
    if as_json:
        print_json({"url": shown, "datasets": [each.to_dict() for each in found]})
    elif not found:
        say(f"there is no dataset below {shown}")
    else:
        print_table(("dataset", "samples", "stored", "version", "splits"), map(_row, found), ("samples", "stored"))


def _row(each: Listed) -> list[str]:
    name = each.path or each.url
    if each.kind == "dataset":
        splits = ", ".join(f"{split} {count:,}" for split, count in each.splits.items())
        return [name, f"{each.num_samples:,}", show_bytes(each.stored or 0), str(each.version), splits]
    arrays = f": {counted(each.arrays, 'array')}" if each.arrays is not None else ""
    problem = f": {each.problem}" if each.problem else ""
    return [name, "", "", "", f"{each.kind}{arrays}{problem}"]


@click.command()
@shared.place("src")
@shared.place("dst")
@shared.storage_option
@shared.target_option
@shared.quiet_option
@shared.json_option
def cp(*, src: str, dst: str, quiet: bool, as_json: bool, **options: Any) -> None:
    """Copy a dataset, with all splits and versions, to any store.

    From SRC to DST, an empty folder or URL. Compares the checksum of every chunk with the chunk table. The copy opens
    when it is complete. Run the same command again to resume an interrupted copy.
    """
    from streamloader.maintenance.copy import copy

    with display(quiet, "interrupted: run the same command again to resume") as shown:
        report = copy(src, dst, progress=shown.update, **options)
    document = {**report.to_dict(), "seconds": shown.elapsed}
    print_result(document, _copied(report, shown.elapsed), as_json=as_json, quiet=quiet)


def _copied(report: CopyReport, seconds: float) -> str:
    samples = f"{counted(sum(report.samples.values()), 'sample')}{by_split(report.samples)}"
    if not report.objects:
        return f"{report.url} has this dataset already, with {samples}: nothing was copied"
    kept = f", {counted(report.kept_objects, 'object')} kept from before" if report.kept_objects else ""
    size = f"{show_bytes(report.bytes)} in {counted(report.objects, 'object')}"
    rate = f"{report.bytes / max(seconds, 1e-3) / 1e6:,.1f} MB/s"
    return f"copied {samples} to {report.url}: {size}{kept}, {seconds:.1f} s, {rate}"
