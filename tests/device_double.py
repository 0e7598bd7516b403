"""A double of a device with streams: what is enqueued is executed when a seeded scheduler chooses, as late as it may.

It has the functions that `Transfers` of `streamloader/pytorch/device.py` uses of torch, and records streams, events and
leases. What torch computes of its memory is enqueued too, on the current stream. Device memory is allocated as by the
caching allocator of CUDA: a block belongs to the stream that was current, and the next allocation there gets it as soon
as the last tensor on it is deleted, whatever other streams still do. Page-locked memory is rewritten as soon as the
last tensor on it is deleted. Copies and computations read and write the bytes that are there when they are executed.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

GARBAGE = 0xEE


class Violation(Exception):
    """A law of the protocol does not hold."""


class Stream:
    """A stream by its number. As in torch, several objects may mean one stream: they are equal, and not the same."""

    def __init__(self, device: "Device", number: int) -> None:
        self.device, self.number = device, number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def enqueue(self, operation: Callable[[], Any]) -> None:
        """Add an operation: a function that returns False as long as it has to wait."""
        self.device.queues[self.number].append(operation)

    def wait_event(self, event: "Event") -> None:
        """Let what follows wait for what the event has recorded by now; an event that recorded nothing is complete."""
        self.device.pass_time()
        completed = event.completed  # another list, once the event records again
        self.enqueue(lambda: completed[0])

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.device)
        event.record(self)
        return event


class Event:
    """Completes when the stream that recorded it last has executed what was enqueued before."""

    def __init__(self, device: "Device") -> None:
        self.device, self.completed = device, [True]

    def record(self, stream: Stream | None = None) -> None:
        self.device.pass_time()
        self.completed = completed = [False]
        (stream or self.device.current).enqueue(lambda: completed.__setitem__(0, True))

    def query(self) -> bool:
        self.device.pass_time()
        return self.completed[0]

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.device.current).wait_event(self)

    def synchronize(self) -> None:
        """Execute operations until this event is complete. Raises `Violation` if none can be executed before."""
        while not self.completed[0]:
            if not self.device.execute():
                raise Violation("deadlock: an event is waited for that no stream can reach")


class Memory:
    """Bytes that are lent as tensors."""

    def __init__(self, size: int, *, host: bool) -> None:
        self.size, self.host, self.bytes = size, host, bytearray([GARBAGE]) * size
        self.view = memoryview(self.bytes)
        self.address = np.frombuffer(self.bytes, np.uint8).__array_interface__["data"][0]
        self.copies = 0  # those from this memory that have not ended

    def lend(self, shape: tuple[int, ...], dtype: torch.dtype, returned: Callable[[], None]) -> torch.Tensor:
        """Return a tensor. `returned` is called once it and all that share its memory are deleted."""
        root = np.frombuffer(self.bytes, np.uint8)  # the base of each of them
        self._ref = weakref.ref(root, lambda _: returned())
        tensor = torch.frombuffer(root, dtype=dtype)
        return tensor if tensor.shape == shape else tensor.view(shape)


class Device(TorchDispatchMode):
    """A runtime, and what its consumer does beside it. `rng` decides what is executed, and when."""

    timer = None  # events that measure time
    interrupts = 0.0  # how often a copy is interrupted, after it is enqueued

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.rng, self.executing = rng, False
        self.queues: list[deque[Callable[[], Any]]] = []
        self.priority: list[float] = []
        self.current = self.new_stream()
        self.patience = rng.choice((0.0, 0.1, 0.5, 0.9))  # how often an operation is executed while the host goes on
        self.memories: list[Memory] = []
        self.elsewhere = Memory(1, host=True)  # any other memory of the host
        self.free: dict[tuple[Stream, int], list[Memory]] = {}  # blocks by their stream and size
        self.free_host: dict[int, list[Memory]] = {}
        self.violations: list[str] = []
        # what the runtime made
        self.streams = self.events = 0
        self.lent = self.most_lent = 0  # blocks
        self.host_lent = self.most_host_lent = 0  # page-locked buffers

    # the runtime

    def Stream(self) -> Stream:
        self.streams += 1
        return self.new_stream()

    def Event(self) -> Event:
        self.events += 1
        return Event(self)

    def current_stream(self) -> Stream:
        return Stream(self, self.current.number)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def empty_like(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory that belongs to the current stream."""
        if not like.nbytes:
            return torch.empty(like.shape, dtype=like.dtype)
        self.pass_time()
        memory, free = self._block(like.nbytes)

        def returned() -> None:
            self.lent -= 1
            free.append(memory)

        self.lent += 1
        self.most_lent = max(self.most_lent, self.lent)
        return memory.lend(like.shape, like.dtype, returned)

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy on the current stream, which holds neither of the tensors."""
        if out.shape != source.shape or out.dtype != source.dtype:
            raise Violation(f"a copy of {source.dtype} {source.shape} to {out.dtype} {out.shape}")
        self.pass_time()
        to, from_, (memory, _) = self._bytes(out), self._bytes(source), self._find(source)
        memory.copies += 1

        def execute() -> None:
            to[:] = from_
            memory.copies -= 1

        self.current.enqueue(execute)
        if self.interrupts and self.rng.random() < self.interrupts:
            raise KeyboardInterrupt

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def on_device(self, tensor: torch.Tensor) -> bool:
        return not self._find(tensor)[0].host

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Enqueue on the current stream what computes values of device memory; do the rest at once."""
        given = args, kwargs or {}
        if self.executing or function.is_view or not any(map(self._is_device, tree_leaves(given))):
            return function(*args, **given[1])
        self.pass_time()
        later_args, later_kwargs = tree_map_only(torch.Tensor, self._unheld, given)
        if function is torch.ops.aten.empty_like.default:
            return self.empty_like(function(*args, **given[1]))
        in_place = function._schema.is_mutable
        # a new tensor has the form of what is computed now, of values that may not be there yet
        out = given[1].get("out", args[0]) if in_place else self.empty_like(function(*args, **given[1]))
        later = self._unheld(out)

        def execute() -> None:
            result = function(*later_args, **later_kwargs)
            if not in_place:
                later.copy_(result)

        self.current.enqueue(execute)
        return out

    # the consumer

    def new_stream(self) -> Stream:
        self.queues.append(deque())
        self.priority.append(self.rng.random())
        return Stream(self, len(self.queues) - 1)

    def empty(self, count: int) -> torch.Tensor:
        """Return memory of the consumer's own for integers, that belongs to the current stream."""
        memory, free = self._block(8 * count)
        return memory.lend((count,), torch.int64, lambda: free.append(memory))

    def fill(self, tensor: torch.Tensor, value: bytes) -> None:
        """Enqueue on the current stream what writes `value` to a tensor."""
        view = self._bytes(tensor)
        self.current.enqueue(lambda: view.__setitem__(slice(None), value))

    def check(self, tensor: torch.Tensor, value: bytes, name: Any) -> None:
        """Enqueue on the current stream what reads a tensor, and raises `Violation` if it has not `value`."""
        view = self._bytes(tensor)

        def execute() -> None:
            if view != value:
                raise Violation(f"{name} has {bytes(view).hex(' ', 8)} instead of {value.hex(' ', 8)}")

        self.current.enqueue(execute)

    def host(self, values: bytes) -> torch.Tensor:
        """Return page-locked memory with these integers: of deleted tensors, else new.

        It is rewritten at once when the last tensor on it is deleted.
        """
        size = len(values)
        free = self.free_host.setdefault(size, [])
        if free:
            memory = free.pop(self.rng.randrange(len(free)))
        else:
            self.memories.append(memory := Memory(size, host=True))

        def returned() -> None:
            self.host_lent -= 1
            memory.view[:] = bytes([GARBAGE]) * size
            free.append(memory)
            if memory.copies:  # an exception would be lost here
                self.violations.append("a buffer is rewritten before its copy ended")

        self.host_lent += 1
        self.most_host_lent = max(self.most_host_lent, self.host_lent)
        memory.view[:] = values
        return memory.lend((size // 8,), torch.int64, returned)

    # time

    def execute(self) -> bool:
        """Execute one operation, of the first stream by priority that need not wait; return False if there is none."""
        rng, priority, queues = self.rng, self.priority, self.queues
        if rng.random() < 0.05:
            priority[rng.randrange(len(priority))] = rng.random()
        for number in sorted(range(len(queues)), key=priority.__getitem__):
            queue = queues[number]
            if queue and self._executed(queue[0]):
                queue.popleft()
                return True
        return False

    def _executed(self, operation: Callable[[], Any]) -> bool:
        self.executing = True
        try:
            return operation() is not False
        finally:
            self.executing = False

    def pass_time(self) -> None:
        """Execute some operations, or none."""
        while self.rng.random() < self.patience and self.execute():
            pass

    def finish(self) -> None:
        """Execute all that is enqueued. Raises `Violation` if something can never be, and for what was recorded."""
        while self.execute():
            pass
        if any(self.queues):
            raise Violation("deadlock: streams wait for what no stream can reach")
        if self.violations:
            raise Violation(self.violations[0])

    # memory

    def _block(self, size: int) -> tuple[Memory, list[Memory]]:
        """Return a block of the current stream: a free one, if there is one; and where it returns to."""
        free = self.free.setdefault((self.current, size), [])
        if not free:
            self.memories.append(memory := Memory(size, host=False))
            return memory, free
        return free.pop(), free

    def _is_device(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and not self._find(value)[0].host

    def _unheld(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the same memory of the device, which does not hold it; other tensors as they are."""
        memory, offset = self._find(tensor)
        if memory.host:
            return tensor
        whole = torch.frombuffer(memory.bytes, dtype=tensor.dtype)
        return whole.as_strided(tensor.size(), tensor.stride(), offset // tensor.element_size())

    def _bytes(self, tensor: torch.Tensor) -> memoryview:
        """Return the bytes of a tensor, which it may be deleted before."""
        memory, offset = self._find(tensor)
        if not tensor.is_contiguous():
            raise Violation(f"a copy of strides {tensor.stride()}")
        if memory is not self.elsewhere:
            return memory.view[offset : offset + tensor.nbytes]
        return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")

    def _find(self, tensor: torch.Tensor) -> tuple[Memory, int]:
        """Return the memory that a tensor is in, and where it begins there."""
        start = tensor.data_ptr()
        for memory in self.memories:
            if 0 <= (offset := start - memory.address) < memory.size:
                return memory, offset
        return self.elsewhere, 0
