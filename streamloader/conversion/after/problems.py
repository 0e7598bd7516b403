"""What a check found wrong: plain values, collected from many threads."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any

MOST = 1000  # more would only say the same again


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; `problem` says it in a sentence that names object, chunk and samples.

    `path` is the object below the URL, where it is one; `chunk` counts the inner chunks of that object; `samples` are
    the numbers [first, stop) of those that it holds.
    """

    problem: str
    path: str = ""
    split: str = ""
    field: str = ""
    chunk: int | None = None
    samples: tuple[int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the problem as JSON values."""
        return asdict(self)

    def _place(self) -> tuple[str, str, int, int, str]:
        return self.split, self.field, *(self.samples or (-1, -1)), self.path


class Problems:
    """A place for up to `MOST` problems; thread-safe."""

    def __init__(self) -> None:
        self._found: dict[str, Problem] = {}
        self._lock = threading.Lock()

    @property
    def full(self) -> bool:
        """Whether there are so many that looking for more is of no use."""
        return len(self._found) >= MOST

    def add(self, problem: Problem) -> None:
        """Keep a problem, unless it was said before, or there are too many."""
        with self._lock:
            if not self.full:
                self._found.setdefault(problem.problem, problem)

    def found(self) -> tuple[Problem, ...]:
        """Return the problems by split, field and sample, whichever thread found them first."""
        with self._lock:
            return tuple(sorted(self._found.values(), key=Problem._place))


def samples_text(first: int, stop: int) -> str:
    """Return the samples [first, stop) as people count them."""
    return f"sample {first}" if stop - first == 1 else f"samples {first} to {stop - 1}"
