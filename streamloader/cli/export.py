"""`streamloader export`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from streamloader.cli.options import INTERRUPTED, counted, parse_options, show_bytes
from streamloader.cli.progress import Step, display

if TYPE_CHECKING:
    from streamloader.conversion.after.export import Exported

FORMATS = ("webdataset", "parquet", "npz", "zarr")


@click.command()
@click.argument("url")
@click.argument("dst")
@click.option("--format", "format_name", type=click.Choice(FORMATS), required=True, help="What to write.")
@click.option("--fields", help="Fields to export, say image,label; all by default.")
@click.option("--split", help="The split, where the dataset has splits.")
@click.option(
    "--storage-option", "storage", multiple=True, metavar="NAME=VALUE", help="An option of the store; repeat."
)
@click.option(
    "--target-option", "target", multiple=True, metavar="NAME=VALUE", help="The same for DST, where it differs."
)
@click.option("--quiet", is_flag=True, help="Say nothing but errors.")
def export(
    *,
    url: str,
    dst: str,
    format_name: str,
    fields: str | None,
    split: str | None,
    storage: tuple[str, ...],
    target: tuple[str, ...],
    quiet: bool,
) -> None:
    """Write the samples of the dataset at URL, in order, as files of another format to the empty folder or URL DST.

    webdataset: tars. parquet: needs pyarrow. npz: fields of fixed shape only. zarr: a plain Zarr v3 group.
    """
    from streamloader.conversion.after.export import export as run

    begin = time.monotonic()
    try:
        with _listener(quiet) as listen:
            done = run(
                url,
                dst,
                format=format_name,
                fields=None if fields is None else [name.strip() for name in fields.split(",")],
                split=split,
                storage_options=parse_options(storage),
                target_options=parse_options(target) or None,
                progress=listen,
            )
    except KeyboardInterrupt:
        from streamloader.storage.location import redact

        click.echo(f"interrupted: {redact(dst)} is not complete, remove it", err=True)
        sys.exit(INTERRUPTED)
    if not quiet:
        what = f"exported {counted(done.done, 'sample')} to {done.url}"
        what += f": {show_bytes(done.bytes)} in {counted(done.files, 'file')}"
        click.echo(f"{what}, {time.monotonic() - begin:.1f} s")


@contextmanager
def _listener(quiet: bool) -> Iterator[Callable[[Exported], None] | None]:
    if quiet:
        yield None
        return
    begin = time.monotonic()
    with display() as shown:

        def listen(done: Exported) -> None:
            elapsed = max(time.monotonic() - begin, 1e-3)
            rate = f"{done.done / elapsed:,.0f} samples/s, {done.bytes / elapsed / 1e6:,.1f} MB/s"
            shown.show(Step("export", done.done, done.total, "samples", rate))

        yield listen
