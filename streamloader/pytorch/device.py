"""Batches on a device: copies that begin before training asks for them, and what is computed there.

Two streams take part: the consumer's, which is the current stream of the thread that asks for a batch, and one stream
for copies, which a `Transfers` has for its whole life. Memory of the device belongs to the consumer's stream, so that
torch's allocator reuses it in the order of that stream, and events order the two:

    consumer's stream   ... the step before | allocated ----------------------------- wait: copied | the step ...
    stream for copies                         wait: allocated | copies | copied

The copy waits for what the consumer still does with the memory that it writes, and the consumer waits for the copy. The
memory of both sides is held until the copy has ended. No other thread takes part, and `Tensor.record_stream` is never
called: memory that is used on two streams is held until an event has completed.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache, partial
from itertools import count
from operator import methodcaller
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import PackedSequence

from streamloader.errors import UsageError
from streamloader.pytorch.tensors import nested_type, to_tensors
from streamloader.stats import Counters
from streamloader.storage.process import Finalizer

# Less memory is copied to page-locked memory of torch's, which takes less time than to lock it.
LOCKED_BYTES = 64 << 10
END_SECONDS = 5.0
PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device

# How the values of a column are computed: scale * x + shift, of shapes that broadcast to that of x.
Affine = tuple[NDArray[np.float32], NDArray[np.float32]]
# The dtype of all columns of floating-point values, or of columns by name.
Cast = torch.dtype | Mapping[str, torch.dtype] | None


def check_device(given: Any) -> torch.device:
    """Return `device=`, without an index if it has none, and without beginning to use it.

    Raises `UsageError` if there is none, or if it is neither CUDA nor the CPU.
    """
    remedy = "give 'cuda', 'cuda:0' or 'cpu', or leave it out"
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device={given!r:.60}: {str(error).partition(chr(10))[0]}", remedy) from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device={given!r:.60} is neither CUDA nor the CPU", "copy each batch with tensor.to(device)")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UsageError(f"device={given!r:.60}, and torch finds {count} CUDA devices", remedy)
    return device


def choose_device(given: Any) -> torch.device:
    """Return the device of `device=`, "cuda" as the one that is current in this thread. Raises `UsageError`."""
    device = check_device(given)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def choose_cast(given: Any) -> Cast:
    """Return the dtypes of `cast=`, a name or a dtype, or these by column. Raises `UsageError` for others."""
    if isinstance(given, Mapping) and given:
        chosen = {name: choose_cast(each) for name, each in given.items()}
        if all(isinstance(each, torch.dtype) for each in chosen.values()):
            return chosen  # type: ignore[return-value]
    dtype: Any = getattr(torch, given, given) if isinstance(given, str) else given
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    raise UsageError(f"cast={given!r:.60}", "give 'bfloat16', 'float16' or another dtype, or a dict of these by column")


def check_columns(cast: Cast, columns: Iterable[Any]) -> None:
    """Raise `UsageError` if `cast` names a column that a batch does not have."""
    if isinstance(cast, Mapping) and (unknown := cast.keys() - columns):
        problem = f"cast= names {', '.join(map(str, unknown))}, and the columns are {', '.join(map(str, columns))}"
        raise UsageError(problem, "name columns of the batch")


def check_normalized(cast: Cast, names: Iterable[str]) -> None:
    """Raise `UsageError` if columns that are normalised would not have floating-point values."""
    for name in names:
        dtype = cast.get(name) if isinstance(cast, Mapping) else cast
        if dtype is not None and not dtype.is_floating_point:
            problem = f"cast= to {dtype} of {name!r}, which is normalised"
            raise UsageError(problem, "give a floating-point dtype, or leave normalize= out")


def page_lock_of(given: Any) -> Callable[[NDArray[np.uint8]], object] | None:
    """Return what is called with new memory of batches that are copied to the device `given`, None for the CPU."""
    chosen = choose_device(given)
    return partial(page_lock, chosen) if chosen.type == "cuda" else None


def runtime_of(device: torch.device) -> SimpleNamespace:
    """Return what `Transfers` uses of torch: streams, events, memory of the device, and copies to it.

    `empty_like` allocates on the current stream, and `copy` is queued there. `source` returns host memory that can be
    copied without waiting. `timer`: an event that measures time, None if there is none.
    """
    module, asynchronous = torch.get_device_module(device), device.type != "cpu"
    return SimpleNamespace(
        Stream=partial(module.Stream, device) if asynchronous else module.Stream,
        # a thread that waits for an event sleeps
        Event=partial(module.Event, blocking=True) if asynchronous else module.Event,
        timer=partial(module.Event, enable_timing=True) if asynchronous else None,
        stream=module.stream,
        current_stream=partial(module.current_stream, device),
        empty_like=partial(torch.empty_like, device=device),
        source=_page_locked if asynchronous else torch.Tensor.detach,
        copy=lambda out, source: out.copy_(source, non_blocking=True),
        on_device=lambda tensor: asynchronous and tensor.device == device,
    )


def _page_locked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


def page_lock(device: torch.device, memory: NDArray[np.uint8]) -> Any:
    """Let the driver of a CUDA device copy from this memory directly, until the array is deleted.

    Return a weak reference to the array, whose callback unlocks it, and which must live as long. If the driver refuses,
    as a limit of locked memory makes it do, batches are copied to page-locked memory first.
    """
    if memory.nbytes < LOCKED_BYTES:
        return None
    if threading.current_thread() is not threading.main_thread():
        torch.cuda.set_device(device)  # a thread of the loader, which would begin to use the first device
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    start = memory.ctypes.data
    with torch.cuda.device(device):
        refused = int(runtime.cudaHostRegister(start, memory.nbytes, PORTABLE))
    if refused:
        with suppress(RuntimeError, AssertionError):  # the next kernel of this thread would raise this error
            torch.ones(1, device=device)
        return None
    # Unlocked before its pages return to the system: the callback that was added last is called first. It runs no
    # Python code, since what a signal handler raises there would be lost.
    return _reference_kind(runtime.cudaHostUnregister)(memory, methodcaller("unlock", start))


@cache
def _reference_kind(unlock: Callable[[int], int]) -> Any:
    return type("_Locked", (weakref.ref,), {"unlock": staticmethod(unlock)})


def mapped(function: Callable[[torch.Tensor, Any], Any], value: Any, name: Any = None) -> Any:
    """Return a nested value with `function(tensor, name)` in place of each tensor, and other values as they are.

    `name`: the key of the outermost mapping. Mutable mappings, sequences, named tuples and dataclasses keep their type.
    Nested tensors of the jagged layout are their values, and offsets and lengths without a name.
    """
    if isinstance(value, torch.Tensor):
        jagged = value.is_nested and value.layout == torch.jagged
        return _mapped_nested(function, value, name) if jagged else function(value, name)
    if isinstance(value, MutableMapping):
        whole: Any = {key: mapped(function, each, key if name is None else name) for key, each in value.items()}
        if type(value) is not dict:
            items, whole = whole, copy(value)
            whole.update(items)
        return whole
    if isinstance(value, PackedSequence):  # its batch sizes stay on the CPU
        names = "data", "sorted_indices", "unsorted_indices"
        value = value._replace(**{each: mapped(function, getattr(value, each), name) for each in names})
    elif isinstance(value, tuple | list):
        items = [mapped(function, item, name) for item in value]
        value = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif is_dataclass(value) and not isinstance(value, type):
        whole = copy(value)
        for field in fields(value):
            object.__setattr__(whole, field.name, mapped(function, getattr(value, field.name), name))
        value = whole
    return value


def _mapped_nested(function: Callable[[torch.Tensor, Any], Any], nested: Any, name: Any) -> torch.Tensor:
    """Return `mapped` of a nested tensor of the jagged layout."""
    options: dict[str, Any] = {} if nested._ragged_idx == 1 else {"_ragged_idx": nested._ragged_idx}
    values, offsets = function(nested.values(), name), function(nested.offsets(), None)
    if nested.lengths() is not None:
        options["lengths"] = function(nested.lengths(), None)
    return nested_type()(values, offsets, **options)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested value, in the order of `mapped`."""
    found: list[torch.Tensor] = []

    def add(tensor: torch.Tensor, _: Any) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(add, value)
    return found


def _groups(tensors: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Yield the numbers of tensors that are copied together: those that are parts of one piece of memory."""
    together: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        key: Any = number
        plain = tensor.layout == torch.strided and not (tensor.is_conj() or tensor.is_neg())
        if plain and tensor.is_contiguous() and tensor.numel():
            key = tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.device
        together.setdefault(key, []).append(number)
    for numbers in together.values():
        spans = [(tensors[at].storage_offset(), tensors[at].numel()) for at in numbers]
        size = max(start + count for start, count in spans) - min(start for start, _ in spans)
        if len(spans) > 1 and size <= 2 * sum(count for _, count in spans):
            yield numbers
        else:
            yield from ([number] for number in numbers)


def cast_tensor(tensor: torch.Tensor, name: Any, cast: Cast) -> torch.Tensor:
    """Return a tensor with the dtype that `cast` has for it: of all columns of floating-point values, or by name."""
    if isinstance(cast, torch.dtype):
        return tensor.to(cast) if tensor.is_floating_point() else tensor
    return tensor if cast is None or name not in cast else tensor.to(cast[name])


def to_cast_tensors(cast: Cast, columns: dict[Any, Any]) -> dict[Any, Any]:
    """Return the columns of a batch as tensors of the dtypes that `cast` has for them, on the CPU."""
    check_columns(cast, columns)
    made: dict[Any, Any] = mapped(partial(cast_tensor, cast=cast), to_tensors(columns))
    return made


class Transfers:
    """Copies batches, nested values with tensors, to a device before they are asked for; see the module.

    `send` begins to copy a batch, and `receive` returns it. `ahead`: the number of batches that may be copied at once.
    While training has a batch, `ahead` - 1 are copied; 1 copies nothing early. What copies have used is let go of by
    the next call, or by `close`.

    `affine`: how values of columns are computed there. `cast`: the dtype of floating-point values, or of columns by
    name. `graph`: batches are copied to the same addresses each time, for CUDA graphs. `borrowed`: columns that are on
    the device already, in memory of another stream.

    With `iterable`, iteration yields its batches on the device.
    """

    def __init__(
        self,
        device: Any,
        ahead: int = 2,
        *,
        iterable: Iterable[Any] = (),
        affine: Mapping[str, Affine] | None = None,
        cast: Cast = None,
        graph: bool = False,
        borrowed: Iterable[str] = (),
        runtime: Any = None,
    ) -> None:
        self.ahead: int = ahead
        self.counters: Counters = Counters()
        self._iterable = iterable
        self._device = choose_device(device)
        self._runtime: Any = runtime or runtime_of(self._device)
        self._copies = self._runtime.Stream()
        pairs = (affine or {}).items()
        self._finish = {name: [torch.from_numpy(values).to(self._device) for values in pair] for name, pair in pairs}
        self._cast, self._graph, self._borrowed = cast, graph, frozenset(borrowed)
        self._fixed: list[torch.Tensor] = []  # the tensors of every batch, for graphs
        self._last: Any = None  # the stream that got the last batch
        self._held: deque[tuple[Any, Any]] = deque()  # what copies read and write, with the events that end them
        self._lent: deque[tuple[Any, Any]] = deque()  # memory that another stream than its own reads, likewise
        self._waits: deque[tuple[Any, Any]] = deque()  # timers before and after a wait for a batch
        self._asked: Any = None
        Finalizer(self, _end, self._device, self._held, self._lent)

    def close(self) -> None:
        """Wait until nothing is being copied, and let go of the memory."""
        if self._fixed:  # the stream that got the last batch may still read it
            ended = self._runtime.Event()
            ended.record(self._last)
            self._lent.append((ended, self._fixed))
            self._fixed = []
        for held in (self._held, self._lent):
            _release(held, 1)

    def send(self, batch: Any, masked: Sequence[int] = ()) -> Any:
        """Begin to copy a batch; return what `receive` takes. Waits while `ahead` others are being copied.

        `masked`: the rows that are zeros, also where values are computed.
        """
        runtime = self._runtime
        self.make_room()
        _release(self._lent)
        found = _tensors(batch)
        consumer = runtime.current_stream()
        with torch.inference_mode(False), torch.no_grad():  # training may use what is sent in an evaluation
            pairs, made = self._allocate(found)
            allocated, copied = runtime.Event(), runtime.Event()
            allocated.record(consumer)
            self._copies.wait_event(allocated)
            self._held.append((copied, pairs))  # before the copies, since they may be interrupted
            try:
                with runtime.stream(self._copies):
                    for out, source in pairs:
                        runtime.copy(out, source)
            finally:
                copied.record(self._copies)
            placed = iter(made)
            return mapped(lambda *_: next(placed), batch), consumer, copied, masked

    def _allocate(self, found: Sequence[torch.Tensor]) -> tuple[list[tuple[Any, Any]], list[Any]]:
        """Return memory of the device with what is copied to it, and for each tensor that on the device."""
        runtime, pairs, made = self._runtime, [], list[Any](found)
        for numbers in _groups(found):
            tensors = [found[number] for number in numbers]
            first = tensors[0]
            if runtime.on_device(first):
                continue
            if first.layout != torch.strided or first.is_nested:
                made[numbers[0]] = first.to(self._device, non_blocking=True)  # on the consumer's stream
                continue
            start = min(tensor.storage_offset() for tensor in tensors)
            if len(tensors) > 1:
                stop = max(tensor.storage_offset() + tensor.numel() for tensor in tensors)
                first = first.as_strided((stop - start,), (1,), start)
            out = runtime.empty_like(first)
            pairs.append((out, runtime.source(first if out.stride() == first.stride() else first.contiguous())))
            if len(tensors) > 1:
                for number, each in zip(numbers, tensors, strict=True):
                    part = out.as_strided(each.size(), each.stride(), each.storage_offset() - start)
                    made[number] = part.data  # no view for autograd, which would forbid to change one of them in place
            else:
                made[numbers[0]] = out
        return pairs, made

    def receive(self, sent: Any) -> Any:
        """Return a batch that the current stream can use: what is queued there from now on comes after the copy.

        Raises `UsageError` if `graph` is given, and the batch differs in shape from the first.
        """
        batch, owner, copied, masked = sent
        if isinstance(self._cast, Mapping):
            check_columns(self._cast, batch)
        consumer = self._runtime.current_stream()
        consumer.wait_event(copied)
        self._note_wait(consumer)
        used: list[torch.Tensor] = []  # on this stream, beside the tensors that are returned
        finish = partial(self._finished, foreign=owner != consumer, masked=masked, used=used)
        with torch.inference_mode(False), torch.no_grad():
            batch = mapped(finish, batch)
            if self._graph:
                batch = self._in_place(batch, consumer)
        if used:
            ended = self._runtime.Event()
            ended.record(consumer)
            self._lent.append((ended, used))
        self._last = consumer
        _release(self._held)
        return batch

    def _finished(
        self, tensor: torch.Tensor, name: Any, *, foreign: bool, masked: Sequence[int], used: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the values of a tensor in memory of the current stream."""
        foreign = foreign or name in self._borrowed
        if foreign:
            used.append(tensor)
        if name not in self._finish:
            out = cast_tensor(tensor, name, self._cast)
            return out.clone() if foreign and out is tensor else out
        scale, shift = self._finish[name]
        dtype: Any = self._cast.get(name) if isinstance(self._cast, Mapping) else self._cast
        out = torch.empty_like(tensor, dtype=dtype or torch.float32)
        torch.addcmul(shift, tensor, scale, out=out)  # one kernel, which computes in float32 and rounds at the end
        for row in masked:
            out[row].zero_()
        return out

    def _in_place(self, batch: Any, consumer: Any) -> Any:
        """Copy the tensors of a batch to those of the first one, and return these."""
        if self._last is not None and self._last != consumer:  # which may still read them
            before = self._runtime.Event()
            before.record(self._last)
            consumer.wait_event(before)
        found = _tensors(batch)
        fixed = self._fixed = self._fixed or [tensor.clone() for tensor in found]
        forms = [[(each.dtype, tuple(each.shape)) for each in tensors] for tensors in (fixed, found)]
        if forms[0] != forms[1]:
            problem = f"graph_buffers=True, and the first batch has tensors of {forms[0]}, this one of {forms[1]}"
            raise UsageError(problem, "choose remainder='drop' or 'pad', and a form of batches with one shape")
        for out, tensor in zip(fixed, found, strict=True):
            out.copy_(tensor)
        number = count()
        return mapped(lambda *_: fixed[next(number)], batch)

    def make_room(self) -> None:
        """Wait until fewer than `ahead` batches are being copied, so that the loader may make another one."""
        _release(self._held, self.ahead)

    def begin_wait(self) -> None:
        """Note that the consumer asks for a batch: the device may wait for data from here on."""
        self.make_room()
        self._asked = None
        if self._runtime.timer is not None:
            self._asked = self._runtime.timer()
            self._asked.record(self._runtime.current_stream())

    def _note_wait(self, consumer: Any) -> None:
        """Count for how long the device waited for batches, as far as it is known without waiting for it."""
        if self._asked is None:
            return
        got = self._runtime.timer()
        got.record(consumer)
        self._waits.append((self._asked, got))
        self._asked = None
        while self._waits and self._waits[0][1].query():
            begin, end = self._waits.popleft()
            self.counters.add(device_wait_seconds=begin.elapsed_time(end) / 1000)

    def __len__(self) -> int:
        """Return the number of batches of `iterable`."""
        return len(self._iterable)  # type: ignore[arg-type] # raises for one without a length

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of `iterable` on the device. An error of it is raised after the batches before it."""
        source, sent, error = iter(self._iterable), deque[Any](), None
        try:
            while True:
                try:
                    while error is None and len(sent) < self.ahead:
                        sent.append(self.send(next(source)))
                except Exception as raised:  # noqa: BLE001 - whatever it is, it belongs to the next batch
                    error = raised
                if sent:
                    yield self.receive(sent.popleft())
                elif isinstance(error, StopIteration):
                    return
                else:
                    raise error  # type: ignore[misc]
        finally:
            error = None  # its traceback refers to this frame, and to the batches that were not asked for


def _release(held: deque[tuple[Any, Any]], most: int = 1 << 30) -> None:
    """Let go of memory whose event has completed, and wait for the oldest ones until fewer than `most` are left."""
    while held:
        with suppress(IndexError, ValueError):  # another thread lets go of memory too, as `close` may
            first = held[0]
            if len(held) < most and not first[0].query():
                return
            first[0].synchronize()
            held.remove(first)


def _end(device: torch.device, *held: deque[tuple[Any, Any]]) -> None:
    """Wait until nothing uses memory that is held, and let go of it.

    In a thread of its own, or at the end of the interpreter, which waits for `END_SECONDS` at most: a device may hang.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if threading.current_thread() is threading.main_thread():
        until = time.monotonic() + END_SECONDS
        while time.monotonic() < until and not all(event.query() for each in held for event, _ in [*each]):
            time.sleep(0.001)
        return
    for each in held:
        _release(each, 1)


def to_device(iterable: Iterable[Any], device: Any, ahead: int = 2) -> Transfers:
    """Yield the batches of an iterable, such as a `DataLoader`, on a device, where they are copied ahead of their use.

    A batch is a tensor, or mappings, sequences and dataclasses with tensors; other values stay as they are. Tensors
    that are not page-locked are copied to page-locked memory first, in this thread. `ahead`: while training has a
    batch, `ahead` - 1 others were read and are copied. The current stream of the thread that iterates can use a batch
    at once. What is returned can be iterated again, and has the length of the iterable.

    Reads ahead, so the state of a loader counts batches that were not returned yet: a streamloader dataset has
    `device=` for that. Raises `UsageError` for a device that is not there.
    """
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1:
        raise UsageError(f"ahead={ahead!r:.60}", "give a whole number of at least 1")
    return Transfers(device, ahead, iterable=iterable)
