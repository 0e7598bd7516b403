"""A cache of ranges of objects on local disk, shared by the processes of a machine: `RangeCache`.

The file system is the whole state. Below the folder of `sl.Cache(path)`:

    streamloader-cache/cache.json        what the folder is, and the version of its layout
    streamloader-cache/<digest>/<key>    a range: its bytes, its key, their lengths and a CRC-32C
    streamloader-cache/<digest>/dataset.json  the URL of the dataset, and the run that reads it
    streamloader-cache/temporary/        ranges that are being written, each locked by its writer
    streamloader-cache/state             the bytes in use, changed under a lock
    streamloader-cache/evicting, fetching     files that are only locked

The time of modification of a range is its next use: a day for each epoch since 1970. That of `dataset.json` is the time
of its readers. Where room is needed, ranges are removed that were to be read before the current epoch, then the one
whose next use is latest (L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems
Journal 5, 1966). The time of access is that of the last read, by the clock on the wall.

An error of the disk never reaches the reader: it costs a request to the store. No lock outlives its process.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
import struct
import sys
import threading
import time
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import count, pairwise
from math import floor, inf
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UsageError
from streamloader.options import Cache
from streamloader.storage.buffers import (
    RECEIVER,
    RESIDENT,
    USE,
    Buffer,
    Receiver,
    Use,
    body_bytes,
    body_crc32c,
    buffers_of,
)
from streamloader.storage.process import Finalizer, PerProcess, close_locked, open_to_lock
from streamloader.storage.url import redact

FOLDER = "streamloader-cache"
MARKER, DATASET, TEMPORARY = "cache.json", "dataset.json", "temporary"
STATE, EVICTING, FETCHING = "state", "evicting", "fetching"
MARKER_TEXT = b'{"format": "streamloader-cache", "version": 1}\n'
DAY = 86_400  # seconds, for an epoch
EARLIEST, LATEST = 2, 2**31 - 2  # seconds since 1970: of all next uses, since a time of 0 means RESIDENT
BLOCK = 4096  # bytes that a file takes a multiple of
SLACK = 50  # an eviction makes room for this part of the limit, if ranges are small enough
WAIT_SECONDS = 10.0  # for another process that fetches the range
LOCK_SECONDS = 0.5  # for the counters, and for the process that evicts
IDLE_SECONDS = 3600.0  # without a read, after which a dataset is dropped before others
CREATIONS = 8  # of a file that is being evicted before it is locked
TOUCH_SECONDS = 1.0  # between two times that a reader writes
REOPEN_SECONDS = 60.0  # until a folder that could not be used is tried again

_ENTRY = re.compile(r"[0-9a-f]{40}")
_UNFINISHED = re.compile(r"[0-9a-f]{40}\.([0-9]{1,15})\.[0-9a-f]{16}")
_DIGEST = re.compile(r"[0-9a-f]{8,128}")
_MAGIC = b"SLRANGE1"
_LENGTHS = struct.Struct("<8sIQ")  # magic, bytes of the key, bytes of the body
_CRC = struct.Struct("<I")
_COUNTERS = struct.Struct("<QQ")
_UNKNOWN = 1 << 62  # bytes in use before they are counted
if sys.platform == "win32":
    _NO_FOLLOW = _FOLDER_FLAGS = 0  # no folder is opened: see `_Folder`
else:
    import fcntl

    _NO_FOLLOW = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would block
    _FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOREIGN = "the folder is not a cache of this version of streamloader: choose another path"
_LOG = logging.getLogger("streamloader")


def disk_bytes(size: int) -> int:
    """Return the bytes that a file of `size` bytes takes on disk."""
    return -(-size // BLOCK) * BLOCK


def time_of_use(next_use: float) -> int:
    """Return the time of modification, in nanoseconds, that states a next use in epochs."""
    if next_use == RESIDENT:
        return 0
    return int(min(max(next_use * DAY, EARLIEST), LATEST) * 1e9)


class _Key(NamedTuple):
    """A range of a dataset: the name of its file, and the bytes that tell there what it is."""

    name: str
    text: bytes
    size: int

    @property
    def file_size(self) -> int:
        return self.size + len(self.text) + _LENGTHS.size + _CRC.size

    def trailer(self, crc: int, size: int) -> bytes:
        """Return what follows a body of `size` bytes with this CRC-32C in its file."""
        end = self.text + _LENGTHS.pack(_MAGIC, len(self.text), size)
        return end + _CRC.pack(crc32c.crc32c(end, crc))


def _key(digest: str, path: str, start: int, stop: int) -> _Key:
    text = json.dumps({"dataset": digest, "path": path, "start": start, "stop": stop}).encode()
    return _Key(blake2b(text, digest_size=20).hexdigest(), text, stop - start)


def _transfer(call: Callable[..., int], descriptor: int, buffers: Sequence[Any]) -> bool:
    """Read or write all of the buffers by `os.readv` or `os.writev`; return whether the file had them."""
    left = [view for view in buffers_of(buffers) if len(view)]
    while left:
        count = call(descriptor, left)
        if not count:
            return False
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]
    return True


@contextmanager
def _opened_to_lock(name: str, folder: int, flags: int = os.O_RDWR | os.O_CREAT | _NO_FOLLOW) -> Iterator[int]:
    """Yield the descriptor of a file, whose locks end with the block."""
    descriptor = open_to_lock(name, flags, folder)
    try:
        yield descriptor
    finally:
        close_locked(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _try_lock_range(descriptor: int, name: str) -> bool:
    """Lock the byte that stands for a range, whose number is in its name; True where systems have no such locks."""
    if not hasattr(fcntl, "F_OFD_SETLK"):
        return True
    lock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, int(name[:15], 16), 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _wait_until(done: Callable[[], object], seconds: float) -> bool:
    """Call `done()` until it returns a true value, for up to `seconds`; return whether it did."""
    until, pause = time.monotonic() + seconds, 0.0002
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True


@dataclass
class _Counters:
    """`used`: bytes of all ranges, finished and not, or more. `added`: those that were ever reserved."""

    used: int
    added: int


# Orders of ranges, the largest of which is evicted first: of datasets that nobody reads; whose use has passed; whose
# use is unknown; that are resident. Those of others are the epochs until they are used, 0 for a use that is late.
_IDLE, _PAST, _UNKNOWN_USE, _LAST = 4e9, 3e9, 2e9, -1.0


def _orders(dataset: int, modified: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the orders of ranges of a dataset by the times of modification of their files, in nanoseconds."""
    try:
        readers = os.stat(DATASET, dir_fd=dataset, follow_symlinks=False)
    except FileNotFoundError:
        return np.full(modified.size, _IDLE)
    if time.time() - readers.st_atime > IDLE_SECONDS:
        return np.full(modified.size, _IDLE)
    seconds, now = modified / 1e9, readers.st_mtime / DAY
    passed, late = seconds < floor(now) * DAY, np.maximum(0.0, seconds / DAY - now)
    return np.select([seconds < 1, seconds >= LATEST - 1, passed], [_LAST, _UNKNOWN_USE, _PAST], late)


class _Folder:
    """The folder of a cache, opened. Files are reached by descriptors, so that no symbolic link leads out of it.

    Raises `OSError` if the folder cannot be used, or is not one of this user's caches.
    """

    def __init__(self, options: Cache) -> None:
        if sys.platform == "win32":
            raise OSError(errno.ENOSYS, "Windows does not open folders, which a cache does to stay inside of its own")
        self.limit, self.free = int(options.limit), int(options.free)
        self._one = threading.Lock()  # for the threads of this process, which would poll the lock of the counters
        self._busy = False
        Path(options.path).mkdir(parents=True, exist_ok=True)
        parent = self._keep(os.open(options.path, _FOLDER_FLAGS))
        with suppress(FileExistsError):
            os.mkdir(FOLDER, 0o700, dir_fd=parent)
        self.root = self._keep(os.open(FOLDER, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=parent))
        self._check()
        self.temporary = self.open_below(TEMPORARY)

    def _keep(self, descriptor: int) -> int:
        Finalizer(self, os.close, descriptor).atexit = False  # threads may store ranges until the process ends
        return descriptor

    def _check(self) -> None:
        """Check owner and marker; complete the marker if the process that began it was killed, or is about to do it."""
        if os.fstat(self.root).st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, "the folder belongs to another user")
        flags = os.O_RDWR | _NO_FOLLOW
        flags |= 0 if _names(self.root) else os.O_CREAT  # before the marker is opened, which others make first
        try:
            descriptor = os.open(MARKER, flags, 0o600, dir_fd=self.root)
        except FileNotFoundError:
            raise FileExistsError(errno.EEXIST, _FOREIGN) from None
        try:
            text = os.pread(descriptor, len(MARKER_TEXT) + 1, 0)
            if not MARKER_TEXT.startswith(text):
                raise FileExistsError(errno.EEXIST, _FOREIGN)
            if text != MARKER_TEXT:
                os.pwrite(descriptor, MARKER_TEXT, 0)
        finally:
            os.close(descriptor)

    def open_below(self, name: str) -> int:
        """Return a descriptor of a folder of ours, which is made if it is not there, until this object is deleted."""
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.root)
        return self._keep(os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=self.root))

    @contextmanager
    def counters(self) -> Iterator[_Counters]:
        """Yield the counters, under their lock, and write them. Raises `TimeoutError` if the lock is held long."""
        with self._one, _opened_to_lock(STATE, self.root) as descriptor:
            if not _wait_until(lambda: _try_lock(descriptor), LOCK_SECONDS):
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock of the counters")
            data, counters = os.pread(descriptor, _COUNTERS.size + _CRC.size, 0), _Counters(_UNKNOWN, 0)
            if len(data) == _COUNTERS.size + _CRC.size and _CRC.pack(crc32c.crc32c(data[:-4])) == data[-4:]:
                counters = _Counters(*_COUNTERS.unpack(data[:-4]))
            yield counters
            data = _COUNTERS.pack(max(0, counters.used), counters.added)
            os.pwrite(descriptor, data + _CRC.pack(crc32c.crc32c(data)), 0)

    def allowed(self, used: int) -> int:
        """Return how many bytes the cache may take, which has `used` now."""
        disk = os.fstatvfs(self.root)
        return min(self.limit, used + disk.f_bavail * disk.f_frsize - self.free)

    def reserve(self, size: int) -> bool:
        """Add `size` bytes to those in use if there is room for them; return whether there is."""
        with self.counters() as counters:
            if counters.used + size > self.allowed(counters.used):
                return False
            counters.used += size
            counters.added += size
        return True

    def remove(self, name: str, folder: int, size: int) -> None:
        """Delete a file with `size` bytes in use, at once for who counts them: an eviction may be under way."""
        with self.counters() as counters, suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
            if counters.used < _UNKNOWN:
                counters.used -= size

    def make_room(self, unfinished: str, size: int, dataset: int, next_use: float) -> bool:
        """Evict ranges so that one of `size` bytes fits, unless it would be the next to be evicted; reserve the bytes.

        `unfinished`: the name of its file in the folder for temporary ones. Return whether the bytes are reserved.
        """
        with _opened_to_lock(EVICTING, self.root) as descriptor:
            # that of many ranges takes seconds: who has waited in vain does not wait again until it has ended
            self._busy = not _wait_until(lambda: _try_lock(descriptor), 0.0 if self._busy else LOCK_SECONDS)
            if self._busy:
                return False
            if self.reserve(size):
                return True  # another process has evicted meanwhile
            with self.counters() as counters:
                added = counters.added
            left, fits = _evict(self, unfinished, size, dataset, next_use)
            with self.counters() as counters:
                if counters.added >= added:  # else the file was replaced
                    counters.used = min(counters.used, left + counters.added - added)
        return fits and self.reserve(size)

    def unfinished_bytes(self, mine: str) -> int:
        """Return the bytes of ranges that are being written, but `mine`, and remove those whose writers have died."""
        size = 0
        for entry in os.scandir(self.temporary):
            named = _UNFINISHED.fullmatch(entry.name)
            if named and entry.name != mine and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    size += 0 if self._remove_unlocked(entry.name) else int(named[1])
        return size

    def _remove_unlocked(self, name: str) -> bool:
        with _opened_to_lock(name, self.temporary, os.O_RDONLY | _NO_FOLLOW) as descriptor:
            if not _try_lock(descriptor):
                return False
            os.unlink(name, dir_fd=self.temporary)
        return True


def _scan(root: int, opened: ExitStack) -> tuple[list[tuple[int, int]], bytearray, array[int]]:
    """Return all ranges in a cache.

    The descriptor of the folder of each dataset with the number of ranges in it and before it, open as long as
    `opened`; the names, of 20 bytes; and of each range the times of modification and access in nanoseconds, and size.
    """
    folders, names, status = list[tuple[int, int]](), bytearray(), array("q")
    for _, dataset in _datasets(root):
        for name, each in _ranges(dataset):
            names += bytes.fromhex(name)
            status.extend((each.st_mtime_ns, each.st_atime_ns, each.st_size))
        folders.append((os.dup(dataset), len(status) // 3))
        opened.callback(os.close, folders[-1][0])
    return folders, names, status


def _ranges(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the names of the ranges in the folder of a dataset, with their status. Other files are not ours."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if _ENTRY.fullmatch(entry.name):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    yield entry.name, status


def _datasets(root: int) -> Iterator[tuple[str, int]]:
    """Yield the digest of each dataset in a cache with a descriptor of its folder, which is closed after that."""
    for name in _names(root):
        if _DIGEST.fullmatch(name):
            with suppress(NotADirectoryError, FileNotFoundError):
                folder = os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=root)
                try:
                    yield name, folder
                finally:
                    os.close(folder)


def _evict(folder: _Folder, unfinished: str, size: int, dataset: int, next_use: float) -> tuple[int, bool]:
    """Remove ranges so that one of `size` bytes fits, unless it is the next to be removed itself.

    More is removed, up to a part of the limit, so that the next ones fit too. Return the bytes that are left, and
    whether it may stay.
    """
    with ExitStack() as opened:
        left, now = folder.unfinished_bytes(unfinished), time.time_ns()
        folders, names, values = _scan(folder.root, opened)
        wanted = len(values) // 3
        values.extend((time_of_use(next_use), now, size))
        status = np.frombuffer(values, np.int64).reshape(-1, 3)
        sizes = -(-status[:, 2] // BLOCK) * BLOCK
        left += int(sizes[:wanted].sum())
        allowed = folder.allowed(left)
        freed, needed, slack = 0, left + size - allowed, max(0, allowed) // SLACK
        if needed <= 0:
            return left, True
        parts = pairwise([(0, 0), *folders, (dataset, wanted + 1)])
        orders = np.concatenate([_orders(each, status[begin:end, 0]) for (_, begin), (each, end) in parts])
        fits = True
        for i in map(int, np.lexsort((status[:, 1], -orders))):
            if freed >= needed and freed + int(sizes[i]) > needed + slack:
                break
            if i == wanted:
                fits = False
            else:
                within = folders[bisect_right(folders, i, key=itemgetter(1))][0]
                if not _remove(within, names[20 * i : 20 * i + 20].hex(), int(status[i, 1])):
                    continue
                left -= int(sizes[i])
            freed += int(sizes[i])
        return left, fits and freed >= needed


def _remove(folder: int, name: str, accessed: int) -> bool:
    """Remove a range unless it was read, and thus got another next use, since the scan; return whether it is gone."""
    with suppress(FileNotFoundError):
        if os.stat(name, dir_fd=folder, follow_symlinks=False).st_atime_ns != accessed:
            return False
        os.unlink(name, dir_fd=folder)
    return True


@dataclass(frozen=True)
class _Opened:
    """The folders of a cache and of a dataset in it."""

    folder: _Folder
    dataset: int


def _store(opened: _Opened, key: _Key, body: Buffer, use: Use) -> None:
    """Write a range if there is room for it: to a locked file among the unfinished ones, which is moved when complete.

    Its bytes are reserved before it is written, once their number is known: an object may end before the range does.
    """
    folder, parts = opened.folder, [body, key.trailer(body_crc32c(body), body_bytes(body))]
    size = disk_bytes(sum(map(len, parts)))
    name, reserved = f"{key.name}.{size}.{os.urandom(8).hex()}", 0
    descriptor = _create(name, folder.temporary)
    try:
        if not (folder.reserve(size) or folder.make_room(name, size, opened.dataset, use.next_use)):
            return
        reserved = size
        if not _transfer(os.writev, descriptor, parts):
            raise OSError(errno.EIO, "nothing is written")
        os.utime(descriptor, ns=(time.time_ns(), time_of_use(use.next_use)))
        with suppress(FileNotFoundError):
            status = os.stat(key.name, dir_fd=opened.dataset, follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or not use.fresh:
                return  # not ours, or another process was sooner
            _discard(folder, opened.dataset, key)
        os.rename(name, key.name, src_dir_fd=folder.temporary, dst_dir_fd=opened.dataset)
        name = ""
    finally:
        try:
            if name:
                folder.remove(name, folder.temporary, reserved)
        finally:
            close_locked(descriptor)


def _create(name: str, temporary: int) -> int:
    """Return the descriptor of a new file among the unfinished ones, locked."""
    for _ in range(CREATIONS):
        descriptor = open_to_lock(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, temporary)
        # an eviction may have found it unlocked, and deleted it
        if _try_lock(descriptor) and os.fstat(descriptor).st_nlink:
            return descriptor
        close_locked(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=temporary)
    raise BlockingIOError(errno.EAGAIN, "the folder is evicted all the time")


def _discard(folder: _Folder, dataset: int, key: _Key) -> None:
    """Remove the file of a range."""
    with suppress(FileNotFoundError):
        status = os.stat(key.name, dir_fd=dataset, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode):
            folder.remove(key.name, dataset, disk_bytes(min(status.st_size, key.file_size)))


class RangeCache:
    """The ranges of the dataset `digest` in a cache. Thread-safe, safe after a fork; pickled as its arguments.

    `url` is recorded, for `streamloader cache`. `wait_seconds` limits how long `read` waits for another process that
    fetches the range. `name`: of the folder for all versions of the dataset; by default the digest. `failures` counts
    the errors of the disk by what failed.
    """

    def __init__(
        self, options: Cache, digest: str, url: str = "", wait_seconds: float = WAIT_SECONDS, name: str = ""
    ) -> None:
        self._arguments = options, digest, url, wait_seconds, name
        self._options, self._url, self._wait_seconds, self._digest = options, redact(url), wait_seconds, digest
        name = name or digest
        self._name = name if _DIGEST.fullmatch(name) else blake2b(name.encode(), digest_size=32).hexdigest()
        self._opened: PerProcess[_Opened] = PerProcess()
        self._retry_at = self._touched = 0.0
        self.failures: Counter[str] = Counter()

    def __reduce__(self) -> tuple[Any, ...]:
        return (range_cache, self._arguments)

    def read(
        self,
        fetch: Callable[[], Buffer],
        path: str,
        start: int,
        stop: int,
        *,
        receiver: Receiver = RECEIVER,
        use: Use = USE,
    ) -> tuple[Buffer, bool]:
        """Return bytes [start, stop) of an object of the dataset, and whether the cache had them; else `fetch()`.

        What `fetch` returns is stored, fewer bytes if the object ends before `stop`. A hit is in the memory of
        `receiver.allocate(size)`. Raises only what `fetch` and `allocate` raise.
        """
        opened = self._open() if stop > start else None
        if opened is None:
            return fetch(), False
        key = _key(use.content or self._digest, path, start, stop)
        self._touch(opened, use)
        body = None if use.fresh else self._lookup(opened, key, receiver, use)
        return self._fetch(opened, key, fetch, receiver, use) if body is None else (body, True)

    def _fetch(
        self, opened: _Opened, key: _Key, fetch: Callable[[], Buffer], receiver: Receiver, use: Use
    ) -> tuple[Buffer, bool]:
        """Return what `fetch` returns, and False, after storing it; or what another process has fetched and stored."""
        with ExitStack() as turn:
            if use.wait and not use.fresh:
                body = self._wait(turn, opened, key, receiver, use)
                if body is not None:
                    return body, True
            body = fetch()
            if 0 < body_bytes(body) <= key.size:
                with self._counting("write"):
                    _store(opened, key, body, use)
        return body, False

    def begin(self, run: str, now: float) -> None:
        """Record that a pass of `run`, which names seed and parameters, begins at `now`, in epochs.

        The next uses that another run has recorded, or this one before it was resumed elsewhere, mean nothing: they
        become the end of this epoch.
        """
        opened = self._open()
        if opened is None:
            return
        with self._counting("begin"), _opened_to_lock(DATASET, opened.dataset) as descriptor:
            if not _try_lock(descriptor):
                return  # another rank does it
            before, known = os.fstat(descriptor).st_mtime / DAY, _parse(os.pread(descriptor, 1 << 16, 0))
            if known.get("run") != run or not 0 <= floor(now) - floor(before) <= 1:
                _reset(opened.dataset, time_of_use(floor(now) + 1) - 10**9)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps({"url": self._url, "run": run}).encode(), 0)
            os.utime(descriptor, ns=(time.time_ns(), time_of_use(now)))

    def _open(self) -> _Opened | None:
        """Return the opened folders, None if they cannot be used now."""
        if time.monotonic() < self._retry_at:
            return None
        try:
            return self._opened.get(self._open_folders)
        except OSError as error:
            self._retry_at = time.monotonic() + REOPEN_SECONDS
            self._note("open", error)
            return None

    def _open_folders(self) -> _Opened:
        folder = _Folder(self._options)
        dataset = folder.open_below(self._name)
        with suppress(FileExistsError):
            descriptor = os.open(DATASET, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o600, dir_fd=dataset)
            try:
                os.write(descriptor, json.dumps({"url": self._url}).encode())
                os.utime(descriptor, ns=(time.time_ns(), time_of_use(0)))
            finally:
                os.close(descriptor)
        return _Opened(folder, dataset)

    def _touch(self, opened: _Opened, use: Use) -> None:
        """Write the time of this reader, now and then."""
        now = time.monotonic()
        if now - self._touched < TOUCH_SECONDS:
            return
        self._touched = now
        with self._counting("touch"):
            status = os.stat(DATASET, dir_fd=opened.dataset, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                modified = time_of_use(use.now) if 0 <= use.next_use < inf else status.st_mtime_ns
                os.utime(DATASET, ns=(time.time_ns(), modified), dir_fd=opened.dataset, follow_symlinks=False)

    def _lookup(self, opened: _Opened, key: _Key, receiver: Receiver, use: Use) -> Buffer | None:
        """Return the bytes of a range from the cache, None if it has them not, or damaged ones."""
        try:
            descriptor = os.open(key.name, os.O_RDONLY | _NO_FOLLOW, dir_fd=opened.dataset)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note("read", error)
            return None
        body = None
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode):
                body = _read(descriptor, status.st_size, key, receiver)
                if body is None:
                    _discard(opened.folder, opened.dataset, key)
                else:
                    modified = status.st_mtime_ns if use.next_use == inf else time_of_use(use.next_use)
                    os.utime(descriptor, ns=(time.time_ns(), modified))
        except OSError as error:
            self._note("read", error)
        finally:
            os.close(descriptor)
        return body

    def _wait(self, turn: ExitStack, opened: _Opened, key: _Key, receiver: Receiver, use: Use) -> Buffer | None:
        """Wait until nobody else fetches the range, for a limited time; return its bytes if it was stored meanwhile.

        If not, it is this process's turn to fetch it, until `turn` is closed; at the same time as others if it has
        waited: what nobody stored has no room.
        """
        found, calls = list[Buffer](), count()

        def has_ended() -> bool:
            next(calls)
            locked = _try_lock_range(descriptor, key.name)
            body = self._lookup(opened, key, receiver, use)  # it may have been stored before the lock
            if body is not None:
                found.append(body)
            return locked or body is not None

        with self._counting("lock"):
            descriptor = turn.enter_context(_opened_to_lock(FETCHING, opened.folder.root))
            _wait_until(has_ended, self._wait_seconds)
        if next(calls) > 1:
            turn.close()
        return found[0] if found else None

    @contextmanager
    def _counting(self, what: str) -> Iterator[None]:
        """Count and log an error of the disk in the block, which ends it."""
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                self._opened = PerProcess()  # the folder was deleted
            self._note(what, error)

    def _note(self, what: str, error: OSError) -> None:
        reason = f"{what}: {error.strerror or error}"
        self.failures[reason] += 1
        if self.failures[reason] == 1:
            text = "cache %s: %s; what it lacks is read from the store"
            _LOG.warning(text, Path(self._options.path) / FOLDER, reason)


@lru_cache(64)
def range_cache(*arguments: Any) -> RangeCache:
    """Return the cache of a dataset, the same one for the same arguments: workers have a copy for each task."""
    return RangeCache(*arguments)


def _read(descriptor: int, file_size: int, key: _Key, receiver: Receiver) -> memoryview | None:
    """Return the body of a range in memory from `receiver`, None if the file is not what was written."""
    size = file_size - (key.file_size - key.size)  # less than the range has, if the object ends before
    if not 0 < size <= key.size:
        return None
    body = receiver.allocate(size)
    trailer = bytearray(file_size - size)
    if not _transfer(os.readv, descriptor, [body, trailer]):
        return None
    return body if trailer == key.trailer(body_crc32c(body), size) else None


def _parse(text: bytes) -> dict[str, Any]:
    """Return a JSON document, empty for what is none."""
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _reset(dataset: int, modified: int) -> None:
    """Set the next use of all ranges of a dataset, but those that are resident."""
    for name, status in _ranges(dataset):
        if status.st_mtime_ns >= EARLIEST * 10**9:
            with suppress(FileNotFoundError):
                os.utime(name, ns=(status.st_atime_ns, modified), dir_fd=dataset, follow_symlinks=False)


class CachedDataset(NamedTuple):
    """What a cache has of a dataset. `last_read`: seconds since 1970; `bytes`: on disk; `url`: "" if unknown."""

    digest: str
    url: str
    ranges: int
    bytes: int
    last_read: float


def entries(path: str | os.PathLike[str]) -> list[CachedDataset]:
    """Return the datasets in the cache of `sl.Cache(path)`, sorted by digest. Raises `UsageError` if there is none."""
    found = []
    with _existing(path) as folder:
        for digest, dataset in _datasets(folder.root):
            count, size, read = 0, 0, 0.0
            for _, status in _ranges(dataset):
                count, size, read = count + 1, size + disk_bytes(status.st_size), max(read, status.st_atime)
            with suppress(FileNotFoundError):
                descriptor = os.open(DATASET, os.O_RDONLY | _NO_FOLLOW, dir_fd=dataset)
                url = str(_parse(_contents(descriptor)).get("url", ""))
                found.append(CachedDataset(digest, url, count, size, read))
    return found


def clear(path: str | os.PathLike[str], digest: str = "") -> tuple[int, int]:
    """Delete the ranges of the datasets whose digest begins with `digest`; by default the cache, even if it is in use.

    Return the number of ranges, and their bytes. What is not of the cache stays. Raises `UsageError` if there is no
    cache, or no such dataset.
    """
    count = size = 0
    with _existing(path) as folder:
        chosen = [name for name, _ in _datasets(folder.root) if name.startswith(digest)]
        if digest and not chosen:
            problem = f"the cache in {os.fspath(path)} has no dataset whose digest begins with {digest!r}"
            raise UsageError(problem, "streamloader cache PATH lists what it has")
        for name, dataset in _datasets(folder.root):
            if name in chosen:
                files = [(file, disk_bytes(status.st_size)) for file, status in _ranges(dataset)]
                for file, taken in [*files, (DATASET, 0)]:
                    with suppress(FileNotFoundError):
                        os.unlink(file, dir_fd=dataset)
                        count, size = count + (taken > 0), size + taken
                _remove_folder(name, folder.root)
        with suppress(FileNotFoundError):
            os.unlink(STATE, dir_fd=folder.root)  # the next writer counts what is left
        if not digest:
            folder.unfinished_bytes("")
            _remove_folder(TEMPORARY, folder.root)
            for name in (EVICTING, FETCHING):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder.root)
            if not set(_names(folder.root)) - {MARKER}:
                os.unlink(MARKER, dir_fd=folder.root)
                _remove_folder(str(Path(path, FOLDER)), None)
    return count, size


@contextmanager
def _existing(path: str | os.PathLike[str]) -> Iterator[_Folder]:
    """Yield the folder of a cache that is there. Raises `UsageError` for errors of the disk."""
    options = Cache(path)
    try:
        if not Path(options.path, FOLDER).is_dir():
            raise UsageError(f"{options.path} has no cache", "give the path of sl.Cache(path)")
        yield _Folder(options)
    except OSError as error:
        where = Path(options.path, FOLDER)
        raise UsageError(f"{where}: {error.strerror or error}", "give the path of a cache of yours") from error


def _contents(descriptor: int) -> bytes:
    """Return what a small file has, and close it."""
    try:
        return os.pread(descriptor, 1 << 16, 0)
    finally:
        os.close(descriptor)


def _remove_folder(name: str, parent: int | None) -> None:
    """Remove a folder unless something is in it."""
    with suppress(OSError):
        os.rmdir(name, dir_fd=parent)


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)
