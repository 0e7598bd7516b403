"""Blocks that are kept in memory: what is dropped first, when they are read next, and that they are not read again."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from amounts import covering, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_memory import BLOCK, arena_items, memory_of
from test_engine_workers import digest
from test_schedule import runs

import streamloader as sl
from streamloader.engine import engine
from streamloader.engine.budget import KEPT_THREADS, MAX_THREADS, Budget, Demand, allot
from streamloader.engine.kept import NO_SLOT, KeptBlocks
from streamloader.loader.dataset import NumpyMixture
from streamloader.measure.forecast import ForecastOptions, forecast
from streamloader.options import MIB, Layout
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.mixture import Mix, MixShare, Phase
from streamloader.order.schedule import BlockRef, EpochShare, World

pytestmark = pytest.mark.usefixtures("two_workers")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Few blocks and many lanes are the subject of other tests, and so are their warnings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(lanes|blocks are read|begins anew)")
        yield


def least_misses(uses: list[int], most: int) -> int:
    """The misses of Belady's algorithm, which may leave out what it has just read: a naive simulation."""
    kept: set[int] = set()
    misses = 0
    for now, block in enumerate(uses):
        misses += block not in kept
        later = {each: uses.index(each, now + 1) if each in uses[now + 1 :] else np.inf for each in kept | {block}}
        kept = set(sorted(later, key=later.__getitem__)[:most])
    return misses


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_blocks_that_are_used_one_after_the_other_are_read_no_more_often_than_any_choice_could(
    count, epochs, most, seed
):
    rng = np.random.default_rng(seed)
    uses = [int(block) for _ in range(epochs) for block in rng.permutation(count)]
    kept, free, misses = KeptBlocks(most), list(range(most + 1)), 0
    for ticket, block in enumerate(uses):
        later = uses.index(block, ticket + 1) if block in uses[ticket + 1 :] else np.inf
        ref = BlockRef(ticket, block, block + 1, block, float(later))
        if ref in kept:
            slot, row, _ = kept.use(ref)
            assert row == 0
        else:
            slot = free.pop()
            assert kept.add(slot, ref, 0) == NO_SLOT
            misses += 1
        assert kept.release(slot, ref)
        while kept.unused > most:
            free.append(kept.drop())
    assert misses == least_misses(uses, most)


def test_blocks_that_are_kept_for_many_epochs_leave_no_entries_behind():
    kept = KeptBlocks(10)
    for epoch in range(200):
        for block in range(10):
            ref = BlockRef(epoch * 10 + block, block, block + 1, block, epoch + 1 + block / 10)
            if ref in kept:
                kept.use(ref)
            else:
                kept.add(block, ref, 0)
            kept.release(block, ref)
    assert kept.unused == 10
    assert len(kept._by_next_use) < 100
    assert [kept.drop() for _ in range(11)] == [*range(9, -1, -1), NO_SLOT]


def test_blocks_that_were_to_be_used_before_a_pass_begins_are_dropped_first():
    kept = KeptBlocks(4)
    for slot, later in enumerate((3.5, 2.5, 3.0, 2.9)):  # the pass of epoch 2 ended before two of them
        kept.add(slot, BlockRef(slot, slot, slot + 1, slot, later), 0)
        kept.release(slot, BlockRef(slot, slot, slot + 1, slot, later))
    kept.begin(3)
    assert {kept.drop(), kept.drop()} == {1, 3}
    assert [kept.drop(), kept.drop(), kept.drop()] == [0, 2, NO_SLOT]


@pytest.mark.long
@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_rows_are_those_of_their_blocks_whatever_is_kept_used_in_part_and_dropped(data):
    slots, most = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4))
    memory, rows, chunks = memory_of(slots, most)
    live: dict[int, BlockRef] = {}
    loaded: set[int] = set()
    ticket = 0
    for _ in range(data.draw(st.integers(1, 60))):
        ticket += data.draw(st.sampled_from((1, 1, 1, 1023, 1024)))  # tickets that would share a place in the table
        if len(live) == slots:
            gone = data.draw(st.sampled_from(sorted(live)))
            memory.release(gone)
            del live[gone]
        first = BLOCK * data.draw(st.integers(0, 5))
        start = data.draw(st.integers(first, first + BLOCK - 1))
        stop = data.draw(st.integers(start + 1, first + BLOCK))
        ref = BlockRef(ticket, start, stop, first, data.draw(st.floats(0, 9)))
        had, size = memory.has(ref), memory.reserve(ref)
        assert had == (size is not None)
        assert most or not had or any(live[each].block == first for each in loaded & live.keys())
        if size is None:
            slot = memory.claim(ticket)
            rows.values[slot * BLOCK : slot * BLOCK + stop - start] = np.arange(start, stop)[:, None]
            chunks.put(slot, 0, arena_items([b"%d" % sample for sample in range(start, stop)]))
            if data.draw(st.booleans()):  # a block that failed is not kept
                memory.complete(ticket, 7)
                loaded.add(ticket)
        else:
            loaded.add(ticket)
            assert size == 7
        live[ticket] = ref
        if data.draw(st.booleans()):
            dropped = memory.bodies.fit(0, -1)
            assert not dropped
            assert memory._kept.unused == 0
        assert memory.free == slots - len(live)
        used = {memory.claim(each) for each in live}
        assert len(memory._free) + len(used) + memory._kept.unused == slots + most
        for each, part in live.items():
            at = memory.locate(np.full(part.stop - part.start, each), np.arange(part.stop - part.start))
            assert rows.values[at, 0].tolist() == list(range(part.start, part.stop))
            assert [int(bytes(item)) for item in chunks.items(at)] == list(range(part.start, part.stop))
    memory.clear(memory.budget, 0)
    assert memory._kept.unused <= most
    assert len(memory._free) + memory._kept.unused == slots + most


def uses_of(share: EpochShare) -> dict[int, float]:
    """The first position of the epoch that needs each block, by its first sample; padded rows do not count."""
    found: dict[int, float] = {}
    blocks: dict[int, int] = {}
    for plan in share.plans(0):
        blocks |= {ref.ticket: ref.block for ref in plan.needs}
        for ticket, position in zip(plan.tickets[plan.valid].tolist(), plan.positions.tolist(), strict=False):
            found.setdefault(blocks[ticket], position)
    return found


@pytest.mark.long
@settings(max_examples=examples(200), deadline=None)
@given(runs())
def test_the_order_tells_when_the_next_epoch_reads_a_block(run):
    share, _ = run
    after = uses_of(share.at_epoch(share.epoch + 1))
    # a lane emits a sample less than a window before or after its arrival, and a step has positions of all lanes
    length = max(1, share.num_samples // share.order.lanes)
    off = 2 * (share.fetch_params.window + share.global_batch) / length + 2 / length
    for plan in share.plans(0):
        for ref in plan.needs:
            whole = ref.start - (ref.start % share.order.params.block if share.order.shuffle else 0)
            assert ref.block == whole
            told = ref.next_use - (share.epoch + 1)
            if ref.block in after:
                assert 0 <= told <= 1 + 1 / length
                if share.divides:  # else another rank may read one of the block's parts
                    assert abs(told - after[ref.block] / max(1, share.num_samples)) <= off
            elif share.order.shuffle and share.divides and share.remainder == "pad":
                assert told == np.inf


@pytest.mark.long
@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_a_mixture_tells_when_its_sources_read_a_block_again(data):
    size, unit = data.draw(st.sampled_from((1, 2))), 4
    params = OrderParams(4, 2, 8)
    orders = tuple(EpochOrder(data.draw(st.integers(30, 200)), params, seed, 0) for seed in (1, 2))
    weights = tuple(data.draw(st.integers(1, 4)) for _ in orders)
    mix = Mix(orders, (4, 4), (Phase.of_all(0, unit, weights),), "last")
    ranks = [MixShare(mix, 0, 4, World(rank, size), "pad") for rank in range(size)]
    for share in ranks:
        later: dict[int, list[float]] = {}
        for epoch in range(6):
            each = share.at_epoch(epoch)
            for plan in each.plans(0):
                for ref in plan.needs:
                    position = plan.positions[np.flatnonzero(plan.tickets == ref.ticket)[0]]
                    later.setdefault(ref.block, []).append(each.bounds[0] + position)
        alone = size == 1  # then it reads every block in each epoch of a source
        window = 4 * sum(weights) / min(weights) * (params.window * params.lanes + unit * size * 4)
        for plan in share.plans(0):
            for ref in plan.needs:
                assert np.isfinite(ref.next_use) or not alone
                if np.isfinite(ref.next_use):
                    assert min(abs(ref.next_use - use) for use in later[ref.block]) <= window


GIB = 1024 * MIB
LAYOUT = Layout(shard_size=1 << 20, block_size=1 << 15, chunk_size=1 << 13, codec="lz4")
FIELDS = {
    "rows": {"x": "float32[1000]"},
    "large rows": {"x": "uint8[96,64,3]"},
    "bytes": {"x": "bytes"},
    "more": {"x": "bytes"},
    "ragged": {"x": "ragged:int32"},
    "both": {"x": "bytes", "y": "float32[1000]", "z": "uint8[20000]"},
}
COUNT = 3000


def value(spec: str, rng: np.random.Generator) -> Any:
    if spec == "bytes":
        return rng.bytes(int(rng.integers(0, 700)))
    if spec == "ragged:int32":
        return rng.integers(0, 1000, int(rng.integers(0, 300)), dtype="i4")
    field = sl.Field.parse(spec)
    return rng.integers(0, 255, field.shape).astype(field.dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, rng = tmp_path_factory.mktemp("kept"), np.random.default_rng(0)
    for name, fields in FIELDS.items():
        count = COUNT // (10 if "[" in str(fields) else 1)
        with sl.Writer(path / name, fields, layout=LAYOUT) as out:
            for _ in range(count):
                out.write({key: value(spec, rng) for key, spec in fields.items()})
    group = zarr.open_group(path / "arrays", mode="w", zarr_format=3)
    data = rng.random((800, 16, 16)).astype("f4")
    group.create_array("x", data=data, chunks=(8, 16, 16), dimension_names=("time", "y", "x"))
    return path


def epochs(folder: Path, name: str, count: int, **options: Any) -> tuple[list[str], list[int]]:
    """A digest of each epoch, and the requests until its end."""
    arrays = {"sample_axis": "time", "fields": ["x"]} if name == "arrays" else {}
    dataset = sl.NumpyDataset(str(folder / name), batch_size=16, seed=5, with_index=True, **arrays, **options)
    digests, requests = [], []
    try:
        for _ in range(count):
            digests.append(digest([digest(batch) for batch in dataset]))
            requests.append(dataset.stats().requests)
    finally:
        dataset.close()
    return digests, requests


# The blocks that two lanes share are read in parts; the next epoch, which shares others, reads them again.
ORDERS: dict[str, tuple[Any, int]] = {
    "one lane": (sl.Shuffle(lanes=1), 0),
    "lanes": (sl.Shuffle(lanes=3), 2),
    "in order": (False, 0),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "order", "workers"), covering([*FIELDS, "arrays"], ORDERS, [0, 2]))
def test_what_fits_into_memory_is_read_once(folder, name, order, workers):
    shuffle, shared = ORDERS[order]
    expected, _ = epochs(folder, name, 4, shuffle=shuffle)
    digests, requests = epochs(folder, name, 4, memory="256MB", shuffle=shuffle, num_workers=workers)
    assert digests == expected
    assert requests[3] - requests[0] <= 3 * shared * 2 * len(FIELDS.get(name, "x"))


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("where", [slice(None, None, 3), slice(100, 2000)])
def test_a_selection_is_read_once(folder, where, workers):
    options = {"shuffle": sl.Shuffle(lanes=1), "where": where}
    expected, _ = epochs(folder, "both", 3, **options)
    digests, requests = epochs(folder, "both", 3, memory="256MB", num_workers=workers, **options)
    assert digests == expected
    assert requests[0] == requests[2]


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_the_sources_of_a_mixture_are_read_once(folder, workers):
    found = []
    for memory in (None, "256MB"):
        sources = {sl.Source(str(folder / "bytes")): 2, sl.Source(str(folder / "more")): 1}
        options = {"batch_size": 16, "seed": 5, "shuffle": sl.Shuffle(lanes=1), "with_index": True}
        mixture = NumpyMixture(sources, memory=memory, num_workers=workers, **options)
        digests, requests = [], []
        for _ in range(4):
            digests.append(digest([digest(batch) for batch in mixture]))
            requests.append(mixture.stats().requests)
        mixture.close()
        found.append((digests, requests))
    assert found[0][0] == found[1][0]
    assert found[1][1][3] == found[1][1][1] < found[0][1][1]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "workers"), covering(["rows", "large rows", "bytes", "both", "arrays"], [0, 2]))
def test_what_fits_in_part_is_read_less(folder, monkeypatch, name, workers):
    """Each block that is kept at the end of an epoch saves its requests in the next one."""
    allot, found = engine.allot, {}
    for share in (0, 0.5):
        made: list[Budget] = []

        def limited(demand: Demand, *args: Any, share: float = share, made: list[Budget] = made) -> Budget:
            demand = replace(demand, kept_bytes=0)  # not all elements of arrays
            made.append(allot(demand, *args)._replace(kept_slots=int(share * demand.blocks)))
            return made[-1]

        monkeypatch.setattr(engine, "allot", limited)
        options = {"shuffle": sl.Shuffle(lanes=1), "num_workers": workers}
        found[share] = epochs(folder, name, 4, memory="256MB", **options)
    assert found[0][0] == found[0.5][0]
    assert made[-1].kept_slots > 5
    assert found[0.5][1][3] <= found[0][1][3] - 3 * made[-1].kept_slots


def test_a_plan_tells_which_share_of_the_blocks_is_kept(folder):
    def kept(memory: int | None) -> float:
        options = ForecastOptions(batch_size=16, shuffle=sl.Shuffle(lanes=1), memory=memory)
        return forecast(str(folder / "both"), options).kept

    assert kept(None) == 0
    assert kept(256_000_000) == 1


@given(st.integers(0, 8 * GIB))
def test_memory_that_requests_do_not_need_keeps_blocks(more):
    demand = Demand(slots=20, slot_bytes=4 * MIB, request_bytes=4 * MIB, blocks=1000, item_bytes=4 * MIB, pieces=1)
    least = demand.least_bytes
    budget, least_budget = allot(demand, least + more), allot(demand, least)
    assert least_budget.kept_slots == 0
    assert budget.slots + budget.kept_slots <= demand.slots + MAX_THREADS + demand.blocks
    if budget.kept_slots < demand.blocks:  # what is left is less than another request needs
        kept = budget.kept_slots * demand.slot_bytes
        assert kept < demand.thread_bytes or budget.threads == MAX_THREADS
    else:
        assert budget.threads >= KEPT_THREADS
    if more >= 1000 * demand.slot_bytes + MAX_THREADS * demand.thread_bytes:
        assert (budget.kept_slots, budget.threads) == (1000, MAX_THREADS)
