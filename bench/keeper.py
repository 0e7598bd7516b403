"""Memory that the machine has handed out already, for each contestant alike.

A virtual machine may provide memory that it has never used, or has not used for seconds, at 0.4 GB/s: ten times slower
than memory in use. Such a first epoch would measure the hypervisor. So memory is held here, touched, and let go of just
when a contestant begins its epochs.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import threading
from collections.abc import Iterator

import numpy as np

READY_FD = "STREAMLOADER_BENCH_READY_FD"
PAGE = 4096


@contextlib.contextmanager
def warm_memory(gigabytes: float) -> Iterator[int]:
    """Touch and hold memory; yield the number of a socket: a byte sent there lets go of it, and is answered."""
    ours, theirs = socket.socketpair()
    held = mmap.mmap(-1, max(PAGE, int(gigabytes * 1e9)))
    held.madvise(mmap.MADV_HUGEPAGE)  # as numpy asks for its arrays: what is let go of must fit them
    np.frombuffer(held, np.uint8)[::PAGE] = 1

    def wait() -> None:
        if ours.recv(1):  # nothing: the contestant has gone
            held.close()
            ours.sendall(b"g")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        with theirs:
            yield theirs.fileno()
    finally:
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
        thread.join()
        ours.close()
        held.close()
