"""Logs of JSON lines that training writes: to a file, or as objects of a folder in any store."""

from __future__ import annotations

import json
import os
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from streamloader.errors import StorageError, message
from streamloader.storage import Store, open_store
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
        self._log, self._failed = log, _Warning(problem)
        self.is_file = log is None or not ("://" in log or log.endswith("/") or Path(log).is_dir())
        self._store = None if log is None or self.is_file else open_store(log, options)
        self._pending: deque[Future[object]] = deque()

    def write(self, name: str, lines: Sequence[Mapping[str, Any]], *, at_once: bool = False) -> None:
        """Append lines to the file, or write them as the object `name`. The first failure is a warning.

        `at_once`: wait for the object, and start no thread, as at the end of a process.
        """
        if self._log is None:
            return
        text = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
        data = text.encode(errors="backslashreplace")  # a path of other bytes has half surrogates
        try:
            if self._store is None:
                _append(Path(self._log), data)
            elif at_once:
                self._store.put(name, data)
            else:
                self._put(self._store, name, data)
        except (OSError, StorageError) as error:
            self._failed(error)

    def _put(self, store: Store, name: str, data: bytes) -> None:
        if not self._pending:
            Finalizer(self, _wait_for_all, self._pending, self._failed)
        self._pending.append(in_thread(lambda: store.put(name, data)))
        _wait_for_all(self._pending, self._failed, PENDING)

    def close(self) -> None:
        """Wait for the objects that are being written."""
        _wait_for_all(self._pending, self._failed)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for workers, which write by themselves."""
        return self.__dict__ | {"_pending": deque()}


class _Warning:
    """Warns of the first failure of a log: on a full disk, each step may fail, with the name of its own object."""

    def __init__(self, problem: str) -> None:
        self._problem, self._warned = problem, False

    def __call__(self, error: BaseException) -> None:
        if not self._warned:
            self._warned = True
            text = f"{self._problem}: {type(error).__name__}: {message(error)}; later failures are not shown"
            warnings.warn(text, RuntimeWarning, stacklevel=4)


def _append(path: Path, data: bytes) -> None:
    """Append lines to a file, all at once, so that ranks do not mix theirs. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:
        if file.seekable() and (size := file.seek(0, os.SEEK_END)):
            file.seek(size - 1)
            # a process that was killed, or a full disk, may have left a part of a line
            data = data if file.read(1) == b"\n" else b"\n" + data
        while data:  # less is written on a full disk, and then nothing, with the reason
            data = data[file.write(data) :]


def _wait_for_all(pending: deque[Future[object]], failed: _Warning, most: int = 0) -> None:
    """Wait until at most so many writes are left, each for `EXIT_SECONDS`; a failure is a warning."""
    while len(pending) > most or (pending and pending[0].done()):
        future = pending.popleft()
        if not wait([future], EXIT_SECONDS).done:
            failed(TimeoutError(f"an object was not written within {EXIT_SECONDS:.0f} s"))
        elif (error := future.exception()) is not None:
            failed(error)
