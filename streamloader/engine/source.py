"""Where blocks come from, and where they are put."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from streamloader.engine.arena import Memory
from streamloader.engine.line import Line
from streamloader.format.reader import FieldReader, Run
from streamloader.plan.booking import BlockRef
from streamloader.plan.selection import Selection
from streamloader.storage.protocol import Store


@dataclass(frozen=True)
class Stored:
    """One dataset: its streamed fields, and the store that holds them.

    Its first sample has the number `start` in the plan. With a `selection`, blocks count the selected samples.
    """

    fields: Mapping[str, FieldReader]
    store: Store
    start: int = 0
    selection: Selection | None = None

    def runs(self, name: str, ref: BlockRef) -> list[Run]:
        """Return the requests for a field's part of a block of this dataset."""
        if self.selection is None:
            return self.fields[name].runs(ref.start, ref.stop)
        return self.fields[name].runs_of(self.selection.samples[ref.start : ref.stop], ref.start)

    def weight(self, ref: BlockRef, names: Iterable[str]) -> int:
        """Return about how many bytes these fields of a block take in memory."""
        return sum(
            int((run.stop - run.start) * run.share) * max(1, layout.nbytes) // max(1, layout.stored)
            for name in names
            for layout in [self.fields[name].layout]
            for run in self.runs(name, ref)
        )


@dataclass(frozen=True)
class Source:
    """The datasets that blocks are of, end to end, all of the same fields; the line to them, and the memory."""

    stored: tuple[Stored, ...]
    line: Line
    memory: Memory

    @contextmanager
    def waits_by(self, sleep: Callable[[float], None]) -> Iterator[None]:
        """Let this thread wait before retries by `sleep` until the block ends, whichever dataset it reads."""
        with ExitStack() as stack:
            for retries in {one.store.retries for one in self.stored}:
                stack.enter_context(retries.waits_by(sleep))
            yield

    @property
    def names(self) -> tuple[str, ...]:
        """The streamed fields."""
        return tuple(self.stored[0].fields)

    @cached_property
    def _starts(self) -> list[int]:
        return [one.start for one in self.stored]

    @cached_property
    def _variable(self) -> list[str]:
        return [name for name, field in self.stored[0].fields.items() if not field.layout.field.fixed]

    def find(self, ref: BlockRef) -> tuple[Stored, BlockRef]:
        """Return whose a block is, and the same block in the numbers of that dataset."""
        found = self.stored[bisect_right(self._starts, ref.start) - 1]
        return found, replace(ref, start=ref.start - found.start, stop=ref.stop - found.start)

    def weight(self, ref: BlockRef) -> int:
        """Return about how many bytes the block's variable-size fields take in memory."""
        found, own = self.find(ref)
        return found.weight(own, self._variable)
