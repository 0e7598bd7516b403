"""The program of one worker process: receive a task, do it, send its receipt, until the starter is gone.

`python -m streamloader.conversion.engines.worker <socket> <lifeline>`: two file descriptors that it inherits.
"""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing.connection import Connection

from streamloader.conversion.task import Outcome, Task
from streamloader.errors import StreamloaderError


def main(socket: int, lifeline: int) -> None:
    """Do tasks from the connection `socket` until it is closed."""
    threading.Thread(target=_die_with_starter, args=(lifeline,), daemon=True).start()
    with Connection(socket) as channel:
        while True:
            try:
                task: Task = channel.recv()
            except EOFError:
                return
            answer: Outcome | StreamloaderError
            try:
                answer = task.run()
            except StreamloaderError as error:
                answer = error
            channel.send(answer)


def _die_with_starter(lifeline: int) -> None:
    """End this process at once when the other end of the pipe is closed, which a kill -9 does too."""
    os.read(lifeline, 1)
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
