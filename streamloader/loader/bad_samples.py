"""The bad samples that a process has delivered: their number, their log, and when they end the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamloader.engine.faults import Fault
from streamloader.errors import BadSamplesError
from streamloader.order.schedule import BatchPlan
from streamloader.storage.json_lines import JsonLines

# As many bad samples in a row end a run whatever `max_bad` is: the transform or the store is at fault, not a sample.
MOST_IN_A_ROW = 100
# A share is that of at least so many samples, since the first bad one is all of one.
LEAST_SAMPLES = 1000


class BadSamples:
    """Counts the bad samples of one process, and writes a line of JSON for each to the log.

    `most`: how many may be bad, a number or a share of the samples that were delivered. `log`: a file that lines are
    appended to; or a URL, or a folder whose path ends with "/", where each step with bad samples writes an object. Such
    a step writes the same object when it is delivered again after a resume. `options`: of the log's store.
    """

    def __init__(self, most: float, log: str | None, options: Mapping[str, Any] | None) -> None:
        self._most, self._count, self._delivered, self._in_a_row = most, 0, 0, 0
        self._log = JsonLines(log, options, "bad samples are missing in error_log=")

    def count(self, plan: BatchPlan, faults: Mapping[int, Fault], num_samples: int) -> list[int]:
        """Count the samples of a step; return the rows of the bad ones. Padded rows, of position N or more, are none.

        `faults` are the bad samples by row.
        """
        real = plan.positions < num_samples
        if not faults:  # without a list of rows, since this is a part of every step
            delivered = int(real.sum())
            self._delivered += delivered
            self._in_a_row = 0 if delivered else self._in_a_row
            return []
        rows = real.nonzero()[0].tolist()
        self._delivered += len(rows)
        bad = [row for row in rows if row in faults]
        self._count += sum(faults[row][3] for row in bad)
        for row in rows if bad else rows[:1]:
            self._in_a_row = self._in_a_row + faults[row][3] if row in faults else 0
            if self._in_a_row == MOST_IN_A_ROW:
                self._most = 0  # from now on
        return bad

    def check(self, last: Fault, rank: int) -> None:
        """Raise `BadSamplesError`, which names the `last` bad sample, if there are too many."""
        most = self._most * (max(LEAST_SAMPLES, self._delivered) if isinstance(self._most, float) else 1)
        if self._count <= most:
            return
        problem = f"{self._count} of {self._delivered} samples of rank {rank} are bad, more than max_bad={self._most}"
        remedy = "repair them, leave them out with exclude=, or allow more with max_bad="
        if self._in_a_row >= MOST_IN_A_ROW:
            problem = f"{self._in_a_row} samples in a row of rank {rank} are bad"
            remedy = "fix what they have in common, such as the transform"
        raise BadSamplesError(f"{problem}; the last is sample {last[0]}: {last[2].problem}", remedy) from last[2]

    def write(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to the log, or write them as its object `name`. The first failure is a warning."""
        self._log.write(name, lines)

    def close(self) -> None:
        """Wait for the objects of the log that are being written."""
        self._log.close()
