"""The memory of a process that blocks and batches lie in: one mapping, private or shared with worker processes.

A mapping reserves addresses, and pages exist once they are written. Shared memory is anonymous (`memfd_create`): it has
no name, and ends with the last process that has its descriptor, however that ends.

`Buffers` are used again, since the first write to a new page costs three times the copy into it.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.stats import Counters

Bytes = NDArray[np.uint8]
PAGE = mmap.PAGESIZE
# Addresses for each byte of the machine's memory, so that fragments of free addresses do not matter.
RESERVED = 4
LEAST_RESERVED = 1 << 33
# Free memory of this size goes back to the system at once; the rest is used again, as malloc does.
RETURNED_BYTES = 1 << 18
# Where a mapping takes what it may need from the system's memory at once, and where that amount is not known: Windows.
FIXED_BYTES = 1 << 33
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # of Python 3.13
HUGE_BYTES = 1 << 22  # allocations that ask for huge pages, as numpy does
HUGE_PAGE = 1 << 21  # only whole ones can be huge


class MappedMemory:
    """The bytes of a mapping: an arena, or that of another process."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self.bytes: Bytes = np.frombuffer(mapping, np.uint8)
        self.size, self.base = self.bytes.size, int(self.bytes.__array_interface__["data"][0])

    def offset(self, array: NDArray[Any]) -> int | None:
        """Return where the memory of an array begins in the mapping, None if it is elsewhere."""
        offset = int(array.__array_interface__["data"][0]) - self.base
        return offset if 0 <= offset < self.size else None


class Arena(MappedMemory):
    """Allocates arrays of bytes in one mapping of `reserved` addresses. Thread-safe.

    An array's memory is free again once it and all arrays and tensors that share its memory are deleted.
    """

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared
        self.descriptor = -1
        if shared and sys.platform == "linux":  # elsewhere none is shared: `choose_workers`
            self.descriptor = os.memfd_create("streamloader")
        self._lock = threading.RLock()
        self._map = self._reserve()
        super().__init__(self._map)
        self._starts, self._sizes = [0], {0: self.size}  # of free ranges
        # by the id of the weak reference to an array: that, the one that frees its pages, and their start and size
        self._allocated: dict[int, tuple[Any, Any, int, int]] = {}
        self.references: dict[int, object] = {}  # to allocated arrays, by their address
        self._deleted: deque[weakref.ref[Bytes]] = deque()  # appended to without the lock
        self._advice = 0
        # Weak references whose callback frees pages by `methodcaller`: what a signal handler raises in a callback that
        # runs Python code is lost. Where the system takes no pages back, it does nothing.
        self._kind: Any = type("_Freed", (weakref.ref,), {"free": staticmethod(slice)})
        self._free_pages()

    def _free_pages(self) -> None:
        """Let the pages of deleted arrays go back to the system, but not in a forked child."""
        if sys.platform == "win32":
            return
        self._advice = mmap.MADV_FREE if sys.platform == "darwin" else mmap.MADV_DONTNEED
        if self.shared and sys.platform == "linux":
            self._map.madvise(mmap.MADV_DONTFORK)  # a forked child would see batches change that it inherits
            self._advice = mmap.MADV_REMOVE
        self._kind.free = staticmethod(self._map.madvise)
        kind = weakref.ref(self._kind)
        os.register_at_fork(after_in_child=lambda: _forget(kind()))

    def _reserve(self) -> mmap.mmap:
        """Map as many addresses as the system allows."""
        size = max(LEAST_RESERVED, RESERVED * machine_memory()) // PAGE * PAGE
        while True:
            try:
                if sys.platform == "win32":
                    return mmap.mmap(-1, min(size, FIXED_BYTES))
                flags = mmap.MAP_SHARED if self.shared else mmap.MAP_PRIVATE | mmap.MAP_ANON
                if self.shared:
                    os.truncate(self.descriptor, size)
                return mmap.mmap(self.descriptor, size, flags=flags | MAP_NORESERVE)
            except OSError:  # a limit of addresses (ulimit -v), or a system without overcommitment
                if size <= LEAST_RESERVED >> 4:
                    raise
                size //= 2

    def allocate(self, size: int, *, huge: bool = True) -> Bytes:
        """Return an array of `size` bytes, uninitialized, that begins at a page. Raises `MemoryError`.

        `huge`: in huge pages if it is large; their first use takes longer, which pays for memory that is used again.
        """
        pages = -(-max(1, size) // PAGE) * PAGE
        huge = huge and pages >= HUGE_BYTES
        with self._lock:
            self._collect()
            start = self._take(pages, (HUGE_PAGE, PAGE) if huge else (PAGE,))
            array = np.frombuffer(self._map, np.uint8, size, start)
            # the last callback is called first
            returned = pages >= RETURNED_BYTES
            freed = self._kind(array, methodcaller("free", self._advice, start, pages)) if returned else None
            entry = weakref.ref(array, self._deleted.append)
            self._allocated[id(entry)] = entry, freed, start, pages
        if huge and sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE, start, pages)
        return array

    def array(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Return an uninitialized array. Raises `MemoryError`."""
        count = math.prod(shape)
        return self.allocate(count * np.dtype(dtype).itemsize).view(dtype)[:count].reshape(shape)

    @property
    def allocated(self) -> int:
        """The number of allocated bytes."""
        with self._lock:
            self._collect()
            return self.size - sum(self._sizes.values())

    def _take(self, pages: int, steps: Sequence[int]) -> int:
        """Remove the first free range of `pages` bytes, and return its start.

        Its address is a multiple of the first of `steps` for which there is one.
        """
        for step in steps:
            for index, first in enumerate(self._starts):
                start, end = first + -(self.base + first) % step, first + self._sizes[first]
                if start + pages <= end:
                    del self._sizes[first]
                    rest = {at: stop - at for at, stop in ((first, start), (start + pages, end)) if at < stop}
                    self._starts[index : index + 1] = rest
                    self._sizes |= rest
                    return start
        raise MemoryError(f"{pages} bytes of {self.size} addresses")

    def _collect(self) -> None:
        """Make the memory of deleted arrays free."""
        while self._deleted:
            _, _, start, size = self._allocated.pop(id(self._deleted.popleft()))
            index = bisect_left(self._starts, start)
            if index < len(self._starts) and self._starts[index] == start + size:
                size += self._sizes.pop(self._starts.pop(index))
            if index and (before := self._starts[index - 1]) + self._sizes[before] == start:
                self._sizes[before] += size
            else:
                insort(self._starts, start)
                self._sizes[start] = size


def address(buffer: Any) -> int:
    """Return the address of the memory of a buffer, in this process."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _forget(kind: Any) -> None:
    """Let the deletion of inherited arrays do nothing in a forked child: shared memory belongs to the parent."""
    if kind is not None:
        kind.free = staticmethod(slice)


def machine_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or the control group's if less.

    8 GiB on Windows, which Python's library does not ask.
    """
    if sys.platform == "win32":
        return FIXED_BYTES
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # absent, or "max"
            total = min(total, int(Path(path).read_text("ascii")))
    return total


class Buffers:
    """A pool of arrays for batches, response bodies and decoded chunks. Thread-safe.

    `lease` never waits: if no array is free, it allocates and counts one. A lease ends when the array that `lease`
    returned and all arrays and tensors that share its memory are deleted. At most `keep` unused arrays of each size are
    kept. When leases would exceed `most` bytes, `give_up` is called, which ends some, and returns True as long as it
    can. Unused arrays are freed when all arrays together would exceed them. `prepare` is called with new memory,
    and what it returns lives as long as that: a weak reference whose callback is called before its pages are free.
    """

    def __init__(
        self,
        arena: Arena,
        counters: Counters,
        *,
        keep: int = 8,
        most: float = math.inf,
        give_up: Callable[[], bool] = bool,
    ) -> None:
        self._arena = arena
        self.prepare: Callable[[Bytes], object] | None = None
        self._free: dict[tuple[int, str], deque[NDArray[np.uint8]]] = {}
        self._made: Counter[tuple[int, str]] = Counter()
        self._counters = counters
        self._keep = keep
        self.most = most
        self._give_up = give_up
        self._allocated = 0
        self._freed: deque[int] = deque()  # sizes
        self._watched: dict[int, tuple[weakref.ref[NDArray[Any]], Callable[[], None]]] = {}
        self._deleted: deque[weakref.ref[NDArray[Any]]] = deque()  # of the watched arrays; appended to without the lock
        self._lock = threading.RLock()

    @property
    def used(self) -> int:
        """The number of bytes that are leased."""
        with self._lock:
            return self._alive() - sum(size * len(free) for (size, _), free in self._free.items())

    def fit(self, size: int, most: float) -> bool:
        """Return whether `size` more bytes would leave at most `most` leased, after others were given up for them."""
        while self.used + size > most:
            if not self._give_up():
                return False
        return True

    def lease(self, shape: tuple[int, ...], dtype: str, usual: int = 1) -> NDArray[Any]:
        """Return an uninitialized array.

        `usual`: the number of such arrays that an ordinary loop holds at once. That many are allocated before one is
        reused, so that memory peaks after the first batches and not when the consumer first falls behind.
        """
        count = math.prod(shape)
        if not count:
            return np.empty(shape, dtype)
        capacity = _capacity(count * np.dtype(dtype).itemsize)
        with self._lock:
            self._alive()
            base, free = self._spare(capacity, dtype, usual)
        # the base of every view: numpy makes views of views refer to the first array that is a view of something else
        root = np.frombuffer(base.data, dtype, count)
        self._when_deleted(root, partial(free.append, base))
        return root.reshape(shape)

    def _spare(self, capacity: int, dtype: str, usual: int) -> tuple[NDArray[np.uint8], deque[NDArray[np.uint8]]]:
        """Return memory and the deque that it returns to: unused memory of this or the next size, else new memory."""
        while True:
            for size in (capacity, _capacity(capacity + 1)):
                free = self._free.setdefault((size, dtype), deque(maxlen=self._keep))
                if size == capacity and self._made[size, dtype] < usual:
                    break
                if free:
                    return free.pop(), free
            if self.used + capacity <= self.most or not self._give_up():
                break
        self._trim(capacity)
        self._made[capacity, dtype] += 1
        self._counters.add(buffers_allocated=1)
        return self._allocate(capacity), self._free[capacity, dtype]

    def limit(self, most: float) -> None:
        """Set `most`, and free unused arrays to comply."""
        with self._lock:
            self.most = most
            self._trim(0)

    def allocate(self, size: int) -> memoryview:
        """Lease `size` bytes of writable memory."""
        return memoryview(self.lease((size,), "uint8"))  # type: ignore[arg-type]

    def _allocate(self, size: int) -> NDArray[np.uint8]:
        """Return new memory, counted until it is deleted."""
        array = self._arena.allocate(size)
        if self.prepare is not None:
            self._arena.references[address(array)] = self.prepare(array)
        with self._lock:
            self._allocated += array.nbytes
        self._when_deleted(array, partial(self._freed.append, array.nbytes))
        return array

    def _when_deleted(self, array: NDArray[Any], call: Callable[[], None]) -> None:
        """Call a function, which must not hold this pool, at the next use of it after an array was deleted.

        An array is deleted in any thread, even inside `lease`, and what a signal handler raises in a callback of a weak
        reference is lost. So the callback runs no Python code.
        """
        ref = weakref.ref(array, self._deleted.append)
        self._watched[id(ref)] = ref, call

    def _alive(self) -> int:
        """Return the bytes of arrays that exist, after the calls for those that were deleted."""
        while self._deleted:
            _, call = self._watched.pop(id(self._deleted.popleft()))
            call()
        while self._freed:
            self._allocated -= self._freed.popleft()
        return self._allocated

    def _trim(self, more: int) -> None:
        """Free unused arrays, the largest first, until `more` bytes fit."""
        for _, free in sorted(self._free.items(), key=lambda item: item[0], reverse=True):
            while free and self._alive() + more > self.most:
                free.popleft()


def _capacity(nbytes: int) -> int:
    """Round up to 1, 1.25, 1.5 or 1.75 times a power of two, so that batches of varying size share buffers."""
    step = 1 << max(6, nbytes.bit_length() - 3)
    return -(-nbytes // step) * step
