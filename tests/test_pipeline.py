"""The engine against the plan: any geometry in as little memory as it says it needs, and stores that misbehave."""

import pkgutil
import struct
import uuid
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pytest
from amounts import examples
from datasets import assert_threads_end, before_error, least_memory, seen
from folder_server import folder_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrun import run_python
from transform_tasks import NoMessage

from streamloader.errors import EndpointError, EngineError, StorageError, ThrottledError, TransientError
from streamloader.format.writer import Writer
from streamloader.options import Layout, RetryPolicy, Shuffle
from streamloader.order.epoch_order import EpochOrder
from streamloader.order.schedule import Share, World
from streamloader.pytorch.dataset import StreamingDataset

FIELDS = ["x", "label", "tok", "name"]


@pytest.fixture(scope="module")
def folder(data: Any) -> Path:
    return Path(data(512, "x", "label"))


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
@pytest.mark.filterwarnings("ignore:.* consumers .* lanes", "ignore:.* ranks are more than")
def test_every_geometry_delivers_the_plan_in_the_memory_it_asks_for(data):
    count = data.draw(st.integers(1, 300))
    chunk = data.draw(st.sampled_from((1 << 11, 1 << 13)))
    layout = Layout(shard_size=1 << 15, block_size=1 << 13, chunk_size=chunk, codec="none")
    name = f"streamloader-{uuid.uuid4().hex}"
    url = f"memory://{name}/data"
    try:
        fields = data.draw(st.sampled_from((FIELDS, ["tok"])))
        datasets.write(url, count, fields, layout)
        size = data.draw(st.integers(1, 5))
        batch = data.draw(st.integers(1, min(count, 40)))
        remainder = data.draw(
            st.sampled_from(("pad", "drop", "uneven") if size * batch <= count else ("pad", "uneven"))
        )
        shuffle: bool | Shuffle = data.draw(st.booleans())
        if shuffle and data.draw(st.booleans()):
            block = StreamingDataset(url, batch_size=1)._start.sources[0].params.block
            shuffle = Shuffle(
                block=block, lanes=data.draw(st.integers(1, 6)), window=block * data.draw(st.integers(2, 5))
            )
        rank = data.draw(st.integers(0, size - 1))
        arguments: dict[str, Any] = {
            "batch_size": batch,
            "shuffle": shuffle,
            "world": (rank, size),
            "remainder": remainder,
            "with_index": True,
        }
        ds = StreamingDataset(url, memory=least_memory(url, **arguments), **arguments)
        batches = iter(ds)  # settles the lanes
        order = EpochOrder(count, ds._start.sources[0].params, 0, 0, shuffle is not False)
        share = Share(order, batch, World(rank, size), remainder)
        truth = order.samples_at(0, count)
        steps = 0
        for steps, got in enumerate(batches, start=1):
            positions = share.positions((steps - 1) * share.global_batch)
            assert got["index"].tolist() == truth[share.source(positions)].tolist()
            assert remainder != "pad" or got["valid"].tolist() == (positions < count).tolist()
            datasets.check_batch(got, fields)
        assert steps == share.num_steps(0) == len(ds)
        assert_threads_end()
    finally:
        fsspec.filesystem("memory").rm(f"/{name}", recursive=True)


IMPATIENT = {"retry": RetryPolicy(outage_seconds=1.0, base_seconds=0.01, cap_seconds=0.05, probe_seconds=0.1)}


def test_a_storm_of_503_is_survived(folder):
    options = {"retry": RetryPolicy(base_seconds=0.01, cap_seconds=0.05, probe_seconds=0.02)}
    with folder_server(folder) as server:
        server.behave, server.times, server.spare = "503", 60, "/label/"
        ds = StreamingDataset(server.url, batch_size=16, with_index=True, storage_options=options)
        assert sorted(seen(ds)) == list(range(512))
        assert server.times == 0
        assert ds.stats().retries >= 30
    assert_threads_end()


@pytest.mark.long
@pytest.mark.parametrize("behave", ["503", "close"])
def test_a_store_that_fails_for_good_is_an_error_after_the_batches_before_it(folder, behave):
    with folder_server(folder) as server:
        server.behave, server.spare = behave, "/c/0"
        ds = StreamingDataset(server.url, batch_size=16, with_index=True, shuffle=False, storage_options=IMPATIENT)
        found, error = before_error(ds, StorageError, r"/x/c/1")
        assert isinstance(error, ThrottledError | EndpointError | TransientError)
        assert found == list(range(len(found)))
        assert 0 < len(found) < 512
        assert "\n" not in str(error)
        assert ds.state_dict()["position"] == len(found)
        server.behave = ""  # the store recovers: the run goes on from its state
        again = StreamingDataset(server.url, batch_size=16, with_index=True, shuffle=False)
        again.load_state_dict(ds.state_dict())
        assert found + seen(again) == list(range(512))
    assert_threads_end()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("where", "shown"),
    [
        ("streamloader.format.reader.FieldReader.decode", r"reading field 'x' of samples \d+ to \d+ failed with"),
        ("streamloader.format.reader.FieldReader.runs", "reading the chunk table of field 'x' failed with"),
        ("streamloader.engine.stages.copy_all", "(gathering field 'x'|making the batch of samples .*) failed with"),
    ],
)
@pytest.mark.parametrize("error", [struct.error, MemoryError, SystemExit, NoMessage])
def test_whatever_a_thread_of_ours_raises_comes_at_its_batch(folder, monkeypatch, where, shown, error):
    plain = pkgutil.resolve_name(where.replace("reader.", "reader:").replace("stages.", "stages:"))
    calls = iter(range(1000))

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        if next(calls) == 5:
            raise error("out of order")
        return plain(self, *arguments, **options)

    ds = StreamingDataset(folder, batch_size=16, fields=["x"], with_index=True, shuffle=False, memory=1 << 24)
    monkeypatch.setattr(where, method)
    text = "its message raises" if error is NoMessage else "out of order"
    found, raised = before_error(ds, EngineError, f"{shown} {error.__name__}: {text}")
    assert isinstance(raised.__cause__, error)
    assert found == list(range(len(found)))
    assert_threads_end()


MEMORY = """
import resource, sys
from streamloader.pytorch.dataset import StreamingDataset

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

for _ in StreamingDataset(sys.argv[1], batch_size=8, fields=["label"]):
    pass  # torch, clients and threads are there
before = peak()
ds = StreamingDataset(sys.argv[1], batch_size=64, memory=int(sys.argv[2]))
peaks = []
for epoch in range(6):
    for batch in ds:
        first = batch["tok"][batch["tok_offsets"][:-1]] if "tok" in batch else batch["image"][:, 0, 0, 0]
        assert (first == batch["label"] % 251).all()
    peaks.append(peak() - before)
print(ds.stats().buffers_allocated, *peaks)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "codec"), [("uint8[224,224,3]", "none"), ("ragged:int32", "none"), ("ragged:int32", "lz4")]
)
def test_peak_memory_stays_within_the_budget_and_does_not_grow(tmp_path, kind, codec):
    rng = np.random.default_rng(0)
    name, count = ("tok", 6000) if kind.startswith("ragged") else ("image", 2048)
    with Writer(tmp_path / "d", {name: kind, "label": "int64"}, layout=Layout(codec=codec)) as out:
        for i in range(count):
            shape, dtype = (rng.integers(200, 4001), np.int32) if name == "tok" else ((224, 224, 3), np.uint8)
            out.write({name: np.full(shape, i % 251, dtype), "label": i})
    need = least_memory(tmp_path / "d", batch_size=64)
    done = run_python("-c", MEMORY, tmp_path / "d", need)
    buffers, *peaks = [int(text) for text in done.stdout.split()]
    assert peaks[-1] <= need + 300 * 10**6
    assert peaks[-1] - peaks[2] <= 30 * 10**6, "memory grows from epoch to epoch"
    assert buffers <= 40
