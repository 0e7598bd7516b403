"""The blocks that are in memory: those that batches use, and those that are kept for later epochs.

Of the blocks that no batch uses, the one whose next use is latest is dropped first, which no choice reads less than
(L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5, 1966). The order
tells the next use: `BlockRef.next_use`.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from streamloader.order.schedule import BlockRef

NO_SLOT = -1
LEAST_PAST = 64  # entries of the heap that are past before it is made anew


class KeptBlocks:
    """Which slots have loaded blocks, with the number of users of each. It holds no memory itself.

    `most`: the blocks without users that are kept.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._slots: dict[int, int] = {}  # by the first sample of a block
        self._refs: dict[int, BlockRef] = {}  # by slot: the samples that were loaded
        self._users: dict[int, int] = {}  # by slot
        self._sizes: dict[int, int] = {}  # by slot
        self._numbers = count()  # of releases
        self._unused: dict[int, int] = {}  # by slot: the release by which it lost its last user
        self._by_next_use: list[tuple[float, int, int]] = []  # a heap of (-next use, release, slot), some of them past

    @property
    def unused(self) -> int:
        """The number of blocks without users."""
        return len(self._unused)

    def __contains__(self, ref: BlockRef) -> bool:
        """Return whether all samples of a block, or of a part of it, are in memory."""
        kept = self._refs.get(self._slots.get(ref.block, NO_SLOT))
        return kept is not None and kept.start <= ref.start and ref.stop <= kept.stop

    def beside(self, block: int, size: int, reach: int) -> list[int]:
        """Return the slots of the blocks up to `reach` before and after one, which has `size` samples as they have.

        A part of the block itself may be among them.
        """
        found = (self._slots.get(block + number * size, NO_SLOT) for number in range(-reach, reach + 1))
        return [slot for slot in found if slot != NO_SLOT]

    def add(self, slot: int, ref: BlockRef, size: int) -> int:
        """Register the block that was loaded into a slot, where it has a user, and `size` bytes.

        Return the slot of another part of the block that is kept instead no more, or `NO_SLOT`. Nothing changes if the
        slot is registered, or a part is that has users.
        """
        other = self._slots.get(ref.block, NO_SLOT)
        if slot in self._refs or self._users.get(other):
            return NO_SLOT
        if other != NO_SLOT:
            self._remove(other)
        self._slots[ref.block], self._refs[slot], self._users[slot], self._sizes[slot] = slot, ref, 1, size
        return other

    def use(self, ref: BlockRef) -> tuple[int, int, int]:
        """Add a user to a block that it contains; return its slot, the row of `ref.start` in it, and its bytes."""
        slot = self._slots[ref.block]
        self._unused.pop(slot, None)
        self._users[slot] += 1
        return slot, ref.start - self._refs[slot].start, self._sizes[slot]

    def release(self, slot: int, ref: BlockRef) -> bool:
        """Remove a user, if the slot is registered; return whether it is."""
        if slot not in self._refs:
            return False
        self._users[slot] -= 1
        if not self._users[slot]:
            self._unused[slot] = number = next(self._numbers)
            heappush(self._by_next_use, (-ref.next_use, number, slot))
            if len(self._by_next_use) > 2 * len(self._unused) + LEAST_PAST:
                self._order(self._by_next_use)
        return True

    def begin(self, time: float) -> None:
        """Let blocks be dropped first whose next use was to be before `time`, when the next pass begins."""
        self._order([(use if -use >= time else -inf, number, slot) for use, number, slot in self._by_next_use])

    def drop(self) -> int:
        """Return the slot of the block without users whose next use is latest, which is dropped; `NO_SLOT` if none."""
        while self._by_next_use:
            _, number, slot = heappop(self._by_next_use)
            if self._unused.get(slot) == number:
                self._remove(slot)
                return slot
        return NO_SLOT

    def _order(self, entries: list[tuple[float, int, int]]) -> None:
        """Make the heap of those entries whose blocks have got no user since."""
        self._by_next_use = [entry for entry in entries if self._unused.get(entry[2]) == entry[1]]
        heapify(self._by_next_use)

    def _remove(self, slot: int) -> None:
        del self._slots[self._refs.pop(slot).block], self._users[slot], self._sizes[slot], self._unused[slot]
