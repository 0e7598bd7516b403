"""The engine's session of this process: threads and clients survive neither a fork nor a pickle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamloader.engine.session import Opened, Session, Wish
from streamloader.format.manifest import Manifest
from streamloader.format.reader import field_reader
from streamloader.format.threads import cpu_count
from streamloader.plan.selection import Selection
from streamloader.storage.protocol import Store
from streamloader.torch_tensors import TENSORS
from streamloader.torch_world import ranks_on_this_machine


@dataclass(frozen=True)
class Wanted:
    """A dataset that is to be read, and which of its samples take part (None: all)."""

    store: Store
    manifest: Manifest
    selection: Selection | None = None


class ProcessSession:
    """Opens a session when it is first asked for in a process, and keeps it."""

    def __init__(self, wanted: Sequence[Wanted], names: Sequence[str], wish: Wish) -> None:
        self.wanted = tuple(wanted)
        self._names = tuple(names)
        self._wish = wish
        self._opened: tuple[int, Session] | None = None

    def here(self) -> Session:
        """Return the session of this process."""
        if self._opened is None or self._opened[0] != os.getpid():
            opened = [
                Opened(
                    one.store,
                    {name: field_reader(one.store, one.manifest, name) for name in self._names},
                    one.manifest.num_samples,
                    one.selection,
                )
                for one in self.wanted
            ]
            wish = replace(self._wish, ranks_here=ranks_on_this_machine(), tensors=TENSORS)
            session = Session(opened, wish)
            session.counters.note(
                cores=max(1, cpu_count() // wish.ranks_here), transformers=max(1, wish.transform_workers)
            )
            self._opened = (os.getpid(), session)
        return self._opened[1]

    def close(self) -> None:
        """End the threads of a session that this process opened."""
        if self._opened is not None and self._opened[0] == os.getpid():
            self._opened[1].close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without what belongs to this process."""
        return self.__dict__ | {"_opened": None}
