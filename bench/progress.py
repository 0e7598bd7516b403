"""How far a run is: a bar with the time left on a terminal, plain lines in a pipe or CI."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Show:
    """Says what is done and how long the rest takes. `total` and `expected` are seconds."""

    def __init__(self, stream: TextIO, total: float) -> None:
        self._stream = stream
        self._begin = time.monotonic()
        self._total, self._done = total, 0.0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if stream.isatty() and not os.environ.get("CI"):
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(file=stream), transient=True)
            self._task = self._bar.add_task("bench", total=total)
            self._bar.start()

    def begin(self, what: str) -> None:
        """Name what is going on now."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)

    def end(self, what: str, expected: float = 0.0) -> None:
        """Say what came out; the time left shrinks by what the step was expected to take."""
        self._done += expected
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            self._bar.console.print(what, markup=False, highlight=False)
        else:
            print(f"[{self._left()}] {what}", file=self._stream, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def _left(self) -> str:
        """The share that is done, and the time left, which follows the pace so far."""
        if not self._done:
            return "  0%"
        elapsed = time.monotonic() - self._begin
        left = elapsed / self._done * max(0.0, self._total - self._done)
        return f"{min(1.0, self._done / self._total):4.0%}, {left / 60:.0f} min left"


@contextlib.contextmanager
def showing(total: float, stream: TextIO | None = None) -> Iterator[Show]:
    """Show progress on `stream`, standard error where none is given."""
    show = Show(stream or sys.stderr, total)
    try:
        yield show
    finally:
        show.close()
