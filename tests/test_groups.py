"""Buckets: steps of samples of like length, an exchange of positions within windows of steps."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import streamloader as sl
from streamloader import errors
from streamloader.measure.forecast import ForecastOptions, forecast
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.groups import exchanged, window_bounds
from streamloader.order.schedule import Share, World
from streamloader.testing import order as reference


@st.composite
def shares(draw):
    """A share of one of R ranks, with R dividing the lanes or not, in buckets of a few steps."""
    block, lanes = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4, 6]))
    params = OrderParams(block, lanes, block * draw(st.integers(2, 5)))
    count = draw(st.integers(1, 400))
    size, batch = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 6))
    order = EpochOrder(count, params, draw(st.integers(0, 3)), draw(st.integers(0, 2)))
    table = np.random.default_rng(draw(st.integers(0, 9))).integers(0, 30, count)
    bucket = (draw(st.integers(1, 9)), draw(st.sampled_from([size * batch, 8])), lambda samples: table[samples])
    remainder = draw(st.sampled_from(["pad", "drop", "uneven"]))
    return Share(order, batch, World(draw(st.integers(0, size - 1)), size), remainder, 1, (), bucket), table


@pytest.mark.long
@given(shares())
def test_positions_are_exchanged_within_windows_and_each_is_taken_once(made):
    share, _ = made
    positions = np.arange(share.num_samples)
    source = exchanged(share.bucket, share.order, positions)[0]
    assert sorted(source.tolist()) == positions.tolist()
    for position, other in zip(positions.tolist(), source.tolist(), strict=True):
        begin, end = window_bounds(*share.bucket[:2], share.num_samples, position)
        assert begin <= other < end
    some = positions[:: 1 + share.num_samples // 7]
    assert np.array_equal(exchanged(share.bucket, share.order, some)[0], source[some])


def naive(share: Share, table: np.ndarray) -> list[int]:
    """The position whose sample each position gets, by rule 12 of the specification, lane by lane."""
    steps, group, _ = share.bucket
    order, count = share.order, share.num_samples
    case = reference.Order(count, order.params.block, order.lanes, order.params.window, order.seed, order.epoch)
    samples, source = reference.samples(case), list(range(count))
    for number, begin in enumerate(range(0, count, steps * group)):
        k = min(steps, -(-(count - begin) // group))
        key = (reference.keys(case)[2] + number) % 2**64
        numbers = [reference.permuted(i, k, key) for i in range(k)]
        for lane in range(order.lanes):
            positions = [p for p in range(begin, min(begin + k * group, count)) if p % order.lanes == lane]
            places = sorted(positions, key=lambda p: (numbers[(p - begin) // group], p))
            taken = sorted(positions, key=lambda p: (table[samples[p]], p))
            for place, other in zip(places, taken, strict=True):
                source[place] = other
    return source


@settings(max_examples=examples(100))
@given(shares())
def test_buckets_follow_the_specification(made):
    share, table = made
    assert exchanged(share.bucket, share.order, np.arange(share.num_samples))[0].tolist() == naive(share, table)


@settings(max_examples=examples(100))
@given(shares())
def test_the_steps_of_a_window_have_the_lengths_of_a_lane_in_order(made):
    share, table = made
    steps, group, _ = share.bucket
    samples = share.order.samples_at(0, share.num_samples)
    source = exchanged(share.bucket, share.order, np.arange(share.num_samples))[0]
    lengths = table[samples[source]]
    if group % share.order.lanes:
        return
    for first in range(0, share.num_samples, steps * group):
        begin, end = window_bounds(*share.bucket[:2], share.num_samples, first)
        if (end - begin) % group:  # its last step is incomplete
            continue
        by_step = lengths[begin:end].reshape(-1, group)
        for lane in range(share.order.lanes):
            columns = np.arange(lane, group, share.order.lanes)
            of_lane = by_step[:, columns]
            in_order = np.sort(of_lane.ravel()).reshape(of_lane.shape)
            assert np.array_equal(np.sort(of_lane.sum(axis=1)), in_order.sum(axis=1))


@pytest.mark.long
@settings(max_examples=examples(25))
@given(shares())
def test_global_batches_are_the_same_at_any_world_size(made):
    share, _ = made
    share = replace(share, remainder="drop", bucket=(share.bucket[0], share.global_batch, share.bucket[2]))
    for position in range(0, share.global_steps(0) * share.global_batch, share.global_batch):
        expected = None
        for size in (1, 2, 3, 4):
            if share.global_batch % size:
                continue
            ranks = [replace(share, batch=share.global_batch // size, world=World(rank, size)) for rank in range(size)]
            samples = sorted(sample for rank in ranks for sample in rank.samples(position).tolist())
            expected = samples if expected is None else expected
            assert samples == expected


@pytest.mark.long
@settings(max_examples=examples(100))
@given(shares(), st.integers(1, 3), st.integers(0, 40))
def test_a_schedule_has_each_row_in_a_block_that_is_open_and_no_more_blocks_than_it_declares(made, at_once, begun):
    check_schedule(made[0], at_once, begun)


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("group", [8, 9])
def test_a_run_that_goes_on_with_another_global_batch_closes_all_blocks(group, size):
    table = np.random.default_rng(0).integers(0, 30, 285)
    order = EpochOrder(285, OrderParams(1, 6, 2), 0, 0)
    share = Share(order, 1, World(0, size), "pad", 1, (), (2, group, lambda samples: table[samples]))
    for begun in (0, 5):
        check_schedule(share, 1, begun)


def check_schedule(share: Share, at_once: int, begun: int) -> None:
    """Check that each row is in an open block, that all are closed, and that they are no more than declared."""
    position = share.after(0, min(begun, share.global_steps(0)))
    expected = [share.samples(share.after(position, step)).tolist() for step in range(share.count_steps(position))]
    open_blocks, seen, rows = {}, set(), []
    for plan in share.plans(position, steps_at_once=at_once):
        for ref in plan.needs:
            assert ref.ticket not in seen
            seen.add(ref.ticket)
            open_blocks[ref.ticket] = ref
        assert len(open_blocks) <= share.slots_needed(at_once)
        for ticket, row, sample in zip(plan.tickets.tolist(), plan.rows.tolist(), plan.samples.tolist(), strict=True):
            ref = open_blocks[ticket]
            assert ref.start <= ref.start + row == sample < ref.stop
        rows += [step.samples.tolist() for step in plan.steps()]
        for ticket in plan.done:
            del open_blocks[ticket]
    assert not open_blocks
    assert rows == expected


@pytest.mark.long
def test_steps_have_much_less_padding_than_without_buckets():
    lengths = np.random.default_rng(0).lognormal(5, 0.8, 60_000).astype(np.int64) + 1
    order = EpochOrder(60_000, OrderParams(64, 16, 512), 0, 0)
    share = Share(order, 32, World(0, 1), "drop", 1, ())

    def padding(bucket):
        rows = [lengths[replace(share, bucket=bucket).samples(step * 32)] for step in range(0, 1800, 12)]
        total = sum(len(row) * row.max() for row in rows)
        return 1 - sum(row.sum() for row in rows) / total

    assert padding(None) > 0.5
    assert padding((300, 32, lengths.__getitem__)) < 0.2


N = 700


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sequences of very different lengths, all of whose values are the number of the sample."""
    path = tmp_path_factory.mktemp("buckets") / "d"
    layout = sl.Layout(chunk_size=1 << 10, block_size=1 << 12, samples_per_shard=64)
    with sl.Writer(path, {"tokens": "ragged:int32", "name": "text"}, layout=layout, num_samples=N) as out:
        for number in range(N):
            out.write({"tokens": np.full(length_of(number), number, np.int32), "name": "x" * (number % 5)})
    return str(path)


def length_of(number: int) -> int:
    return 1 + (number * 7919) % 97


def read(url: str, state: dict[str, Any] | None = None, **given: Any) -> list[tuple[list[int], list[int]]]:
    """The samples of each batch and their lengths, after checking the values."""
    dataset = sl.NumpyDataset(**{"url": url, "batch_size": 12, "with_index": True, "num_workers": 0, **given})
    if state is not None:
        dataset.load_state_dict(state)
    found = []
    for batch in dataset:
        for row, number in enumerate(batch["index"].tolist()):
            begin, end = batch["tokens_offsets"][row : row + 2]
            assert batch["tokens"][begin:end].tolist() == [number] * length_of(number)
        found.append((batch["index"].tolist(), np.diff(batch["tokens_offsets"]).tolist()))
    dataset.close()
    return found


BUCKETS = {"bucket_by": "tokens", "bucket_steps": 15, "fields": ["tokens"], "remainder": "drop"}


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("memory", [None, "4MB"])
def test_buckets_have_every_sample_once_and_like_lengths_in_a_batch(memory, workers, texts):
    batches = read(texts, num_workers=workers, memory=memory, **BUCKETS)
    plain = read(texts, fields=["tokens"], remainder="drop")
    assert batches == read(texts, **BUCKETS)
    samples = [number for numbers, _ in batches for number in numbers]
    assert len(samples) == len({*samples}) == N // 12 * 12
    spread = [np.mean([max(lengths) - min(lengths) for _, lengths in found]) for found in (batches, plain)]
    assert spread[0] < 0.5 * spread[1]


@pytest.mark.long
def test_buckets_resume_exactly_and_have_the_same_global_batches_at_any_world_size(texts):
    whole = read(texts, **BUCKETS)
    for stop in (1, 7, 20, 40):
        dataset = sl.NumpyDataset(texts, batch_size=12, num_workers=0, **BUCKETS)
        for _, _ in zip(range(stop), dataset, strict=False):
            pass
        state = dataset.state_dict()
        dataset.close()
        assert read(texts, state, **BUCKETS) == whole[stop:]
        for size in (2, 3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                ranks = [
                    read(texts, state, **BUCKETS | {"batch_size": 12 // size, "world": (rank, size)})
                    for rank in range(size)
                ]
            for step, (numbers, _) in enumerate(whole[stop:]):
                assert sorted(numbers) == sorted(number for rank in ranks for number in rank[step][0])


def test_a_state_keeps_the_buckets_of_its_global_batch(texts):
    first = sl.NumpyDataset(texts, batch_size=12, num_workers=0, with_index=True, **BUCKETS)
    seen = [batch["index"].tolist() for _, batch in zip(range(9), first, strict=False)]
    state = first.state_dict()
    assert state["bucket"]["positions"] == 12
    rest = read(texts, state, **BUCKETS | {"batch_size": 8, "remainder": "drop"})
    samples = [number for numbers in [*seen, *(numbers for numbers, _ in rest)] for number in numbers]
    assert len(samples) == len({*samples}) >= N - 12


@pytest.mark.parametrize("change", [{"bucket_by": None}, {"bucket_steps": 16}, {"bucket_by": "name"}])
def test_a_state_belongs_to_its_buckets(change, texts):
    options = {**BUCKETS, "fields": None, "batch_size": 12}
    state = sl.NumpyDataset(texts, **options).state_dict()
    with pytest.raises(errors.StateError, match="bucket"):
        sl.NumpyDataset(texts, **options | change).load_state_dict(state)


@pytest.mark.long
def test_a_function_of_the_lengths_chooses_buckets(texts):
    by_field = read(texts, **BUCKETS)
    assert read(texts, **BUCKETS | {"bucket_by": lambda lengths: lengths["tokens"]}) == by_field
    assert read(texts, **BUCKETS | {"bucket_by": lambda lengths: lengths["name"]}) != by_field


@pytest.mark.long
def test_buckets_work_with_weights_exclusions_padding_and_steps_per_epoch(texts):
    options = {**BUCKETS, "batch_size": 12, "exclude": [1, 2, 3], "num_workers": 0, "with_index": True}
    dataset = sl.NumpyDataset(texts, **options, weights=np.arange(N) % 3, collate="pad")
    plain = sl.NumpyDataset(texts, **options | {"bucket_by": None}, weights=np.arange(N) % 3, collate="pad")
    numbers = [number for batch in dataset for number in batch["index"].tolist()]
    assert not {*numbers} & {1, 2, 3}
    assert all(number % 3 for number in numbers)
    list(plain)
    assert 0 < dataset.stats().padding_share < 0.6 * plain.stats().padding_share
    loops = sl.NumpyDataset(texts, **options, steps_per_epoch=20)
    assert len({number for _ in range(3) for batch in loops for number in batch["index"].tolist()}) > 600


@pytest.mark.long
def test_a_plan_tells_the_padding_with_and_without_buckets(texts):
    options = ForecastOptions(batch_size=12, fields=("tokens",), bucket_by="tokens", bucket_steps=15)
    within, without = forecast(texts, options).padding
    dataset = sl.NumpyDataset(texts, batch_size=12, num_workers=0, collate="pad", **BUCKETS)
    plain = sl.NumpyDataset(texts, batch_size=12, num_workers=0, collate="pad", **BUCKETS | {"bucket_by": None})
    list(dataset), list(plain)
    assert abs(dataset.stats().padding_share - within) < 0.1
    assert (within, without) == pytest.approx([each.stats().padding_share for each in (dataset, plain)], abs=0.01)
    assert within < 0.6 * without
    assert forecast(texts, ForecastOptions(batch_size=12)).padding is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bucket_by": 5}, "bucket_by=5"),
        ({"bucket_by": "nothing"}, "nothing"),
        ({"bucket_by": "tokens", "shuffle": False}, "shuffle=False"),
        ({"bucket_by": "tokens", "batch_size": None}, "batch_size=None"),
        ({"bucket_by": lambda lengths: [1, 2]}, "bucket_by= returned"),
        ({"bucket_by": lambda lengths: -lengths["tokens"]}, "bucket_by= returned"),
        ({"bucket_by": lambda lengths: lengths["tokens"] / 128}, "bucket_by= returned.*whole number"),
        ({"bucket_steps": 1}, "bucket_steps"),
    ],
)
def test_buckets_that_cannot_be_made_are_errors(given, message, texts):
    with pytest.raises(errors.UsageError, match=message):
        sl.NumpyDataset(**{"url": texts, "batch_size": 4, **given})
