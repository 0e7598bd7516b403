"""An iterator that a thread of its own runs, some items ahead of whoever takes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """The items of an iterator, up to `most` of them made ahead. One thread runs it, one takes, any may close."""

    def __init__(self, items: Iterator[T], most: int) -> None:
        self._items = items
        self._most = most
        self._made: deque[T] = deque()
        self._over = False
        self._changed = threading.Condition()

    def run(self) -> None:
        """Make items until there is no more, or until closed. Raises what the iterator raises."""
        try:
            for item in self._items:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._made) < self._most or self._over)
                    if self._over:
                        return
                    self._made.append(item)
                    self._changed.notify_all()
        finally:
            self.close()

    def there(self, *, wait: bool) -> bool:
        """Return whether an item is there; `wait` for it, and False says that none will come."""
        if wait and not self._made:
            with self._changed:
                self._changed.wait_for(lambda: self._made or self._over)
        return bool(self._made)

    def take(self) -> T:
        """Return the next item, once `there` said that it is."""
        item = self._made.popleft()
        # Not after each: to wake a thread costs as much as what it makes. Only this side takes away, so that the number
        # passes the middle whenever it was full.
        if len(self._made) == self._most // 2:
            with self._changed:
                self._changed.notify_all()
        return item

    def close(self) -> None:
        """Make no more; what was made can still be taken."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
