"""Progress on stderr, with rate and time left: a bar on a terminal, plain lines in a pipe or CI."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import click

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LINE_SECONDS = 5.0  # how often a line is printed where there is no terminal
SURE_SECONDS = 0.5  # before this, a guess of the time left would only jump about


@dataclass(frozen=True)
class Step:
    """What is shown: `done` of `total` in `unit`, of which `begun` were done before the clock started; `rate` in words.

    A new `label` is a new phase; the time left is that of all of them where they share a `total`.
    """

    label: str
    done: float
    total: float
    unit: str
    rate: str = ""
    begun: float = 0

    def left(self, elapsed: float) -> str:
        """Return the time left, `h:mm:ss left`, if it goes on as in the `elapsed` seconds; empty where unknown."""
        if elapsed < SURE_SECONDS or not self.begun < self.done < self.total:
            return ""
        seconds = round(elapsed * (self.total - self.done) / (self.done - self.begun))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


class Display(Protocol):
    """Where progress is shown; from any thread, one call at a time."""

    def say(self, line: str) -> None:
        """Print a line that stays."""
        ...

    def show(self, step: Step) -> None:
        """Show where the work stands."""
        ...


class Lines:
    """Plain lines: at the start of a phase, every few seconds, and at its end. No control characters."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._said = 0.0
        self._last: Step | None = None

    def say(self, line: str) -> None:
        """Print a line."""
        click.echo(line, err=True)

    def show(self, step: Step) -> None:
        """Print where the work stands, unless a line was printed just before."""
        now, last = time.monotonic(), self._last
        self._last, self._begin = step, self._begin or now
        ends = step.done >= step.total and (last is None or last.done < step.total)
        if last is not None and last.label == step.label and now - self._said < LINE_SECONDS and not ends:
            return
        self._said = now
        parts = [f"{step.done:.0f} of {step.total:.0f} {step.unit}", step.rate, step.left(now - self._begin)]
        self.say(f"{step.label}: {', '.join(part for part in parts if part)}")


class _Terminal:
    def __init__(self, bar: Bar, row: TaskID) -> None:
        self._bar, self._row = bar, row
        self._begin = 0.0

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, step: Step) -> None:
        now = time.monotonic()
        self._begin = self._begin or now
        self._bar.update(
            self._row,
            description=step.label,
            completed=step.done,
            total=step.total,
            amount=f"{step.done:.0f}/{step.total:.0f} {step.unit}",
            rate=step.rate,
            left=step.left(now - self._begin),
        )


@contextmanager
def display(environment: Mapping[str, str] = os.environ) -> Iterator[Display]:
    """Give what shows progress on stderr. CI systems may pretend to be a terminal: they say so in CI."""
    if not sys.stderr.isatty() or environment.get("CI") or environment.get("TERM") == "dumb":
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = [TextColumn("{task.description}", markup=False), BarColumn()]
    columns += [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("amount", "rate", "left")]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Terminal(bar, bar.add_task("", total=None, amount="", rate="", left=""))
