"""What comes out of `StreamingDataset`: every sample once, with its exact content, in the planned order."""

import json
import re
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from inspect import signature
from typing import Any

import datasets
import numpy as np
import pytest
import reference_order as golden_orders
import torch
from amounts import covering
from conversions import wait_for
from datasets import assert_threads_end, before_error, least_memory, numbers, our_threads, planned, seen, take
from leaks import uncollected
from torch.utils.data import DataLoader
from transform_tasks import slow

from streamloader.engine.engine import Pipeline
from streamloader.engine.residence import Chunks
from streamloader.engine.stages import Batch
from streamloader.errors import (
    BatchError,
    DecodeError,
    EngineError,
    FieldError,
    MissingObjectError,
    StreamloaderError,
    TransformError,
    UsageError,
    WorldError,
)
from streamloader.errors import MemoryBudgetError as TooLittle
from streamloader.format.reader import FieldReader
from streamloader.options import Layout, Shuffle
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.pytorch.dataset import Mixture, StreamingDataset

N = 603
GOLDEN = json.loads(golden_orders.ORDERS.read_text(encoding="utf-8"))["orders"]


@pytest.fixture(scope="module")
def url(data: Any) -> str:
    """A dataset of N samples with every kind of field."""
    return data(N)


@pytest.mark.long
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_comes_once_with_exact_content_in_the_planned_order(url, shuffle):
    ds = StreamingDataset(url, batch_size=32, shuffle=shuffle, seed=5, with_index=True)
    for epoch in range(4):  # from the third on, a pass begins while the one before it drains
        assert ds.epoch == epoch
        batches = list(ds)
        assert len(batches) == len(ds) == 19
        for batch in batches:
            datasets.check_batch(batch, datasets.FIELDS)
            assert len(batch["index"]) == 32
        assert sorted(seen(batches)) == list(range(N))
        assert seen(batches) == planned(ds, shuffle, 5, epoch)
        assert batches[-1]["valid"].sum() == N % 32
    ds.close()
    assert_threads_end()


@pytest.mark.long
def test_a_single_pass_ends_its_threads_and_fetches_nothing_of_the_next(url):
    ds = StreamingDataset(url, batch_size=32)
    list(ds)
    once = ds.stats().requests
    assert_threads_end()
    assert ds.stats().requests == once


@pytest.mark.long
def test_from_the_second_pass_on_the_next_one_is_loaded_ahead_and_dropped_if_another_is_chosen(url):
    ds = StreamingDataset(url, batch_size=32, seed=5, with_index=True)
    list(ds)
    once = ds.stats().requests
    list(ds)
    deadline = time.monotonic() + 300
    while ds.stats().requests <= 2 * once:  # nobody has asked for the third pass yet
        assert time.monotonic() < deadline
    ds.set_epoch(7)
    for epoch in (7, 8, 9):
        assert seen(ds) == planned(ds, True, 5, epoch)
    (begin,) = take(iter(ds), 1)
    state = ds.state_dict()
    ds.load_state_dict(state)
    assert begin + seen(ds) == planned(ds, True, 5, 10)
    ds.close()
    assert_threads_end()


def test_columns_come_in_the_order_that_was_asked_for(url):
    wanted = ["tok", "x", "label", "name"]
    ds = StreamingDataset(url, batch_size=8, fields=wanted, remainder="drop")
    assert list(next(iter(ds))) == ["tok", "tok_offsets", "x", "label", "name"]
    assert list(ds.fields) == wanted
    assert list(StreamingDataset(url, batch_size=8).fields) == sorted(datasets.FIELDS)


def test_only_the_fields_that_are_asked_for_are_fetched(url):
    fetched = {}
    for fields in (["label"], ["x"], ["x", "wide"], []):
        ds = StreamingDataset(url, batch_size=32, fields=fields)
        rows = sum(len(batch["valid"]) for batch in ds)
        assert rows == 19 * 32
        fetched[tuple(fields)] = ds.stats().bytes_fetched
    assert fetched[()] == 0
    assert 8 * N <= fetched[("label",)] <= 8 * 1024 + 64
    most = N + 7 * 4 + 1  # a chunk that two of the 8 lanes share is fetched by both; the last one is padded
    assert 1200 * N <= fetched[("x",)] <= 1204 * most
    assert 2400 * N <= fetched[("x", "wide")] <= 2408 * most


@pytest.mark.quick(11)
@pytest.mark.parametrize("remainder", ["pad", "drop", "uneven"])
@pytest.mark.parametrize(
    ("num_samples", "size", "batch"), [(0, 1, 4), (1, 1, 1), (5, 1, 64), (3, 2, 32), (5, 4, 5), (21, 2, 4), (7, 3, 4)]
)
def test_datasets_smaller_than_a_step_come_out_whole(tmp_path, num_samples, size, batch, remainder):
    fields = ["x", "label", "name", "tok"]
    datasets.write(tmp_path, num_samples, fields)
    found, lengths = [], []
    for rank in range(size):
        ds = StreamingDataset(tmp_path, batch_size=batch, remainder=remainder, world=(rank, size), with_index=True)
        if remainder == "drop" and 0 < num_samples < size * batch:
            problem = f"take {size * batch} samples per step, the dataset has {num_samples}"
            with pytest.raises(BatchError, match=problem):
                iter(ds)
            return
        batches = list(ds)
        assert len(batches) == len(ds)
        for one in batches:
            datasets.check_batch(one, fields)
            assert remainder == "uneven" or len(one["x"]) == batch
        found += seen(batches)
        lengths.append(len(batches))
    step = size * batch
    full = num_samples // step
    assert len(found) == len(set(found)) == (full * step if remainder == "drop" else num_samples)
    if remainder != "uneven":
        assert set(lengths) == {full + (remainder == "pad" and num_samples % step > 0)}


@pytest.mark.quick(8)
@pytest.mark.parametrize("golden", [g for g in GOLDEN if g.get("samples")], ids=lambda golden: golden["name"])
def test_the_pinned_orders_are_what_is_delivered(tmp_path, golden):
    count = golden["num_samples"]
    datasets.write(tmp_path, count, ["label", "x"], Layout(chunk_size=1, shard_size=1 << 14, codec="none"))
    shuffle: Any = Shuffle(block=golden["block"], lanes=golden["lanes"], window=golden["window"])
    ds = StreamingDataset(
        tmp_path,
        batch_size=min(count, 7),
        shuffle=shuffle if golden["shuffle"] else False,
        seed=golden["seed"],
        with_index=True,
    )
    ds.set_epoch(golden["epoch"])
    batches = list(ds)
    for batch in batches:
        datasets.check_batch(batch, ["label", "x"])
    assert seen(batches) == golden["samples"]


def test_shuffle_overrides_the_order_of_the_manifest_and_refuses_an_impossible_one(url):
    shuffle = Shuffle(block=16, lanes=4, window=48)
    ds = StreamingDataset(url, batch_size=16, fields=["x"], shuffle=shuffle, with_index=True)
    order = EpochOrder(N, OrderParams(16, 4, 48), 0, 0)
    assert seen(ds) == order.samples_at(0, N).tolist()
    with pytest.raises(UsageError, match=r"Shuffle\(block=6\) cuts chunks of 8 samples; give a multiple of 8"):
        StreamingDataset(url, batch_size=16, shuffle=Shuffle(block=6))
    with pytest.raises(UsageError, match="window=20 with block=8 is not a whole number of blocks"):
        StreamingDataset(url, batch_size=16, shuffle=Shuffle(window=20))


def test_samples_come_singly_for_a_dataloader_that_batches(url):
    fields = ["x", "label", "name", "tok"]
    ds = StreamingDataset(url, batch_size=None, fields=fields, with_index=True, remainder="uneven")
    assert len(ds) == N
    samples = list(ds)
    assert seen(samples) == planned(ds)
    for sample in samples[:70]:
        i = sample["index"].item()
        datasets.equal(sample["x"], datasets.value("x", i))
        datasets.equal(sample["tok"], datasets.value("tok", i))
        assert sample["label"].item() == datasets.value("label", i)
        assert sample["name"] == datasets.value("name", i)
    ds = StreamingDataset(url, batch_size=None, fields=["x", "label", "name"], with_index=True)
    batches = list(DataLoader(ds, batch_size=64))
    for batch in batches:
        datasets.check_batch(batch, ["x", "label", "name"])
    assert seen(batches) == planned(ds)


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"batch_size": 4, "num_workers": 1}])
def test_a_dataloader_that_would_batch_batches_is_refused(url, options):
    workers = {"multiprocessing_context": "fork"} if "num_workers" in options else {}
    loader = DataLoader(StreamingDataset(url, batch_size=16, fields=["label"]), **options, **workers)
    with pytest.raises(UsageError, match=r"batches of 16 samples already; use DataLoader\(dataset, batch_size=None"):
        next(iter(loader))


@pytest.mark.long
def test_a_dataloader_may_take_batches_with_a_collate_function_of_the_user(url):
    ds = StreamingDataset(url, batch_size=16, fields=["label"])
    (batch, *_) = DataLoader(ds, collate_fn=lambda batches: batches[0])
    assert batch["label"].shape == (16,)
    assert len(next(iter(DataLoader(ds, batch_size=2, collate_fn=list)))) == 2


class Rebatched(torch.utils.data.IterableDataset[Any]):
    """Samples that a user takes out of batches."""

    def __init__(self, batches: StreamingDataset) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        for batch in self.batches:
            yield from batch["label"]


@pytest.mark.long
def test_a_dataset_of_the_user_around_ours_may_be_batched(url):
    ds = StreamingDataset(url, batch_size=16, fields=["label"], remainder="uneven")
    assert sum(len(batch) for batch in DataLoader(Rebatched(ds), batch_size=10)) == N


def test_indexing_is_an_error_that_names_open(url):
    with pytest.raises(UsageError, match=r"a StreamingDataset has no random access.*sl.open\(url, split=...\)\[i\]"):
        StreamingDataset(url, batch_size=16)[0]


@pytest.mark.long
def test_batches_that_the_consumer_keeps_are_not_written_again(url):
    ds = StreamingDataset(url, batch_size=16, with_index=True)
    kept = []
    for _ in range(2):
        for batch in ds:
            kept.append({"x": batch["x"], "label": batch["label"].view(-1), "index": batch["index"]})
            kept[-1]["wide"] = batch["wide"][2:3]  # a view alone must keep the batch's memory
            if len(kept) > 20:
                kept.pop(0)
    for batch in kept:
        datasets.check_batch(batch, ["x", "label"])
        datasets.equal(batch["wide"][0], datasets.value("wide", batch["index"][2].item()))


@pytest.mark.long
def test_dropped_batches_are_used_again(url):
    ds = StreamingDataset(url, batch_size=4, fields=["x", "wide", "label"])
    for _ in range(4):
        before = ds.stats().buffers_allocated
        assert sum(1 for _ in ds) == 151
        # a pass has one batch handed out, three ready and one in the making, of three fields each
        assert ds.stats().buffers_allocated - before <= 3 * 6
    np_view = next(iter(ds))["x"].numpy()  # memory that is still seen is not recycled
    copy = np_view.copy()
    for _ in ds:
        pass
    assert np.array_equal(np_view, copy)


def test_the_world_comes_from_the_environment_unless_it_is_given(url, monkeypatch):
    ds = StreamingDataset(url, batch_size=8, fields=[], with_index=True)
    given = StreamingDataset(url, batch_size=8, fields=[], with_index=True, world=(0, 4))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(ds) == 38
    assert seen(ds) == planned(ds)[1::2]
    assert seen(given) == planned(ds)[0::4]
    monkeypatch.setenv("RANK", "")
    with pytest.raises(WorldError, match="'' is not a rank"):
        iter(ds)
    monkeypatch.delenv("RANK")
    with pytest.raises(WorldError, match="RANK=None and WORLD_SIZE=2"):
        len(ds)


@pytest.mark.quick(9)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 11])
def test_ranks_share_every_global_batch(url, size, shuffle, recwarn):
    ranks = [
        StreamingDataset(url, batch_size=12, fields=["label"], with_index=True, world=(r, size), shuffle=shuffle)
        for r in range(size)
    ]
    one = ranks[0].state_dict()["order"]
    order = EpochOrder(N, OrderParams(**one), 0, 0, shuffle).samples_at(0, N).tolist()
    assert size > 8 or order == planned(ranks[0], shuffle)
    step = 12 * size
    steps = [list(ds) for ds in ranks]
    assert {len(batches) for batches in steps} == {-(-N // step)}
    for k, parts in enumerate(zip(*steps, strict=True)):
        assert sorted(seen(parts)) == sorted(order[k * step : (k + 1) * step])
    warned = [str(warning.message) for warning in recwarn]
    assert bool(warned) == (shuffle and size in (3, 11))
    assert all(f"{size} consumers" in text or f"{size} ranks are more than" in text for text in warned)
    assert not warned or size == 3 or any("set shuffle=Shuffle(lanes=16)" in text for text in warned)
    assert {warning.filename for warning in recwarn} <= {__file__}, "warnings name the line of the loop"


@pytest.mark.parametrize("kind", [StreamingDataset, Mixture])
@pytest.mark.parametrize(
    ("name", "ours"),
    [
        *(("drop_last", "remainder='drop'"), ("transform_workers", "num_workers="), ("collate_fn", "transform=")),
        *(("sampler", "where="), ("pin_memory", "device="), ("prefetch_factor", "memory=")),
    ],
)
def test_an_argument_of_other_loaders_is_a_type_error_that_names_ours(url, kind, name, ours):
    with pytest.raises(
        TypeError, match=re.escape(f"{kind.__name__}() got an unexpected keyword argument {name!r}: use")
    ) as error:
        kind(url, batch_size=8, **{name: None})
    assert ours in str(error.value)
    similar = re.escape(f"{kind.__name__}() got an unexpected keyword argument 'shufle': did you mean 'shuffle'?")
    with pytest.raises(TypeError, match=similar):
        kind(url, batch_size=8, shufle=True)


@pytest.mark.parametrize("kind", [StreamingDataset, Mixture])
def test_no_argument_that_a_class_has_is_said_to_be_elsewhere(kind):
    given = dict.fromkeys(signature(kind).parameters)
    assert len(given) > 20
    assert isinstance(kind.__new__(kind, **given), kind)


@pytest.mark.parametrize(("name", "ours"), [("split", "Source(url, split=)"), ("weights", "Mixture({a: 0.7, b: 0.3})")])
def test_an_argument_of_a_dataset_is_a_type_error_of_a_mixture_that_names_the_source(url, name, ours):
    with pytest.raises(
        TypeError, match=re.escape(f"Mixture() got an unexpected keyword argument {name!r}: use {ours}")
    ):
        Mixture({url: 1}, batch_size=8, **{name: None})


BAD_ARGUMENTS: list[tuple[dict[str, Any], type[StreamloaderError], str]] = [
    ({"batch_size": 0}, BatchError, "batch_size=0"),
    ({"batch_size": -3}, BatchError, "batch_size=-3"),
    ({"batch_size": True}, BatchError, "batch_size=True"),
    ({"batch_size": 2.0}, BatchError, "batch_size=2.0"),
    ({"fields": ["x", "nope"]}, FieldError, "there is no field 'nope'; choose from"),
    ({"fields": "x"}, FieldError, r"give a list: fields=\['x'\]"),
    ({"fields": ["x", "x"]}, FieldError, "'x'"),
    ({"remainder": "keep"}, UsageError, "remainder='keep'; choose one of pad, drop, uneven"),
    ({"seed": -1}, UsageError, "seed=-1; give a whole number"),
    ({"seed": 2**64}, UsageError, "seed=18446744073709551616 is not in"),
    ({"transform": 3}, UsageError, "transform=3 cannot be called"),
    ({"on_batch": "print"}, UsageError, "cannot be called"),
    ({"num_workers": "many"}, UsageError, "num_workers='many'"),
    ({"num_workers": -1}, UsageError, "num_workers=-1"),
    ({"memory": 0}, UsageError, "memory=0 is not a size; write it like 64MiB"),
    ({"memory": "2 potatoes"}, UsageError, "memory='2 potatoes' is not a size"),
    ({"memory": [1]}, UsageError, r"memory=\[1\] is not a size"),
    ({"shuffle": 1000}, UsageError, r"shuffle=1000 is neither .*; give True, False, or Shuffle\(window=1000\)"),
    ({"shuffle": 1}, UsageError, r"shuffle=1 is neither .*; give True, False, or Shuffle\(window=, lanes=, block=\)"),
    ({"shuffle": "yes"}, UsageError, "shuffle='yes' is neither"),
    ({"decode": True}, FieldError, "no field holds encoded images"),
    ({"decode": {"label": True}}, FieldError, "decode names 'label'"),
    ({"decode": 3}, UsageError, "3"),
    ({"decode": ["image"]}, UsageError, "image"),
    ({"decode": {"nope": True}}, FieldError, "decode names 'nope'"),
    ({"split": "val"}, FieldError, "val"),
    ({"world": (2, 2), "url": "nothing"}, WorldError, "rank 2 is invalid for world size 2"),  # before anything is read
    ({"world": (0,)}, WorldError, r"world=\(0,\)"),
    ({"world": "01x"}, WorldError, "world='01x'"),
    ({"world": ("a", 2)}, WorldError, "'a' is not a rank or world size"),
    ({"world": 3}, WorldError, "world=3"),
]


@pytest.mark.parametrize(("arguments", "kind", "shown"), BAD_ARGUMENTS, ids=lambda case: str(case)[:30])
def test_wrong_arguments_are_errors_of_the_constructor(url, arguments, kind, shown):
    with pytest.raises(kind, match=shown) as caught:
        StreamingDataset(**{"url": url, "batch_size": 8, **arguments})
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("epoch", [-1, 1.5, True, "1"])
def test_an_invalid_epoch_is_an_error(url, epoch):
    with pytest.raises(UsageError, match="set_epoch"):
        StreamingDataset(url, batch_size=8).set_epoch(epoch)


def test_a_column_is_never_silently_replaced_by_a_field(tmp_path):
    from streamloader.format.writer import Writer

    with Writer(tmp_path, {"valid": "bool", "index": "int64"}) as out:
        out.write({"valid": True, "index": 7})
    with pytest.raises(FieldError, match="'valid'"):
        StreamingDataset(tmp_path, batch_size=1)
    with pytest.raises(FieldError, match="'index'"):
        StreamingDataset(tmp_path, batch_size=1, remainder="drop", with_index=True)
    (batch,) = StreamingDataset(tmp_path, batch_size=1, remainder="drop")
    assert batch["index"].item() == 7


def test_too_little_memory_names_the_need_and_that_much_is_enough(url):
    need = least_memory(url, batch_size=32)
    for less in (need - 1, "1KiB"):
        with pytest.raises(TooLittle, match=f"but memory={1024 if less == '1KiB' else less};"):
            iter(StreamingDataset(url, batch_size=32, memory=less))
    for remainder in ("pad", "drop", "uneven"):
        found = seen(StreamingDataset(url, batch_size=32, memory=need, with_index=True, remainder=remainder))
        assert len(found) == len(set(found)) == (N - N % 32 if remainder == "drop" else N)


def test_small_batches_are_gathered_together_if_memory_suffices(url):
    def steps_at_once(**options: Any) -> int:
        ds = StreamingDataset(url, batch_size=4, fields=["x"], **options)
        iterator = iter(ds)
        assert next(iterator)["x"].untyped_storage().nbytes() == 4 * 1200  # not that of all batches
        *_, steps = ds._engine()._upcoming
        ds.close()
        assert not iterator._waiting  # a pass that is closed keeps no batches
        return steps

    assert steps_at_once() > steps_at_once(memory=least_memory(url, batch_size=4, fields=["x"])) == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize(("batch_size", "before"), [(4, 28), (None, 30)])
def test_a_group_that_fails_leaves_nothing_behind(tmp_path, monkeypatch, batch_size, before):
    """The steps before the one with the error come, and the memory of the pass is freed without a collection."""
    datasets.write(tmp_path / "d", 256, ["x", "name"])
    ds = StreamingDataset(tmp_path / "d", batch_size=batch_size, shuffle=False, with_index=True)

    gather = Chunks.gather

    def fails(chunks: Any, places: Any, plan: Any, *args: Any) -> Any:
        if 30 in plan.samples:
            raise DecodeError("sample 30 is bad", "repair it")
        return gather(chunks, places, plan, *args)

    monkeypatch.setattr(Chunks, "gather", fails)
    with uncollected():
        iterator, found = iter(ds), []
        arena = weakref.ref(ds._engine().core.memory)
        with suppress(DecodeError):
            for batch in iterator:
                found += numbers(batch)
        del iterator, batch
        ds.close()
        assert_threads_end()
        assert found == list(range(before))
        assert arena() is None


@pytest.mark.quick(1)
@pytest.mark.parametrize("spec", ["uint8[16384]", "bytes"])
def test_chunks_between_selected_ones_are_not_kept_in_memory(tmp_path, spec):
    """Every eighth chunk is selected whole; requests read the chunks between them, too."""
    from streamloader.format.writer import Writer

    layout = Layout(shard_size=1 << 23, block_size=1 << 19, chunk_size=1 << 16, codec="none")
    rows = (np.arange(4096) % 251).astype(np.uint8).repeat(16384).reshape(4096, -1)
    with Writer(tmp_path / "d", {"x": spec}, layout=layout) as out:
        out.write_batch({"x": list(map(bytes, rows)) if spec == "bytes" else rows})
    chosen = (np.arange(4096) // 4) % 8 == 0
    options: dict[str, Any] = {"where": chosen, "shuffle": Shuffle(block=64, window=256, lanes=1), "with_index": True}
    ds = StreamingDataset(tmp_path / "d", batch_size=32, **options)
    for batch in ds:
        assert [row[0] for row in batch["x"]] == [i % 251 for i in batch["index"].tolist()]
        # 8 MiB are selected; a request reads 1 MiB at most
        assert ds._engine().core.memory.bodies.used < 24 << 20


# steps that are gathered together, and one that needs more blocks than are requested ahead
@pytest.mark.quick(1)
@pytest.mark.parametrize(("batch_size", "number"), [(1, 1), (16, 4), (64, 4), (512, 0)])
def test_a_missing_shard_is_named_after_the_batches_before_it(tmp_path, batch_size, number):
    datasets.write(tmp_path / "d", 512, ["x"])
    shards = sorted(path for path in (tmp_path / "d").rglob("*") if path.is_file() and path.parent.parent.name == "c")
    gone = shards[number]
    gone.unlink()
    ds = StreamingDataset(tmp_path / "d", batch_size=batch_size, shuffle=False, with_index=True)
    iterator = iter(ds)
    found, error = before_error(iterator, MissingObjectError, "is missing, but the manifest lists it")
    assert found == list(range(64 * number))  # 64 samples a shard
    assert str(gone.relative_to(tmp_path / "d")) in str(error)
    with pytest.raises(EngineError, match="ended with an error"):
        list(iterator)
    assert ds.epoch == 0
    assert_threads_end()


@pytest.mark.long
def test_dropping_an_iterator_ends_its_threads(url):
    for steps in (0, 1, 5):
        iterator = iter(StreamingDataset(url, batch_size=8))
        for _ in range(steps):
            next(iterator)
        assert our_threads()
        del iterator
        assert_threads_end()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("how", "waits_for", "steps"), covering(["close", "iter", "load_state_dict"], ["transform", "fetch"], [None, 50])
)
def test_a_waiting_loop_gets_an_error_when_its_pass_is_ended(url, monkeypatch, waits_for, how, steps):
    go, waiting = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        assert go.wait(300)

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if waits_for == "transform":
            wait()
        return sample

    plain = FieldReader.fetch

    def fetch(*arguments: Any) -> memoryview:
        if waits_for == "fetch":
            wait()
        return plain(*arguments)

    monkeypatch.setattr(FieldReader, "fetch", fetch)
    ds = StreamingDataset(url, batch_size=16, fields=["x"], transform=transform, steps_per_epoch=steps)
    state, ends = ds.state_dict(), []  # type: ignore[var-annotated]

    def loop(iterator: Any) -> None:
        for _ in range(2):  # it stays an error: another thread may wait for the same iterator
            with pytest.raises(EngineError, match="this pass was ended by a later iter"):
                take(iterator)
        ends.append(True)

    thread = threading.Thread(target=loop, args=(iter(ds),))
    thread.start()
    assert waiting.wait(300)
    time.sleep(0.1)
    begin = time.monotonic()
    {"close": ds.close, "iter": lambda: iter(ds), "load_state_dict": lambda: ds.load_state_dict(state)}[how]()
    thread.join(300)
    seconds = time.monotonic() - begin
    go.set()
    assert not thread.is_alive()
    assert ends
    assert len(list(ds)) == len(ds)
    ds.close()
    assert seconds < 60  # within a second, on a machine that is not busy
    assert_threads_end()


@pytest.mark.long
def test_a_pass_that_is_ended_is_not_said_to_have_lost_its_transform_process(url):
    ds = StreamingDataset(url, batch_size=16, transform=slow, num_workers=1)
    with ThreadPoolExecutor(1) as pool:
        loop = pool.submit(list, ds)
        wait_for(lambda: ds.state_dict()["position"])
        ds.close()
        with pytest.raises(EngineError, match="this pass was ended by a later iter"):
            loop.result(300)


@pytest.mark.parametrize("batch_size", [8, None])
def test_threads_that_share_a_pass_get_each_item_once_and_all_come_to_its_end(url, batch_size):
    ds = StreamingDataset(url, batch_size=batch_size, fields=["label"], with_index=True, remainder="uneven")
    iterator, found = iter(ds), []
    threads = [threading.Thread(target=lambda: found.extend(seen(iterator))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert sorted(found) == list(range(N))
    assert ds.state_dict()["epoch"] == 1


def test_no_thread_takes_an_error_for_the_end_of_the_epoch(url):
    ds = StreamingDataset(url, batch_size=16, transform=lambda sample: sample["missing"])
    iterator, errors = iter(ds), []

    def loop() -> None:
        try:
            list(iterator)
        except StreamloaderError as error:
            errors.append(type(error))

    threads = [threading.Thread(target=loop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sorted(errors, key=str) == [EngineError] * 3 + [TransformError]


def test_an_interrupted_wait_loses_no_batch(url, monkeypatch):
    ds = StreamingDataset(url, batch_size=16, fields=["label"], transform=dict, with_index=True, shuffle=False)
    iterator, found, calls, finish = iter(ds), [], iter(range(10**6)), Pipeline._finish

    def interrupted(pipeline: Pipeline, batch: Batch) -> None:
        if next(calls) % 5 == 2:
            raise KeyboardInterrupt
        finish(pipeline, batch)

    monkeypatch.setattr(Pipeline, "_finish", interrupted)
    while len(found) < N:
        with suppress(KeyboardInterrupt):
            found += numbers(next(iterator))
    assert found == list(range(N))


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch_size", [16, None])
def test_a_pass_is_complete_with_its_last_batch_without_another_next(data, batch_size):
    ds = StreamingDataset(data(100, "label"), batch_size=batch_size, with_index=True)
    for epoch in range(4):
        iterator = iter(ds)
        for step in range(len(ds)):
            assert ds.epoch == epoch
            assert next(iterator)["index"].reshape(-1).equal(ds.samples(epoch, step))
        state = ds.state_dict()
        assert (ds.epoch, state["epoch"], state["position"]) == (epoch + 1, epoch + 1, 0)
        assert state == ds.state_dict(batches=len(ds))
        assert list(iterator) == list(iterator) == []
    assert ds._engine().core.passes >= 2  # and it went on with what was loaded ahead


def test_stats_say_what_was_done(url):
    ds = StreamingDataset(url, batch_size=32, fields=["x"])
    assert ds.stats().batches == 0
    assert ds.stats().verdict == "no batch yet"
    for _ in ds:
        pass
    stats = ds.stats()
    assert (stats.batches, stats.samples) == (19, 19 * 32)
    assert stats.requests >= 10
    assert stats.retries == 0
    assert stats.bytes_decoded >= 1200 * N
    assert 0 < stats.wait_seconds <= stats.seconds < 60
    assert 0 < stats.first_batch_seconds < stats.wait_seconds
    assert min(stats.request_seconds, stats.unpack_seconds, stats.cpu_seconds, stats.cores) > 0
    assert stats.client.startswith("file: ")
    assert "bound" in str(stats)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", [StreamingDataset, Mixture])
@pytest.mark.parametrize("lanes", [2, 4])
def test_rank_0_alone_warns_that_blocks_are_read_again_with_values_that_end_it(url, kind, lanes, recwarn):
    def warned(size: int, **options: Any) -> list[str]:
        recwarn.clear()
        for rank in range(size):
            source = url if kind is StreamingDataset else {url: 1}
            next(iter(kind(source, batch_size=8, fields=["label"], world=(rank, size), **options)))
        return [str(warning.message) for warning in recwarn]

    (text,) = warned(3, shuffle=Shuffle(lanes=lanes))
    begun, other = re.search(r"begin a run with (.*), or use (\d+)", text).groups()
    assert not warned(3, **eval(f"dict({begun})", {"Shuffle": Shuffle}))
    assert not warned(int(other), shuffle=Shuffle(lanes=lanes))
