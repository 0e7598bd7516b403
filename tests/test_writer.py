"""Laws of the writer: what is written is read, nothing opens before it closed, and its memory is bounded."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from amounts import examples
from conversions import wait_for
from format_data import ALL_KINDS, StoreProxy, column_of, equal, memory_store, objects_of, public, some_fields
from hypothesis import given, settings
from hypothesis import strategies as st

import streamloader as sl
import streamloader.format.writer as writer_module
from streamloader.errors import AccessError, DestinationError, FieldError, IncompleteError, NotADatasetError, UsageError
from streamloader.format.dataset import open as open_dataset
from streamloader.storage import open_store

SMALL = sl.Layout(samples_per_shard=16, chunk_size=64, block_size=256)
PAIR = {"image": "uint8[4,4]", "label": "int64"}


@pytest.fixture
def store():
    return memory_store()


def threads_of_writer():
    return [thread for thread in threading.enumerate() if thread.name.startswith("streamloader-write")]


@pytest.mark.quick(2)
def test_what_is_written_is_read_on_every_store(store_url):
    url, options = store_url
    fields = {name: ALL_KINDS[name] for name in ("f_bool", "image", "blob", "words", "boxes")}
    columns = {name: public(field, column_of(field, 40)) for name, field in fields.items()}
    with sl.Writer(url, fields, layout=SMALL, storage_options=options, provenance={"made": "here"}) as out:
        for i in range(20):
            out.write({name: column[i] for name, column in columns.items()})
        out.write_batch({name: column[20:39] for name, column in columns.items()})
        out.write({name: column[39] for name, column in columns.items()})
        assert len(out) == 40
        with pytest.raises((IncompleteError, NotADatasetError)):
            open_dataset(url, storage_options=options)
    ds = open_dataset(url, storage_options=options)
    found = ds[:]
    assert len(ds) == 40 and ds.manifest.provenance == {"made": "here"}
    for name in fields:
        assert equal(found[name], columns[name]), name
    assert not threads_of_writer()
    with pytest.raises(DestinationError, match="overwrite"):
        sl.Writer(url, PAIR, storage_options=options)
    with sl.Writer(url, {"label": "uint8"}, overwrite=True, storage_options=options) as out:
        out.write({"label": 7})
    assert open_dataset(url, storage_options=options)[0] == {"label": 7}
    kept = {path.split("/")[0] for path in objects_of(open_store(url, options))}
    assert kept == {"zarr.json", "label", "_streamloader"}


@given(some_fields, st.integers(0, 80), st.integers(1, 30), st.booleans(), st.integers(1, 3000))
@settings(max_examples=examples(25), deadline=None)
def test_samples_and_batches_of_any_size_give_the_same_dataset(fields, count, step, known, probe):
    columns = {name: public(field, column_of(field, count)) for name, field in fields.items()}
    found = []
    original = writer_module.PROBE_BYTES
    try:
        writer_module.PROBE_BYTES = probe  # so that the probe ends in the middle of these small datasets
        for batches in (False, True):
            store = memory_store()
            with sl.Writer(store.url, fields, layout=SMALL, num_samples=count if known else None, workers=2) as out:
                for start in range(0, count, step if batches else 1):
                    if batches:
                        out.write_batch({name: column[start : start + step] for name, column in columns.items()})
                    else:
                        out.write({name: column[start] for name, column in columns.items()})
            found.append(objects_of(store))
            ds = open_dataset(store.url)
            assert all(equal(ds.read(name, 0, count), columns[name]) for name in fields)
    finally:
        writer_module.PROBE_BYTES = original
    assert found[0] == found[1]


SPECS = PAIR | {"half": "float16", "byte": "uint8", "single": "float32"}
SPECS |= {"raw": "bytes", "words": "text", "rows": "ragged:int32[2]"}
GOOD = {"image": np.ones((4, 4), "u1"), "label": 3, "half": 1.5, "byte": np.int64(255), "single": 2}
GOOD |= {"raw": b"x", "words": "x", "rows": [[1, 2]]}
BAD_VALUES = [
    ({"x": 0}, "sample 1 has an unknown field 'x'"),
    ({"image": np.ones((3, 4), "u1")}, r"field 'image' of sample 1 has shape \(3, 4\), expected \(4, 4\)"),
    ({"image": np.zeros((4, 4))}, "field 'image' of sample 1 is float64, expected uint8"),
    ({"image": np.full((4, 4), 256)}, "which does not hold 256 to 256"),
    ({"image": [[1], [2, 3]]}, "field 'image' of sample 1 is not an array"),
    ({"image": None}, "field 'image' of sample 1 is missing"),
    ({"image": np.ma.array(GOOD["image"], mask=np.eye(4))}, "'image' of sample 1 .* elements of uint8 are masked"),
    ({"label": np.ma.masked}, "field 'label' of sample 1 is missing"),
    ({"rows": [np.ma.array([1, 2], mask=[0, 1])]}, "'rows' of sample 1 .* elements of int64 are masked"),
    ({"label": 0.5}, "field 'label' of sample 1 is float64"),
    ({"label": "3"}, "field 'label' of sample 1"),
    ({"single": [1.5, 2]}, r"has shape \(2,\), expected \(\); give a single float32, or declare single=float32\[2\]"),
    ({"half": 1e6}, "does not hold its values"),
    ({"half": 1j}, "complex128"),
    ({"byte": -1}, "does not hold -1 to -1"),
    ({"raw": "text"}, "'raw' of sample 1 is a str"),
    ({"words": b"x"}, "'words' of sample 1 is a bytes"),
    ({"words": "\ud800"}, "'words' of sample 1 is not valid text"),
    ({"rows": [1, 2]}, r"'rows' of sample 1 has shape \(2,\), expected \(any, 2\)"),
    ({"rows": [[1.5, 2]]}, "'rows' of sample 1 is float64, expected int32"),
]


def test_a_sample_that_does_not_fit_is_an_error_and_the_next_one_is_written(store):
    with sl.Writer(store.url, SPECS) as out:
        out.write(GOOD)
        for sample, message in (
            ({"image": GOOD["image"]}, "sample 1 has no field '"),
            *((GOOD | change, message) for change, message in BAD_VALUES),
        ):
            with pytest.raises(FieldError, match=message) as caught:
                out.write(sample)
            assert "\n" not in str(caught.value)
        changes = {"half": True, "byte": True, "single": np.float64(0.1), "raw": bytearray(b"y")}
        out.write(GOOD | changes | {"words": "", "rows": []})
    first, second = open_dataset(store.url)
    assert (first["label"], second["label"], first["byte"], second["byte"]) == (3, 3, 255, 1)
    assert (second["half"], second["single"], second["raw"], second["words"]) == (1, np.float32(0.1), b"y", "")
    assert second["rows"].shape == (0, 2)


def test_batches_that_do_not_fit_name_field_sample_and_lengths(store):
    image = np.zeros((3, 4, 4), "u1")
    with sl.Writer(store.url, PAIR) as out:
        out.write_batch({"image": image, "label": [1, 2, 3]})
        for batch, message in (
            ({"image": image, "label": [1, 2]}, "unequal lengths: 'image' 3, 'label' 2"),
            ({"image": image[:, :3], "label": [1, 2, 3]}, r"'image' of sample 3 has shape \(3, 4\)"),
            ({"image": [image[0], image[0, :2]], "label": [1, 2]}, r"'image' of sample 4 has shape \(2, 4\)"),
            ({"image": image, "label": 5}, "'label' of a batch is a int"),
            ({"image": image, "label": np.ma.array([1, 2, 3], mask=[0, 1, 0])}, "'label' of sample 4 is missing"),
            ({"image": image, "label": [1.5, 2, 3]}, "'label' of samples 3 to 5 is float64, expected int64"),
        ):
            with pytest.raises(FieldError, match=message):
                out.write_batch(batch)
    assert len(open_dataset(store.url)) == 3


def test_masked_floats_are_written_as_nan(store):
    numbers = np.ma.array([[1, 2], [3, 4]], "f4", mask=[[0, 1], [0, 0]])
    expected = [[1, np.nan], [3, 4]]
    with sl.Writer(store.url, {"x": "float32[2]", "n": "float64", "r": "ragged:float32"}) as out:
        out.write_batch({"x": numbers, "n": numbers[:, 1], "r": list(numbers)})
        out.write_batch({"x": list(numbers), "n": list(numbers[:, 1]), "r": numbers})
        for row in numbers:
            out.write({"x": row, "n": row[1], "r": row})
    ds = open_dataset(store.url)
    for first in (0, 2, 4):
        assert np.array_equal(ds.read("x", first, first + 2), expected, equal_nan=True)
        assert np.array_equal(ds.read("n", first, first + 2), [np.nan, 4], equal_nan=True)
        assert np.array_equal(ds.read("r", first, first + 2), expected, equal_nan=True)


def test_the_writer_keeps_copies_of_what_it_is_given():
    store, image, batch = memory_store(), np.zeros((4, 4), "u1"), np.zeros((5, 4, 4), "u1")
    with sl.Writer(store.url, PAIR) as out:
        out.write({"image": image, "label": 0})
        out.write_batch({"image": batch, "label": np.zeros(5, int)})
        image[:], batch[:] = 9, 9
    assert not open_dataset(store.url)[:]["image"].any()


def test_an_exception_in_the_block_leaves_nothing_and_no_thread(store):
    store.put("mine.txt", b"x")
    with pytest.raises(ZeroDivisionError), sl.Writer(store.url, PAIR, layout=SMALL) as out:
        out.write_batch({"image": np.zeros((100, 4, 4), "u1"), "label": np.arange(100)})
        raise ZeroDivisionError
    assert objects_of(store) == {"mine.txt": b"x"} and not threads_of_writer()
    with pytest.raises(UsageError, match="closed"):
        out.write({"image": np.zeros((4, 4), "u1"), "label": 0})
    with pytest.raises(NotADatasetError):
        open_dataset(store.url)


def test_a_closed_writer_is_an_error_to_write_to_but_not_to_close(store):
    out = sl.Writer(store.url, PAIR)
    assert out.close() == out.close()
    with pytest.raises(UsageError, match="closed"):
        out.write_batch({"image": np.zeros((1, 4, 4), "u1"), "label": [0]})
    out.abort()
    assert len(open_dataset(store.url)) == 0


@pytest.mark.parametrize(("declared", "written"), [(5, 4), (5, 6)])
def test_a_declared_number_of_samples_must_be_right(declared, written, store):
    with pytest.raises(UsageError, match="num_samples=5"), sl.Writer(store.url, PAIR, num_samples=declared) as out:
        for i in range(written):
            out.write({"image": np.zeros((4, 4), "u1"), "label": i})
    assert objects_of(store) == {}


def test_wrong_arguments_are_errors_before_anything_is_written(store):
    for options, message in (
        ({"fields": {}}, "at least one field"),
        ({"fields": {"A": "int64"}}, "field name 'A'"),
        ({"fields": {"a": "object"}}, "dtype 'object'"),
        ({"workers": 0}, "workers=0"),
        ({"num_samples": -1}, "num_samples=-1"),
        ({"provenance": {"x": float("nan")}}, "provenance"),
        ({"provenance": {"x": object()}}, "provenance"),
    ):
        with pytest.raises(UsageError, match=message):
            sl.Writer(store.url, **{"fields": PAIR, **options})
    assert objects_of(store) == {}


def gated(monkeypatch, act):
    """Return a store whose uploads by a writer wait for `act`, or fail by it."""
    store = memory_store()

    class Gated(StoreProxy):
        def put(self, path, data):
            act(path)
            return store.put(path, data)

    monkeypatch.setattr(writer_module, "open_store", lambda url, options: Gated(store))
    monkeypatch.setattr(writer_module, "PROBE_BYTES", 1)
    return store


def test_an_upload_that_fails_surfaces_at_a_later_write_or_at_close(monkeypatch):
    def fail(path):
        if path.startswith("image/c/2"):
            raise AccessError(f"no permission for {path}", "ask for it")

    store = gated(monkeypatch, fail)
    fields = {"image": sl.Field.parse("uint8[1100]")}
    with pytest.raises(AccessError, match="image/c/2"), sl.Writer("memory://x", fields, layout=SMALL) as out:
        for _ in range(100):
            out.write_batch({"image": np.zeros((16, 1100), "u1")})
    assert objects_of(store) == {} and not threads_of_writer()


def test_the_objects_of_a_shard_are_put_together(monkeypatch):
    """Each takes the latency of the store. Here none of the three is stored before all of them are on their way."""
    together = threading.Barrier(3)

    def meet(path):
        if path.endswith("/c/0") or path.endswith("/c/0/0"):
            together.wait(60)

    store = gated(monkeypatch, meet)
    with sl.Writer("memory://x", {"image": "uint8[1100]", "text": "text"}, layout=SMALL, workers=1) as out:
        out.write_batch({"image": np.zeros((9, 1100), "u1"), "text": ["a"] * 9})
    assert len(open_dataset(store.url)) == 9


def test_writing_waits_while_all_workers_are_busy(monkeypatch):
    gate, arrived = threading.Event(), threading.Semaphore(0)

    def wait(path):
        if path.startswith("image/c/"):
            arrived.release()
            assert gate.wait(300)

    store = gated(monkeypatch, wait)
    out = sl.Writer("memory://x", {"image": sl.Field.parse("uint8[1100]")}, layout=SMALL, workers=2)
    written = 0

    def feed():
        nonlocal written
        for _ in range(10):
            out.write_batch({"image": np.zeros((16, 1100), "u1")})
            written += 1

    feeder = threading.Thread(target=feed)
    feeder.start()
    for _ in range(2):
        assert arrived.acquire(timeout=300)
    wait_for(lambda: written == 2)
    feeder.join(0.3)  # it must stay blocked, however long one waits: two shards at work, the third is whole
    assert feeder.is_alive() and written == 2
    gate.set()
    feeder.join(300)
    assert written == 10
    out.close()
    assert len(open_dataset(store.url)) == 160


WRITE = """
import sys
import numpy as np
import streamloader.format.writer as w
from streamloader.options import Layout
fields = {"image": "uint8[65536]", "label": "int64"}
layout = Layout(shard_size=8 << 20, codec="none")
def rss():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
out = w.Writer(sys.argv[1], fields, layout=layout, workers=2)
image = np.random.default_rng(0).integers(0, 256, 65536, np.uint8)
for i in range(int(sys.argv[2])):
    out.write({"image": image, "label": i})
    if i == 600:
        print("early", rss(), flush=True)
print("late", rss(), flush=True)
sys.stdin.read()
out.close()
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_dataset_and_a_kill_leaves_nothing_to_open(tmp_path):
    url = str(tmp_path / "data")
    command = [sys.executable, "-c", WRITE, url, "6000"]  # 375 MiB in shards of 8
    root = Path(__file__).parent.parent
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
    try:
        early = float(process.stdout.readline().split()[1])
        late = float(process.stdout.readline().split()[1])
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    # three shards, each with its encoded copy and the client's, and room for the allocator; never the 375 MiB
    assert late - early < 6 * 8 + 24, (early, late)
    with pytest.raises(IncompleteError, match="overwrite=True"):
        open_dataset(url)
    with pytest.raises(DestinationError, match="unfinished"):
        sl.Writer(url, PAIR)
    with sl.Writer(url, PAIR, overwrite=True) as out:
        out.write({"image": np.zeros((4, 4), "u1"), "label": 1})
    assert len(open_dataset(url)) == 1
    left = {path.relative_to(url).parts[0] for path in Path(url).rglob("*") if path.is_file()}
    assert left == {"zarr.json", "_streamloader", "image", "label"}
    assert not list(Path(url).glob("image/c/[1-9]*/0")), "shards of the killed writer are gone"
