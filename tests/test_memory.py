"""`memory=` holds for uneven samples too: what is in use is counted, and a need beyond it is an error that names it."""

import io
import json
import re
import threading
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import within
from PIL import Image

from streamloader.conversion.api import convert
from streamloader.conversion.job import Listener, Progress, SplitPlan, SplitRun, first_change, list_files, read_files
from streamloader.conversion.row_order import SampleRows
from streamloader.conversion.shard_task import QUARANTINE_BYTES, Quarantine, SkippedSample, read_skipped, write_skipped
from streamloader.engine import fetcher as fetcher_module
from streamloader.engine.arena import Arena, Buffers
from streamloader.engine.budget import Budget
from streamloader.engine.executor import Executor
from streamloader.engine.fetcher import Fetcher
from streamloader.engine.memory import Memory
from streamloader.engine.pace import Hedging, Pace
from streamloader.errors import CorruptError, DecodeError, FormatError, MemoryBudgetError, ObjectExistsError
from streamloader.format import opening
from streamloader.format.codecs import decode_items
from streamloader.format.dataset import open as open_dataset
from streamloader.format.geometry import Geometry
from streamloader.format.manifest import Field, FieldLayout, OrderPin
from streamloader.format.publish import begin, job_document, take_over
from streamloader.format.reader import FieldReader
from streamloader.format.writer import Writer
from streamloader.loader.arguments import Source
from streamloader.loader.opening import open_dataset as open_source
from streamloader.maintenance.append import append
from streamloader.options import Layout, Shuffle
from streamloader.order.schedule import BlockRef
from streamloader.pytorch.dataset import StreamingDataset
from streamloader.stats import Counters
from streamloader.storage import open_store
from streamloader.storage.objects import ObjectInfo
from streamloader.storage.process import in_thread


def plant(path: Path) -> None:
    """Make a file of 4 GiB that takes no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(4 << 30)


@pytest.mark.quick(1)
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_blocks_that_do_not_fit_at_once_are_an_error_that_names_the_need(codec, tmp_path, monkeypatch):
    with Writer(tmp_path / "d", {"x": "bytes"}, num_samples=1000, layout=Layout(codec=codec)) as out:
        for i in range(1000):
            out.write({"x": bytes([i % 251]) * (4 << 20 if 16 <= i < 32 else 5000)})
    arguments = {"batch_size": 16, "with_index": True, "shuffle": Shuffle(lanes=1, block=16, window=64)}
    sizes = {}
    for batch in StreamingDataset(tmp_path / "d", **arguments):
        sizes |= dict(zip(batch["index"].tolist(), batch["x"], strict=True))
    assert sizes == {i: bytes([i % 251]) * (4 << 20 if 16 <= i < 32 else 5000) for i in range(1000)}
    used, allocate = [], Buffers.allocate

    def counted(self: Buffers, size: int) -> memoryview:
        given = allocate(self, size)
        used.append(self.used)
        return given

    monkeypatch.setattr(Buffers, "allocate", counted)
    with pytest.raises(MemoryBudgetError, match=r"more memory than planned: memory=\d+ .*, but memory=24000000;") as e:
        for batch in StreamingDataset(tmp_path / "d", memory=24 * 10**6, **arguments):
            del batch
    assert max(used) <= 56 * 10**6, "the chunks of one request count one by one"
    need = int(re.search(r"give memory=(\d+)", str(e.value))[1])
    assert need > 40 * 10**6
    assert sum(len(b["x"]) for b in StreamingDataset(tmp_path / "d", memory=4 * need, **arguments)) == 1008


@pytest.mark.long
def test_images_that_do_not_fit_decoded_are_an_error_that_names_the_need(tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (2000, 2000)).save(file, "png")
    with Writer(tmp_path / "d", {"x": Field("bytes", encoding="png")}, num_samples=64) as out:
        for i in range(64):
            out.write({"x": file.getvalue() if i < 60 else b"no image"})
    arguments = {"batch_size": 4, "decode": True, "shuffle": False}
    with pytest.raises(MemoryBudgetError, match=r"more memory than planned: .* batches of \d{9},") as e:
        next(iter(StreamingDataset(tmp_path / "d", memory=40 * 10**6, **arguments)))
    need = int(re.search(r"give memory=(\d+)", str(e.value))[1])
    dataset = StreamingDataset(tmp_path / "d", memory=need, **arguments)
    batches = iter(dataset)
    assert sum(len(next(batches)["x"]) for _ in range(15)) == 60
    with pytest.raises(DecodeError, match="sample 60 of field 'x' does not decode"):
        next(batches)


def test_the_body_of_a_loading_block_counts_once_beside_batches(tmp_path, monkeypatch):
    with Writer(tmp_path / "d", {"x": "bytes"}, num_samples=64, layout=Layout(codec="none")) as out:
        for i in range(64):
            out.write({"x": bytes([i]) * (1 << 20)})
    fetch, arrived, resume = fetcher_module.fetch_items, threading.Event(), threading.Event()

    def fetch_and_wait(*args: Any) -> Any:
        items = fetch(*args)
        arrived.set()
        resume.wait(300)
        return items

    monkeypatch.setattr(fetcher_module, "fetch_items", fetch_and_wait)
    dataset = open_source(Source(tmp_path / "d"))
    budget = Budget(slots=4, threads=1, bytes=1 << 30, body_bytes=1 << 30, exact=True)
    executor, limits = Executor(), (Pace(1), Hedging())
    memory = Memory(dataset.readers, 4, budget, Counters(), executor.arena)
    fetcher = Fetcher([dataset], dataset.names, limits, memory, executor)
    with closing(fetcher):
        fetcher.load(BlockRef(0, 0, 4))
        assert arrived.wait(300)
        assert 4 << 20 <= fetcher.leave(0) <= 5 << 20
        resume.set()
        assert fetcher.wait(0) is None
        assert 4 << 20 <= fetcher.leave(0) <= 5 << 20
        fetcher.release(0)


def test_an_earlier_block_is_loaded_before_threads_wait_for_the_memory_of_a_later_one(tmp_path, monkeypatch):
    with Writer(tmp_path / "d", {"x": "bytes"}, num_samples=16, layout=Layout(codec="zstd", chunk_size=1)) as out:
        for _ in range(16):
            out.write({"x": bytes(4 << 20)})
    dataset = open_source(Source(tmp_path / "d"))
    # a block may decode a quarter of these bytes before the one in front of it is complete
    budget = Budget(slots=2, threads=2, bytes=64 << 20, body_bytes=64 << 20, exact=True)
    executor = Executor()
    memory = Memory(dataset.readers, 8, budget, Counters(), executor.arena)
    fetcher = Fetcher([dataset], dataset.names, (Pace(2), Hedging()), memory, executor)
    runs, fetch = FieldReader.runs, fetcher_module.fetch_items
    queued = threading.Event()

    def fetch_late(*args: Any) -> Any:
        assert queued.wait(300)
        return fetch(*args)

    monkeypatch.setattr(FieldReader, "runs", lambda self, start, stop: runs(self, start, stop, 1))  # one a sample
    monkeypatch.setattr(fetcher_module, "fetch_items", fetch_late)
    with closing(fetcher):
        for ticket in (1, 0):  # the threads begin with the later one
            fetcher.load(BlockRef(ticket, 8 * ticket, 8 * ticket + 8))
        queued.set()
        assert in_thread(partial(fetcher.wait, 0)).result(300) is None
        fetcher.release(0)


def test_bodies_count_what_is_in_use_and_free_what_is_not_within_their_limit():
    bodies = Buffers(Arena(shared=False), Counters(), keep=8, most=10 << 20)
    large = bodies.allocate(9 << 20)
    foreign = bodies.allocate(1 << 20)
    assert 10 << 20 <= bodies.used < 12 << 20
    del foreign
    part = large[:5]
    del large
    assert 9 << 20 <= bodies.used < 11 << 20, "a view keeps the whole"
    del part
    assert bodies.used == 0
    small = bodies.allocate(8 << 20)
    assert bodies.used < 10 << 20
    assert bodies._alive() == bodies.used + (1 << 20), "the unused one of another size is freed"
    del small


@pytest.mark.long
@pytest.mark.parametrize("path", ["zarr.json", "_streamloader/job.json"])
def test_documents_that_are_too_large_are_refused_before_they_are_read(path, tmp_path):
    plant(tmp_path / path)
    with within(50 << 20), pytest.raises(FormatError, match=rf"{path} has over 67108864 bytes"):
        open_dataset(tmp_path)


@pytest.mark.long
def test_a_job_file_that_is_too_large_is_not_read_whole_by_runs_that_hold_or_take_it(tmp_path):
    store = open_store(tmp_path)
    claim = begin(store, job_document("writer", ["x"]))
    plant(tmp_path / "_streamloader/job.json")
    with closing(claim), within(50 << 20):
        assert not claim.held()
        with pytest.raises(FormatError, match="over 67108864 bytes"):
            take_over(store, {"by": "convert"})
        with pytest.raises(FormatError, match="over 67108864 bytes"):
            begin(store, job_document("writer", ["x"]), overwrite=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("receipts/0.json", "has over 67108864 bytes"),
        ("bad/0.json", "has a line of over 33554432 bytes"),
        ("files", "has a line of over 1048576 bytes"),
        ("parts/0", "differs from its receipt"),
        ("append/receipts/0.json", "has over 67108864 bytes"),
        ("append/parts/0", "differs from its receipt"),
    ],
)
def test_what_a_conversion_left_is_refused_where_it_is_too_large(name, problem, tmp_path):
    source, more, out = tmp_path / "source.jsonl", tmp_path / "more.jsonl", tmp_path / "out"
    large = out / "_streamloader" / name

    def run(progress: Listener | None = None) -> None:
        if name.startswith("append"):
            append(out, more, workers=0, progress=progress)
        else:
            convert(source, out, workers=0, progress=progress)

    def at_the_end(progress: Progress) -> None:
        if progress.phase == "finish":  # all shards are written, the small fields are about to be gathered
            plant(large)
            if "parts" not in name:
                raise KeyboardInterrupt

    for file in (source, more):
        file.write_text('{"x": 7}\n' * 10)
    if name.startswith("append"):
        convert(source, out, workers=0)
    if "parts" not in name:
        with suppress(KeyboardInterrupt):
            run(at_the_end)
    if name == "files":
        source.write_text('{"x": 8}\n' * 11)
    with within(200 << 20), pytest.raises(FormatError, match=rf"_streamloader/{name} {problem}"):
        run(at_the_end if "parts" in name else None)


@pytest.mark.long
def test_a_file_list_is_read_only_until_it_differs(tmp_path, monkeypatch):
    store, files = open_store(tmp_path), [ObjectInfo("a", 1), ObjectInfo("b", 2)]
    line = b'["%b", 1, ""]\n'
    store.put("many", line % b"a" + b"".join(line % b"more%d" % i for i in range(100)) * 40_000)
    with within(20 << 20):
        assert first_change(read_files(store, "many"), files) == "more0 is gone"
    store.put("short", list_files(files)[:-5])
    with pytest.raises(FormatError, match="short is damaged"):
        list(read_files(store, "short"))
    monkeypatch.setattr(opening, "PIECE_BYTES", 1000)
    files = [ObjectInfo(f"folder/{i}", i, f"tag {i}") for i in range(5000)]
    store.put("files", list_files(files))
    assert list(read_files(store, "files")) == files


@pytest.mark.long
def test_an_object_that_another_made_large_is_not_read_whole_to_be_replaced(tmp_path):
    store = open_store(tmp_path)
    plant(tmp_path / "zarr.json")
    with within(50 << 20), pytest.raises(ObjectExistsError):
        store.replace("zarr.json", b"new", b"before")


def test_a_chunk_of_2_gib_is_refused(tmp_path):
    layout = FieldLayout(Field("bytes"), chunk=1, shard=1, codec="none", resident=False)
    with (tmp_path / "chunk").open("wb") as file:
        file.write((1).to_bytes(4, "little") + (2**31 - 8).to_bytes(4, "little"))
        file.truncate(2**31)  # sparse: the places of its items do not fit into 31 bits
    body = memoryview(np.memmap(tmp_path / "chunk", np.uint8, "r"))
    with pytest.raises(CorruptError, match="has 2147483648 decoded bytes, the format allows at most 2147483584"):
        decode_items(layout, body)


@pytest.mark.long
def test_a_condition_is_looked_at_a_piece_at_a_time(tmp_path):
    count = 6_000_000
    labels = np.arange(count) % 1000
    with Writer(tmp_path / "d", {"label": "int64"}, num_samples=count) as out:
        out.write_batch({"label": labels})
    with within(100 << 20):
        ds = StreamingDataset(tmp_path / "d", batch_size=4096, where="label == 7 or label + 1 > 999", shuffle=False)
    found = np.concatenate([batch["label"][batch["valid"]].numpy() for batch in ds])
    assert found.tolist() == labels[(labels == 7) | (labels == 999)].tolist()


@pytest.mark.long
def test_many_bad_samples_take_linear_time_and_little_memory(tmp_path):
    count, size = 200_000, 200
    layout = FieldLayout(Field("bytes"), chunk=1, shard=size, codec="none", resident=False)
    geometry = Geometry(size, OrderPin(1, 1, 2), {"x": layout})
    job = SplitPlan("", SampleRows.of(range(count), 3), geometry, {})
    store = open_store(tmp_path)
    with within(100 << 20):
        begin = time.process_time()
        run = SplitRun(job, store, keep_bad=True, job="")
        assert run.missing() == list(range(count // size))
        for shard in range(count // size):
            rows = job.shard_rows(shard)
            bad = (SkippedSample(row, f"file {row}", "is empty", "data" * 8000) for row in rows[: size // 10].tolist())
            run.record(shard, tuple(one.without_data() for one in bad))
        todo = run.missing()
        kept = [row for shard in todo for row in run.plan.shard_rows(shard).tolist()]
        assert time.process_time() - begin < 10  # seconds under tracemalloc; quadratic took minutes
    assert len(todo) == 900
    assert len(set(kept)) == 180_000
    assert not run.skipped.keys() & set(kept)


@pytest.mark.long
def test_a_quarantine_is_written_in_files_of_bounded_size(tmp_path):
    store = open_store(tmp_path)
    samples = [SkippedSample(row, f"file {row}", "is empty", "A" * 1_000_000) for row in range(100)]
    for shard in range(5):
        write_skipped(store, "", shard, samples[20 * shard : 20 * shard + 20])
    skipped = read_skipped(store, "", 20)
    assert not any(one.data for one in skipped.values())
    again = SkippedSample(7000, "file 7000", "is bad now")
    with within(150 << 20):
        quarantine = Quarantine(store)
        quarantine.add_all("", store, {**skipped, 7000: again})
        quarantine.flush()
    files = sorted((tmp_path / "_streamloader").glob("quarantine*"), key=lambda path: (len(path.name), path.name))
    assert [path.name for path in files] == ["quarantine.jsonl", *(f"quarantine-{i}.jsonl" for i in range(1, 4))]
    assert all(path.stat().st_size <= QUARANTINE_BYTES for path in files)
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert [line["row"] for line in lines] == [*range(100), 7000]
    assert all(line["data"] == "A" * 1_000_000 for line in lines[:100])


@pytest.mark.quick(1)
@pytest.mark.parametrize("spec", ["text", "bytes"])
def test_what_compresses_well_is_cut_by_its_decoded_bytes(spec, tmp_path):
    layout = Layout(shard_size=1 << 18, block_size=1 << 16, chunk_size=1 << 14)
    for declared in (None, 3000):
        with Writer(tmp_path / str(declared), {"x": spec}, layout=layout, num_samples=declared) as out:
            for i in range(3000):
                data = b"%04d" % i * 2000
                out.write({"x": data.decode() if spec == "text" else data})
        manifest = out.close()
        field = manifest.fields["x"]
        assert field.stored * 20 < field.nbytes, "it compresses well"
        assert field.shard * 8000 <= 4 * layout.shard_size * 1.5  # nearest powers of two
        assert manifest.order.block * 8000 <= 4 * layout.block_size * 1.5
        assert field.chunk * 8000 <= 4 * layout.chunk_size * 1.5
