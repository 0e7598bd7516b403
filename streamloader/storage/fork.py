"""The one fact that a whole process must remember: whether obstore was used in it.

obstore's runtime hangs in a child that was forked after it had been used, even with a new store. The
process that first uses it notes its id here; a process with another id has inherited the note by a fork.
A global that changes, as few do: the runtime that it describes is global too.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass

FORKED_REASON = "forked after obstore was used; use forkserver or spawn"


@dataclass
class _Note:
    obstore_user: int = 0  # process id, 0 for none
    warned: int = 0


_note = _Note()


def note_obstore_use() -> None:
    """Remember that this process uses obstore from now on."""
    if not _note.obstore_user:
        _note.obstore_user = os.getpid()


def obstore_is_forbidden() -> bool:
    """Return whether this process was forked from one that had used obstore."""
    return _note.obstore_user not in (0, os.getpid())


def warn_forked() -> None:
    """Recommend another start method, once in each process."""
    if _note.warned != os.getpid():
        _note.warned = os.getpid()
        warnings.warn(
            "this process was forked after obstore was used: it reads through fsspec, which is slower; "
            "start processes with forkserver or spawn, e.g. DataLoader(multiprocessing_context='forkserver')",
            RuntimeWarning,
            stacklevel=2,
        )
