"""The bad samples that a process has delivered: their number, their log, and when they end the run."""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from streamloader.engine.faults import Fault
from streamloader.errors import BadSamplesError, message
from streamloader.order.schedule import BatchPlan
from streamloader.storage import open_store
from streamloader.storage.process import Finalizer, in_thread

# As many bad samples in a row end a run whatever `max_bad` is: the transform or the store is at fault, not a sample.
MOST_IN_A_ROW = 100
# A share is that of at least so many samples, since the first bad one is all of one.
LEAST_SAMPLES = 1000
# Objects of the log that are written at the same time, and how long the exit of the process waits for them.
PENDING = 16
EXIT_SECONDS = 30.0


class BadSamples:
    """Counts the bad samples of one process, and writes a line of JSON for each to the log.

    `most`: how many may be bad, a number or a share of the samples that were delivered. `log`: a file that lines are
    appended to; or a URL, or a folder whose path ends with "/", where each step with bad samples writes an object. Such
    a step writes the same object when it is delivered again after a resume. `options`: of the log's store.
    """

    def __init__(self, most: float, log: str | None, options: Mapping[str, Any] | None) -> None:
        self._most, self._log, self._count, self._delivered, self._in_a_row = most, log, 0, 0, 0
        is_file = log is None or not ("://" in log or log.endswith("/") or Path(log).is_dir())
        self._store = None if log is None or is_file else open_store(log, options)
        self._pending: deque[Future[object]] = deque()

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
        """Append lines to the file, or write them as the object `name`. A failure of that is a warning."""
        if self._log is None:
            return
        data = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode()
        if self._store is not None:
            store = self._store
            if not self._pending:
                Finalizer(self, wait_for_all, self._pending)
            self._pending.append(in_thread(lambda: store.put(name, data)))
            wait_for_all(self._pending, PENDING)
            return
        try:
            path = Path(self._log)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:  # all lines at once, so that ranks do not mix theirs
                file.write(data)
        except OSError as error:
            warn_of(error)

    def close(self) -> None:
        """Wait for the objects that are being written."""
        wait_for_all(self._pending)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for workers, which count by themselves."""
        return self.__dict__ | {"_pending": deque()}


def wait_for_all(pending: deque[Future[object]], most: int = 0) -> None:
    """Wait until at most so many writes are left, each for `EXIT_SECONDS`; a failure is a warning."""
    while len(pending) > most or (pending and pending[0].done()):
        future = pending.popleft()
        if not wait([future], EXIT_SECONDS).done:
            warn_of(TimeoutError(f"an object was not written within {EXIT_SECONDS:.0f} s"))
        elif (error := future.exception()) is not None:
            warn_of(error)


def warn_of(error: BaseException) -> None:
    """Warn that bad samples were not logged."""
    text = f"bad samples are missing in error_log=: {type(error).__name__}: {message(error)}"
    warnings.warn(text, RuntimeWarning, stacklevel=4)
