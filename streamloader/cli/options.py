"""What the commands share: options, numbers and tables as people read them, and progress on stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from streamloader.errors import UsageError

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from streamloader.conversion.job import Preview, Progress

INTERRUPTED = 130  # the exit status after Ctrl-C: 128 + SIGINT, as shells have it
CLASSES_SHOWN = 12
LINE_SECONDS = 5.0  # how often a line is printed where there is no terminal
SURE_SECONDS = 0.5  # before this, an estimate of the time left would only jump about


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Return the options of `name=value` texts; a value that is JSON is read as such. Raises `UsageError`."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:  # the text may be secret
            remedy = "write it as name=value, say endpoint_url=http://host or anon=true"
            raise UsageError("a storage option without a name or '='", remedy)
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def parse_fill(pairs: Iterable[str]) -> Mapping[str, str]:
    """Return the fill values of `field=value` texts. Raises `UsageError`."""
    values: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals or name in values:
            raise UsageError(f"fill value {pair!r}", "write it as field=value, each field once")
        values[name] = value
    return values


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """Return the field names of `image,label`."""
    return None if text is None else tuple(name.strip() for name in text.split(","))


def option(*names: str, parse: Callable[[Any], Any] | None = None, **settings: Any) -> Callable[[Any], Any]:
    """Return an option of a command, whose value goes through `parse`."""
    callback = None if parse is None else lambda _context, _option, value: parse(value)
    return click.option(*names, callback=callback, **settings)


PAIRS: Mapping[str, Any] = {"multiple": True, "metavar": "NAME=VALUE"}


def store_option(kind: str, text: str, none: Mapping[str, Any] | None = None) -> Callable[[Any], Any]:
    """Return what reads the options of a store; their value is `none` where none is given."""
    name = f"{kind}_options"
    return option(f"--{kind}-option", name, parse=lambda pairs: parse_options(pairs) or none, help=text, **PAIRS)


_STORE = "An option of the store, by its fsspec name; the value may be JSON. May be repeated."
storage_option = store_option("storage", _STORE, {})
source_option = store_option("source", "The same for SRC, where it differs.")
target_option = store_option("target", "The same for DST, where it differs.")
quiet_option = option("--quiet", is_flag=True, help="Print errors only.")
json_option = option("--json", "as_json", is_flag=True, help="Print JSON.")
split_option = option("--split", help="The split, where the dataset has splits.")
fields_option = option("--fields", parse=parse_names, help="Fields to read, say image,label; default: all.")


def counted(count: int, noun: str) -> str:
    """Return a number of things like `1 shard`, `1,024 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def by_split(counts: Mapping[str, int]) -> str:
    """Return the samples of each split like ` (train 90, val 10)`; nothing where there are no splits."""
    named = ", ".join(f"{name} {count:,}" for name, count in counts.items() if name)
    return f" ({named})" if named else ""


def show_bytes(size: float) -> str:
    """Return a number of bytes like `1.5 GiB`."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} TiB"


def print_table(titles: Sequence[str], rows: Iterable[Sequence[object]], right: Collection[str]) -> None:
    """Print a table on stdout; the columns `right` are aligned to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out, table = Console(highlight=False), Table()
    if not out.is_terminal:
        out.width = 160  # a pipe has no width: do not fold columns at 80
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    out.print(table)


def preview_lines(preview: Preview) -> Iterator[str]:
    """Yield the lines that describe what a conversion is going to write."""
    what = f"{counted(preview.num_samples, 'sample')} in {counted(preview.files, 'file')}"
    yield f"{preview.format}: {what} at {preview.url}"
    names = max(map(len, preview.fields))
    types = max(len(str(field)) for field in preview.fields.values())
    for name, field in preview.fields.items():
        detail = f"  ({preview.details[name]})" if name in preview.details else ""
        size = f"{show_bytes(preview.sizes[name])} per sample{detail}"
        yield f"  {name:{names}}  {field!s:{types}}  {preview.codecs[name]:4}  {size}"
    for name, classes in preview.classes.items():
        noun = "class" if len(classes) == 1 else "classes"
        some: Sequence[str] = classes
        if len(classes) > CLASSES_SHOWN:
            some = [*classes[: CLASSES_SHOWN - 2], "...", classes[-1]]
        yield f"  {name}: {len(classes):,} {noun}: {', '.join(some)}"
    yield f"about {show_bytes(preview.stored)} in {counted(preview.shards, 'shard')}{by_split(preview.splits)}"


@dataclass(frozen=True)
class Step:
    """What is shown: `done` of `total` in `unit`, of which `kept` were done before the clock started; `rate` as text.

    A new `label` is a new phase.
    """

    label: str
    done: float
    total: float
    unit: str
    rate: str = ""
    kept: float = 0

    def left(self, elapsed: float) -> str:
        """Return the time left at the rate of the `elapsed` seconds, as `h:mm:ss left`; empty where unknown."""
        if elapsed < SURE_SECONDS or not self.kept < self.done < self.total:
            return ""
        seconds = round(elapsed * (self.total - self.done) / (self.done - self.kept))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


class Display:
    """Progress on stderr: a bar on a terminal, else a line at the start of a phase, every few seconds, and at its end.

    It may be called from any thread, by one at a time.
    """

    def __init__(self, bar: Bar | None = None, quiet: bool = False) -> None:
        self._bar, self._quiet = bar, quiet
        self._row = bar.add_task("", total=None, amount="", rate="", left="") if bar else None
        self._started = time.monotonic()
        self._begin = self._printed = 0.0
        self._last: Step | None = None

    @property
    def seconds(self) -> str:
        """The time since the command began, as text."""
        return f"{time.monotonic() - self._started:.1f} s"

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            click.echo(line, err=True)

    def update(self, progress: Progress) -> None:
        """Show the progress of a conversion, append, export or verification, with its rate."""
        if progress.phase == "scan":
            for line in preview_lines(progress.preview) if progress.preview else [progress.detail]:
                self.say(f"scan: {line}")
            return
        if progress.phase == "compare" and self._last is not None and self._last.label == "verify":
            self._begin = 0.0  # samples are counted now, not bytes
        in_bytes, now = progress.phase == "verify", time.monotonic()
        elapsed = max(now - (self._begin or now), 1e-3)
        rates = [] if in_bytes else [f"{(progress.done - progress.kept) / elapsed:,.0f} samples/s"]
        if progress.phase != "compare":
            rates.append(f"{(progress.done if in_bytes else progress.bytes) / elapsed / 1e6:,.1f} MB/s")
        if progress.kept:
            rates.append(f"{progress.kept} kept from before")
        scale, unit = (1, "samples") if not in_bytes else (1e6, "MB") if progress.total >= 1e7 else (1e3, "kB")
        done, total = progress.done / scale, progress.total / scale
        self.show(Step(progress.phase, done, total, unit, ", ".join(rates), progress.kept))

    def show(self, step: Step) -> None:
        """Show a step; a line is left out where one was printed just before."""
        now, last, self._last = time.monotonic(), self._last, step
        self._begin = self._begin or now
        left = step.left(now - self._begin)
        if self._bar is not None and self._row is not None:
            amount = f"{step.done:.0f}/{step.total:.0f} {step.unit}"
            place: dict[str, Any] = {"description": step.label, "completed": step.done, "total": step.total}
            self._bar.update(self._row, **place, amount=amount, rate=step.rate, left=left)
            return
        ends = step.done >= step.total and (last is None or last.done < step.total)
        if last is not None and last.label == step.label and now - self._printed < LINE_SECONDS and not ends:
            return
        self._printed = now
        parts = [f"{step.done:.0f} of {step.total:.0f} {step.unit}", step.rate, left]
        self.say(f"{step.label}: {', '.join(part for part in parts if part)}")


@contextmanager
def display(quiet: bool = False, interrupted: str = "interrupted") -> Iterator[Display]:
    """Give what shows progress, or nothing where it is `quiet`. Ctrl-C prints `interrupted` and exits with 130."""
    try:
        # CI systems may pretend to be a terminal: they set CI
        if quiet or not sys.stderr.isatty() or os.environ.get("CI") or os.environ.get("TERM") == "dumb":
            yield Display(quiet=quiet)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = [TextColumn("{task.description}", markup=False), BarColumn()]
        columns += [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("amount", "rate", "left")]
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            yield Display(bar)
    except KeyboardInterrupt:
        click.echo(interrupted, err=True)
        sys.exit(INTERRUPTED)
