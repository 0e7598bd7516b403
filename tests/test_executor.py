"""The executor: functions give the same in threads and in workers, and workers live, die and end as they should."""

import gc
import importlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import datasets
import numpy as np
import pytest
import worker_tasks
from amounts import longer
from datasets import encoded, picture, write_images
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchrun import TESTS, environment, run_python
from transform_tasks import Odd, slow
from worker_tasks import workers_of

import streamloader as sl
from streamloader.engine.arena import HUGE_BYTES, HUGE_PAGE, PAGE, RETURNED_BYTES, Arena
from streamloader.engine.executor import LEAST_CORES, MOST_COPYING, SLOW_TRANSFORM, Executor, Job, choose_workers
from streamloader.engine.messages import MOVED_BYTES, Callback, receive
from streamloader.errors import EngineError
from streamloader.storage.process import in_thread

BOTH = pytest.mark.parametrize("workers", [0, 1])


@pytest.fixture(scope="module")
def executors() -> tuple[Executor, Executor]:
    """Of this process, and of one worker."""
    found = Executor(0), Executor(1)
    found[1].start()
    return found


# ---- the arena


@pytest.mark.long
@settings(max_examples=40)
@given(st.booleans(), st.data())
def test_live_arrays_keep_their_values_and_all_memory_comes_back(shared, data):
    arena, live = Arena(shared=shared), {}
    large = [RETURNED_BYTES, RETURNED_BYTES + 1, 1 << 20, HUGE_BYTES, HUGE_BYTES + 1]
    sizes = st.one_of(st.integers(0, 3 * PAGE), st.sampled_from(large))
    for number in range(data.draw(st.integers(1, 40))):
        if live and data.draw(st.booleans()):
            del live[data.draw(st.sampled_from(sorted(live)))]
        else:
            live[number] = arena.allocate(data.draw(sizes))
            live[number][:] = number
        assert arena.allocated == sum(-(-max(1, array.nbytes) // PAGE) * PAGE for array in live.values())
        spans = sorted((arena.offset(array), array.nbytes) for array in live.values())
        assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
        assert not any((arena.base + a) % HUGE_PAGE for a, size in spans if size >= HUGE_BYTES), "or no page is huge"
        assert all((array == key).all() for key, array in live.items())
    del live
    whole = arena.allocate(arena.size)  # one range again
    with pytest.raises(MemoryError):
        arena.allocate(1)
    del whole
    assert arena.allocated == 0


@pytest.mark.parametrize("shared", [False, True])
def test_pages_of_deleted_arrays_leave_the_memory(shared):
    arena = Arena(shared=shared)

    def resident() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssShmem:" if shared else "RssAnon:")[1].split()[0]) << 10

    before = resident()
    array = arena.allocate(64 << 20)
    array[:] = 1
    view = array[1 << 20 :: 4096].reshape(-1, 63)[3:]
    assert resident() > before + (60 << 20)
    del array
    assert resident() > before + (60 << 20)  # a view keeps it
    del view
    assert resident() < before + (4 << 20)
    assert not shared or os.fstat(arena.descriptor).st_blocks == 0


def test_views_and_tensors_keep_the_memory_of_an_array():
    import torch

    arena = Arena(shared=True)
    kept = torch.from_numpy(arena.array((10, 100), "float32")[3:])
    kept[:] = 3
    assert arena.allocated == PAGE
    other = arena.allocate(PAGE)
    other[:] = 255
    assert (kept == 3).all()
    del kept, other
    assert arena.allocated == 0


# ---- what is sent


def same(value: Any) -> Any:
    return value


def kind(value: Any) -> Any:
    """A value without identity: its bytes, type, shape and dtype."""
    if isinstance(value, dict):
        return {key: kind(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [kind(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, memoryview):
        return "memory", value.tobytes()
    return type(value), value


DTYPES = ["u1", "?", "f2", "<i4", ">i8", "c8", "M8[s]"]


@st.composite
def arrays(draw: Any, allocate: Callable[..., Any]) -> Any:
    """Arrays of any dtype, zero-size and large ones, in the arena or not, contiguous or not; also their memory."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    large = (MOVED_BYTES // dtype.itemsize + 1,)
    shape = draw(st.one_of(st.lists(st.integers(0, 6), max_size=3).map(tuple), st.just(large)))
    array = allocate(shape, dtype.str) if draw(st.booleans()) else np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = draw(st.integers(0, 1))
    change = draw(st.sampled_from(["", "reversed", "transposed", "part", "memory"]))
    if change == "memory":
        return memoryview(array.reshape(-1).view(np.uint8))
    if array.ndim and change:
        array = {"reversed": array[::-1], "transposed": array.T, "part": array[1::2]}[change]
    return array


def copied(value: Any) -> Any:
    """A value with other arrays."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    if isinstance(value, memoryview):
        return memoryview(bytearray(value))
    return value.copy(order="K") if isinstance(value, np.ndarray) else value


@pytest.mark.long
@settings(max_examples=25)
@given(data=st.data())
def test_values_are_received_and_returned_as_they_are(executors, data):
    leaves = st.one_of(arrays(executors[1].arena.array), st.integers(), st.text(), st.binary(), st.none(), st.floats(0))
    values = st.recursive(leaves, lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)))
    value = data.draw(values)
    for executor in executors:
        assert executor.call(kind, value) == kind(value)
        assert kind(executor.call(copied, value)) == kind(value)


def fill(array: Any, number: int) -> Any:
    array[...] = number
    return array


@settings(max_examples=20)
@given(data=st.data())
def test_arrays_in_the_arena_are_written_in_place(executors, data):
    for executor in executors:
        whole = executor.arena.array((12, 10), "int32")
        whole[:] = 0
        rows, columns = (
            slice(data.draw(st.integers(0, 9)), None, data.draw(st.sampled_from([1, 2, -1]))) for _ in "12"
        )
        part = whole[rows, columns]
        result = executor.call(fill, part, 7)
        assert (part == 7).all()
        assert whole.sum() == 7 * part.size
        assert not part.size or executor.arena.offset(result) == executor.arena.offset(part)


def fill_memory(memory: memoryview) -> None:
    memory[:] = b"\xff" * memory.nbytes


@BOTH
def test_memory_in_the_arena_is_written_in_place(executors, workers):
    array = executors[workers].arena.allocate(8)
    array[:] = 0
    executors[workers].call(fill_memory, memoryview(array)[2:4])
    assert array.tolist() == [0, 0, 255, 255, 0, 0, 0, 0]


def test_other_arrays_are_sent_by_value(executors):
    array = np.zeros(5)
    assert executors[1].call(fill, array, 7).tolist() == [7] * 5
    assert array.tolist() == [0] * 5


def test_large_results_are_moved_into_the_arena(executors):
    arena = executors[1].arena
    before = arena.allocated
    large, small = executors[1].call(np.arange, MOVED_BYTES), executors[1].call(np.arange, 9)
    assert arena.offset(large) is not None
    assert arena.offset(small) is None
    assert large.tolist() == list(range(MOVED_BYTES))
    assert arena.allocated == before + large.nbytes
    several = executors[1].call(halves, 2 * MOVED_BYTES)
    assert np.concatenate(several).tolist() == list(range(2 * MOVED_BYTES))
    del large, several
    assert arena.allocated == before


@pytest.mark.parametrize("part", [slice(None), slice(5, None)])
def test_a_large_argument_may_be_a_result(executors, part):
    array = np.arange(MOVED_BYTES)
    result = executors[1].call(np.ndarray.__getitem__, array, part)
    others = [executors[1].call(np.full, MOVED_BYTES, 7) for _ in range(3)]
    assert result.tolist() == array[part].tolist()
    del others


def test_structured_arrays_keep_the_names_of_their_fields(executors):
    array = np.zeros(3, "i4,f8")
    assert [executor.call(np.copy, array).dtype for executor in executors] == [array.dtype] * 2


def halves(count: int) -> list[Any]:
    return np.split(np.arange(count), 2)


def ask(callback: Callable[..., Any], count: int) -> list[Any]:
    return [callback(np.full(3, number)) for number in range(count)]


@BOTH
def test_callbacks_run_in_the_calling_process(executors, workers):
    given: list[int] = []

    def called(array: Any) -> Any:
        given.append(int(array.sum()))
        return array * 2, os.getpid()

    results = executors[workers].call(ask, Callback(called), 4)
    assert given == [0, 3, 6, 9]
    assert [array.tolist() for array, _ in results] == [[2 * number] * 3 for number in range(4)]
    assert {pid for _, pid in results} == {os.getpid()}


def ask_for_memory(callback: Callable[..., Any]) -> None:
    callback(100)[:] = np.arange(100)


@BOTH
def test_a_callback_can_give_memory_to_write_to(executors, workers):
    made: list[Any] = []

    def allocate(size: int) -> Any:
        made.append(executors[workers].arena.allocate(size))
        return made[-1]

    executors[workers].call(ask_for_memory, Callback(allocate))
    assert made[0].tolist() == list(range(100))


def write_slowly(callback: Callable[..., Any], path: Path) -> None:
    memory = callback(1 << 20)
    path.touch()
    time.sleep(0.5)
    memory[:] = 7


def test_closing_frees_no_memory_that_a_worker_may_write_to(executors, tmp_path):
    """Without waiting for calls: one that was given memory goes on and ends, and the memory is there until then."""
    arena, ended = executors[1].arena, SimpleQueue[Any]()
    before = arena.allocated
    jobs = executors[1].jobs("slow", 1, bool)
    arguments = Callback(arena.allocate), tmp_path / "begun"
    jobs.submit(Job(write_slowly, arguments, lambda *end: ended.put((*end, arena.allocated - before))))
    while not (tmp_path / "begun").exists():
        time.sleep(0.001)
    jobs.close(wait=False)
    assert arena.allocated == before + (1 << 20)
    assert ended.get(timeout=60) == (None, None, 0)


@BOTH
def test_the_error_of_a_callback_is_raised_and_the_next_call_works(executors, workers):
    for error in (KeyError("colour"), KeyboardInterrupt(), Odd(1, 2)):

        def fails(_: Any, error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            executors[workers].call(ask, Callback(fails), 3)
        assert caught.value is error
        assert executors[workers].call(same, 5) == 5


def raise_it(error: BaseException) -> None:
    raise error


def raise_from() -> None:
    try:
        raise KeyError("colour")
    except KeyError as error:
        raise EngineError("no work", "rest") from error


def test_an_error_of_a_function_is_raised_with_its_cause_and_where_it_was(executors):
    with pytest.raises(ZeroDivisionError, match="division") as caught:
        executors[1].call(divmod, 1, 0)
    assert "in the worker process" in caught.value.__notes__[0]
    with pytest.raises(EngineError, match="no work; rest") as ours:
        executors[1].call(raise_from)
    assert type(ours.value.__cause__) is KeyError
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):  # which cannot be pickled
        executors[1].call(raise_odd)
    for unpicklable in (lambda: 1, gc):
        with pytest.raises((TypeError, AttributeError, Exception)):
            executors[1].call(same, unpicklable)
    with pytest.raises(Exception, match="pickle"):
        executors[1].call(make_lambda)
    assert executors[1].call(same, 5) == 5


def raise_odd() -> None:
    raise Odd(1, 2)


def make_lambda() -> Any:
    return lambda: 1


class Loaded:
    """Counts how often a process loads one."""

    times = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        Loaded.times += 1


def times_loaded(values: list[Any]) -> tuple[int, str]:
    return Loaded.times, values[-1][0].name


def test_a_shared_value_is_sent_once(executors):
    threads, workers = executors
    value = Loaded("first")
    assert threads.share(value) is value
    first, second = workers.share(value), workers.share(Loaded("second"))
    before = Loaded.times
    assert [workers.call(times_loaded, [1, (first,)]) for _ in range(3)] == [(1, "first")] * 3
    assert workers.call(times_loaded, [(first,), (second,)]) == (2, "second")
    assert Loaded.times == before


def test_executors_that_a_thread_calls_in_turn_get_their_own_memory(executors):
    other = Executor(1)
    array = other.arena.array((5,), "int64")
    for executor in (executors[1], other, executors[0], executors[1], other):
        assert executor.call(np.arange, MOVED_BYTES).sum() == MOVED_BYTES * (MOVED_BYTES - 1) // 2
        assert executor.call(np.sum, np.ones(MOVED_BYTES)) == MOVED_BYTES
        executor.call(fill, array, 3)
        assert array.tolist() == [3] * 5
        array[:] = 0


# ---- messages


@given(st.one_of(st.integers(0, 40), st.integers(0, 1 << 20)))
def test_a_message_of_any_size_is_received(size):
    ours, theirs = Pipe()
    sent = bytes(range(251)) * (size // 251) + bytes(size % 251)
    with ours, theirs:
        sender = in_thread(partial(theirs.send_bytes, sent))
        assert receive(ours) == sent
        sender.result(60)
        theirs.close()
        with pytest.raises(EOFError):
            receive(ours)


def test_a_message_above_2_gib_states_its_size_in_8_bytes():
    ours, theirs = Pipe()
    with ours, theirs:
        os.write(theirs.fileno(), struct.pack("!iQ", -1, 3) + b"abc")
        assert receive(ours) == b"abc"


# ---- the number of workers


@given(
    choice=st.one_of(st.just("auto"), st.integers(0, 99)),
    cores=st.integers(1, 256),
    seconds=st.one_of(st.just(0.0), st.floats(0, 0.01)),
    flags=st.fixed_dictionaries({"in_worker": st.booleans(), "computes": st.booleans()}),
    has_memory=st.booleans(),
)
def test_the_number_of_workers_follows_from_the_choice_the_cores_and_the_work(
    choice, cores, seconds, flags, has_memory
):
    with pytest.MonkeyPatch.context() as patch:
        if not has_memory:
            patch.delattr(os, "memfd_create")
        workers, reason = choose_workers(choice, cores, transform_seconds=seconds, **flags)
        fewer = choose_workers(choice, max(1, cores - 1), transform_seconds=seconds, **flags)[0]
    assert reason
    is_slow = seconds >= SLOW_TRANSFORM
    assert fewer <= workers or is_slow
    if flags["in_worker"] or not has_memory:
        assert workers == 0
        assert ("DataLoader" if flags["in_worker"] else "memfd_create") in reason
    elif choice != "auto":
        assert (workers, "num_workers=" in reason) == (choice, True)
    else:
        assert str(cores) in reason
        if cores < LEAST_CORES:
            assert workers == (cores if is_slow and cores > 1 else 0)
        else:
            assert workers == (cores - 1 if flags["computes"] else min(cores - 1, MOST_COPYING))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("transform", "found"), [(slow, [0, 2, 2, 2]), (dict, [0, 0, 0, 0])])
def test_a_slow_transform_gets_workers_from_the_second_pass_on(transform, found, data, monkeypatch):
    monkeypatch.setattr("streamloader.loader.base.cpu_count", lambda: 2)
    monkeypatch.setattr("streamloader.engine.executor.SLOW_TRANSFORM", 5e-3)  # this process may stand still
    monkeypatch.setattr("streamloader.loader.base.LEAST_SECONDS", 0.1)
    url = data(60, "label")
    ds = sl.NumpyDataset(url, transform=transform, batch_size=10, num_workers="auto")
    workers, passes = [], []
    for _ in range(4):
        passes.append([batch["label"].tolist() for batch in ds])
        workers.append(ds.stats().workers)
    assert workers == found
    assert ds.stats().samples == 4 * 60, "the counters go on"
    assert ("transform takes 1" in ds.stats().workers_reason) == (transform is slow)
    monkeypatch.setattr("streamloader.loader.base.LEAST_SECONDS", 60.0)
    ds = sl.NumpyDataset(url, transform=transform, batch_size=10, num_workers="auto")
    assert [len(list(ds)) for _ in range(2)] == [6, 6]
    assert ds.stats().workers == 0, "what a transform takes in all must be worth the start of workers"
    plain = sl.NumpyDataset(url, batch_size=10, num_workers=0)
    assert passes == [[batch["label"].tolist() for batch in plain] for _ in range(4)]


def test_without_anonymous_shared_memory_threads_do_the_work_and_stats_say_why(data, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    ds = sl.NumpyDataset(data(60), batch_size=16, num_workers=2)
    assert len(list(ds)) == 4
    assert ds.stats().workers == 0
    assert "memfd_create" in ds.stats().workers_reason


class Telling(sl.StreamingDataset):
    """Yields the number of workers of the engine instead of batches."""

    def __iter__(self) -> Iterator[Any]:
        for _ in super().__iter__():
            yield self.stats().workers, self.stats().workers_reason


def test_inside_the_workers_of_a_dataloader_there_are_none(data):
    ds = Telling(data(60, "label"), batch_size=10, num_workers=2)
    found = list(DataLoader(ds, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    assert set(map(tuple, found)) == {(0, "DataLoader workers have none of their own")}


def test_a_lambda_runs_in_a_thread_where_the_number_of_workers_is_chosen(data, monkeypatch):
    monkeypatch.setattr("streamloader.loader.base.cpu_count", lambda: LEAST_CORES)
    options = {"batch_size": 10, "num_workers": "auto", "shuffle": False}
    ds = sl.NumpyDataset(data(60, "label"), transform=lambda sample: {"pid": os.getpid(), **sample}, **options)
    batches = list(ds)
    assert ds.stats().workers == LEAST_CORES - 1
    assert {int(pid) for batch in batches for pid in batch["pid"]} == {os.getpid()}
    assert [batch["label"].tolist() for batch in batches] == [
        batch["label"].tolist() for batch in sl.NumpyDataset(data(60, "label"), batch_size=10, shuffle=False)
    ]


# ---- processes


def test_two_datasets_share_their_workers(data):
    url = data(60, "label")
    first, second = (sl.NumpyDataset(url, batch_size=5, num_workers=2, seed=seed) for seed in (1, 2))
    pairs = list(zip(first, second, strict=True))
    assert len(pairs) == 12
    pids = workers_of(os.getpid())
    list(sl.NumpyDataset(url, batch_size=5, num_workers=2))
    assert workers_of(os.getpid()) == pids


RUN = TESTS / "worker_runs.py"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("executor") / "images"
    write_images(path, (encoded(picture(i, 96, 128), "jpeg") for i in range(200)))
    return path


def run(scenario: str, *arguments: object) -> Any:
    """What a scenario of worker_runs.py shows."""
    return json.loads(run_python(RUN, scenario, *arguments).stdout.splitlines()[-1])


@pytest.mark.long
def test_workers_start_without_a_main_guard_and_import_no_torch(data):
    code = f"import streamloader as sl, sys; print(sum(len(b['x']) for b in sl.NumpyDataset({data(60)!r}, batch_size=6,"
    code += " num_workers=2))); from streamloader.engine.executor import Executor; import worker_tasks\n"
    code += "print([Executor(1).call(worker_tasks.imported, name) for name in ('torch', 'numpy')])"
    assert run_python("-c", code).stdout.splitlines() == ["60", "[False, True]"]


@pytest.mark.long
def test_passes_do_not_wait_for_workers_that_start(data, tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o700)
    assert run("unserved", data(203), program) == {"same": [True] * 3, "requests": True, "workers": 2}


HEAVY = {"PIL", "botocore", "cv2", "dask", "fsspec", "obstore", "pandas", "pyarrow", "s3fs", "scipy", "torch", "zarr"}


NEEDED = [longer("file", "fsspec"), ("s3", "botocore"), longer("images", "fsspec PIL cv2")]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "needed"), NEEDED)
def test_workers_import_what_they_need_once_for_all(kind, needed, data, images, request):
    url, arguments = (images, {"decode": True}) if kind == "images" else (data(60), {})
    if kind == "s3":
        server = request.getfixturevalue("moto")
        url, arguments = server.url(), {"storage_options": server.storage_options}
        datasets.write(url, 60, options=server.storage_options)
    found = run("imports", url, json.dumps(arguments))
    first, later = map(set, found["packages"])
    assert first == later  # which has read nothing
    assert first & HEAVY == set(needed.split())
    assert found["threads"] == 1  # of the process that forks: locks that other threads hold would be held for ever


@pytest.mark.long
@pytest.mark.parametrize("moment", ["fetching", "decoding", "transforming"])
def test_work_of_a_killed_worker_is_repeated(moment, data, images, tmp_path):
    url = images if moment == "decoding" else data(203)
    found = run("killed", moment, url, tmp_path)
    assert found["same"]
    assert found["replaced"] == found["killed"] > 0
    assert found["warnings"] == ["a worker process ended by SIGKILL; its work is repeated"] * found["killed"]


@pytest.mark.long
def test_workers_are_replaced_with_the_process_that_forks_them(data):
    found = run("server_killed", data(203))
    assert found == {
        "same": True,
        "ended": [True] * 3,
        "warnings": ["a worker process ended by SIGKILL; its work is repeated"],
        "replaced": 1,
        "workers": 3,
    }


@pytest.mark.long
@pytest.mark.parametrize(("name", "how"), [("kill_itself", "by SIGKILL"), ("exit_itself", "with exit code 3")])
def test_the_third_death_within_a_minute_is_an_error(name, how):
    found = run("deaths", name, 0, 30, 59.9)
    assert found["deaths"] == 3
    assert found["repeated"] == 2
    assert f"worker processes ended 3 times within 60 s, the last one {how}" in found["error"]
    assert "bytes of shared memory are in use" in found["error"]
    assert "give a smaller memory=, fewer num_workers=" in found["error"]


@pytest.mark.long
def test_three_deaths_in_more_than_a_minute_are_no_error():
    found = run("deaths", "kill_itself", 0, 31, 60, 90.9)
    assert (found["deaths"], found["repeated"]) == (4, 3)


@pytest.mark.long
def test_a_job_that_begins_while_its_connection_ends_runs_in_another_worker():
    assert run("lost") == [3, 3]


@pytest.mark.long
def test_a_connection_is_not_closed_while_a_thread_sends():
    """Its descriptor could be that of another connection before the thread sends."""
    assert run("killed_while_sending") == {"result": 3, "closed": [False]}


@pytest.mark.long
def test_a_forked_child_refuses_a_pass_of_its_parent_and_has_workers_of_its_own(data):
    found = run("forked", data(60))
    assert found["refused"] == "ForkError"
    assert found["same"]
    assert not set(found["own"]) & set(found["parents"])
    assert found["after"]


@pytest.mark.long
def test_closing_does_not_wait_for_a_transform_in_a_worker(data):
    assert run("closed", data(60)) == {"threads": [], "memory": 0}


@pytest.mark.long
def test_a_transform_that_hangs_does_not_block_the_next_dataset(data):
    assert run("after_a_hang", data(60)) == 12


@pytest.mark.long
def test_workers_that_start_are_no_slow_requests(data):
    assert run("hedges", data(203)) == [0, 0]


class Started:
    """A scenario that runs, in a session, a current folder and a folder for temporary files of its own."""

    def __init__(self, tmp_path: Path, scenario: str, *arguments: object) -> None:
        self.folders = [tmp_path / name for name in ("current", "temporary")]
        for folder in self.folders:
            folder.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, str(RUN), scenario, *map(str, arguments)],
            env=environment() | {"TMPDIR": str(self.folders[1])},
            cwd=self.folders[0],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def line(self) -> Any:
        """The next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def end(self) -> tuple[int, str]:
        _, error = self.process.communicate(timeout=300)
        return self.process.returncode, error


def opened_names(pid: int) -> set[str]:
    """The files that a process has opened or mapped, but programs and libraries."""
    links = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]  # noqa: PTH208
    found = set()
    for link in links:
        with suppress(FileNotFoundError):
            found.add(os.readlink(link))  # noqa: PTH115
    found |= {line.split(maxsplit=5)[5] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line}
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("work", ["iterating", "transforming", "forked", "without server"])
def test_workers_end_with_a_killed_parent_and_leave_nothing(work, data, tmp_path):
    child = Started(tmp_path, "endless", work, data(60))
    shown = child.line()
    pids = shown["workers"]
    assert len(pids) == 2
    assert len(shown["servers"]) == (work != "without server")
    pids += shown["servers"]
    for pid in (child.process.pid, *pids):
        names = opened_names(pid)
        assert any("memfd:streamloader" in name for name in names)
        assert [name for name in names if name.startswith(("/dev/shm", *map(str, child.folders)))] == []
    handles = [os.pidfd_open(pid) for pid in pids]
    child.process.kill()
    begin = time.monotonic()
    try:
        for handle in handles:
            assert select.select([handle], [], [], 60)[0]
        assert time.monotonic() - begin < 10  # one second on a machine that has no other work
    finally:
        for handle in handles:
            os.close(handle)
        for pid in shown["others"]:
            os.kill(pid, signal.SIGKILL)
        child.end()
    assert [list(folder.iterdir()) for folder in child.folders] == [[], []]


@pytest.mark.long
@pytest.mark.parametrize("work", ["iterating", "transforming"])
def test_ctrl_c_is_raised_in_the_parent_and_ignored_by_workers(work, data, tmp_path):
    child = Started(tmp_path, "interrupted", work, data(60))
    pids = child.line()["workers"]
    os.killpg(child.process.pid, signal.SIGINT)
    shown = child.line()
    assert shown["workers"] == pids
    assert shown["batches"] > 0
    assert shown["replaced"] == 0
    status, error = child.end()
    assert (status, error) == (0, "")


@pytest.mark.long
def test_ctrl_c_while_workers_start_does_not_end_them(data, tmp_path):
    child = Started(tmp_path, "interrupted_start", data(60))
    replaced = child.line()
    status, error = child.end()
    assert (replaced, status, error) == (0, 0, "")


MANY_FILES = """
import os, resource, signal, warnings
import worker_tasks
from streamloader.engine.executor import Executor

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
executor = Executor(1)
executor.start()
print(executor.call(len, "abc"))
warnings.simplefilter("ignore")
try:
    executor.call(worker_tasks.exit_itself)
except Exception as error:
    print(error)
"""


@pytest.mark.long
def test_workers_start_in_a_process_with_many_files_that_ignores_the_end_of_others():
    first, second = run_python("-c", MANY_FILES).stdout.splitlines()
    assert first == "3"
    assert "the last one with exit code 3" in second


def test_each_worker_draws_other_random_numbers_in_no_sample():
    executor, drawn = Executor(2), []
    executor.start()
    both = threading.Barrier(2)

    def draw() -> None:
        executor.call(len, "")
        both.wait(60)
        drawn.append(executor.call(worker_tasks.random_numbers))

    threads = [threading.Thread(target=draw, name=f"draw{number}") for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for one, other in zip(*drawn, strict=True):
        assert one != other


MAIN = """
import sys
import streamloader as sl

def doubled(sample):
    import torch
    return {"label": sample["label"] * 2, "main": __name__}

if __name__ == "__main__":
    ds = sl.StreamingDataset(sys.argv[1], batch_size=10, fields=["label"], transform=doubled, num_workers=2)
    print(sorted({name for batch in ds for name in batch["main"]}), ds.stats().samples)
"""


@pytest.mark.long
def test_a_transform_of_a_script_runs_in_workers(data, tmp_path):
    (tmp_path / "script.py").write_text(MAIN)
    assert run_python(tmp_path / "script.py", data(60, "label")).stdout == "['__mp_main__'] 60\n"


def test_modules_of_folders_that_are_added_later_are_imported_in_workers(tmp_path, monkeypatch):
    executor = Executor(1)
    executor.start()
    assert executor.call(len, "abc") == 3
    (tmp_path / "added_later.py").write_text("def double(value):\n    return 2 * value\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert executor.call(importlib.import_module("added_later").double, 21) == 42
