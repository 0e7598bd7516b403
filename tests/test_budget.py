"""Steps by a budget, `max_tokens=`: the steps of buckets are cut where padded batches fit."""

import gc
import json
import tracemalloc
import warnings
import weakref
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_groups import N, check_schedule, length_of
from test_groups import shares as shares_of_datasets
from test_mixture_groups import shares as shares_of_mixtures
from torch.utils.data import DataLoader

import streamloader as sl
from streamloader import errors
from streamloader.loader.dataset import NumpyMixture
from streamloader.measure.forecast import ForecastOptions, forecast
from streamloader.order.budget import cut, step_scale
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.mixture import Mix, MixShare, Phase
from streamloader.order.schedule import EpochShare, Share, World

LONGEST = 30  # of the strategies' lengths


def by_budget(share: EpochShare, most: int, padded=lambda lengths: lengths) -> EpochShare:
    kept: dict[EpochShare, np.ndarray] = {}

    def starts(share: EpochShare) -> np.ndarray:
        every = replace(share, world=World(0, share.world.size))
        if every not in kept:
            kept[every] = every.budget_starts()
        return kept[every]

    return replace(share, budget=(most, padded, starts))


@st.composite
def budgets(draw):
    """The share of rank 0, whose world divides the steps of its buckets, with a budget of at least the longest."""
    share, tables = draw(st.one_of(shares_of_datasets(), shares_of_mixtures()))
    steps, group, lengths = share.bucket
    if isinstance(share, MixShare):
        group *= draw(st.integers(1, 3))
        size = draw(st.sampled_from([size for size in (1, 2, 3, 4) if group % size == 0]))
    else:
        tables, size = [tables], draw(st.sampled_from([1, 2, 3, 4]))
        group = size * draw(st.integers(1, 12))
    share = replace(share, bucket=(steps, group, lengths), world=World(0, size), batch=draw(st.integers(1, 8)))
    longest = max(int(table.max()) for table in tables)
    return by_budget(share, draw(st.integers(max(1, longest), 8 * max(1, longest)))), tables


def ranks(share: EpochShare) -> list[EpochShare]:
    return [replace(share, world=World(rank, share.world.size)) for rank in range(share.world.size)]


def lengths_of(share: EpochShare, tables: list[np.ndarray], samples: np.ndarray) -> np.ndarray:
    return np.concatenate(tables)[samples]


def of_all(share: EpochShare) -> EpochShare:
    """The steps of the buckets, on one rank."""
    return replace(share, batch=share.bucket[1], world=World(0, 1), budget=None, remainder="pad")


@given(
    st.lists(st.lists(st.integers(0, 20), min_size=6, max_size=6), max_size=5), st.integers(20, 90), st.integers(1, 7)
)
def test_a_part_has_as_many_rows_as_fit(lengths, most, rows):
    longest = np.maximum.accumulate(np.array(lengths, np.int64).reshape(-1, 6), axis=1)
    pieces, firsts = cut(longest, most, rows)
    expected = []
    for piece, row in enumerate(longest.tolist()):
        begin = 0
        while begin < len(row):
            expected.append((piece, begin))
            fitting = [n for n in range(1, rows + 1) if begin + n <= 6 and n * row[begin + n - 1] <= most]
            begin += max(fitting, default=1)
    assert list(zip(pieces.tolist(), firsts.tolist(), strict=True)) == expected


@given(st.integers(1, 4096), st.floats(0.1, 1e5), st.booleans())
def test_a_step_of_the_buckets_has_some_parts_of_equal_size_on_all_ranks(batch, fitting, whole):
    more, fewer = step_scale(batch, fitting, whole=whole)
    assert batch * more % fewer == 0
    assert fewer == 1 or not whole
    rows = batch * more // fewer
    assert rows >= min(batch, 4 * min(batch, fitting)) or more == fewer == 1
    assert rows <= 8 * batch


@pytest.mark.long
@settings(deadline=None, max_examples=examples(40))
@given(budgets())
def test_steps_fit_into_the_budget_and_have_each_sample_once_on_all_ranks(made):
    share, tables = made
    steps, size = share.global_steps(0), share.world.size
    starts = share.starts_from(0).tolist()
    assert starts[0] == 0
    assert starts == sorted({*starts})
    assert len(starts) == steps + 1
    seen: list[int] = []
    for start in starts[:-1]:
        rows = [each.samples(start) if each.num_steps(start) else np.zeros(0, np.int64) for each in ranks(share)]
        assert all(len(row) <= share.batch for row in rows)
        assert all(lengths_of(share, tables, row).max(initial=0) * len(row) <= share.budget[0] for row in rows)
        assert len({*map(len, rows)}) == 1 or (share.remainder == "uneven" and start == starts[-2])
        positions = [each.positions_of_steps(start, 1) if hasattr(each, "order") else each.rows(start, 1)[2]
                     for each in ranks(share)]  # fmt: skip
        seen += [int(p) for p in np.concatenate(positions) if p < share.num_samples]
    left_out = share.num_samples % size if share.remainder == "drop" else 0
    assert sorted(seen) == list(range(share.num_samples - left_out))
    assert seen == sorted(seen) or size > 1
    counts = {each.count_steps(0) for each in ranks(share)}
    assert counts == {steps} or share.remainder == "uneven"


@pytest.mark.long
@settings(deadline=None, max_examples=examples(40))
@given(budgets())
def test_the_samples_of_the_steps_are_those_of_the_buckets_in_their_order(made):
    share, _ = made
    expected, whole = [], of_all(share)
    for number in range(whole.global_steps(0)):
        expected += whole.samples(number * whole.batch).tolist()
    begin = 0
    for start, stop in pairwise(share.starts_from(0).tolist()):
        last = min(stop, share.num_samples)
        samples = [s for each in ranks(share) if each.num_steps(start) for s in each.samples(start).tolist()]
        assert sorted(samples[: last - start]) == sorted(expected[begin:last]) or last == share.num_samples
        begin = last


@settings(deadline=None, max_examples=examples(40))
@given(budgets(), st.data())
def test_a_run_goes_on_from_any_step_with_other_ranks_and_another_budget(made, data):
    share, _ = made
    starts = share.starts_from(0).tolist()
    position = data.draw(st.sampled_from(starts))
    sizes = [size for size in (1, 2, 3, 4) if share.bucket[1] % size == 0]
    other = replace(share, world=World(0, data.draw(st.sampled_from(sizes))), batch=data.draw(st.integers(1, 8)))
    other = by_budget(other, data.draw(st.integers(LONGEST, 200)))
    left = other.starts_from(position).tolist()
    assert left == sorted({*left})
    assert not left or left[0] == position or position > share.num_samples
    for number, start in enumerate(left):
        assert other.starts_from(start).tolist() == left[number:]
        assert other.after(position, number) == start
        assert other.steps_between(position, start) == number
        assert other.walk(position, number) == start
    assert share.starts_from(position).tolist() == [start for start in starts if start >= position]


@pytest.mark.long
@settings(deadline=None, max_examples=examples(40))
@given(budgets(), st.integers(0, 40))
def test_a_schedule_by_a_budget_has_each_row_in_an_open_block(made, begun):
    share, _ = made
    for each in ranks(share):
        check_schedule(each, 1, begun)


@pytest.mark.quick(1)
@pytest.mark.parametrize("count", range(20, 44, 4))
def test_padding_may_end_in_a_turn_of_a_source_that_the_step_has_no_more_of(count):
    table = np.arange(200) % 7 + 1
    orders = tuple(EpochOrder(samples, OrderParams(2, 4, 4), 0, 0) for samples in (count, 200))
    mix = Mix(orders, (1, 1), (Phase(0, 4, (2, 1), (0, 1)),), "first")
    for size in (1, 2, 3, 4):
        share = MixShare(mix, 0, 4, World(0, size), "pad", (), (3, 12, (table.__getitem__,) * 2))
        for each in ranks(by_budget(share, 16)):
            check_schedule(each, 1, 0)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sequences of very different lengths, all of whose values are the number of the sample."""
    path = tmp_path_factory.mktemp("budget") / "d"
    layout = sl.Layout(chunk_size=1 << 10, block_size=1 << 12, samples_per_shard=64)
    with sl.Writer(path, {"tokens": "ragged:int32", "label": "int64"}, layout=layout, num_samples=N) as out:
        for number in range(N):
            out.write({"tokens": np.full(length_of(number), number, np.int32), "label": number % 3})
    return str(path)


BUDGET: dict[str, Any] = {"bucket_by": "tokens", "bucket_steps": 40, "collate": "pad", "num_workers": 0}
ALL = {"with_index": True, "shuffle": sl.Shuffle(lanes=4)}


def opened(url: str, size: int = 1, rank: int = 0, total: int = 1200, **given: Any) -> sl.NumpyDataset:
    """A dataset of a rank, of whose steps all ranks together have at most `total` elements and 48 samples."""
    options = {"batch_size": 48 // size, "max_tokens": total // size, "world": (rank, size)}
    return sl.NumpyDataset(url, **{**options, **BUDGET, **ALL, **given})


def batches(dataset: sl.NumpyDataset, state: dict[str, Any] | None = None) -> list[list[int]]:
    """The samples of each batch, after checking values and the budget."""
    if state is not None:
        dataset.load_state_dict(state)
    found = []
    for batch in dataset:
        assert batch["tokens"].size <= dataset._options.max_tokens
        assert len(batch["tokens"]) <= dataset._options.batch_size
        for row, number in enumerate(batch["index"].tolist()):
            assert batch["tokens"][row, : batch["tokens_lengths"][row]].tolist() == [number] * length_of(number)
        found.append(batch["index"][batch["valid"]].tolist())
    dataset.close()
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_have_the_same_number_of_steps_and_each_sample_once(size, workers, texts):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # 3 ranks do not divide 4 lanes
        of_rank = []
        for rank in range(size):
            dataset = opened(texts, size, rank, num_workers=workers)
            steps = len(dataset)
            of_rank.append(batches(dataset))
            assert len(of_rank[-1]) == steps
    assert len({*map(len, of_rank)}) == 1
    assert sorted(number for rank in of_rank for batch in rank for number in batch) == list(range(N))
    one = opened(texts, total=1200)
    order = [number for batch in batches(one) for number in batch]
    together = [sorted(n for rank in of_rank for n in rank[step]) for step in range(len(of_rank[0]))]
    begin = 0
    for step in together:  # the same order, cut at other places
        assert sorted(order[begin : begin + len(step)]) == step
        begin += len(step)


@pytest.mark.long
def test_batches_have_little_padding_and_are_nearly_full():
    lengths = np.random.default_rng(0).lognormal(5, 0.8, 60_000).astype(np.int64).clip(1, 4000)
    order, most = EpochOrder(60_000, OrderParams(64, 16, 512), 0, 0), 16384
    more, fewer = step_scale(512, most / lengths.mean(), whole=False)
    bucket = (12, 512 * more // fewer, lengths.__getitem__)
    share = by_budget(Share(order, 512, World(0, 1), "drop", 1, (), bucket), most)
    rows = [lengths[share.samples(start)] for start in share.starts_from(0)[:-1:7].tolist()]
    padded = np.array([len(row) * row.max() for row in rows])
    assert padded.max() <= most
    assert 1 - sum(int(row.sum()) for row in rows) / padded.sum() < 0.15
    assert padded.mean() > 0.85 * most


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stop", [1, 6, 17])
def test_a_run_resumes_exactly_at_each_batch_and_at_another_world_size(stop, size, texts):
    whole = [batches(opened(texts, size, rank)) for rank in range(size)]
    dataset = opened(texts, size)
    for _, _ in zip(range(stop), dataset, strict=False):
        pass
    state = json.loads(json.dumps(dataset.state_dict()))
    assert state == dataset.state_dict(batches=stop)
    dataset.close()
    assert batches(opened(texts, size), state) == whole[0][stop:]
    left = sorted(number for rank in whole for batch in rank[stop:] for number in batch)
    for other in (1, 2, 4):
        rest = [batches(opened(texts, other, rank), state) for rank in range(other)]
        assert len({*map(len, rest)}) == 1
        assert sorted(number for rank in rest for batch in rank for number in batch) == left


@pytest.mark.long
def test_ranks_that_cannot_share_the_rest_of_a_step_repeat_some_samples(texts):
    dataset = opened(texts, total=100)
    for _, _ in zip(range(200), dataset, strict=False):
        state = dataset.state_dict()
        if (
            state["position"] % state["bucket"]["positions"] % 4
            and state["bucket"]["positions"] - (state["position"] % state["bucket"]["positions"]) < 4
        ):
            break
    else:
        pytest.fail("no such state")
    with pytest.warns(UserWarning, match="max_tokens"):
        rest = [batches(opened(texts, 4, rank, total=400), state) for rank in range(4)]
    assert len({*map(len, rest)}) == 1
    dataset.load_state_dict(state)
    left = [number for batch in batches(dataset) for number in batch]
    found = [number for rank in rest for batch in rank for number in batch]
    assert {*left} <= {*found}
    assert len(found) - len(left) < 4
    five = opened(texts, 5, total=4000, batch_size=9)
    five.load_state_dict(state)
    for ask in (lambda: batches(five), lambda: len(five), lambda: five.samples(0, 0)):
        with pytest.raises(errors.BatchError, match="5 ranks"):
            ask()


@pytest.mark.long
def test_steps_are_known_left_out_and_delivered_again(texts):
    dataset = opened(texts)
    whole = batches(dataset)
    for step in (0, 3, len(whole) - 1):
        samples = dataset.samples(0, step)
        assert [n for n in dict.fromkeys(samples.tolist()) if n in whole[step]] == whole[step]
    assert [batch["index"][batch["valid"]].tolist() for batch in dataset.replay(0, [2, 5])] == [whole[2], whole[5]]
    left = [batch for step, batch in enumerate(whole) if step not in (1, 2, 7)]
    skipping = opened(texts, skip_steps={0: [1, 2, 7]})
    assert len(skipping) == len(left)
    assert batches(skipping) == left
    with pytest.raises(errors.UsageError, match=f"which has {len(whole)} steps"):
        len(opened(texts, skip_steps={0: [len(whole)]}))
    later = opened(texts)
    later.set_epoch(1)
    steps = len(later)
    second = batches(later)
    assert len(second) == steps
    loops = opened(texts, steps_per_epoch=len(whole) + 3)
    first = [batch["index"][batch["valid"]].tolist() for batch in loops]
    assert first == [*whole, *second[:3]]


def test_budgets_work_with_weights_exclusions_bad_samples_and_padding_to_a_multiple(texts):
    chosen = {"weights": "balanced:label", "exclude": [1, 2, 3], "on_error": "mask"}
    found = [number for batch in batches(opened(texts, **chosen)) for number in batch]
    assert len(found) == N - 3
    assert not {1, 2, 3} & {*found}
    for batch in opened(texts, collate={"tokens": sl.Pad(to=64)}):
        assert batch["tokens"].shape[1] in (64, 128)
        assert batch["tokens"].size <= 1200


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mixed", "homogeneous"])
def test_a_mixture_has_batches_by_a_budget(kind, texts, tmp_path):
    with sl.Writer(tmp_path / "d", {"tokens": "ragged:int32", "label": "int64"}, num_samples=300) as out:
        for number in range(300):
            out.write({"tokens": np.full(1 + number % 40, number, np.int32), "label": 0})
    sources = {texts: 0.7, str(tmp_path / "d"): 0.3}

    def mixed(size: int, rank: int) -> list[list[int]]:
        dataset = NumpyMixture(
            sources, batch_size=48 // size, max_tokens=1200 // size, world=(rank, size), batches=kind, **BUDGET, **ALL
        )
        found = []
        for batch in dataset:
            assert batch["tokens"].size <= 1200 // size
            found.append(batch["index"][batch["valid"]].tolist())
        return found

    one = mixed(1, 0)
    order = [number for batch in one for number in batch]
    for size in (2, 4):
        of_rank = [mixed(size, rank) for rank in range(size)]
        assert len({*map(len, of_rank)}) == 1
        begin = 0
        for step in range(len(of_rank[0])):
            together = sorted(number for rank in of_rank for number in rank[step])
            assert sorted(order[begin : begin + len(together)]) == together
            begin += len(together)
        assert begin == len(order)


def test_homogeneous_batches_by_a_budget_have_one_source(texts, tmp_path):
    with sl.Writer(tmp_path / "d", {"tokens": "ragged:int32", "label": "int64"}, num_samples=300) as out:
        for number in range(300):
            out.write({"tokens": np.full(1 + number % 40, number, np.int32), "label": 7})
    given = {"batch_size": 48, "max_tokens": 1200, "batches": "homogeneous", **BUDGET, **ALL}
    labels = [
        {int(label) == 7 for label in batch["label"]}
        for batch in NumpyMixture({texts: 0.7, str(tmp_path / "d"): 0.3}, **given)
    ]
    assert all(len(of_batch) == 1 for of_batch in labels)


def test_weights_of_a_budget_change_by_samples(texts):
    options = {"batch_size": 48, "max_tokens": 1200, **BUDGET, **ALL}
    second = sl.Source(texts, where="label == 1")
    first = sl.Source(texts, where="label == 0")
    with pytest.raises(errors.UsageError, match="a schedule by steps"):
        NumpyMixture({first: 1, second: 1}, schedule={20: {first: 0, second: 1}}, **options)
    with pytest.raises(errors.UsageError, match=r"set_weights\(\) by steps"):
        NumpyMixture({first: 1, second: 1}, **options).set_weights({first: 1})
    mixture = NumpyMixture({first: 1, second: 1}, schedule_by="samples", **options)
    with pytest.raises(errors.MixtureError, match="set_weights"):
        mixture.set_weights(first)
    labels = np.concatenate([batch["label"][batch["valid"]] for batch in mixture])
    assert abs(labels.mean() - 0.5) < 0.05


def test_steps_are_skipped_and_counted_from_where_another_budget_begins(texts):
    dataset, reports = opened(texts), []
    next(iter(dataset))
    state = dataset.state_dict()
    rest = batches(opened(texts, total=700, on_batch=reports.append), state)
    first = reports[0].step
    resumed = opened(texts, total=700)
    resumed.load_state_dict(state)
    for step in range(6):
        samples = resumed.samples(0, first + step).tolist()
        assert [number for number in samples if number in rest[step]] == rest[step]
    for step in (first, first + 2):
        left = batches(opened(texts, total=700, skip_steps={0: [step]}), state)
        assert left == [batch for number, batch in enumerate(rest) if number + first != step]


def test_states_with_and_without_a_budget_are_of_different_runs(texts):
    with_budget, without = opened(texts), opened(texts, max_tokens=None)
    for one, other in ((with_budget, without), (without, with_budget)):
        next(iter(one))
        with pytest.raises(errors.StateError, match="max_tokens="):
            other.load_state_dict(one.state_dict())


@pytest.mark.quick(1)
@pytest.mark.parametrize("given", [{"max_tokens": 1200}, {}])
def test_a_persistent_worker_takes_the_buckets_of_a_loaded_state(given, texts):
    options = {"batch_size": 48, "world": (0, 1), **BUDGET, **ALL, **given, "num_workers": 0}
    other = sl.StreamingDataset(texts, **options | ({"max_tokens": 400} if given else {"batch_size": 24}))
    seen = next(iter(other))["index"].tolist()
    state = other.state_dict()
    other.close()
    dataset = sl.StreamingDataset(texts, **options)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    for _ in loader:
        pass
    dataset.load_state_dict(state)
    rest = [number for batch in loader for number in batch["index"][batch["valid"]].tolist()]
    assert sorted(seen + rest) == list(range(N))


@pytest.mark.long
def test_a_plan_tells_the_padding_of_batches_by_a_budget(texts):
    options = ForecastOptions(batch_size=48, fields=("tokens",), bucket_by="tokens", bucket_steps=40, max_tokens=1200)
    within, without = forecast(texts, options).padding
    dataset = sl.NumpyDataset(texts, batch_size=48, max_tokens=1200, **BUDGET)
    list(dataset)
    assert within == pytest.approx(dataset.stats().padding_share, abs=0.02)
    assert within < 0.6 * without


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"bucket_by": None}, errors.UsageError, "without bucket_by="),
        ({"max_tokens": 0}, errors.UsageError, "max_tokens"),
        ({"max_tokens": 96}, errors.BatchError, "max_tokens=96.*97"),
        ({"max_tokens": 100, "collate": {"tokens": sl.Pad(to=64)}}, errors.BatchError, "max_tokens=100.*128"),
    ],
)
def test_budgets_that_cannot_be_kept_are_errors(given, error, message, texts):
    with pytest.raises(error, match=message):
        opened(texts, **given)


@pytest.mark.quick(2)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("budget", [False, True])
def test_planning_for_64_ranks_takes_no_more_memory_than_it_declares(mixed, budget):
    count, size = 2_000_000, 64
    table = (np.arange(count, dtype=np.uint32) * 7919) % 997 + 1
    order, world = EpochOrder(count, OrderParams(256, 64, 4096), 0, 0), World(5, size)
    if mixed:
        mix = Mix((order, order), (1, 1), (Phase(0, 8, (7, 3), (0, 1)),), "first")
        share = MixShare(mix, 0, 64, world, "pad", (), (20, 64 * size, (table.__getitem__,) * 2))
    else:
        share = Share(order, 64, world, "pad", 1, (), (20, 64 * size, table.__getitem__))
    share = by_budget(share, 4096) if budget else share
    tracemalloc.start()
    try:
        assert sum(1 for _ in islice(share.plans(0), 120)) == 120
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < share.plan_bytes(False)


def test_a_dataset_with_a_budget_is_freed_when_it_is_dropped(texts):
    dataset = opened(texts)
    assert len(list(dataset)) > 10
    dataset.close()
    kept = weakref.ref(dataset)
    gc.disable()
    try:
        del dataset
        assert kept() is None
    finally:
        gc.enable()
