"""Arrays read in place from real servers, by workers, and damaged in every place."""

import json
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path

import numpy as np
import pytest
import zarr
from conversions import wait_for
from datasets import assert_threads_end
from folder_server import folder_server, location
from servers import S3Server
from torch.utils.data import DataLoader
from torchrun import run_python
from zarr_stores import STORES, anchors, samples_of, url_of, values_of

import streamloader as sl
from streamloader import errors
from streamloader.engine import fetcher as fetcher_module
from streamloader.engine.budget import Budget
from streamloader.engine.executor import Executor
from streamloader.engine.fetcher import Attempt, Fetcher
from streamloader.engine.memory import Memory
from streamloader.engine.pace import Hedging, Pace
from streamloader.loader.arguments import Source
from streamloader.loader.opening import open_dataset
from streamloader.order.schedule import BlockRef
from streamloader.stats import Counters
from streamloader.storage import open_store
from streamloader.storage.retry import Request

TIME = {"sample_axis": "time", "batch_size": 2}


def upload(server: S3Server, store: str) -> str:
    """Put a store into a bucket; return its URL."""
    url = server.url(store)
    bucket = open_store(url, server.storage_options)
    for path in (STORES / store).rglob("*"):
        if path.is_file():
            bucket.put(path.relative_to(STORES / store).as_posix(), path.read_bytes())
    return url


def copied(tmp_path: Path, store: str) -> Path:
    """A copy of a store, to damage."""
    return Path(shutil.copytree(STORES / store, tmp_path / store))


def edited(path: Path, change) -> None:
    """Change a JSON document."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.long
@pytest.mark.parametrize("store", ["xarray2_unconsolidated.zarr", "python3.zarr"])
def test_a_store_in_a_bucket_gives_the_same_values(store, s3):
    url = upload(s3, store)
    options = {**TIME, "windows": sl.Window(3), "with_index": True, "storage_options": s3.storage_options}
    dataset = sl.StreamingDataset(url, **options)
    found = samples_of(list(dataset))
    assert sorted(int(sample["index"]) for sample in found) == anchors(3, 1)
    for sample in found:
        first = int(sample["index"])
        np.testing.assert_allclose(sample["t2m"], values_of(store, "t2m")[first : first + 3], rtol=1e-6)
        np.testing.assert_array_equal(sample["z"], values_of(store, "z")[first : first + 3])
    assert dataset.stats().client.startswith("http: S3")


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_dataloader_workers_read_all_windows_once(method):
    dataset = sl.StreamingDataset(url_of("xarray3.zarr"), **TIME, windows=sl.Window(3), with_index=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = list(DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=method))
    assert sorted(int(sample["index"]) for sample in samples_of(batches)) == anchors(3, 1)


@pytest.mark.long
def test_an_icechunk_repository_is_read_by_workers_that_are_not_forked():
    dataset = sl.StreamingDataset(url_of("icechunk"), **TIME, with_index=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = list(DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn"))
    assert sorted(int(sample["index"]) for sample in samples_of(batches)) == list(range(23))


def test_a_repository_used_before_a_fork_is_an_error_and_no_hang():
    dataset = sl.StreamingDataset(url_of("icechunk"), **TIME)
    list(dataset)
    with warnings.catch_warnings(), pytest.raises(errors.UnsupportedError, match="forkserver or spawn"):
        warnings.simplefilter("ignore")
        list(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork"))


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"1234",
    "changed header": lambda data: bytes(8) + data[8:],
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(("store", "chunk"), [("xarray2.zarr", "z/1.0.0.0"), ("python3.zarr", "t2m/c/1/0/0")])
def test_a_damaged_chunk_is_an_error_that_names_it(store, chunk, damage, tmp_path):
    path = copied(tmp_path, store) / chunk
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(errors.CorruptError, match=rf"the chunk \[6:12, .*\] in .*{chunk}"):
        list(sl.StreamingDataset(tmp_path / store, **TIME))


PASSING = ["short", "flip", "damage", "zero", "empty", "gzip", "416", "204", "503"]


@pytest.mark.quick(3)
@pytest.mark.parametrize("fault", PASSING)
@pytest.mark.parametrize("plane", ["s3", "http", "fsspec"])
def test_metadata_that_were_damaged_once_on_their_way_are_read_again(plane, fault):
    with folder_server(STORES) as server:
        for store, path in [("xarray3.zarr", "/zarr.json"), ("xarray2.zarr", "/.zmetadata")]:
            url, options = location(server.url, plane, store)
            server.faults[path] = [fault]
            dataset = sl.StreamingDataset(url, **TIME, fields=["z"], storage_options=options)
            assert not server.faults[path]
            assert dataset.num_samples == 23


def test_a_chunk_that_is_read_to_know_whether_any_exists_is_asked_for_again(tmp_path):
    store = copied(tmp_path, "xarray3.zarr")
    shutil.rmtree(store / "z/c/0")
    retry = {"base_seconds": 0.01, "cap_seconds": 0.05}
    with folder_server(tmp_path) as server:
        server.faults["/z/c/1/"] = ["503"] * 9
        options = {"fields": ["z"], "shuffle": False, "storage_options": {"retry": retry}}
        dataset = sl.StreamingDataset(f"{server.url}/xarray3.zarr", **TIME | options)
        assert len(list(dataset)) == len(dataset)
        assert dataset.stats().missing_chunks


@pytest.mark.quick(1)
@pytest.mark.parametrize("field", ["z", "sharded"])
def test_a_pass_that_ends_while_it_is_unknown_whether_any_chunk_exists_leaves_no_thread(field, tmp_path):
    store = copied(tmp_path, "xarray3.zarr")
    values = np.arange(24, dtype="f4").reshape(24, 1)
    more = {"dimension_names": ("time", "x"), "fill_value": 0.0}
    zarr.create_array(store / "sharded", data=values, chunks=(1, 1), shards=(6, 1), **more)
    shutil.rmtree(store / field / "c" / "0")
    with folder_server(tmp_path) as server:
        retry = {"base_seconds": 0.01, "cap_seconds": 6000.0, "probe_seconds": 6000.0}
        options = {"fields": [field], "shuffle": False, "storage_options": {"retry": retry}}
        dataset = sl.StreamingDataset(f"{server.url}/xarray3.zarr", **TIME | options)
        server.faults |= {f"/{field}/c/{number}/": ["503"] * 10**6 for number in (1, 2, 3)}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(list, dataset)
            wait_for(lambda: sum(f"/{field}/c/1/" in path for path in server.paths) > 2)
            dataset.close()
            with pytest.raises(errors.StreamloaderError):
                waiting.result(60)
        assert_threads_end()


def test_valid_json_with_a_changed_shape_is_read_again():
    path = "xarray3.zarr/zarr.json"
    with folder_server(STORES) as server:
        document = (STORES / path).read_bytes()
        server.contents[path] = [document.replace(b"23", b"22", 1)]
        dataset = sl.StreamingDataset(f"{server.url}/xarray3.zarr", **TIME, windows=sl.Window(2))
        assert not server.contents[path]
        assert dataset.num_samples == len(anchors(2, 1))


@pytest.mark.parametrize("times", [1, 10**9])
def test_an_inner_chunk_of_a_shard_whose_index_was_read_is_not_missing(times):
    """A shard that does not exist is fill values; one that was there before is an error."""
    with folder_server(STORES) as server:
        options = {**TIME, "fields": ["z"], "with_index": True, "strict": False}
        dataset = sl.StreamingDataset(f"{server.url}/xarray3.zarr", **options)
        server.behave, server.times = "404", times  # not for indexes
        with nullcontext() if times == 1 else pytest.raises(errors.MissingObjectError, match="index of this shard"):
            for sample in samples_of(list(dataset)):
                np.testing.assert_array_equal(sample["z"], values_of("xarray3.zarr", "z")[int(sample["index"])])
        assert server.times < times


def test_a_flipped_bit_in_a_checked_chunk_or_index_is_an_error(tmp_path):
    path = copied(tmp_path, "xarray3.zarr") / "z" / "c" / "0" / "0" / "0" / "0"
    data = bytearray(path.read_bytes())
    for at in (len(data) - 20, len(data) - 2):  # the index and its checksum
        damaged = bytearray(data)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(errors.CorruptError, match=r"the index of .*z/c/0/0/0/0 is damaged: .*crc32c checksum"):
            list(sl.StreamingDataset(tmp_path / "xarray3.zarr", **TIME))


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda d: d["compressor"].update(id="jpegxl"), errors.FormatError, "has the codec 'jpegxl'"),
        (lambda d: d["compressor"].update(id="imagecodecs_jpeg2k"), errors.FormatError, "install imagecodecs"),
        (lambda d: d.update(filters=[{"id": "pickle"}]), errors.FormatError, "pickled objects, which are never read"),
        (lambda d: d.update(filters=5), errors.FormatError, "the filters of the array 't2m' are damaged: 5"),
        (lambda d: d.update(dtype="|O", filters=[{"id": []}]), errors.FormatError, r"values of '\|O'"),
        (lambda d: d.update(dtype="|O"), errors.FormatError, r"values of '\|O', and tensors hold numbers"),
        (lambda d: d.update(dtype="<c8"), errors.FormatError, "values of '<c8'"),
        (lambda d: d.update(chunks=[0, 1, 1]), errors.FormatError, "the metadata of the array 't2m' is damaged"),
        (lambda d: d.update(chunks=[6, 7]), errors.FormatError, "the metadata of the array 't2m' is damaged"),
        (lambda d: d.update(fill_value="x"), errors.FormatError, "has the fill value 'x' for int16"),
        (lambda d: d.update(shape=[22, 12, 20]), errors.FieldError, "different lengths along 'time': t2m 22, z 23"),
    ],
)
def test_bad_metadata_is_a_clear_error_before_data_is_read(change, kind, message, tmp_path):
    store = copied(tmp_path, "xarray2_unconsolidated.zarr")
    edited(store / "t2m" / ".zarray", change)
    with pytest.raises(kind, match=message):
        sl.StreamingDataset(store, **TIME, fields=["t2m", "z"])


def test_a_claim_of_too_many_chunks_is_an_error_and_takes_no_memory(tmp_path):
    store = copied(tmp_path, "xarray2_unconsolidated.zarr")
    claim = {"shape": [2**50, 4096], "chunks": [1, 4096], "dtype": "<f8"}
    edited(store / "t2m" / ".zarray", lambda document: document.update(claim))
    edited(store / "t2m" / ".zattrs", lambda attributes: attributes.update(_ARRAY_DIMENSIONS=["n", "m"]))
    with pytest.raises(errors.FormatError, match="boxes of chunks of 't2m' are more than"):
        sl.StreamingDataset(store, batch_size=2, sample_axis="n", fields=["t2m"])


def test_an_unknown_codec_of_version_3_is_named(tmp_path):
    store = copied(tmp_path, "python3.zarr")
    edited(store / "t2m" / "zarr.json", lambda d: d["codecs"].append({"name": "numcodecs.pcodec"}))
    with pytest.raises(errors.FormatError, match=r"the codec 'numcodecs.pcodec'.*install numcodecs\[pcodec\]"):
        sl.StreamingDataset(store, **TIME, fields=["t2m"])


def test_an_index_that_claims_a_large_chunk_is_an_error(tmp_path):
    array = zarr.create_array(
        tmp_path / "x.zarr", shape=(4, 8), chunks=(2, 8), shards=(4, 8), dtype="f4", dimension_names=["t", "k"]
    )
    array[...] = 1
    document = tmp_path / "x.zarr" / "zarr.json"
    index = [{"name": "bytes", "configuration": {"endian": "little"}}]
    edited(document, lambda d: d["codecs"][0]["configuration"].update(index_codecs=index))
    shard = tmp_path / "x.zarr" / "c" / "0" / "0"
    entries = np.array([[0, 64 << 20], [2**64 - 1, 2**64 - 1]], "<u8")
    shard.write_bytes(bytes(64 << 20) + entries.tobytes())
    with pytest.raises(errors.CorruptError, match="is damaged: a chunk of 67108864 bytes is larger"):
        list(sl.StreamingDataset(tmp_path / "x.zarr", batch_size=2, sample_axis="t"))


@pytest.mark.parametrize("damage", [5, "x", [], [1], {"t2m": 5}, {"t2m/.zarray": "x"}])
@pytest.mark.parametrize(("store", "name"), [("xarray2.zarr", ".zmetadata"), ("xarray3.zarr", "zarr.json")])
def test_damaged_consolidated_metadata_is_an_error_that_names_its_document(store, name, damage, tmp_path):
    path = copied(tmp_path, store) / name
    edited(path, lambda document: document.get("consolidated_metadata", document).update(metadata=damage))
    with pytest.raises(errors.FormatError, match=f"{store}/{name} is damaged; consolidate the metadata again"):
        sl.StreamingDataset(path.parent, **TIME)


def test_an_unknown_encoding_of_the_keys_of_chunks_is_an_error_and_no_chunk_is_missing(tmp_path):
    store = copied(tmp_path, "python3.zarr")
    edited(store / "t2m" / "zarr.json", lambda d: d.update(chunk_key_encoding={"name": "fanout"}))
    with pytest.raises(errors.FormatError, match="the array 't2m' has the chunk key encoding 'fanout'"):
        list(sl.StreamingDataset(store, **TIME, fields=["t2m"], strict=False))


@pytest.mark.parametrize("times", [[0, 6, 12, 6, 18], [0, 0, 6, 12, 18]])
def test_times_that_are_not_monotonic_are_an_error(times, tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("time", data=np.array(times), dimension_names=["time"])
    group.create_array("a", data=np.zeros(5), dimension_names=["time"])
    with pytest.raises(errors.UsageError, match=r"'time' .* is not monotonic: elements . and . are"):
        sl.StreamingDataset(tmp_path / "x.zarr", batch_size=1, sample_axis="time", windows=sl.Window(2))
    assert len(list(sl.StreamingDataset(tmp_path / "x.zarr", batch_size=1, sample_axis="time", strict=False))) == 5


def test_times_that_descend_are_in_order(tmp_path):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("time", data=np.arange(20, 0, -1), dimension_names=["time"])
    group.create_array("a", data=np.arange(20.0), dimension_names=["time"])
    windows = sl.Window(2)
    assert sl.StreamingDataset(tmp_path / "x.zarr", batch_size=1, sample_axis="time", windows=windows).num_samples == 19


@pytest.mark.long
@pytest.mark.parametrize("steps", [8, 1])
def test_memory_holds_for_regions(tmp_path, steps):
    group = zarr.open_group(tmp_path / "x.zarr", mode="w")
    shape = (1024, 256, 256)  # 256 MiB each: more than memory= and what a process may take beside it
    for name in ("a", "b"):
        array = group.create_array(
            name, shape=shape, chunks=(steps, *shape[1:]), dtype="f4", dimension_names=["time", "y", "x"]
        )
        array[:] = np.broadcast_to(np.arange(1024, dtype="f4")[:, None, None], shape)
    script = """
import resource, sys, torch, streamloader as sl
whole = sys.argv[3] == "1"  # samples are chunks
options = dict(batch_size=16 if whole else 4, sample_axis="time", windows=None if whole else sl.Window(4))
dataset = sl.StreamingDataset(sys.argv[1], **options, memory=int(sys.argv[2]), shuffle=sl.Shuffle(lanes=1, window=64))
def peak():
    return int([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1]) << 10
before = peak()
for _ in range(2):
    for batch in dataset:
        pass
print(peak() - before)
"""
    memory = 150 << 20
    assert int(run_python("-c", script, tmp_path / "x.zarr", memory, steps).stdout) < memory + (60 << 20)


@pytest.mark.quick(1)
@pytest.mark.parametrize("more", [0, 2, 16, 64])
def test_any_memory_that_is_enough_at_first_is_enough_later(more, tmp_path):
    """Samples are chunks; from some size on all blocks are kept."""
    shape = (64, 512, 1024)
    zarr.create_array(
        tmp_path / "a", shape=shape, chunks=(1, 512, 1024), dtype="f4", dimension_names=["time", "y", "x"]
    )
    options = {"batch_size": 32, "sample_axis": "time", "strict": False}  # no chunk is stored
    with pytest.raises(errors.MemoryBudgetError) as needed:
        iter(sl.StreamingDataset(tmp_path / "a", memory=10 << 20, **options))
    least = int(str(needed.value).split("needs memory=")[1].split()[0])
    dataset = sl.StreamingDataset(tmp_path / "a", memory=least + (more << 20), **options)
    for _ in range(2):
        assert sum(len(batch["a"]) for batch in dataset) == 64


def test_a_changed_declaration_does_not_load_a_state():
    options = {**TIME, "windows": sl.Window(3)}
    dataset = sl.StreamingDataset(url_of("xarray3.zarr"), **options)
    next(iter(dataset))
    state = dataset.state_dict()
    sl.StreamingDataset(url_of("xarray3.zarr"), **options).load_state_dict(state)
    for change in ({"windows": sl.Window(4)}, {"fields": ["z"]}, {"decode_cf": False}, {"where": slice(0, 20)}):
        with pytest.raises(errors.StateError):
            sl.StreamingDataset(url_of("xarray3.zarr"), **(options | change)).load_state_dict(state)


def test_a_late_request_of_a_complete_block_opens_no_regions_in_its_slot(monkeypatch):
    """Its slot may belong to another block by then, which would get the regions of this one."""
    dataset = open_dataset(Source(url_of("xarray3.zarr"), sample_axis="time"))
    budget, executor = Budget(slots=1, threads=2, bytes=1 << 30, body_bytes=1 << 30), Executor()
    memory = Memory(dataset.region_readers, 4, budget, Counters(), executor.arena)
    fetch, begun, resume = fetcher_module.fetch_body, threading.Event(), threading.Event()

    def fetch_late(*args):
        begun.set()
        assert resume.wait(300)
        return fetch(*args)

    monkeypatch.setattr(fetcher_module, "fetch_body", fetch_late)
    with closing(Fetcher([dataset], dataset.names, (Pace(2), Hedging()), memory, executor)) as fetcher:
        fetcher.load(BlockRef(0, 0, 4))
        assert begun.wait(300)
        with fetcher._changed:
            late = Attempt(next(iter(fetcher._pieces)), 1, Request(0.0, 0.0))
            late.piece.requests.add(1)
            fetcher._busy += 1
        resume.set()
        assert fetcher.wait(0) is None
        fetcher.release(0)
        memory.reserve(BlockRef(1, 4, 8))
        slot = memory.claim(1)
        late.memory[:] = [memoryview(bytearray(1 << 20))]
        fetcher._received(late, (1 << 20, 1.0, False), None)
        assert all(regions._blocks[slot] is None for regions in memory.residences.values())
