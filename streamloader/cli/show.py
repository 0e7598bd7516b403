"""Printing: numbers, tables and JSON on stdout, and the progress of commands on stderr."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from streamloader.cli.terminal import has_colors, has_unicode, progress_line, redraws
from streamloader.errors import UNSEEN

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

    from streamloader.conversion.job import Preview, Progress

INTERRUPTED = 130  # the exit status after Ctrl-C: 128 + SIGINT, as in shells
CLASSES_SHOWN = 12
LINE_SECONDS = 5.0  # between two lines of progress, if stderr is not a terminal
MIN_ESTIMATE_SECONDS = 0.5  # an estimate of the time left is unreliable before this
FOLDED = 16  # characters: a table folds longer words
PIPE_WIDTH = 160  # characters of tables in a pipe, which has no width of its own
_UNSEEN_IN_LINES = {code: text for code, text in UNSEEN.items() if chr(code) not in "\n\t"}


class Interrupted(click.Abort):
    """Ctrl-C; the message says what is there now."""


def printable(text: str) -> str:
    """Return a text with escapes for controls, which a terminal obeys, and for characters that are not seen."""
    return text.translate(UNSEEN)


def say(text: str, *, err: bool = False) -> None:
    """Print lines on stdout or stderr, with escapes as `printable`: names of files and of fields may have any."""
    click.echo(text.translate(_UNSEEN_IN_LINES), err=err)


def print_json(document: Any) -> None:
    """Print a JSON document on stdout; numbers that JSON does not have, NaN and infinity, become null."""
    click.echo(json.dumps(_finite(document), indent=1, allow_nan=False))


def print_result(document: Any, text: str, *, as_json: bool, quiet: bool = False) -> None:
    """Print the result of a command: the document, or the text unless `quiet`."""
    if as_json:
        print_json(document)
    elif not quiet:
        say(text)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def counted(count: int, noun: str) -> str:
    """Format a number of things as `1 shard`, `1,024 shards`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def by_split(counts: Mapping[str, int]) -> str:
    """Format the samples of each split as ` (train 90, val 10)`; empty for a dataset without splits."""
    named = ", ".join(f"{name} {count:,}" for name, count in counts.items() if name)
    return f" ({named})" if named else ""


def show_bytes(size: float) -> str:
    """Format a number of bytes as `1.5 GiB`."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:,.1f} TiB"


def show_classes(name: str, classes: Sequence[object]) -> str:
    """Format the classes of a field as `label: 12 classes: ant, bee, ..., wasp`."""
    shown = [printable(str(class_name)) for class_name in classes]
    if len(shown) > CLASSES_SHOWN:
        shown = [*shown[: CLASSES_SHOWN - 2], "...", shown[-1]]
    return f"{name}: {len(classes):,} {'class' if len(classes) == 1 else 'classes'}: {', '.join(shown)}"


def print_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Collection[str],
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print a table on stdout, or the rows below each other if the terminal is too narrow for it.

    The columns `right` are aligned to the right. `styles`: the style of rich that cells with a text have on a terminal
    with colours.
    """
    from rich.box import ASCII, HEAVY_HEAD
    from rich.table import Table
    from rich.text import Text

    unicode = has_unicode(sys.stdout)
    table = Table(box=HEAVY_HEAD if unicode else ASCII)
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    console, shown = console_of(sys.stdout), [[printable(str(cell)) for cell in row] for row in rows]
    if _narrowest(titles, shown) > console.width:
        for row in shown:
            lines = (f"{title}: {cell}" for title, cell in zip(titles, row, strict=True) if cell)
            say("\n  ".join(lines))
        return
    for cells in shown:
        table.add_row(*(Text(cell, (styles or {}).get(cell, "")) for cell in cells))
    console.print(table)


def _narrowest(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table that is folded at spaces only, and in words of more than `FOLDED` characters."""
    columns = zip(titles, *rows, strict=True)
    words = [max(len(word) for cell in column for word in [*cell.split(), ""]) for column in columns]
    return sum(min(word, FOLDED) for word in words) + 3 * len(words) + 1


def console_of(stream: Any) -> Console:
    """Return rich's console of a stream, whose abilities are those that `terminal.py` finds."""
    from rich.console import Console

    colors, is_terminal = has_colors(stream), stream.isatty()
    system: Any = "auto" if colors else None
    width = None if is_terminal else PIPE_WIDTH  # do not fold columns at 80
    options: dict[str, Any] = {"force_terminal": colors or redraws(stream), "color_system": system, "width": width}
    return Console(file=stream, highlight=False, no_color=not colors, **options)


def preview_lines(preview: Preview) -> Iterator[str]:
    """Yield lines that describe what a conversion will write."""
    size = f"{counted(preview.num_samples, 'sample')} in {counted(preview.files, 'file')}"
    yield f"{preview.format}: {size} at {preview.url}"
    name_width = max(map(len, preview.fields))
    type_width = max(len(str(field)) for field in preview.fields.values())
    for name, field in preview.fields.items():
        detail = f"  ({preview.details[name]})" if name in preview.details else ""
        size = f"{show_bytes(preview.sizes[name])} per sample{detail}"
        yield f"  {name:{name_width}}  {field!s:{type_width}}  {preview.codecs[name]:4}  {size}"
    yield from (f"  {show_classes(name, classes)}" for name, classes in preview.classes.items())
    yield f"about {show_bytes(preview.stored)} in {counted(preview.shards, 'shard')}{by_split(preview.splits)}"


def time_left(done: float, total: float, kept: float, elapsed: float) -> str:
    """Return the time left as `h:mm:ss left`, at the rate of the `elapsed` seconds; empty if unknown.

    An earlier run finished `kept` of `done`.
    """
    if elapsed < MIN_ESTIMATE_SECONDS or not kept < done < total:
        return ""
    seconds = round(elapsed * (total - done) / (done - kept))
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


class Display:
    """Shows progress on stderr: a bar on a terminal, else a line at the start and the end of a phase and between them.

    Any thread may call it, but only one at a time.
    """

    def __init__(self, bar: Bar | None = None, quiet: bool = False) -> None:
        self._bar, self._quiet = bar, quiet
        if bar is not None:
            bar.add_task("", total=None, details=())
        self._created = time.monotonic()
        self._begin = self._printed = 0.0  # when the rate began to count, and when the last line was printed
        self._last: tuple[str, bool] | None = None  # the phase, and whether it has ended

    @property
    def elapsed(self) -> float:
        """The seconds since the command began."""
        return time.monotonic() - self._created

    @property
    def seconds(self) -> str:
        """The time since the command began, as text."""
        return f"{self.elapsed:.1f} s"

    def print_line(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
        elif not self._quiet:
            say(line, err=True)

    def update(self, progress: Progress) -> None:
        """Show the progress of a conversion, append, export or verification, with its rate."""
        if progress.phase == "scan":
            for line in preview_lines(progress.preview) if progress.preview else [progress.detail]:
                self.print_line(f"scan: {line}")
            return
        if progress.phase == "compare" and self._last is not None and self._last[0] == "verify":
            self._begin = 0.0  # the unit changes from bytes to samples
        in_bytes, now = progress.phase in ("verify", "copy"), time.monotonic()
        elapsed = max(now - (self._begin or now), 1e-3)
        rates = [] if in_bytes else [f"{(progress.done - progress.kept) / elapsed:,.0f} samples/s"]
        if progress.phase != "compare":
            size = progress.done if progress.phase == "verify" else progress.bytes
            rates.append(f"{size / elapsed / 1e6:,.1f} MB/s")
        kept = progress.done - progress.bytes if progress.phase == "copy" else progress.kept
        if kept:
            rates.append(f"{f'{kept / 1e6:,.1f} MB' if in_bytes else kept} kept from before")
        scale, unit = (1, "samples") if not in_bytes else (1e6, "MB") if progress.total >= 1e7 else (1e3, "kB")
        done, total = progress.done / scale, progress.total / scale
        self.show(progress.phase, done, total, unit, ", ".join(rates), kept=kept / scale)

    def show(self, phase: str, done: float, total: float, unit: str, rate: str = "", *, kept: float = 0) -> None:
        """Show that `done` of `total` are done; without a terminal, at most every `LINE_SECONDS` within a phase."""
        now, last, self._last = time.monotonic(), self._last, (phase, done >= total)
        self._begin = self._begin or now
        left = time_left(done, total, kept, now - self._begin)
        if self._bar is not None:
            (task,) = self._bar.task_ids
            details = f"{done:.0f}/{total:.0f} {unit}", left, rate
            self._bar.update(task, description=phase, completed=done, total=total, details=details)
            return
        repeated = last is not None and last[0] == phase and (done < total or last[1])
        if repeated and now - self._printed < LINE_SECONDS:
            return
        self._printed = now
        parts = [f"{done:.0f} of {total:.0f} {unit}", rate, left]
        self.print_line(f"{phase}: {', '.join(part for part in parts if part)}")


@contextmanager
def display(quiet: bool = False, interrupted: str = "interrupted") -> Iterator[Display]:
    """Yield a `Display`, which shows nothing if `quiet`. Ctrl-C raises `Interrupted` with the text `interrupted`."""
    try:
        if quiet or not redraws(sys.stderr):
            yield Display(quiet=quiet)
            return
        with _bar() as bar:
            yield Display(bar)
    except KeyboardInterrupt:
        raise Interrupted(interrupted) from None


def _bar() -> Bar:
    """Return a progress bar on stderr, on one line however narrow the terminal is."""
    from rich.progress import Progress, ProgressColumn, Task
    from rich.text import Text

    console, unicode = console_of(sys.stderr), has_unicode(sys.stderr)

    class Line(ProgressColumn):
        """The whole line."""

        def render(self, task: Task) -> Text:
            share = task.completed / task.total if task.total else None
            before, bar, after = progress_line(console.width, unicode, share, task.description, *task.fields["details"])
            return Text.assemble(before, (bar, "cyan"), after, no_wrap=True)

    return Progress(Line(), console=console, transient=True)
