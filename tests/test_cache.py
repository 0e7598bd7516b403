"""The cache of ranges: always the right bytes, one request for each range and machine, never more than its limit.

Ranges are of objects that the tests make up; each fetch is a line of a log that all processes append to. Processes are
real, and so are their kills; disks that are full or read only are mounted where the system lets us.
"""

import errno
import itertools
import json
import logging
import multiprocessing
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import floor, inf
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
import pytest
from amounts import examples, longer
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import streamloader as sl
from streamloader.cli.main import main
from streamloader.errors import UsageError
from streamloader.storage import cache as cache_module
from streamloader.storage import process as process_module
from streamloader.storage.buffers import RESIDENT, Receiver, Use
from streamloader.storage.cache import RangeCache, disk_bytes

A, B = "5e" * 32, "0b" * 32  # digests of datasets
FORKED = multiprocessing.get_context("fork")
SOON = Use(1.5)
PATIENCE = 30.0  # seconds for what must end soon, on a machine that others use


def body_of(digest: str, path: str, start: int, stop: int) -> bytes:
    """The bytes of a range, which are others in each dataset and object."""
    seed = int(digest[:8], 16) + sum(path.encode())
    return bytes(np.random.default_rng([seed, start, stop]).bytes(stop - start))


class Source:
    """A cache of one dataset whose fetches are appended to a log."""

    def __init__(self, folder: Path, digest: str = A, limit: str | int = "1GiB", **options: Any) -> None:
        self.log, self.digest, self.folder = folder / "log", digest, folder / "cache" / "streamloader-cache"
        self.cache = RangeCache(sl.Cache(folder / "cache", limit=limit, free=0), digest, **options)

    def fetch(self, path: str, start: int, stop: int) -> bytes:
        with self.log.open("a") as log:
            log.write(f"{self.digest[:2]} {path} {start} {stop}\n")
        return body_of(self.digest, path, start, stop)

    def read(self, path: str, start: int, stop: int, use: Use = SOON) -> bool:
        """Read a range and check its bytes; return whether it was a hit."""
        body, hit = self.cache.read(lambda: self.fetch(path, start, stop), path, start, stop, use=use)
        assert bytes(body) == body_of(self.digest, path, start, stop)
        return hit

    @property
    def fetched(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def stored(self) -> list[Path]:
        """The files of ranges of the dataset."""
        return [path for path in (self.folder / self.digest).glob("*") if path.name != "dataset.json"]


def used(folder: Path) -> int:
    """The bytes on disk of all ranges in a cache, finished or not."""
    files = [*folder.glob("streamloader-cache/temporary/*.*.*"), *folder.glob("streamloader-cache/*/*")]
    sizes = {}  # by inode: a file may be moved meanwhile
    for path in files:
        if re.match(r"[0-9a-f]{40}", path.name):
            with suppress(FileNotFoundError):
                status = path.lstat()
                sizes[status.st_ino] = disk_bytes(status.st_size) if stat.S_ISREG(status.st_mode) else 0
    return sum(sizes.values())


def counted(folder: Path) -> int:
    """The bytes that the cache says are in use."""
    return int.from_bytes((folder / "streamloader-cache" / "state").read_bytes()[:8], "little")


def key_of(file: Path) -> dict[str, Any]:
    """The key in the file of a range, found as docs/cache.md says."""
    data = file.read_bytes()
    size = int.from_bytes(data[-16:-12], "little")
    assert data[-24:-16] == b"SLRANGE1"
    return dict(json.loads(data[-24 - size : -24]))


# one range, one process


def test_a_range_is_fetched_once_and_read_into_the_memory_of_its_reader(tmp_path):
    source, memory = Source(tmp_path), memoryview(bytearray(40))
    assert not source.read("c/0", 10, 50)
    body, hit = source.cache.read(lambda: b"", "c/0", 10, 50, receiver=Receiver(lambda size: memory[:size]))
    assert hit
    assert body.obj is memory.obj
    assert bytes(memory) == body_of(A, "c/0", 10, 50)
    assert Source(tmp_path).read("c/0", 10, 50)
    assert source.fetched == ["5e c/0 10 50"]
    assert not source.cache.failures


def test_a_file_says_which_range_it_is_and_when_it_is_read_next(tmp_path):
    source = Source(tmp_path, url="s3://bucket/photos")
    source.read("c/0/1", 7, 107, Use(next_use=3.25, now=2.5))
    (file,) = source.stored()
    assert key_of(file) == {"dataset": A, "path": "c/0/1", "start": 7, "stop": 107}
    assert file.read_bytes()[:100] == body_of(A, "c/0/1", 7, 107)
    assert file.stat().st_mtime == 3.25 * 86_400
    assert (file.parent / "dataset.json").stat().st_mtime == 2.5 * 86_400
    assert source.read("c/0/1", 7, 107, Use(next_use=4.75, now=3.25))
    assert file.stat().st_mtime == 4.75 * 86_400
    assert source.read("c/0/1", 7, 107)  # who does not know the next use leaves it
    assert source.read("c/0/1", 7, 107, Use())
    assert abs(file.stat().st_atime - time.time()) < PATIENCE


def test_ranges_of_other_places_objects_and_datasets_are_others(tmp_path):
    for digest, path, start, stop in itertools.product((A, B), ("c/0", "c/1"), (0, 1), (50, 51)):
        assert not Source(tmp_path, digest).read(path, start, stop)
    for digest, path, start, stop in itertools.product((A, B), ("c/0", "c/1"), (0, 1), (50, 51)):
        assert Source(tmp_path, digest).read(path, start, stop)


def test_a_body_that_is_shorter_than_its_range_takes_only_its_own_bytes(tmp_path):
    source = Source(tmp_path)
    for hit in (False, True):
        assert source.cache.read(lambda: b"short", "c/0", 0, 50_000) == (b"short", hit)
    assert used(tmp_path / "cache") == counted(tmp_path / "cache") == 4096
    os.truncate(source.stored()[0], 40)
    assert source.cache.read(lambda: b"short", "c/0", 0, 50_000) == (b"short", False)
    for _ in range(2):
        assert source.cache.read(lambda: b"", "c/0", 5, 5) == (b"", False)
        assert source.cache.read(lambda: b"", "c/0", 6, 60) == (b"", False)
        assert source.cache.read(lambda: b"too long", "c/0", 7, 9) == (b"too long", False)
    assert len(source.stored()) == 1


def test_an_error_of_the_store_is_raised_and_leaves_nothing(tmp_path):
    source = Source(tmp_path)
    with pytest.raises(ConnectionError, match="gone"):
        source.cache.read(lambda: (_ for _ in ()).throw(ConnectionError("gone")), "c/0", 0, 50)
    assert used(tmp_path / "cache") == 0
    assert not (source.folder / "state").exists(), "nothing was reserved either"
    assert not source.cache.failures
    assert not source.read("c/0", 0, 50)


def test_a_fresh_read_replaces_what_is_stored(tmp_path):
    source = Source(tmp_path)
    source.cache.read(lambda: bytes(50), "c/0", 0, 50)  # damaged on its way, which its checksum here cannot tell
    assert not source.read("c/0", 0, 50, Use(fresh=True))
    assert source.read("c/0", 0, 50)
    assert len(source.stored()) == 1
    assert used(tmp_path / "cache") == counted(tmp_path / "cache")


def test_every_damaged_byte_is_a_miss(tmp_path):
    source = Source(tmp_path)
    source.read("c/0", 0, 5)
    (file,) = source.stored()
    data = file.read_bytes()
    for place in range(len(data)):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
        assert not source.read("c/0", 0, 5), f"byte {place}"
        assert file.read_bytes() == data
    assert used(tmp_path / "cache") == counted(tmp_path / "cache")


# any sequence of reads, damage and deletion

NAMES = ["notes.txt", "state.bak", "ab" * 20, "g" * 40, "AB" * 20, "temporary2", "x.y", ".hidden"]


class Damaged(RuleBasedStateMachine):
    """Two datasets in a cache whose files are damaged, deleted and joined by files of others."""

    folder: Path
    number = itertools.count()

    @initialize(blocks=st.integers(1, 12))
    def begin(self, blocks: int) -> None:
        self.root = self.folder / str(next(self.number))
        self.limit, self.foreign = blocks * 4096, dict[Path, Any]()
        self.root.mkdir()
        self.outside = self.root / "outside"
        self.outside.mkdir()
        (self.outside / "file").write_bytes(b"precious")
        self.reopen()

    @rule()
    def reopen(self) -> None:
        self.sources = [Source(self.root, digest, limit=self.limit) for digest in (A, B)]

    @rule(
        which=st.sampled_from((0, 1)),
        number=st.integers(0, 5),
        size=st.sampled_from((1, 3000, 4096, 9000)),
        next_use=st.sampled_from((RESIDENT, 0.5, 1.25, 1.5, 2.5, inf)),
        now=st.sampled_from((0.0, 0.75, 1.0, 2.0)),
        fresh=st.booleans(),
    )
    def read(self, which: int, number: int, size: int, next_use: float, now: float, fresh: bool) -> None:
        self.sources[which].read(f"c/{number}", 0, size, Use(next_use, now, fresh=fresh))
        assert used(self.root / "cache") <= self.limit

    @rule(which=st.sampled_from((0, 1)), run=st.sampled_from("ab"), now=st.sampled_from((0.0, 1.5, 7.0)))
    def begin_pass(self, which: int, run: str, now: float) -> None:
        self.sources[which].cache.begin(run, now)

    def files(self) -> list[Path]:
        found = [path for path in (self.root / "cache").rglob("*") if path.is_file() and not path.is_symlink()]
        return sorted(path for path in found if not {path, path.parent} & self.foreign.keys())

    @rule(data=st.data(), bit=st.integers(0, 7), place=st.floats(0, 1, exclude_max=True))
    def flip_a_bit(self, data: st.DataObject, bit: int, place: float) -> None:
        file = data.draw(st.sampled_from(self.files() or [self.outside / "none"]))
        if file.exists() and (content := bytearray(file.read_bytes())):
            content[int(place * len(content))] ^= 1 << bit
            with file.open("r+b") as opened:
                opened.write(content)

    @rule(data=st.data(), place=st.floats(0, 1))
    def truncate(self, data: st.DataObject, place: float) -> None:
        file = data.draw(st.sampled_from(self.files() or [self.outside / "none"]))
        if file.exists():
            os.truncate(file, int(place * file.stat().st_size))

    @rule(data=st.data())
    def delete_a_file(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.files() or [self.outside / "none"])).unlink(missing_ok=True)

    @rule(name=st.sampled_from(("", A, B, "temporary")))
    def delete_a_folder(self, name: str) -> None:
        folder = self.root / "cache" / "streamloader-cache" / name
        self.foreign = {path: value for path, value in self.foreign.items() if folder not in path.parents}
        shutil.rmtree(folder, ignore_errors=True)

    @rule(
        below=st.sampled_from(("", A, B, "temporary")),
        name=st.sampled_from(NAMES),
        kind=st.sampled_from(("file", "folder", "link", "fifo")),
    )
    def put_something_else(self, below: str, name: str, kind: str) -> None:
        path = self.root / "cache" / "streamloader-cache" / below / name
        if path.parent.is_dir() and not os.path.lexists(path):
            if kind == "file" and name != "ab" * 20:  # a regular file of that name is one of ours
                path.write_bytes(b"foreign")
            elif kind == "folder":
                path.mkdir()
                (path / "inner").write_bytes(b"foreign")
            elif kind == "link":
                path.symlink_to(self.outside / "file")
            elif kind == "fifo":
                os.mkfifo(path)
            else:
                return
            self.foreign[path] = kind

    @rule(which=st.sampled_from((0, 1)), size=st.sampled_from((1, 3000)))
    def put_a_link_in_the_place_of_a_range(self, which: int, size: int) -> None:
        name = cache_module._key((A, B)[which], "c/0", 0, size).name
        path = self.root / "cache" / "streamloader-cache" / (A, B)[which] / name
        if path.parent.is_dir():
            path.unlink(missing_ok=True)
            path.symlink_to(self.outside / "file")
            self.foreign[path] = "link"

    @invariant()
    def nothing_foreign_is_touched(self) -> None:
        if hasattr(self, "outside"):
            assert [path.name for path in self.outside.iterdir()] == ["file"]
            assert (self.outside / "file").read_bytes() == b"precious"
            for path, kind in self.foreign.items():
                assert os.path.lexists(path), f"{kind} {path} was deleted"
                assert kind != "file" or path.read_bytes() == b"foreign"
                assert kind != "folder" or (path / "inner").read_bytes() == b"foreign"
                assert (kind == "link") == path.is_symlink()

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)


@pytest.mark.long
def test_whatever_happens_to_its_files_a_cache_returns_the_right_bytes_within_its_limit(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    machine = type("Damaged", (Damaged,), {"folder": tmp_path})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(150), stateful_step_count=40))


# processes


def in_processes(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Call `work(number)` in processes that begin together, and return what each returns."""
    barrier = FORKED.Barrier(count)
    pipes = [FORKED.Pipe(duplex=False) for _ in range(count)]

    def child(number: int) -> None:
        barrier.wait(PATIENCE)
        pipes[number][1].send(work(number))

    processes = [FORKED.Process(target=child, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0
    return [pipe.recv() for pipe, _ in pipes]


@pytest.fixture
def patient_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for locks however slow the machine is, in place of skipping a write."""
    monkeypatch.setattr(cache_module, "LOCK_SECONDS", PATIENCE)


@pytest.mark.usefixtures("patient_locks")
def test_each_range_is_fetched_once_by_all_processes_of_a_machine(tmp_path):
    ranges = [("c/0", 1000 * number, 1000 * number + 900) for number in range(40)]

    def read_all(number: int) -> tuple[int, dict[str, int]]:
        source = Source(tmp_path)
        order = [ranges[i] for i in np.random.default_rng(number // 2).permutation(len(ranges))]  # pairs collide always
        return sum(source.read(*each) for each in order), dict(source.cache.failures)

    hits, failures = zip(*in_processes(8, read_all), strict=True)
    assert not any(failures), failures
    assert sum(hits) == 7 * len(ranges)
    assert len(Source(tmp_path).fetched) == len(ranges)
    assert used(tmp_path / "cache") == len(ranges) * 4096
    # who counts first also counts what others are about to reserve, until the next eviction
    assert len(ranges) * 4096 <= counted(tmp_path / "cache") <= (len(ranges) + 8) * 4096


@pytest.mark.usefixtures("patient_locks")
def test_threads_of_a_process_fetch_each_range_once_too(tmp_path):
    source, started = Source(tmp_path), threading.Barrier(8)

    def read_all() -> None:
        started.wait(PATIENCE)
        for number in range(20):
            source.read("c/0", number, number + 500)

    threads = [threading.Thread(target=read_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(source.fetched) == 20


@pytest.mark.long
@pytest.mark.usefixtures("patient_locks")
def test_processes_that_fill_a_cache_together_stay_within_its_limit(tmp_path):
    limit, blocks = 24 * 4096, 200

    def read_many(number: int) -> int:
        source, most = Source(tmp_path, limit=limit), 0
        for i in np.random.default_rng(number).permutation(blocks)[:60]:
            source.read("c/0", int(i), int(i) + 3000, Use(1 + i / blocks, 0.5))
            with source.cache._open().folder.counters() as counters:  # nobody else reserves
                assert counters.used <= limit
                most = max(most, used(tmp_path / "cache"))
        return most

    assert max(in_processes(4, read_many)) <= limit
    files = len(Source(tmp_path).stored())
    assert 20 <= files <= 24, "a full cache stays full"
    assert used(tmp_path / "cache") <= counted(tmp_path / "cache") <= limit


class Stopper:
    """Stands for a module in the cache's: at call number `at` of its functions the process tells, and stops."""

    def __init__(self, real: Any, tell: Callable[[], None], count: Iterator[int], at: int) -> None:
        self._real, self._tell, self._count, self._at = real, tell, count, at

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if not callable(value) or isinstance(value, type) or name in ("getpid", "fspath", "urandom"):
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            if next(self._count) == self._at:
                self._tell()
            return value(*arguments, **options)

        return call


def killed_at(at: int, work: Callable[[], None]) -> bool:
    """Kill a process that does `work` just before its system call number `at`; return whether it came there."""
    pipe, end = FORKED.Pipe(duplex=False)

    def child() -> None:
        def stop() -> None:
            end.send(True)
            while True:
                signal.pause()

        count = itertools.count()
        cache_module.os = Stopper(os, stop, count, at)  # type: ignore[assignment]
        process_module.os = Stopper(os, stop, count, at)  # type: ignore[assignment]
        cache_module.fcntl = Stopper(cache_module.fcntl, stop, count, at)  # type: ignore[assignment]
        work()
        end.send(False)

    process = FORKED.Process(target=child)
    process.start()
    assert pipe.poll(PATIENCE)
    came = bool(pipe.recv())
    process.kill()
    process.join(PATIENCE)
    return came


@pytest.mark.long
@pytest.mark.parametrize("step", [3, 1])
@pytest.mark.parametrize("filled", [False, True], ids=["empty", "full"])
def test_a_kill_at_any_system_call_costs_misses_only(tmp_path, filled, step):
    limit = 6 * 4096

    def use(number: int) -> Use:
        return Use(1 + number / 100, 0.5)

    def work() -> None:
        source = Source(root, limit=limit)
        source.cache.begin("run", 0.5)
        for number in (3, 1):
            source.read("c/0", number, number + 3000, use(number))

    for at in itertools.count(0, step):
        root = tmp_path / f"{at}"
        root.mkdir()
        if filled:
            source = Source(root, limit=limit)
            source.cache.begin("run", 0.5)
            for number in range(10, 16):
                source.read("c/0", number, number + 3000, use(number))
        came = killed_at(at, work)
        source, begun = Source(root, limit=limit), time.monotonic()
        source.read("c/0", 3, 3003, use(3))
        assert source.read("c/0", 3, 3003, use(3))
        assert used(root / "cache") <= limit
        for number in reversed(range(20, 28)):  # each is read sooner than what is there: the last ones are evicted
            source.read("c/0", number, number + 3000, Use(0.5 + number / 1000, 0.5))
        assert not list((source.folder / "temporary").iterdir()), f"call {at} left a file"
        assert used(root / "cache") == counted(root / "cache") <= limit
        assert len(source.stored()) == 6
        assert time.monotonic() - begun < source.cache._wait_seconds, f"call {at} left a lock"
        assert not source.cache.failures
        shutil.rmtree(root)
        if not came:
            break
    assert at > 40


def holding(root: Path, fork: bool = False) -> tuple[multiprocessing.process.BaseProcess, Any]:
    """A process that fetches [0, 500) of c/0 until it gets something by the pipe, which may have a child by then."""
    pipe, end = FORKED.Pipe()

    def child() -> None:
        source = Source(root)

        def fetch() -> bytes:
            if fork and not os.fork():
                end.poll(PATIENCE)  # lives as long as the pipe
                os._exit(0)
            end.send("fetching")
            end.recv()
            return source.fetch("c/0", 0, 500)

        source.cache.read(fetch, "c/0", 0, 500)

    process = FORKED.Process(target=child)
    process.start()
    assert pipe.poll(PATIENCE)
    assert pipe.recv() == "fetching"
    return process, pipe


def test_others_wait_for_who_fetches_a_range(tmp_path):
    process, pipe = holding(tmp_path)
    threading.Timer(0.3, pipe.send, ["go on"]).start()
    assert Source(tmp_path, wait_seconds=PATIENCE).read("c/0", 0, 500)
    process.join(PATIENCE)
    assert len(Source(tmp_path).fetched) == 1


def test_who_waits_in_vain_fetches_itself_and_a_hedge_does_not_wait(tmp_path):
    process, pipe = holding(tmp_path)
    begun = time.monotonic()
    source = Source(tmp_path, wait_seconds=PATIENCE)
    assert not source.read("c/0", 0, 500, Use(wait=False))
    assert not source.read("c/0", 0, 500, Use(fresh=True))
    assert time.monotonic() - begun < PATIENCE / 2
    source.stored()[0].unlink()
    begun = time.monotonic()
    assert not Source(tmp_path, wait_seconds=0.4).read("c/0", 0, 500)
    assert time.monotonic() - begun >= 0.4
    pipe.send("go on")
    process.join(PATIENCE)
    assert used(tmp_path / "cache") <= counted(tmp_path / "cache")
    assert Source(tmp_path).read("c/0", 0, 500)


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a child that lives on"])
def test_no_lock_outlives_its_process(tmp_path, fork):
    process, pipe = holding(tmp_path, fork)
    os.kill(process.pid or 0, signal.SIGKILL)
    os.waitpid(process.pid or 0, 0)  # `join` would wait for its child too
    begun = time.monotonic()
    source = Source(tmp_path, limit=3 * 4096, wait_seconds=PATIENCE)
    assert not source.read("c/0", 0, 500)
    assert time.monotonic() - begun < PATIENCE / 2
    for number in range(1, 5):
        source.read("c/0", number, number + 500)
    assert not list((source.folder / "temporary").iterdir())
    assert not source.cache.failures
    pipe.close()


# which ranges are evicted


class Reference:
    """Belady's choice among what is stored and what is to be stored, written independently of the cache's code."""

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, itertools.count()
        self.stored: dict[tuple[str, int], tuple[float, int, int]] = {}  # next use, number of the last read, blocks
        self.now = {A: 0.0, B: 0.0}

    def worst(self, entries: dict[tuple[str, int], tuple[float, int, int]]) -> tuple[str, int]:
        """The entry to drop first: whose use has passed, else the one that is read last, else the one read before."""

        def rank(key: tuple[str, int]) -> tuple[int, float, int]:
            next_use, read, _ = entries[key]
            if next_use == RESIDENT:
                return 0, 0.0, -read
            if next_use < floor(self.now[key[0]]):
                return 2, 0.0, -read
            return 1, next_use if next_use == inf else max(0.0, next_use - self.now[key[0]]), -read

        return max(entries, key=rank)

    def read(self, key: tuple[str, int], use: Use, blocks: int) -> bool:
        if 0 <= use.next_use < inf:
            self.now[key[0]] = use.now
        if key in self.stored:
            next_use = self.stored[key][0] if use.next_use == inf else use.next_use
            self.stored[key] = next_use, next(self.count), blocks
            return True
        entries = {**self.stored, key: (use.next_use, next(self.count), blocks)}
        total = sum(size for *_, size in entries.values())
        least, slack, freed = total - self.limit, self.limit // 50, 0
        while entries and least > 0:
            size = entries[self.worst(entries)][2]
            if freed >= least and freed + size > least + slack:
                break
            freed += size
            del entries[self.worst(entries)]
        self.stored = entries
        return False


@pytest.mark.quick(1)
@pytest.mark.parametrize(("limit", "reads"), [(7, 60), (110, 250)], ids=["small", "with slack"])
@pytest.mark.parametrize("seed", [1, 2, *map(longer, range(3, 40))])
def test_an_eviction_is_beladys_choice_over_all_datasets(tmp_path, monkeypatch, limit, reads, seed):
    monkeypatch.setattr(cache_module, "TOUCH_SECONDS", 0.0)
    rng, reference = np.random.default_rng(seed), Reference(limit)
    sources = {digest: Source(tmp_path, digest, limit=limit * 4096) for digest in (A, B)}
    for source in sources.values():
        source.cache.begin("run", 0.0)
    for _ in range(reads):
        digest, name = (A, B)[rng.integers(2)], int(rng.integers(limit))
        now = max(reference.now[digest], float(rng.choice([0.0, 0.5, 1.0, 1.25, 2.0], p=[0.6, 0.2, 0.1, 0.06, 0.04])))
        next_use = float(rng.choice([RESIDENT, inf, 0.25, 1.0, 1.125, *np.arange(1.5, 4, 0.25)]))
        blocks, use = 1 + name % 3, Use(next_use, now)
        expected = reference.read((digest, name), use, blocks)
        assert sources[digest].read(f"{name}", 0, 4096 * blocks - 1000, use) == expected
    left = {(digest, int(key_of(file)["path"])) for digest in (A, B) for file in sources[digest].stored()}
    assert left == set(reference.stored)
    assert len(left) > limit // 4
    assert used(tmp_path / "cache") == counted(tmp_path / "cache")


def test_folders_are_listed_for_evictions_only_and_each_of_these_makes_room_for_many(tmp_path, monkeypatch):
    """The cost of a read does not grow with the number of ranges that are stored."""
    scans, scandir = list[Any](), os.scandir
    monkeypatch.setattr(os, "scandir", lambda *given: scans.append(given) or scandir(*given))
    source, fit = Source(tmp_path, limit=200 * 4096), 200
    source.read("0", 0, 9, Use(1.1, 0.1))
    scans.clear()
    for number in range(1, fit):
        source.read(f"{number}", 0, 9, Use(1 + number / 1000, number / 1000))
    for number in range(fit):
        assert source.read(f"{number}", 0, 9, Use(1 + number / 1000, number / 1000))
    assert not scans
    for number in range(fit, 2 * fit):
        assert not source.read(f"{number}", 0, 9, Use(1 + number / 1000, number / 1000))
    evictions = -(-fit // (fit // cache_module.SLACK))
    assert 0 < len(scans) <= 3 * evictions  # the folders of the cache, of its dataset and of what is unfinished


def test_ranges_of_a_dataset_that_nobody_reads_are_evicted_first_and_resident_ones_last(tmp_path):
    limit = 4 * 4096
    old, new = Source(tmp_path, A, limit=limit), Source(tmp_path, B, limit=limit)
    for number in range(2):
        old.read(f"{number}", 0, 9, Use(1.1, 1.0))
    new.read("resident", 0, 9, Use(RESIDENT, 1.0))
    new.read("late", 0, 9, Use(1.9, 1.0))
    two_hours_ago = time.time() - 7200
    os.utime(old.folder / A / "dataset.json", (two_hours_ago, 86_400))
    for number in range(3):
        new.read(f"{number}", 0, 9, Use(1.5, 1.0))
    assert not old.stored()
    assert {key_of(file)["path"] for file in new.stored()} == {"resident", "0", "1", "2"}


def test_reads_whose_next_use_is_unknown_are_evicted_as_lru(tmp_path):
    source = Source(tmp_path, limit=3 * 4096)
    for name in ("a", "b", "c", "a", "d"):
        source.read(name, 0, 9, Use())
    assert {key_of(file)["path"] for file in source.stored()} == {"c", "a", "d"}


def test_times_of_files_that_are_coarse_keep_the_order(tmp_path):
    source = Source(tmp_path, limit=4 * 4096)
    for number in range(4):
        source.read(f"{number}", 0, 9, Use(1 + number / 1000, 0.5))
        for file in source.stored():  # as FAT stores them: to 2 s, of 86,400 for an epoch
            status = file.stat()
            os.utime(file, (status.st_atime // 2 * 2, status.st_mtime // 2 * 2))
    source.read("new", 0, 9, Use(1.0005, 0.5))
    assert {key_of(file)["path"] for file in source.stored()} == {"0", "1", "2", "new"}


def test_another_run_makes_the_recorded_next_uses_the_end_of_its_epoch(tmp_path):
    source = Source(tmp_path)
    source.cache.begin("seed 1", 3.0)
    source.read("a", 0, 9, Use(4.25, 3.5))
    source.read("table", 0, 9, Use(RESIDENT, 3.5))

    def times() -> set[float]:
        return {round(file.stat().st_mtime / 86_400, 3) for file in source.stored()}

    for now in (3.5, 4.0):  # it goes on
        source.cache.begin("seed 1", now)
        assert times() == {0.0, 4.25}
    source.cache.begin("seed 3", 4.5)
    assert times() == {0.0, 5.0}
    source.cache.begin("seed 2", 0.0)
    assert times() == {0.0, 1.0}
    source.read("a", 0, 9, Use(1.5, 0.5))
    source.cache.begin("seed 2", 7.0)  # resumed: others have read six epochs elsewhere
    assert times() == {0.0, 8.0}
    source.cache.begin("seed 2", 2.0)
    assert times() == {0.0, 3.0}
    assert json.loads((source.folder / A / "dataset.json").read_text())["run"] == "seed 2"


# disks that are full, read only or of others


def misses_only(source: Source) -> None:
    """Read twice, without the cache."""
    for _ in range(2):
        assert not source.read("c/0", 0, 500)


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [record.getMessage() for record in caplog.records if record.name == "streamloader"]


def test_a_file_that_the_system_does_not_let_grow_is_a_miss(tmp_path):
    def write() -> tuple[list[str], int, int]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # the kernel refuses, in the middle of a write
        source = Source(tmp_path)
        source.read("c/0", 0, 1_000_000)
        source.read("c/0", 0, 1_000_000)
        source.read("c/0", 0, 50_000)
        return list(source.cache.failures), used(tmp_path / "cache"), counted(tmp_path / "cache")

    ((failures, taken, known),) = in_processes(1, lambda _: write())
    assert failures == ["write: File too large"]
    assert taken == known == 53_248
    assert Source(tmp_path).read("c/0", 0, 50_000)


IN_NAMESPACE = """
import json, subprocess, sys
from pathlib import Path
from streamloader.storage.buffers import Use
from test_cache import Source, used

def mount(name, options):
    (root := Path(sys.argv[1]) / name / "cache").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(root)], check=True)
    return root

def hits(source, start=0):
    return sum(source.read("c/0", n, n + 100_000, Use(1 + n / 100, 0.5)) for n in range(start, start + 20))

disk, told = mount("small", "size=1m"), {}
source = Source(disk.parent)
told["cold"], told["full"] = hits(source), hits(source)
with (disk / "of others").open("ab") as file:
    try:
        file.write(bytes(1 << 20))
    except OSError as error:
        told["filled"] = error.errno
told["filled by others"] = hits(source)
told["failures"], told["unfinished"] = dict(source.cache.failures), len(list(disk.rglob("temporary/*")))
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
source = Source(disk.parent)
told["read only"], told["its failures"] = hits(source), sorted(source.cache.failures)
source = Source(mount("without inodes", "size=9m,nr_inodes=15").parent)
told["few files"], told["refused"] = hits(source) + hits(source), sorted(source.cache.failures)
print(json.dumps(told))
"""


@pytest.mark.long
def test_a_full_and_a_read_only_disk_cost_misses_only(tmp_path):
    run = ["unshare", "--map-root-user", "--mount", sys.executable, "-c", IN_NAMESPACE, str(tmp_path)]
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    if subprocess.run([*run[:3], "true"], capture_output=True, check=False).returncode:
        pytest.skip("the system lets no process mount a file system of its own")
    done = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == {
        **{"cold": 0, "full": 10, "filled": errno.ENOSPC, "filled by others": 10, "failures": {}, "unfinished": 0},
        **{"read only": 0, "its failures": ["open: Read-only file system"]},
        **{"few files": told["few files"], "refused": ["write: No space left on device"]},
    }
    assert 0 < told["few files"] < 15


@pytest.mark.parametrize("what", ["a file", "a folder of others", "a later version", "a link"])
def test_a_folder_that_is_not_a_cache_of_ours_is_left_as_it_is(tmp_path, warnings_of, what):
    folder = tmp_path / "cache" / "streamloader-cache"
    folder.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    if what == "a file":
        folder.write_text("text")
    elif what == "a link":
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        (folder / ("cache.json" if what == "a later version" else "mine")).write_text('{"version": 2}')
    before = sorted((path, path.is_symlink()) for path in tmp_path.rglob("*"))
    source = Source(tmp_path)
    misses_only(source)
    source.cache.begin("run", 0.0)
    (tmp_path / "log").unlink()
    assert sorted((path, path.is_symlink()) for path in tmp_path.rglob("*")) == before
    assert len(warnings_of()) == 1
    assert str(folder) in warnings_of()[0]


def test_a_path_that_is_a_file_costs_misses_only(tmp_path, warnings_of):
    (tmp_path / "cache").write_text("text")
    misses_only(Source(tmp_path))
    assert (tmp_path / "cache").read_text() == "text"
    assert len(warnings_of()) == 1


def test_the_cache_of_another_user_costs_misses_only(tmp_path):
    Source(tmp_path).read("c/0", 0, 500)
    (tmp_path / "log").unlink()
    if os.geteuid():
        (tmp_path / "cache" / "streamloader-cache").chmod(0)
    for folder in (tmp_path, *itertools.islice(tmp_path.parents, 3)):
        folder.chmod(folder.stat().st_mode | 0o755)
    tmp_path.chmod(0o777)

    def read(_: int) -> list[str]:
        if not os.geteuid():
            os.setuid(65_534)
        source = Source(tmp_path)
        misses_only(source)
        return list(source.cache.failures)

    try:
        assert in_processes(1, read) == [["open: Permission denied"]]
    finally:
        (tmp_path / "cache" / "streamloader-cache").chmod(0o700)
    assert Source(tmp_path).read("c/0", 0, 500)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_a_folder_that_another_user_has_made_is_not_trusted_even_if_it_may_be_written(tmp_path):
    source = Source(tmp_path)
    source.read("c/0", 0, 500)
    os.chown(source.folder, 65_534, 65_534)
    other = Source(tmp_path)
    misses_only(other)
    assert list(other.cache.failures) == ["open: the folder belongs to another user"]


def test_a_cache_that_leaves_too_little_free_gives_back_what_it_has(tmp_path):
    source = Source(tmp_path)
    source.read("c/0", 0, 500)
    greedy = RangeCache(sl.Cache(tmp_path / "cache", free="1000TiB"), A)
    greedy.read(lambda: bytes(9), "c/1", 0, 9)
    assert not source.stored()
    assert not greedy.failures


def test_a_range_that_is_larger_than_the_limit_is_not_stored_and_evicts_nothing_that_is_read_sooner(tmp_path):
    source = Source(tmp_path, limit=3 * 4096)
    source.read("c/0", 0, 9, Use(1.1))
    assert not source.read("c/0", 0, 20_000, Use(1.5))
    assert not source.read("c/0", 0, 20_000, Use(1.5))
    assert source.read("c/0", 0, 9, Use(1.1))


# options


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"path": "s3://bucket/cache"}, r"Cache\(path='s3://bucket/cache'\)"),
        ({"path": ""}, r"Cache\(path=''\)"),
        ({"path": 3}, r"Cache\(path=3\)"),
        ({"path": "/x", "limit": "many"}, r"Cache\(limit=\): 'many' is not a size"),
        ({"path": "/x", "limit": 0}, r"Cache\(limit=\): '0' is not a size|Cache\(limit=\): 0 is not a size"),
        ({"path": "/x", "free": -1}, r"Cache\(free=-1\)"),
        ({"path": "/x", "arrays": 1}, r"Cache\(arrays=1\)"),
    ],
)
def test_options_of_a_cache_are_checked(options, problem):
    with pytest.raises(UsageError, match=problem):
        sl.Cache(**options)


def test_options_are_absolute_and_in_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = sl.Cache("here", limit="2MiB", free=0)
    assert repr(cache) == f"Cache(path='{tmp_path}/here', limit=2097152, free=0, arrays=False)"
    assert sl.Cache(tmp_path / "here", limit=2 << 20, free="0") == cache
    assert (sl.Cache("/x").limit, sl.Cache("/x").free) == (100 << 30, 5 << 30)


# what the command lists and clears


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["cache", *map(str, arguments)])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out + err


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A cache of two datasets, with a file of somebody else's in each folder."""
    one, other = Source(tmp_path, A, url="s3://key:secret@bucket/photos"), Source(tmp_path, B, url="s3://bucket/text")
    for number in range(3):
        one.read("c/0", number, number + 5000)
    other.read("c/0", 0, 100)
    for folder in (one.folder, one.folder / A, one.folder / "temporary"):
        (folder / "of others").write_text("precious")
    return one.folder


def test_the_command_lists_the_datasets_of_a_cache(listed, capsys):
    status, printed = run(capsys, listed.parent)
    assert status == 0
    assert "secret" not in printed
    for text in (A[:12], "bucket/photos", "24.0 KiB", B[:12], "s3://bucket/text", "4.0 KiB"):
        assert text in printed
    status, printed = run(capsys, listed.parent, "--json")
    (other, one) = json.loads(printed)
    assert (one["digest"], one["ranges"], one["bytes"]) == (A, 3, 24_576)
    assert (other["digest"], other["url"], other["ranges"], other["bytes"]) == (B, "s3://bucket/text", 1, 4096)
    assert abs(one["last_read"] - time.time()) < PATIENCE


def test_the_command_clears_one_dataset_or_all_and_nothing_of_others(listed, capsys, tmp_path):
    assert run(capsys, listed.parent, "--clear", B[:8]) == (0, "removed 1 range, 4.0 KiB\n")
    assert not (listed / B).exists()
    assert Source(tmp_path).read("c/0", 1, 5001)
    assert not Source(tmp_path, B).read("c/0", 0, 100)
    assert used(tmp_path / "cache") == counted(tmp_path / "cache") == 24_576 + 4096
    assert run(capsys, listed.parent, "--clear", "all") == (0, "removed 4 ranges, 28.0 KiB\n")
    left = sorted(str(path.relative_to(listed)) for path in listed.rglob("*") if path.is_file())
    assert left == sorted(["of others", f"{A}/of others", "temporary/of others", "cache.json"])
    assert run(capsys, listed.parent)[1] == "the cache is empty\n"
    assert not Source(tmp_path).read("c/0", 1, 5001)


def test_a_cache_that_is_cleared_leaves_no_folder_and_is_made_again_by_who_reads(tmp_path, capsys):
    source = Source(tmp_path)
    source.read("c/0", 0, 100)
    assert run(capsys, tmp_path / "cache", "--clear", "all")[0] == 0
    assert not list((tmp_path / "cache").iterdir())
    hits = [source.read("c/0", 0, 100) for _ in range(3)]
    assert hits[-1]


def test_the_command_names_what_is_no_cache_and_no_dataset(listed, capsys, tmp_path):
    status, printed = run(capsys, tmp_path)
    assert (status, "has no cache" in printed, list(tmp_path.glob("streamloader-cache"))) == (2, True, [])
    status, printed = run(capsys, listed.parent, "--clear", "77777777")
    assert status == 2
    assert "no dataset whose digest begins with '77777777'" in printed
    (listed / "cache.json").write_text("{}")
    status, printed = run(capsys, listed.parent, "--clear", "all")
    assert status == 2
    assert "not a cache of this version" in printed


# what a hit costs


@pytest.mark.alone
def test_a_hit_costs_little_more_than_reading_its_file(tmp_path, capsys):
    for size in (64 << 10, 8 << 20):
        memory = memoryview(bytearray(size))
        source = Source(tmp_path)
        source.read("c/0", 0, size)
        file = os.open(max(source.stored(), key=lambda path: path.stat().st_size), os.O_RDONLY)

        def plain(file: int = file, memory: memoryview = memory) -> None:
            os.preadv(file, [memory], 0)
            crc32c.crc32c(memory)

        def hit(source: Source = source, size: int = size, memory: memoryview = memory) -> None:
            use, receiver = Use(2.5, 1.5), Receiver(lambda _: memory)
            assert source.cache.read(lambda: b"", "c/0", 0, size, receiver=receiver, use=use)[1]

        times = {call: [] for call in (plain, hit)}
        for _ in range(100):
            for call, taken in times.items():
                begun = time.perf_counter()
                call()
                taken.append(time.perf_counter() - begun)
        read, cached = (1e6 * float(np.median(taken)) for taken in times.values())
        with capsys.disabled():
            print(f"\n{size >> 10} KiB: pread and CRC-32C {read:.0f} us, a hit {cached:.0f} us")
        assert cached < 2 * read + 500
        os.close(file)


LATE = """
import atexit, sys, threading

ends, stored = threading.Event(), threading.Event()


@atexit.register  # runs after what is registered later, by imports and by the cache
def end():
    ends.set()
    stored.wait(60)


import streamloader as sl
from streamloader.storage import cache

store = cache._store


def store_late(*given):
    ends.wait()
    try:
        store(*given)
    finally:
        stored.set()


cache._store = store_late
ranges = cache.RangeCache(sl.Cache(sys.argv[1]), "5e" * 32)
threading.Thread(target=ranges.read, args=(lambda: b"body", "x", 0, 4), daemon=True).start()
"""


def test_a_range_that_is_stored_while_the_interpreter_ends_is_stored_without_a_word(tmp_path):
    done = subprocess.run([sys.executable, "-c", LATE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert RangeCache(sl.Cache(tmp_path), "5e" * 32).read(lambda: b"", "x", 0, 4) == (b"body", True)
