"""What limits training, in words: laws on made-up stats, and real runs that each have one clear limit."""

import dataclasses
import logging
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from amounts import examples
from datasets import encoded, write_images
from folder_server import folder_server
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import streamloader as sl
from streamloader.errors import TransformError, UsageError
from streamloader.stats import BatchReport, Counters, Stats

N = 700
NO_SUMS = ("in_flight", "cores", "transformers", "workers", "workers_reason", "client", "chunks", "waiting_for")
NO_SUMS += ("rank", "world_size", "worker", "url", "epoch", "step", "ready_batches", "ready_batches_limit")
NO_SUMS += ("ready_blocks", "ready_blocks_limit", "memory_bytes", "memory_limit")
SUMS = [item.name for item in dataclasses.fields(Stats) if item.name not in NO_SUMS]

seconds = st.just(0.0) | st.floats(1e-9, 1e6)  # clocks count nanoseconds
counts = st.integers(0, 10**12)
any_stats = st.builds(
    Stats,
    **{name: counts if isinstance(getattr(Stats, name), int) else seconds for name in SUMS},
    in_flight=st.integers(0, 64),
    cores=st.integers(1, 256),
    transformers=st.integers(1, 64),
    workers=st.integers(0, 64),
    client=st.sampled_from(["obstore: obstore supports s3", "fsspec: obstore does not support ftp"]),
).map(lambda stats: dataclasses.replace(stats, first_batch_seconds=min(stats.first_batch_seconds, stats.wait_seconds)))


@pytest.fixture(scope="module")
def vectors(data: Any) -> Path:
    """Small blocks of float vectors, not compressed."""
    return Path(data(N, "x", "label"))


def stream(url: str | Path, batch: int | None = 32, **options: Any) -> sl.StreamingDataset:
    return sl.StreamingDataset(url, batch_size=batch, world=(0, 1), **options)


def run(url: str | Path, batches: int = 22, seconds: float = 0.0, **options: Any) -> Stats:
    """The stats of an epoch of so many batches, each trained for some seconds."""
    dataset = stream(url, **options)
    assert sum(time.sleep(seconds) is None for _ in dataset) == batches
    return dataset.stats()


def on_cores_of_its_own(stats: Stats) -> Stats:
    """The stats of a run that computes all the time, had no other program taken its cores: by its processor time."""
    share = stats.cpu_seconds / stats.cores / stats.seconds
    waits = ("fetch_wait_seconds", "decode_wait_seconds", "gather_seconds")
    names = ("seconds", "wait_seconds", "first_batch_seconds", "full_seconds", *waits)
    return dataclasses.replace(stats, **{name: getattr(stats, name) * share for name in names})


# ---- laws


@given(any_stats)
def test_a_verdict_is_one_line_that_begins_with_the_limit(stats):
    assert stats.limit in (("network", "gather", "decode", "transform", "consumer") if stats.batches else ("",))
    assert stats.verdict.startswith(f"{stats.limit}-bound: training waited " if stats.batches else "no batch yet")
    assert "\n" not in str(stats)
    assert stats.verdict in str(stats)
    assert 0 <= stats.wait_fraction <= 1
    assert stats.active_seconds >= stats.wait_seconds
    assert (stats.limit == "consumer") == (stats.batches > 0 and stats.wait_fraction < 0.05)


@given(any_stats, st.sampled_from([0.125, 0.5, 2.0, 64.0]))
def test_the_limit_does_not_depend_on_how_long_was_measured(stats, factor):
    longer = dataclasses.replace(stats, **{name: getattr(stats, name) * factor for name in SUMS if "seconds" in name})
    assert longer.limit == stats.limit


@settings(max_examples=examples(100))
@given(any_stats, any_stats)
def test_an_interval_and_what_came_before_it_make_the_whole(before, interval):
    whole = dataclasses.replace(interval, **{name: getattr(before, name) + getattr(interval, name) for name in SUMS})
    since = whole.since(before)
    for name in SUMS:
        expected = getattr(interval, name)
        assert getattr(since, name) == pytest.approx(expected, abs=1e-6 * (1 + abs(getattr(whole, name))))
    assert (since.in_flight, since.cores, since.client) == (interval.in_flight, interval.cores, interval.client)
    assert before.since(before).verdict == "no batch yet"


def test_since_of_a_later_snapshot_is_an_error():
    with pytest.raises(UsageError, match=r"stats of 3 batches .* these are of 2"):
        Stats(batches=2, seconds=2.0).since(Stats(batches=3, seconds=2.0))


SECOND = Stats(batches=100, samples=3200, seconds=100.0, wait_seconds=50.0, cores=2, client="obstore: knows s3")
NETWORK = dataclasses.replace(
    SECOND, fetch_wait_seconds=50.0, bytes_fetched=41_200_000_000, requests=9810, request_seconds=4100.0, in_flight=64
)


def changed(stats: Stats, **values: Any) -> str:
    return dataclasses.replace(stats, **values).verdict


def test_the_network_is_the_limit_where_no_stage_is_busy():
    assert NETWORK.verdict == (
        "network-bound: training waited 50% of the time; 412 MB/s in 41 requests in flight of 4.2 MB; "
        "`streamloader bench` shows whether the endpoint is faster"
    )
    assert "they are small: a larger shuffle=Shuffle(block=)" in changed(NETWORK, requests=981_000)
    assert "1000 retries in 9810 requests: the store throttles or fails" in changed(NETWORK, retries=1000)
    assert "stats().client says why" in changed(NETWORK, client="fsspec: obstore does not support ftp")
    assert "keeps its 2 cores busy" in changed(NETWORK, cpu_seconds=190.0)
    assert "more memory=" in changed(NETWORK, request_seconds=500.0)


def test_a_stage_that_is_busy_all_the_time_is_the_limit():
    unpack = changed(NETWORK, unpack_seconds=180.0, decode_seconds=10.0)
    assert unpack.startswith("decode-bound: training waited 50% of the time; 2 cores 95% busy, 95% of it unpacking")
    assert "codec lz4 or none" in unpack
    images = changed(NETWORK, unpack_seconds=10.0, decode_seconds=180.0)
    assert "95% of it decoding images; choose fewer pixels" in images
    transform = changed(NETWORK, transform_seconds=390.0, transformers=4, decode_seconds=180.0)
    assert transform.startswith("transform-bound: ")
    assert "4 transformers 98% busy" in transform
    assert changed(NETWORK, transform_seconds=90.0, transformers=4).startswith("network-bound")


def test_images_that_wait_for_cores_which_the_loader_does_not_get_need_other_cores():
    waiting = {"decode_wait_seconds": 49.0, "fetch_wait_seconds": 1.0}
    text = changed(NETWORK, decode_seconds=40.0, **waiting)
    assert "decode-bound: training waited 50% of the time; 2 cores 20% busy: training or other processes" in text
    assert "choose fewer pixels" in changed(NETWORK, decode_seconds=80.0, **waiting)


def test_only_decoders_that_are_not_installed_are_advised(monkeypatch):
    images = {"unpack_seconds": 10.0, "decode_seconds": 180.0}
    assert changed(NETWORK, **images).endswith("; choose fewer pixels (Decode(size=)) or more cores")
    monkeypatch.setitem(sys.modules, "cv2", None)
    advice = "; choose fewer pixels (Decode(size=)), pip install opencv-python-headless, or more cores"
    assert changed(NETWORK, **images).endswith(advice)


def test_what_to_change_about_gathering_depends_on_the_size_of_a_sample():
    gather = dataclasses.replace(SECOND, gather_seconds=80.0, bytes_decoded=320_000)
    assert gather.verdict == (
        "gather-bound: training waited 50% of the time; one thread gathers 32 samples/s, 80% busy; "
        "train with more ranks, or store several of these small samples as one"
    )
    large = changed(gather, bytes_decoded=4_800_000_000)
    assert "gathers 48 MB/s, 80% busy; train with more ranks, or read fewer or smaller fields" in large


def test_what_batches_waited_for_decides_where_no_stage_is_busy():
    late = dataclasses.replace(SECOND, fetch_wait_seconds=1.0, decode_wait_seconds=49.0, decode_seconds=60.0)
    assert late.limit == "decode"
    assert dataclasses.replace(late, fetch_wait_seconds=60.0).limit == "network"


def test_the_first_batch_does_not_count_as_waiting():
    slow_start = Stats(batches=100, seconds=110.0, wait_seconds=11.0, first_batch_seconds=10.0, full_seconds=55.0)
    assert slow_start.wait_fraction == pytest.approx(0.01)
    assert slow_start.verdict == (
        "consumer-bound: training waited 1% of the time; the loader keeps up and was ahead 50% of the time"
    )
    assert Stats(batches=1, seconds=3.0, wait_seconds=3.0, first_batch_seconds=3.0).wait_fraction == 1


def test_a_wait_that_ends_with_an_error_counts():
    counters = Counters()
    counters.failed(time.perf_counter() - 5)
    assert counters.snapshot().wait_seconds == 0, "before the first batch"
    counters.delivered(32, 1, time.perf_counter())
    counters.failed(time.perf_counter() - 25)
    stats = counters.snapshot()
    assert stats.wait_seconds >= 25
    assert stats.limit != "consumer"


def test_a_pass_that_ends_with_an_error_has_waited_for_it(tmp_path):
    def transform(sample):
        return {"x": 1 // sample["x"]}

    with sl.Writer(tmp_path / "d", {"x": "int64"}, num_samples=8) as writer:
        for number in range(8):
            writer.write({"x": 7 - number})
    dataset = sl.NumpyDataset(tmp_path / "d", batch_size=1, shuffle=False, transform=transform, num_workers=0)
    before = Stats()
    with pytest.raises(TransformError):
        for _ in dataset:
            before = dataset.stats()
    assert dataset.stats().batches == before.batches == 7
    assert dataset.stats().wait_seconds > before.wait_seconds


def test_a_snapshot_while_the_first_batch_is_counted_has_no_negative_time(monkeypatch):
    counters, seconds = Counters(), list[float]()
    add = counters.add

    def snapshot_first(**amounts: float) -> None:
        seconds.append(counters.snapshot().seconds)
        add(**amounts)

    monkeypatch.setattr(counters, "add", snapshot_first)
    counters.delivered(1, 1, time.perf_counter())
    assert seconds
    assert min(seconds) >= 0


# ---- real runs


@pytest.mark.alone
def test_a_store_that_delays_every_request_is_network_bound(vectors):
    with folder_server(vectors) as server:
        server.delay = 0.05  # what a request to a far store takes
        stats = run(server.url)
    assert stats.limit == "network", stats
    assert "they are small" in stats.verdict
    assert stats.requests_in_flight > 1


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.002)
    return sample


@pytest.mark.alone
def test_a_slow_transform_is_transform_bound(vectors):
    stats = run(vectors, transform=slow)
    assert stats.limit == "transform", stats
    assert "1 transformer " in stats.verdict
    assert stats.transform_busy > 0.7


@pytest.mark.alone
def test_chunks_that_are_hard_to_unpack_are_decode_bound(tmp_path):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 16, (64, 1 << 20), dtype=np.uint8)  # half of it entropy: zstd's slow case
    layout = sl.Layout(shard_size=16 << 20, block_size=2 << 20, chunk_size=1 << 20, codec="zstd")
    with sl.Writer(tmp_path / "packed", {"x": "uint8[1048576]"}, layout=layout, num_samples=128) as out:
        for _ in range(2):
            out.write_batch({"x": rows})
    dataset = stream(tmp_path / "packed", batch=4)
    assert sum(1 for _ in dataset) == 32  # memory is touched for the first time
    before = dataset.stats()
    assert sum(1 for _ in range(3) for _ in dataset) == 96
    stats = on_cores_of_its_own(dataset.stats().since(before))
    assert stats.limit == "decode", (stats, stats.decode_busy)
    assert "codec lz4 or none" in stats.verdict


@pytest.mark.alone
def test_large_photographs_are_decode_bound(tmp_path):
    rng = np.random.default_rng(0)
    noise = encoded(rng.integers(0, 256, (400, 400, 3), dtype=np.uint8), "jpeg")
    write_images(tmp_path / "photos", [noise] * 96)
    stats = on_cores_of_its_own(run(tmp_path / "photos", 6, batch=16, decode="pillow"))
    assert stats.limit == "decode", (stats, stats.decode_busy)
    assert "fewer pixels" in stats.verdict


@pytest.mark.alone
def test_a_slow_consumer_is_consumer_bound(vectors):
    stats = run(vectors, seconds=0.05)  # what a training step takes
    assert stats.limit == "consumer", stats
    assert "was ahead" in stats.verdict
    assert stats.full_seconds > 0.5


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs that take a few milliseconds each to decode."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("stats") / "photographs"
    noise = encoded(rng.integers(0, 256, (300, 300, 3), dtype=np.uint8), "jpeg")
    write_images(folder, [noise] * 128)
    return folder


def interval(dataset: Any, passes: int) -> tuple[Stats, float]:
    """The stats of later passes of an empty loop, and the time they took."""
    for _ in range(2):  # from the second on, the next pass is loaded while the current one drains
        list(dataset)
    before, begin = dataset.stats(), time.perf_counter()
    for _ in range(passes):
        list(dataset)
    return dataset.stats().since(before), time.perf_counter() - begin


def slow_part(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.001)
    return sample


@pytest.mark.parametrize(
    "options",
    [{}, {"num_workers": 2}, {"transform": slow_part, "num_workers": 0}],
    ids=["threads", "workers", "transform"],
)
def test_a_loader_that_training_waits_for_is_not_ahead(photographs, options):
    stats, took = interval(stream(photographs, 16, decode=sl.Decode(crop="random", size=(64, 64)), **options), 2)
    assert stats.samples == 256
    assert stats.full_seconds + stats.wait_seconds <= 1.05 * stats.seconds, stats
    assert stats.samples / (stats.seconds - stats.full_seconds) == pytest.approx(stats.samples / took, rel=0.25)
    assert stats.active_seconds == pytest.approx(stats.seconds, rel=0.25)


@pytest.mark.alone
def test_a_loader_that_waits_for_training_is_ahead_once_its_images_are_decoded(photographs):
    dataset = stream(photographs, 16, decode="pillow")
    for _ in range(2):
        list(dataset)
    while (before := dataset.stats()).ready_batches < before.ready_batches_limit:
        time.sleep(0.001)  # the next pass begins
    for _ in dataset:
        time.sleep(0.15)
    stats = dataset.stats().since(before)
    assert stats.limit == "consumer", stats
    assert 0.5 < stats.full_seconds / stats.seconds < 1
    assert 0 < stats.decode_busy < 1.05, "decoding takes the rest of the time"


def test_the_steps_of_a_slow_consumer_have_no_negative_times(vectors):
    dataset = stream(vectors)
    before = dataset.stats()
    for _ in dataset:
        time.sleep(0.01)
        now = dataset.stats()
        step, before = now.since(before), now
        assert step.active_seconds >= step.wait_seconds >= 0
        assert min(step.megabytes_per_second, step.requests_in_flight, step.decode_busy) >= 0
    assert dataset.stats().full_seconds > 0


# ---- each batch, as it happens


def test_every_batch_is_reported_before_it_is_returned(vectors):
    reports: list[BatchReport] = []
    dataset = stream(vectors, on_batch=reports.append)
    for epoch in range(2):
        for number, batch in enumerate(dataset):
            assert len(reports) == epoch * 22 + number + 1
            assert (reports[-1].epoch, reports[-1].samples) == (epoch, len(batch["x"]))
    stats = dataset.stats()
    assert all(type(value) is type(getattr(Stats, name)) for name, value in dataclasses.asdict(stats).items())
    assert [report.step for report in reports] == list(range(44))
    assert all(0 <= report.wait_seconds <= report.seconds for report in reports)
    assert sum(report.wait_seconds for report in reports) >= stats.wait_seconds
    assert sum(report.seconds for report in reports) <= stats.seconds + 60
    assert {report.worker for report in reports} == {0}


def test_a_resumed_run_continues_to_count_steps(vectors):
    reports: list[BatchReport] = []
    first, second = (stream(vectors, on_batch=reports.append) for _ in range(2))
    list(first)
    list(zip(range(6), first, strict=False))
    second.load_state_dict(first.state_dict())
    list(second)
    assert [report.step for report in reports] == [*range(22 + 6), *range(28, 44)]


def test_single_samples_are_reported_as_they_are_made(vectors):
    reports: list[BatchReport] = []
    run(vectors, N, batch=None, on_batch=reports.append)
    assert sum(report.samples for report in reports) == N
    assert [report.step for report in reports] == list(range(0, N, 64))


def test_an_on_batch_that_raises_loses_no_batch(vectors):
    calls: list[int] = []

    def fails_once(report: BatchReport) -> None:
        calls.append(report.step)
        if len(calls) == 3:
            raise RuntimeError("the disk of the log is full")

    dataset = stream(vectors, on_batch=fails_once, with_index=True)
    batches = iter(dataset)
    seen = [next(batches)["index"].tolist() for _ in range(2)]
    state = dataset.state_dict()
    with pytest.raises(RuntimeError, match="the disk of the log"):
        next(batches)
    assert dataset.state_dict() == state
    seen += [batch["index"].tolist() for batch in batches]
    again = stream(vectors, with_index=True)
    assert seen == [batch["index"].tolist() for batch in again]


def note(path: Path, report: BatchReport) -> None:
    with path.open("a") as file:
        file.write(f"{os.getpid()} {report.worker} {report.step}\n")


@pytest.mark.filterwarnings("ignore:2 DataLoader workers on each rank")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_each_dataloader_worker_reports_its_own_batches(vectors, tmp_path):
    dataset = pickle.loads(pickle.dumps(stream(vectors, on_batch=partial(note, tmp_path / "log"))))
    count = sum(1 for _ in DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    lines = [tuple(map(int, line.split())) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(lines) == count == 22
    for number in range(2):
        assert [step for _, worker, step in lines if worker == number] == list(range(11))
    assert os.getpid() not in {pid for pid, _, _ in lines}


class Waiting:
    """A transform that waits until it may go on."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.goes_on.wait()
        return sample


class Noted(logging.Handler):
    """Has the messages of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: SimpleQueue[str] = SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.put(record.getMessage())


@contextmanager
def first_message(dataset: Any, go_on: Callable[[], object]) -> Iterator[str]:
    """What is logged while the first batch is awaited, until it may go on; there must be one message."""
    noted, logger = Noted(), logging.getLogger("streamloader")
    logger.addHandler(noted)
    thread = threading.Thread(target=lambda: list(dataset))
    thread.start()
    try:
        yield noted.messages.get(timeout=60)
        for _ in range(3):
            dataset._engine().core.check_waiting()
        assert noted.messages.empty()
    finally:
        go_on()
        thread.join()
        logger.removeHandler(noted)


def test_a_wait_of_stall_seconds_for_a_transform_is_logged_once(data):
    transform = Waiting()
    options = {"fields": ["label"], "num_workers": 0, "transform": transform, "world": (1, 2), "batch_size": 16}
    with first_message(sl.NumpyDataset(data(N, "label"), stall_seconds=0.2, **options), transform.goes_on.set) as text:
        assert re.match(
            r"rank 1 has waited for a batch for \d+ s: samples \d+, \d+, \d+, ... are being transformed", text
        )


@pytest.mark.long
def test_a_wait_of_stall_seconds_for_a_store_names_the_request_that_it_waits_for(vectors):
    with folder_server(vectors) as server:
        server.behave = "stall"

        def go_on() -> None:
            server.behave = ""
            server.released.set()

        options = {"fields": ["x"], "num_workers": 0, "shuffle": False, "batch_size": 16}
        with first_message(sl.NumpyDataset(server.url, stall_seconds=0.2, **options), go_on) as text:
            asked = r"field 'x': the request for bytes \d+ of http://\S+/x/c/0/0 was sent \d+ s ago"
            assert re.match(rf"rank 0 has waited for a batch for \d+ s: samples 0 to \d+ are read \({asked}", text)
            assert re.search(r"; \d+ requests are in flight of \d+ that may be", text)


@pytest.mark.parametrize("seconds", [0, -1, True, "1"])
def test_stall_seconds_are_above_0(seconds, vectors):
    with pytest.raises(UsageError, match="stall_seconds"):
        stream(vectors, stall_seconds=seconds)
