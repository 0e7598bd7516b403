"""The bytes of the blocks of a pass: which may be admitted, and who may decode next.

Bodies and decoded chunks share `Budget.body_bytes`. A block is admitted if its expected bytes fit. Where only a body
states how many bytes it decodes to, these are reserved once it has arrived, in the order of tickets: an earlier block
must find its memory free, since a batch waits for it first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from heapq import heappop, heappush
from itertools import count
from typing import Any

from streamloader.engine.arena import Buffers
from streamloader.engine.budget import TOLERANCE_BYTES, Budget


class Ledger:
    """Counts the bytes of blocks by ticket. Its owner has a lock, which all methods but `check` require.

    `needed`: bytes of the blocks in use, for which a batch has waited and which later ones still need.
    """

    def __init__(self, bodies: Buffers, budget: Budget, future: Callable[[], Future[Any]] = Future) -> None:
        self.needed = 0
        self._future = future
        self._bodies, self._budget = bodies, budget
        self._held: dict[int, int] = {}  # bytes of a block, by ticket
        self._loading: dict[int, int] = {}  # further bytes that are expected of a block that is loading, by ticket
        self._used: dict[int, int] = {}  # the part of `needed` of a block, by ticket
        self._waiting: list[tuple[int, int, int, Callable[[], Exception | None], Any, Future[memoryview]]] = []  # heap
        self._numbers = count()
        self._awaited = -1  # the ticket that a batch waits for

    def fits(self, size: int, *, batches_grow: bool) -> bool:
        """Return whether a block of the expected size fits.

        `batches_grow`: the size of later batches is unknown, so blocks ahead get a part of the memory only.
        """
        most = self._bodies.most
        if batches_grow:
            most = min(most, self.needed + ahead_limit(most))
        return self._bodies.fit(sum(self._loading.values()) + size, most)

    def check(self, size: int) -> None:
        """Raise `MemoryBudgetError` if a block of this size does not fit in addition to those in use."""
        self._budget.check(self.needed + size)

    @property
    def waiting(self) -> int:
        """The number of reservations that do not fit yet."""
        return len(self._waiting)

    def open(self, ticket: int, expected: int) -> None:
        """Count a block that begins to load."""
        self._held[ticket], self._loading[ticket] = 0, expected

    def hold(self, ticket: int, size: int, *, expected: bool = False) -> None:
        """Count bytes of a block that are in memory, fewer if negative. `expected`: they were part of that."""
        if ticket not in self._held:  # closed: a late response to another request
            return
        self._held[ticket] += size
        if expected and ticket in self._loading:
            self._loading[ticket] -= size

    def complete(self, ticket: int) -> None:
        """Count a block that is loaded by what it holds."""
        del self._loading[ticket]
        self.grant()

    def use(self, ticket: int) -> int:
        """Count a block as in use; return the bytes that it holds."""
        held = self._used[ticket] = self._held[ticket]
        self.needed += held
        return held

    def close(self, ticket: int) -> None:
        """Count a block no more, which was in use."""
        del self._held[ticket]
        self.needed -= self._used.pop(ticket)
        self.grant()

    def leave(self, size: int) -> int:
        """Leave `size` bytes to finished batches from now on; return the bytes of all blocks, loading ones included."""
        self._bodies.limit(min(self._bodies.most, self._budget.body_bytes - size))
        self._bodies.fit(0, self._bodies.most)
        # `used` includes bodies of loading blocks, so what is expected of these would count twice
        blocks = sum(max(held, self._loading.get(ticket, 0)) for ticket, held in self._held.items())
        return max(blocks, self._bodies.used)

    def reserve(
        self,
        size: int,
        ticket: int,
        ended: Callable[[], Exception | None],
        on_end: Callable[[memoryview | None], object] = bool,
    ) -> Future[memoryview]:
        """Return memory of a block, once it fits: blocks ahead get it in their order, an awaited one at once.

        The future's error is that of `ended()`, if it returns one, or a `MemoryBudgetError`. `on_end` is called with
        the memory, or None after an error, before the thread that waits for the future continues.
        """
        granted: Future[memoryview] = self._future()
        heappush(self._waiting, (ticket, next(self._numbers), size, ended, on_end, granted))
        return granted

    def grant(self, awaited: int | None = None) -> None:
        """Allocate what was reserved, as far as it fits. `awaited`: the ticket that a batch waits for from now on."""
        self._awaited = self._awaited if awaited is None else awaited
        while self._waiting:
            ticket, _, size, ended, on_end, granted = self._waiting[0]
            needed = ticket <= self._awaited
            error: BaseException | None = ended()
            if not (needed or error or self._fits_ahead(ticket, size)):
                return
            heappop(self._waiting)
            if error is None:
                memory, error = self._allocate(ticket, size, check=needed)
            on_end(memory if error is None else None)
            if error is None:
                granted.set_result(memory)
            else:
                granted.set_exception(error)
            del error, granted  # whose frames refer to each other

    def _allocate(self, ticket: int, size: int, *, check: bool) -> tuple[Any, BaseException | None]:
        try:
            if check:
                self._budget.check(self.needed + self._held[ticket] + size)
            memory = self._bodies.allocate(size)
        except BaseException as error:  # noqa: BLE001 - raised by the function that decodes
            return None, error.with_traceback(None)  # which holds this frame
        self._held[ticket] += size
        return memory, None

    def _fits_ahead(self, ticket: int, size: int) -> bool:
        """Return whether a block ahead may decode `size` bytes now.

        Most of the memory is left for an earlier block, whose decoded size is unknown until its body arrives.
        """
        if not self._bodies.fit(size, self._bodies.most):
            return False
        oldest = min(self._loading, default=ticket)
        later = sum(held for number, held in self._held.items() if number > oldest)
        return not self._budget.exact or ticket <= oldest or later + size <= ahead_limit(self._bodies.most)


def ahead_limit(most: float) -> float:
    """Return the bytes of `most` that blocks ahead may take if an earlier block or batch may be larger than planned."""
    return max(TOLERANCE_BYTES, most // 4)
