"""The program of one worker process: receive a task, do it, send its receipt, until the starter is gone.

`python -m streamloader.conversion.engines.worker <socket> <lifeline>`: two file descriptors that it inherits.
One shard is read while the one before is written, for the processor has little to do with a write. What it sends: None
when it can take another task; and an outcome or an error for each task, in the order of the tasks.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection

from streamloader.conversion.task import Outcome, Task
from streamloader.errors import StreamloaderError


def main(socket: int, lifeline: int) -> None:
    """Do tasks from the connection `socket` until it is closed."""
    threading.Thread(target=_die_with_starter, args=(lifeline,), daemon=True).start()
    writing: Future[None] | None = None
    with Connection(socket) as channel, ThreadPoolExecutor(1) as writer:
        speech = threading.Lock()  # the writer speaks too
        while True:
            try:
                task: Task = channel.recv()
            except EOFError:
                return
            write = _prepare(task)
            if writing is not None:
                writing.result()  # two shards are held, not more
            writing = writer.submit(_write, channel, speech, write)
            del write  # the writer lets go of it
            with speech:
                channel.send(None)


def _prepare(task: Task) -> Callable[[], Outcome | StreamloaderError]:
    try:
        return task.prepare()
    except StreamloaderError as error:
        failure = error
        return lambda: failure


def _write(channel: Connection, speech: threading.Lock, write: Callable[[], Outcome | StreamloaderError]) -> None:
    try:
        answer = write()
    except StreamloaderError as error:
        answer = error
    except Exception:  # noqa: BLE001 - a bug: the other thread may wait for a task that never comes
        traceback.print_exc()
        os._exit(1)
    with speech:
        channel.send(answer)


def _die_with_starter(lifeline: int) -> None:
    """End this process at once when the other end of the pipe is closed, which a kill -9 does too."""
    os.read(lifeline, 1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
