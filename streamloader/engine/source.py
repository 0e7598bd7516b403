"""Where blocks come from, and where they are put."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streamloader.engine.arena import Memory
from streamloader.engine.line import Line
from streamloader.format.reader import FieldReader
from streamloader.plan.schedule import BlockRef
from streamloader.storage.protocol import RangeReader


@dataclass(frozen=True)
class Source:
    """The streamed fields, the data plane (opened on first use) and the line to it, and the memory for it all."""

    fields: Mapping[str, FieldReader]
    reader: Callable[[], RangeReader]
    line: Line
    memory: Memory

    def weight(self, ref: BlockRef) -> int:
        """Return about how many bytes the block's variable-size fields take in memory."""
        return sum(
            (run.stop - run.start) * max(1, field.layout.nbytes) // max(1, field.layout.stored)
            for field in self.fields.values()
            if not field.layout.field.fixed
            for run in field.runs(ref.start, ref.stop)
        )
