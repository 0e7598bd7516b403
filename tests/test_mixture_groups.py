"""Buckets of mixtures: positions of the same source, in the same epoch and lane of it, exchange their samples."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mixture_plan import phases_of
from test_schedule import Engine, spans

import streamloader as sl
from streamloader import errors
from streamloader.loader.dataset import NumpyMixture
from streamloader.measure.forecast import ForecastOptions, forecast_mixture
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.mixture import Mix, MixShare
from streamloader.order.schedule import World
from streamloader.testing import order as reference


@st.composite
def shares(draw: st.DrawFn) -> tuple[MixShare, list[np.ndarray]]:
    """A share of one of R ranks, with R dividing turns and lanes or not, and the lengths of each source."""
    count, seed = draw(st.integers(1, 3)), draw(st.integers(0, 9))
    orders, tables = [], []
    for number in range(count):
        block = draw(st.sampled_from((1, 2, 5)))
        params = OrderParams(block, draw(st.sampled_from((1, 2, 4))), block * draw(st.integers(2, 4)))
        samples = draw(st.integers(1, 30) | st.integers(30, 250))
        orders.append(EpochOrder(samples, params, seed, 0))
        tables.append(np.random.default_rng(number).integers(0, 30, samples))
    mix = Mix(tuple(orders), (1,) * count, draw(phases_of(count)), draw(st.sampled_from(("first", "last"))))
    size, unit = draw(st.integers(1, 4)), mix.phases[0].unit
    batch = unit * draw(st.sampled_from((1, 2, 5)))
    world, remainder = World(draw(st.integers(0, size - 1)), size), draw(st.sampled_from(("pad", "drop")))
    group = draw(st.sampled_from((size * batch, 2 * unit)))
    bucket = draw(st.integers(2, 7)), group, tuple(table.__getitem__ for table in tables)
    return MixShare(mix, draw(st.integers(0, 2)), batch, world, remainder, (), bucket), tables


def alone(share: MixShare) -> MixShare:
    """The same steps on one rank."""
    return replace(share, batch=share.global_batch, world=World(0, 1))


def naive(share: MixShare, tables: list[np.ndarray]) -> list[int]:
    """The source position whose sample each position of the epoch gets, by rule 12 of the specification."""
    assert share.bucket is not None
    (steps, group, _), orders = share.bucket, share.mix.orders
    source, at, _ = replace(share, bucket=None, batch=1, world=World(0, 1)).rows(0, share.num_samples)
    got, key = at.tolist(), reference.keys(reference.Order(1, 1, 1, 2, orders[0].seed, share.epoch))[2]
    samples: dict[tuple[int, int], list[int]] = {}
    for window, begin in enumerate(range(0, share.num_samples, steps * group)):
        k = min(steps, -(-(share.num_samples - begin) // group))
        numbers = [reference.permuted(i, k, (key + window) % 2**64) for i in range(k)]
        places: dict[tuple[int, int, int], list[int]] = {}
        for p in range(begin, min(begin + k * group, share.num_samples)):
            order = orders[source[p]]
            epoch, position = divmod(int(at[p]), order.num_samples)
            places.setdefault((int(source[p]), epoch, position % order.lanes), []).append(p)
            if (source[p], epoch) not in samples:
                of_epoch = replace(order, epoch=epoch)
                samples[source[p], epoch] = of_epoch.samples_at(0, order.num_samples).tolist()
        for (number, epoch, _), group_places in places.items():
            count, table = orders[number].num_samples, tables[number]
            by_number = sorted(group_places, key=lambda p: (numbers[(p - begin) // group], p))
            length = {p: table[samples[number, epoch][at[p] % count]] for p in group_places}
            for place, other in zip(by_number, sorted(group_places, key=lambda p: (length[p], p)), strict=True):
                got[place] = int(at[other])
    return got


@settings(max_examples=examples(25), deadline=None)
@given(shares())
def test_buckets_of_mixtures_follow_the_specification(made):
    share, tables = made
    one = replace(share, batch=1, world=World(0, 1))
    assert one.rows(0, share.num_samples)[1].tolist() == naive(share, tables)


@settings(max_examples=examples(25), deadline=None)
@given(shares(), st.integers(0, 30))
def test_all_ranks_together_deliver_the_steps_of_one_with_the_sources_in_their_turns(made, step):
    share, _ = made
    if not share.global_steps(0):
        return
    position = min(step, share.global_steps(0) - 1) * share.global_batch
    ranks = [replace(share, world=World(rank, share.world.size)) for rank in range(share.world.size)]
    seen = [i for one in ranks for i in one.samples(position).tolist()]
    assert sorted(seen) == sorted(alone(share).samples(position).tolist())
    sources, _, positions = share.rows(position, 1)
    plain = replace(share, bucket=None).rows(position, 1)
    assert (sources.tolist(), positions.tolist()) == (plain[0].tolist(), plain[2].tolist())


@settings(max_examples=examples(40), deadline=None)
@given(shares(), st.integers(0, 30), st.sampled_from((1, 3)), st.booleans())
def test_a_schedule_has_each_row_in_an_open_block_and_no_more_blocks_than_it_declares(made, begun, at_once, short):
    share, _ = made
    first = min(begun, share.global_steps(0))
    with spans(short=short):
        engine, rows = Engine(), []
        for plan in engine.run(share.plans(first * share.global_batch, None, at_once)):
            rows += [step.samples.tolist() for step in plan.steps()]
        expected = [share.samples(step * share.global_batch).tolist() for step in range(first, share.num_steps(0))]
        assert rows == expected
        assert engine.most_live <= share.slots_needed(at_once)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two datasets of sequences of very different lengths; their values are the number of the sample."""
    found = []
    for source, count in enumerate((420, 130)):
        path = tmp_path_factory.mktemp("mixed") / "d"
        layout = sl.Layout(chunk_size=1 << 9, block_size=1 << 11, samples_per_shard=64)
        with sl.Writer(path, {"tokens": "ragged:int32"}, layout=layout, num_samples=count) as out:
            for number in range(count):
                out.write({"tokens": np.full(length_of(source, number), number, np.int32)})
        found.append(str(path))
    return found


def length_of(source: int, number: int) -> int:
    return 1 + (number * 7919) % (97 if source == 0 else 31)


BUCKETS = {"bucket_by": "tokens", "bucket_steps": 10, "remainder": "drop"}
Rows = list[tuple[int, int]]  # (source, sample) of a batch


def mixture(urls: list[str], weights: tuple[float, ...] = (0.7, 0.3), **given: Any) -> NumpyMixture:
    options = {"batch_size": 16, "with_index": True, "num_workers": 0, **BUCKETS, **given}
    return NumpyMixture(dict(zip(urls, weights, strict=True)), **options)


def read(mixed: NumpyMixture, state: dict[str, Any] | None = None, steps: int | None = None) -> list[Rows]:
    """The rows of each batch, after checking their values."""
    found = []
    if state is not None:
        mixed.load_state_dict(state)
    for _, batch in zip(range(steps if steps is not None else 10**9), mixed, strict=False):
        found.append(rows(batch))
        for row, (source, number) in enumerate(found[-1]):
            begin, end = batch["tokens_offsets"][row : row + 2]
            assert batch["tokens"][begin:end].tolist() == [number] * length_of(source, number)
    return found


def rows(batch: dict[str, Any]) -> Rows:
    return list(zip(batch["source"].tolist(), batch["index"].tolist(), strict=True))


def spread(batches: list[Rows]) -> float:
    """The mean difference of the longest and the shortest sample of a source in a batch."""
    lengths = [[length_of(*row) for row in rows if row[0] == 0] for rows in batches]
    return float(np.mean([max(each) - min(each) for each in lengths if each]))


@pytest.mark.quick(1)
@pytest.mark.parametrize("batches", ["mixed", "homogeneous"])
def test_mixed_batches_have_like_lengths_and_each_sample_once(batches, urls):
    plain, within = (read(mixture(urls, batches=batches, bucket_by=by)) for by in (None, "tokens"))
    assert [sorted(source for source, _ in rows) for rows in within] == [
        sorted(source for source, _ in rows) for rows in plain
    ]
    assert within == read(mixture(urls, batches=batches, num_workers=2))
    of_first = [number for rows in within for source, number in rows if source == 0]
    assert len(of_first) == len({*of_first}) > 280
    assert spread(within) < 0.5 * spread(plain)


@pytest.mark.quick(1)
@pytest.mark.parametrize("batches", ["mixed", "homogeneous"])
def test_mixtures_resume_exactly_with_the_same_global_batches_at_any_world_size(batches, urls):
    whole = read(mixture(urls, batches=batches))
    for stop in (4, 23):
        first = mixture(urls, batches=batches)
        assert read(first, steps=stop) == whole[:stop]
        state = first.state_dict()
        assert read(mixture(urls, batches=batches), state) == whole[stop:]
        for size in (2, 4):
            given = {"batches": batches, "batch_size": 16 // size}
            ranks = [mixture(urls, world=(rank, size), **given) for rank in range(size)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                parts = [read(rank, state) for rank in ranks]
            for step, rows in enumerate(whole[stop:]):
                assert sorted(rows) == sorted(row for part in parts for row in part[step])


def test_three_ranks_have_the_steps_of_one(urls):
    whole = read(mixture(urls, batch_size=24))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        parts = [read(mixture(urls, batch_size=8, world=(rank, 3))) for rank in range(3)]
    assert [sorted(rows) for rows in whole] == [
        sorted(row for part in parts for row in part[step]) for step in range(len(whole))
    ]


@pytest.mark.long
def test_samples_of_a_step_are_known_without_reading(urls):
    mixed = mixture(urls)
    for step, rows in enumerate(read(mixed)):
        known = mixed.samples(0, step)
        assert list(zip(known["source"].tolist(), known["index"].tolist(), strict=True)) == rows
    again = next(mixed.replay(0, [7]))
    assert again["index"].tolist() == mixed.samples(0, 7)["index"].tolist()
    skipped = read(mixture(urls, skip_steps={0: range(5, 12)}))
    assert skipped == [rows for step, rows in enumerate(read(mixture(urls))) if not 5 <= step < 12]


@pytest.mark.long
def test_another_mixture_takes_over_where_a_window_ends_and_not_inside_one(urls):
    first = mixture(urls)
    seen = read(first, steps=20)
    state = first.state_dict()
    rest = read(mixture(urls, (0.5, 0.5)), state)
    samples = [row for rows in [*seen, *rest] for row in rows]
    of_first = [number for source, number in samples if source == 0]
    assert len(of_first) == len({*of_first})
    state["position"] += 16
    assert read(mixture(urls), state) == read(mixture(urls))[21:]
    for change in ({"weights": (0.5, 0.5)}, {"batch_size": 12}):
        with pytest.raises(errors.StateError, match="multiple of bucket_steps=10"):
            read(mixture(urls, **change), state)


@pytest.mark.long
def test_new_weights_hold_after_the_window_that_has_begun(urls):
    changed = mixture(urls, stop="last", steps_per_epoch=60)
    seen = read(changed, steps=14)
    even = dict(zip(urls, (1, 1), strict=True))
    with pytest.raises(errors.MixtureError, match="at=20 or later"):
        changed.set_weights(even, at=15)
    assert changed.set_weights(even) == 20
    state = changed.state_dict()
    rest = read(changed, steps=46)
    planned = read(mixture(urls, stop="last", steps_per_epoch=60, schedule={20: even}), steps=60)
    assert seen + rest == planned
    assert read(mixture(urls, stop="last", steps_per_epoch=60), state, steps=46) == rest


@pytest.mark.long
@pytest.mark.parametrize(("stop", "remainder"), [("first", "pad"), ("last", "drop")])
def test_new_weights_in_the_last_window_of_an_epoch_hold_from_its_end_on(stop, remainder, urls):
    given: dict[str, Any] = {"stop": stop, "remainder": remainder, "batch_size": 32}
    even = dict(zip(urls, (1, 1), strict=True))
    count = len(mixture(urls, **given))
    for before in (count // 10 * 10 + 1, count - 1):  # the last one before an incomplete step
        changed = mixture(urls, **given)
        iterator = iter(changed)
        seen = [rows(next(iterator)) for _ in range(before)]
        at = changed.set_weights(even)
        assert at == -(-changed._at.state.num_samples // 32)
        seen += [rows(batch) for batch in iterator] + read(changed)
        planned = mixture(urls, schedule={at: even}, **given)
        assert seen == read(planned) + read(planned)


@pytest.mark.parametrize(
    "change", [{"bucket_by": None}, {"bucket_steps": 11}, {"bucket_by": lambda by: by["tokens"] % 9}]
)
def test_a_state_belongs_to_its_buckets(change, urls):
    state = mixture(urls).state_dict()
    with pytest.raises(errors.StateError, match="bucket"):
        mixture(urls, **change).load_state_dict(state)


@pytest.mark.long
def test_sources_that_are_drawn_by_weights_or_selected_have_buckets(urls):
    drawn = sl.Source(urls[0], weights=np.arange(420) % 3, exclude=[1, 2, 3])
    mixed = mixture([drawn, sl.Source(urls[1], where=np.arange(130) % 2 == 0)], steps_per_epoch=60)
    batches = [rows for _ in range(2) for rows in read(mixed)]
    rows = [row for each in batches for row in each]
    assert all(number % 3 and number > 3 if source == 0 else number % 2 == 0 for source, number in rows)
    assert spread(batches) < 40


def test_a_plan_tells_the_padding_of_a_mixture(urls):
    options = ForecastOptions(batch_size=16, fields=("tokens",), bucket_by="tokens", bucket_steps=10)
    weights = list(zip(urls, (0.7, 0.3), strict=True))
    within, without = forecast_mixture(weights, options).padding
    padded = mixture(urls, collate="pad")
    list(padded)
    assert abs(padded.stats().padding_share - within) < 0.1
    assert within < without
    assert forecast_mixture(weights, replace(options, bucket_by=None)).padding is None


@pytest.mark.long
def test_packed_rows_of_mixtures_have_like_costs_at_any_world_size(urls):
    def rows(balance: Any, **given: Any) -> list[list[tuple[int, int]]]:
        pack = {"tokens": sl.Pack(128, fit="best", balance=balance)}
        sources = dict(zip(urls, (0.7, 0.3), strict=True))
        shared = {"shuffle": sl.Shuffle(lanes=2), "with_index": True, "remainder": "drop", "num_workers": 0}
        packed = NumpyMixture(sources, pack=pack, **shared, **given)
        return [list(zip(batch["source"].tolist(), batch["index"].tolist(), strict=True)) for batch in packed]

    within = rows("attention", batch_size=8)
    assert [sorted(source for source, _ in each) for each in within] == [
        sorted(source for source, _ in each) for each in rows(None, batch_size=8)
    ]
    parts = [rows("attention", batch_size=4, world=(rank, 2)) for rank in range(2)]
    assert [sorted(each) for each in within] == [sorted(a + b) for a, b in zip(*parts, strict=True)]
