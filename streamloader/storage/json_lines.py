"""Logs of JSON lines that training writes: to a file, or as objects of a folder in any store."""

from __future__ import annotations

import json
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from streamloader.errors import message
from streamloader.storage import open_store
from streamloader.storage.process import Finalizer, in_thread

# Objects of the log that are written at the same time, and how long the exit of the process waits for them.
PENDING = 16
EXIT_SECONDS = 30.0


class JsonLines:
    """Appends lines of JSON to a file, or writes them as objects of a folder.

    `log`: a file, which several processes may append to; or a URL, or a folder whose path ends with "/", where each
    call writes an object. None writes nothing. `options`: of the log's store. `problem`: how the warning about a failed
    write begins.
    """

    def __init__(self, log: str | None, options: Mapping[str, Any] | None, problem: str) -> None:
        self._log, self._problem = log, problem
        self.is_file = log is None or not ("://" in log or log.endswith("/") or Path(log).is_dir())
        self._store = None if log is None or self.is_file else open_store(log, options)
        self._pending: deque[Future[object]] = deque()

    def write(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines to the file, or write them as the object `name`. A failure of that is a warning."""
        if self._log is None:
            return
        data = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode()
        if self._store is not None:
            store = self._store
            if not self._pending:
                Finalizer(self, _wait_for_all, self._pending, self._problem)
            self._pending.append(in_thread(lambda: store.put(name, data)))
            _wait_for_all(self._pending, self._problem, PENDING)
            return
        try:
            path = Path(self._log)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab", buffering=0) as file:  # all lines at once, so that ranks do not mix theirs
                file.write(data)
        except OSError as error:
            _warn(self._problem, error)

    def close(self) -> None:
        """Wait for the objects that are being written."""
        _wait_for_all(self._pending, self._problem)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for workers, which write by themselves."""
        return self.__dict__ | {"_pending": deque()}


def _wait_for_all(pending: deque[Future[object]], problem: str, most: int = 0) -> None:
    """Wait until at most so many writes are left, each for `EXIT_SECONDS`; a failure is a warning."""
    while len(pending) > most or (pending and pending[0].done()):
        future = pending.popleft()
        if not wait([future], EXIT_SECONDS).done:
            _warn(problem, TimeoutError(f"an object was not written within {EXIT_SECONDS:.0f} s"))
        elif (error := future.exception()) is not None:
            _warn(problem, error)


def _warn(problem: str, error: BaseException) -> None:
    warnings.warn(f"{problem}: {type(error).__name__}: {message(error)}", RuntimeWarning, stacklevel=4)
