"""What a process and its workers send each other: calls, their results and their errors.

Everything is pickled, but arrays in the arena are sent by reference, so that functions read and write the same memory
in both processes. Large arrays elsewhere are copied into the arena first. A `Shared` value is sent to each connection
once, and a `Callback` as the number by which a function in a worker calls it in the process of its caller.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing import current_process, spawn
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.arena import Arena, MappedMemory
from streamloader.errors import StreamloaderError, message
from streamloader.storage.process import result_of

ALLOCATE = -1  # the number of the last callback, which returns memory for a large array of a result
MOVED_BYTES = 1 << 16  # of an array that is sent through the arena
READ_BYTES = 1 << 17


class Shared(NamedTuple):
    """A value that is sent to each worker once. `main`: what workers need to import the script of this process.

    `memory`: of its large arrays, in the arena. `path`: where modules are imported from. `here`: the value itself, for
    jobs in this process.
    """

    key: int
    data: bytes
    main: dict[str, Any] | None = None
    memory: tuple[NDArray[np.uint8], ...] = ()
    path: tuple[str, ...] = ()
    here: Any = None


class Callback(NamedTuple):
    """A function that runs in this process, also if a function in a worker calls it.

    It must not wait: it may return a `Future` instead, whose result its caller gets. Memory that it returns is valid
    until the caller calls a callback again, or has ended.
    """

    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """Call the function, and wait for its result."""
        value = self.call(*args)
        return result_of(value) if isinstance(value, Future) else value


_LOCAL = threading.local()  # what the messages of a thread refer to: see `refer_to`, and `serve` for workers


def refer_to(arena: MappedMemory, moved: list[NDArray[np.uint8]] | None = None) -> None:
    """Let the messages and functions of this thread refer to an arena, until it is called again.

    `moved`: gets the memory of large arrays that are copied into the arena.
    """
    _LOCAL.arena, _LOCAL.moved = arena, [] if moved is None else moved


def serve(connection: Connection, arena: MappedMemory) -> None:
    """Let functions in this thread of a worker call callbacks by a connection, whose other end has the same arena."""
    _LOCAL.connection, _LOCAL.of_caller = connection, arena
    _LOCAL.shared = {}  # values, or `Shared` until their first use, by key
    refer_to(arena)


def in_worker() -> bool:
    """Return whether a function is called in a worker process."""
    return caller() is not None


def caller() -> Connection | None:
    """Return the connection with the thread that has called a function in a worker, None in other processes."""
    return getattr(_LOCAL, "connection", None)


def all_bytes() -> NDArray[np.uint8]:
    """Return the arena, in a function that an executor calls."""
    arena: MappedMemory = _LOCAL.arena
    return arena.bytes


# ---- shared values


def share(value: Any, arena: Arena) -> Shared:
    """Return what is sent for a value that is the same in many calls. Its large arrays are copied into the arena."""
    memory = list[NDArray[np.uint8]]()
    refer_to(arena, memory)
    data = dump(value)[0]
    refer_to(arena)  # which holds no memory
    return Shared(next(_KEYS), data, None, tuple(memory), tuple(sys.path), value)


def share_pickle(data: bytes, main: dict[str, Any] | None) -> Shared:
    """Return what is sent for a pickled value, of which each worker has its own."""
    return Shared(next(_KEYS), data, main, (), tuple(sys.path))


def script_of_this_process() -> dict[str, Any]:
    """Return what another process needs to import the script of this one, as `multiprocessing` does with spawn."""
    values = spawn.get_preparation_data("streamloader-worker")
    return {name: value for name, value in values.items() if name != "authkey"}  # for connections of multiprocessing


def _shared(key: int) -> Any:
    """Return a shared value, which is loaded at its first use: once for all threads of a worker."""
    value = _LOCAL.shared[key]
    if type(value) is not Shared:
        return value
    with _LOADING:
        loaded = _LOADED.get(key)
        if loaded is None:
            loaded = _load_shared(value)
            with suppress(TypeError):  # a value without weak references
                _LOADED[key] = loaded
    _LOCAL.shared[key] = loaded
    return loaded


def _load_shared(value: Shared) -> Any:
    sys.path += [path for path in value.path if path not in sys.path]  # added since the worker started
    if value.main is not None and not hasattr(sys.modules["__main__"], "__file__"):  # the script is not imported yet
        process = current_process()
        process._inheriting = True  # type: ignore[attr-defined]
        try:
            spawn.prepare(value.main)
        finally:
            del process._inheriting  # type: ignore[attr-defined]
    return pickle.loads(value.data)


_KEYS = count()
_LOADING = threading.RLock()
_LOADED: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


# ---- messages


def dump_call(values: Sequence[Any]) -> tuple[bytes, list[Shared], list[Callback]]:
    """Return the message that calls a function, given with its arguments, the shared values in it and its callbacks.

    Arguments that are shared or callbacks are sent as numbers: a pickler takes longer to find them.
    """
    keys = [(at, value.key) for at, value in enumerate(values) if type(value) is Shared]
    calls = [at for at, value in enumerate(values) if type(value) is Callback]
    plain = [None if type(value) in (Shared, Callback) else value for value in values]
    data, shared, callbacks = dump((plain, keys, calls), [values[at] for at in calls])
    return data, shared + [values[at] for at, _ in keys], callbacks


def dump_shared(value: Shared) -> bytes:
    """Return the message with a shared value, which comes before the first call that has it."""
    return pickle.dumps(value._replace(memory=(), here=None))


def load_call(data: bytes) -> list[Any]:
    """Return the function of a call and its arguments; nothing for a shared value, which is kept for later calls."""
    value = pickle.loads(data)
    if type(value) is Shared:
        _LOCAL.shared[value.key] = value
        return []
    values: list[Any]
    values, keys, calls = value
    for at, key in keys:
        values[at] = _shared(key)
    for number, at in enumerate(calls):
        values[at] = _callback(number)
    return values


load = pickle.loads  # the content of a message


def dump(value: Any, callbacks: Sequence[Callback] = ()) -> tuple[bytes, list[Shared], list[Callback]]:
    """Return the pickle of a value, the shared values in it, and its callbacks after those that are given.

    Arrays and buffers in the arena are pickled by reference, `Shared` values and `Callback`s by number.
    """
    out, shared, called = io.BytesIO(), list[Shared](), [*callbacks]

    def share(found: Shared) -> Any:
        shared.append(found)
        return _shared, (found.key,)

    def call(found: Callback) -> Any:
        called.append(found)
        return _callback, (len(called) - 1,)

    pickler = pickle.Pickler(out, pickle.HIGHEST_PROTOCOL)
    # faster than `reducer_override`, which is called for functions and classes too
    pickler.dispatch_table = _REDUCERS | {Shared: share, Callback: call}
    pickler.dump(value)
    return out.getvalue(), shared, called


def receive(connection: Connection) -> bytes:
    """Return the next message, after which the other end sends no other one without an answer.

    By one read if it is small, where `Connection.recv_bytes` reads its size first. Raises `EOFError`.
    """
    data = os.read(connection.fileno(), READ_BYTES)
    size, begin = int.from_bytes(data[:4], "big", signed=True), 4
    if size < 0:  # the format of `Connection` for more than 2 GiB
        size, begin = int.from_bytes(data[4:12], "big"), 12
    parts, left = [data[begin:]], size + begin - len(data)
    while left:
        data = os.read(connection.fileno(), min(left, READ_BYTES))
        if not data:
            raise EOFError
        parts.append(data)
        left -= len(data)
    return b"".join(parts)


def dump_error(error: BaseException) -> bytes:
    """Return the message with the error of a call, and that of its cause."""
    return dump(("error", *_portable(error)))[0]


def _portable(error: BaseException, depth: int = 3) -> tuple[BaseException, BaseException | None]:
    """Return a copy of an exception that another process can load, and one of its cause.

    Its traceback, unless it is one of ours, is a note.
    """
    cause = error.__cause__ and _portable(error.__cause__, depth - 1)[0] if depth else None
    try:
        copy: BaseException = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a class of the user may raise anything when it is pickled
        copy = RuntimeError(f"{type(error).__name__}: {message(error)}")
    if not isinstance(error, StreamloaderError):
        copy.add_note("in the worker process:\n" + "".join(traceback.format_exception(error)))
    return copy, cause


def _callback(number: int) -> Callback:
    return Callback(partial(_ask, number))


def _ask(number: int, *args: Any) -> Any:
    """Call a callback of the parent. Raises `SystemExit` if it failed: the caller has the error."""
    connection: Connection = _LOCAL.connection
    refer_to(_LOCAL.of_caller)  # the function may have used an executor of its own
    connection.send_bytes(dump(("callback", number, args))[0])
    ok, answer = pickle.loads(connection.recv_bytes())
    if not ok:
        raise SystemExit("a callback failed")
    return answer


# ---- arrays


def _reduced(value: NDArray[Any]) -> Any:
    """Reduce an array: by reference if it is in the arena, where a large one is copied to, else by value."""
    arena: MappedMemory | None = getattr(_LOCAL, "arena", None)
    offset = None if arena is None else arena.offset(value)
    if value.dtype.hasobject or value.dtype.names or (offset is not None and not value.size):
        return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if offset is not None:
        return _array, (offset, value.shape, None if value.flags.c_contiguous else value.strides, value.dtype.str)
    if value.nbytes < MOVED_BYTES or arena is None:
        return _values, (value.tobytes(), value.shape, value.dtype.str)  # 3 times as fast as numpy's own way
    if isinstance(arena, Arena):
        number, memory = -1, arena.allocate(value.nbytes)
        _LOCAL.moved.append(memory)
    else:
        number, memory = _ask(ALLOCATE, value.nbytes)
    moved = memory.view(value.dtype).reshape(value.shape)
    moved[...] = value
    return _reduced(moved) if number < 0 else (_moved, (number, value.shape, value.dtype.str))


_REDUCERS: dict[type, Callable[[Any], Any]] = {
    np.ndarray: _reduced,
    memoryview: lambda value: (_memory, (np.frombuffer(value, np.uint8),)),
}


def _values(data: bytes, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def _array(offset: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: str) -> NDArray[Any]:
    arena: MappedMemory = _LOCAL.arena
    for memory in _LOCAL.moved:  # a result may be a large argument, whose memory is free without it
        start = arena.offset(memory)
        if start is not None and start <= offset < start + memory.nbytes:
            return np.ndarray(shape, dtype, memory.data, offset - start, strides)
    return np.ndarray(shape, dtype, arena.bytes, offset, strides)


def _memory(array: NDArray[np.uint8]) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]


def _moved(number: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Return a large array of a result, which a worker wrote to memory that the caller had allocated."""
    moved: list[NDArray[np.uint8]] = _LOCAL.moved
    return moved[number].view(dtype).reshape(shape)
