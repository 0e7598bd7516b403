"""`streamloader verify`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from streamloader.cli.options import INTERRUPTED, counted, parse_options, show_bytes
from streamloader.cli.progress import Step, display
from streamloader.errors import UsageError

if TYPE_CHECKING:
    from streamloader.conversion.after.verify import Checked, VerifyReport

NOT_WHOLE = 1


@click.command()
@click.argument("url")
@click.option("--split", help="One split only; all of them by default.")
@click.option("--against", "src", metavar="SRC", help="The source to compare every sample with.")
@click.option("--format", "format_name", help="The format of SRC; found out by default.")
@click.option(
    "--storage-option", "storage", multiple=True, metavar="NAME=VALUE", help="An option of the store; repeat."
)
@click.option(
    "--source-option", "source", multiple=True, metavar="NAME=VALUE", help="The same for SRC, where it differs."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of sentences.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
def verify(
    *,
    url: str,
    split: str | None,
    src: str | None,
    format_name: str | None,
    storage: tuple[str, ...],
    source: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> None:
    """Read all of the dataset at URL, and say everything that is wrong with it.

    Sizes, indexes, checksums, tables, documents, every item; with --against the source too. Nothing is written. The
    exit status is 0 where the dataset is whole, 1 where it is not.
    """
    from streamloader.conversion.after.against import Against
    from streamloader.conversion.after.verify import verify as run

    if src is None and (format_name or source):
        raise UsageError("--format or --source-option without --against", "name the source with --against SRC")
    against = None if src is None else Against(src, format_name, parse_options(source) or None)
    begin = time.monotonic()
    try:
        with _listener(quiet) as listen:
            report = run(url, split=split, against=against, storage_options=parse_options(storage), progress=listen)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=1))
    else:
        click.echo("\n".join(_sentences(report, time.monotonic() - begin)))
    if not report.whole:
        sys.exit(NOT_WHOLE)


def _sentences(report: VerifyReport, seconds: float) -> list[str]:
    said = [f"problem: {one.problem}" for one in report.problems]
    if not report.listed:
        said.append("the store does not list its objects: ones that do not belong there were not looked for")
    if report.appending:
        said.append("an append to it is not finished: documents and the ends of shards were not looked at")
    elif report.leftovers:
        remedy = f"streamloader rm-incomplete {report.url}"
        said.append(f"{report.leftovers} objects are leftovers of earlier writers: {remedy}")
    if report.others:
        said.append(f"{report.others} other objects lie there too, which are not the dataset's")
    sizes = ", ".join(f"{name} {count:,}" for name, count in report.samples.items() if name)
    what = f"{counted(sum(report.samples.values()), 'sample')}{f' ({sizes})' if sizes else ''}"
    compared = f", {report.compared:,} compared with the source" if report.compared else ""
    read = f"{show_bytes(report.bytes)} in {counted(report.objects, 'object')}, {seconds:.1f} s"
    count = counted(len(report.problems), "problem")
    said.append(f"{report.url}: {'whole' if report.whole else count}; {what}{compared}, {read}")
    return said


@contextmanager
def _listener(quiet: bool) -> Iterator[Callable[[Checked], None] | None]:
    if quiet:
        yield None
        return
    begins: dict[str, float] = {}
    with display() as shown:

        def listen(checked: Checked) -> None:
            now = time.monotonic()
            elapsed = max(now - begins.setdefault(checked.phase, now), 1e-3)
            if checked.phase == "verify":
                size, unit = (1e6, "MB") if checked.total >= 1e7 else (1e3, "kB")
                rate = f"{checked.done / elapsed / 1e6:,.1f} MB/s"
                step = Step(checked.phase, checked.done / size, checked.total / size, unit, rate)
            else:
                rate = f"{checked.done / elapsed:,.0f} samples/s"
                step = Step(checked.phase, checked.done, checked.total, "samples", rate)
            shown.show(step)

        yield listen
