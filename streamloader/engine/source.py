"""Where blocks come from, and where they are put."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from streamloader.engine.arena import Memory
from streamloader.engine.line import Line
from streamloader.format.reader import FieldReader, Run
from streamloader.plan.schedule import BlockRef
from streamloader.plan.selection import Selection
from streamloader.storage.protocol import RangeReader


@dataclass(frozen=True)
class Source:
    """The streamed fields, the data plane (opened on first use) and the line to it, and the memory for it all.

    With a `selection`, blocks count the selected samples.
    """

    fields: Mapping[str, FieldReader]
    reader: Callable[[], RangeReader]
    line: Line
    memory: Memory
    selection: Selection | None = None

    def runs(self, field: FieldReader, ref: BlockRef) -> list[Run]:
        """Return the requests for a field's part of a block."""
        if self.selection is None:
            return field.runs(ref.start, ref.stop)
        return field.runs_of(self.selection.samples[ref.start : ref.stop], ref.start)

    def weight(self, ref: BlockRef) -> int:
        """Return about how many bytes the block's variable-size fields take in memory."""
        return sum(
            int((run.stop - run.start) * run.share) * max(1, field.layout.nbytes) // max(1, field.layout.stored)
            for field in self.fields.values()
            if not field.layout.field.fixed
            for run in self.runs(field, ref)
        )
