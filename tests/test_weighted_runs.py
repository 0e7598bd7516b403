"""`weights=`: what epochs, ranks and states have whose samples are drawn by weights, and what `weights=` may be."""

import io
import json
import pickle
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import commands
import datasets
import numpy as np
import pytest
import torch
from amounts import examples
from datasets import flat, seen, take
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bad_samples import N as BAD_N
from test_bad_samples import check_rows, damage
from test_bad_samples import write as write_samples
from test_schedule import runs
from torch.utils.data import DataLoader

import streamloader as sl
from streamloader.engine.dataset import Dataset, first_samples, numbers_among_all, plans
from streamloader.engine.fetcher import Fetcher
from streamloader.errors import SelectionError, StateError, UsageError
from streamloader.format.writer import Writer
from streamloader.loader.dataset import NumpyMixture, mean_length
from streamloader.measure.forecast import ForecastOptions, forecast
from streamloader.options import Shuffle
from streamloader.order.schedule import BlockRef, World
from streamloader.order.weights import Drawn
from streamloader.pytorch.dataset import StreamingDataset
from streamloader.storage import open_store
from streamloader.testing import order as reference

N = 603
WEIGHTS = np.random.default_rng(5).choice([0, 0.1, 0.5, 1, 1, 2, 6.5], N)
CLASSES = np.random.default_rng(6).choice(4, N, p=[0.7, 0.2, 0.07, 0.03])
NAMES = ("ant", "bee", "cat", "dog")


@pytest.fixture(scope="module")
def url(data: Any) -> str:
    """A dataset of N samples with every kind of field."""
    return data(N)


@pytest.fixture(scope="module")
def animals(tmp_path_factory: pytest.TempPathFactory) -> str:
    """N samples of four classes, by number with names and as text, and their weights."""
    url = str(tmp_path_factory.mktemp("animals") / "d")
    fields = {"label": "uint8", "kind": "text", "w": "float64"}
    with Writer(url, fields, layout=datasets.SMALL, provenance={"classes": {"label": NAMES}}) as out:
        for number, weight in zip(CLASSES.tolist(), WEIGHTS.tolist(), strict=True):
            out.write({"label": number, "kind": NAMES[number], "w": weight})
    return url


def stream(url: str, batch: int = 16, **options: Any) -> StreamingDataset:
    return StreamingDataset(url, batch_size=batch, with_index=True, **{"world": (0, 1), **options})


def drawn(ds: StreamingDataset, epoch: int) -> list[int]:
    """The samples of an epoch, ascending."""
    selection = ds._datasets[0].selection
    assert isinstance(selection, Drawn)
    return selection[epoch * len(selection) : (epoch + 1) * len(selection)].tolist()


def positions_of(ds: StreamingDataset, case: reference.Weighted) -> list[int]:
    """The sample at each position of an epoch by the reference."""
    params, count = ds._first.sources[0].params, reference.num_draws(case)
    order = reference.Order(count, params.block, params.lanes, params.window, case.seed, case.epoch)
    draws = reference.draws(case)
    return [draws[element] for element in reference.samples(order)]


# ---- the plan


@settings(max_examples=examples(80), deadline=None)
@given(runs(), st.integers(3000, 10**12))
def test_epochs_with_samples_of_their_own_differ_only_in_the_numbers_of_samples(run, stride):
    share, start = run
    own = replace(share, order=replace(share.order, stride=stride))
    first = share.epoch * stride
    for plan, same in zip(own.plans(start), share.plans(start), strict=True):
        assert (plan.samples - first).tolist() == same.samples.tolist()
        assert plan.positions.tolist() == same.positions.tolist()
        assert plan.tickets.tolist() == same.tickets.tolist()
        assert [(ref.start - first, ref.stop - first) for ref in plan.needs] == [ref[1:3] for ref in same.needs]
        assert all(ref.next_use == np.inf for ref in plan.needs)
    if share.global_steps(start):
        assert (own.samples(start) - first).tolist() == share.samples(start).tolist()


def dataset_of(count: int, selection: Any) -> Dataset:
    return Dataset(None, type("M", (), {"num_remaining": count})(), (), selection)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 5), st.booleans())
def test_numbers_of_draws_tell_dataset_and_epoch(count, other, epoch, ordinary_first):
    selection = Drawn(count, np.arange(count) + 1, 1)
    parts = [dataset_of(count, selection), dataset_of(other, None)][:: -1 if ordinary_first else 1]
    first, all_first = ((first_samples(parts, selected=each)) for each in (True, False))
    at = int(ordinary_first)
    begin = epoch * (count + other) + first[at]
    found = numbers_among_all(parts)(np.arange(begin, begin + count))
    assert (found - all_first[at]).tolist() == selection[epoch * count : (epoch + 1) * count].tolist()
    ordinary = np.arange(first[1 - at], first[1 - at] + other)
    assert (numbers_among_all(parts)(ordinary) - all_first[1 - at]).tolist() == list(range(other))
    fetcher = Fetcher.__new__(Fetcher)
    fetcher._datasets, fetcher._starts, fetcher._total = parts, first, count + other
    dataset, ref = fetcher._locate(BlockRef(0, begin, begin + count))
    assert (dataset, ref.start, ref.stop) == (parts[at], epoch * count, (epoch + 1) * count)


def test_ranks_that_divide_the_lanes_read_different_blocks(url):
    ds = stream(url, weights=WEIGHTS, shuffle=Shuffle(lanes=4))
    for size in (1, 2, 4):
        found = []
        for rank in range(size):
            share = replace(ds._first_share(), batch=16 // size, world=World(rank, size)).at_epoch(3)
            found += [ref for plan in plans(share, 0, ds._datasets) if plan for ref in plan.needs]
        elements = sorted(number for ref in found for number in range(ref.start, ref.stop))
        assert elements == list(range(3 * N, 4 * N))


def test_an_epoch_whose_numbers_do_not_fit_is_an_error(url):
    ds = stream(url, weights=WEIGHTS)
    ds.set_epoch(2**53)
    with pytest.raises(UsageError, match=r"epoch=9007199254740992 is not in \[0, "):
        next(iter(ds))


# ---- what comes out


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"replacement": False}, {"shuffle": False, "where": slice(50, 500)}])
def test_every_row_of_every_epoch_is_the_sample_that_was_drawn(url, workers, options):
    ds = stream(url, weights=WEIGHTS, num_workers=workers, **options)
    weights = WEIGHTS[options.get("where", slice(None))]
    assert len(ds) == -(-ds.num_samples // 16)
    for epoch in range(2):
        batches = list(ds)
        for step, batch in enumerate(batches):
            datasets.check_batch(batch, datasets.FIELDS)
            assert batch["index"].tolist() == ds.samples(epoch, step).tolist()
        found = [i - (603 - 553) * ("where" in options) for i in seen(batches)]
        case = reference.Weighted(tuple(weights), None, options.get("replacement", True), 0, epoch)
        expected = positions_of(ds, case) if options.get("shuffle", True) else reference.draws(case)
        assert found == expected
    ds.close()


def test_copies_of_a_sample_have_random_numbers_of_their_own(url):
    def transform(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"count": sample["count"], "number": rng.integers(2**62)}

    only_one = np.eye(1, N, 7)[0]
    ds = stream(url, weights=only_one, transform=transform, fields=["count"], num_workers=0)
    numbers = [int(number) for batch in ds for number in batch["number"][batch["valid"]]]
    assert len(numbers) == len(set(numbers)) == N


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*blocks are read")
@pytest.mark.parametrize("options", [{"weights": WEIGHTS}, {"weights": "balanced:flag", "replacement": False}])
def test_every_world_size_has_the_same_steps_and_resumes_at_the_others_states(url, options):
    options = {**options, "fields": ["tok", "label"], "shuffle": Shuffle(lanes=4), "exclude": [3, 500]}
    alone = stream(url, 12, **options)
    whole = [sorted(step) for _ in range(2) for step in take(alone)]
    epoch = len(alone)
    assert sorted(flat(whole[:epoch])) == drawn(alone, 0)
    assert sorted(flat(whole[epoch:])) == drawn(alone, 1)
    for size, done in ((1, 3), (2, epoch - 1), (3, epoch + 9), (4, epoch + 4)):
        saved = stream(url, 12, **options)
        saved.set_epoch(done // epoch)
        iterator = iter(saved)
        take(iterator, done % epoch)
        state = json.loads(json.dumps(saved.state_dict()))
        assert len(json.dumps(state)) < 600
        ranks = [stream(url, 12 // size, world=(rank, size), **options) for rank in range(size)]
        for rank in ranks:
            rank.load_state_dict(state)
        steps = [[batch for _ in range(2 - done // epoch) for batch in take(rank)] for rank in ranks]
        assert [sorted(flat(step)) for step in zip(*steps, strict=True)] == whole[done:]


def test_steps_are_skipped_replayed_and_counted_as_without_weights(url):
    ds = stream(url, weights=WEIGHTS, fields=["label"], skip_steps={1: range(3, 5)}, steps_per_epoch=10)
    steps = take(iter(stream(url, weights=WEIGHTS, fields=["label"])))
    found = [take(ds) for _ in range(5)]
    assert flat(found)[:38] == steps
    second = [ds.samples(1, step).tolist() for step in (0, 1, 2, 5, 6)]
    assert flat(found)[38:43] == second
    assert take(ds.replay(1, [2, 5])) == second[2:4]
    assert take(ds.replay(0, [7])) == [steps[7]]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:epoch 4 begins anew")
@pytest.mark.parametrize("memory", [2_000_000, 60_000_000])
def test_blocks_of_an_epoch_are_never_those_of_another(url, memory):
    fields = ["x", "count", "name"]
    ds = stream(url, weights=WEIGHTS, memory=memory, fields=fields, num_workers=0)
    for epoch in range(4):
        batches = list(ds)
        for batch in batches[::7]:
            datasets.check_batch(batch, fields)
        assert sorted(seen(batches)) == drawn(ds, epoch)
    again = iter(ds)
    take(again, 5)
    assert sorted(seen(ds)) == drawn(ds, 4)  # after a pass that was left early
    ds.close()


def test_weights_count_as_memory(url):
    one, without = (stream(url, weights=weights, fields=["x"]) for weights in (WEIGHTS, None))
    selection = one._datasets[0].selection
    assert isinstance(selection, Drawn)
    least = [ds._engine().least_memory(ds._first_share()) for ds in (one, without)]
    assert selection.nbytes > 10 * N
    assert least[0] >= least[1] + selection.nbytes


def test_a_copy_in_another_process_draws_the_same(url):
    ds = stream(url, weights=WEIGHTS, fields=["label"])
    steps = take(ds)
    copy = pickle.loads(pickle.dumps(stream(url, weights=WEIGHTS, fields=["label"])))
    assert take(copy) == steps


def test_dataloader_workers_take_parts_of_the_same_draws(url):
    ds = stream(url, weights=WEIGHTS, fields=["label"], num_workers=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batches depend on the number of workers; threads at a fork
        batches = list(DataLoader(ds, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    assert sorted(seen(batches)) == drawn(ds, 0)
    assert batches[4]["index"].tolist() == ds.samples(0, 4, workers=2).tolist()


@pytest.mark.parametrize("field", ["vec", "large", "tok", "name"])
def test_each_copy_of_a_bad_sample_is_masked(field, tmp_path):
    path = write_samples(tmp_path / "d", [field, "label"])
    bad = {*damage(path, field, 40)}
    weights = np.random.default_rng(1).integers(0, 4, BAD_N)
    weights[40] = 3
    ds = sl.NumpyDataset(path, batch_size=40, with_index=True, weights=weights, on_error="mask", max_bad=1.0)
    selection = ds._datasets[0].selection
    assert selection is not None
    good = [number for batch in ds for number in check_rows(batch, "mask", bad)]
    assert sorted(good) == [i for i in selection[:].tolist() if i not in bad]
    assert ds.stats().bad_samples == len(selection) - len(good) > len(bad & {*selection[:].tolist()})


@pytest.mark.long
def test_a_mixture_draws_from_a_source_by_its_weights(url, data):
    other = data(200)
    weighted = sl.Source(url, weights=WEIGHTS, exclude=[5])
    options = {"batch_size": 16, "with_index": True, "stop": "last", "world": (0, 1)}
    mixture = NumpyMixture({other: 1, weighted: 1}, **options)
    found: list[int] = []
    for _ in range(2):
        for step, batch in enumerate(mixture):
            samples = mixture.samples(mixture.epoch, step) if step < 3 else batch
            assert (samples["index"] == batch["index"]).all()
            rows = batch["valid"] & (batch["source"] == 1)
            found += batch["index"][rows].tolist()
            values = {name: torch.from_numpy(batch[name]) for name in ("index", "x", "count")}
            datasets.check_batch(values, ["x", "count"])
    selection = mixture._datasets[1].selection
    assert isinstance(selection, Drawn)
    count = len(selection)
    assert count == N - 1
    for epoch in range(2):
        assert (
            sorted(found[epoch * count : (epoch + 1) * count])
            == selection[epoch * count : (epoch + 1) * count].tolist()
        )
    state = mixture.state_dict()
    assert [source.get("weights") for source in state["sources"]] == [None, selection.digest]
    with pytest.raises(StateError, match="which is none of this run's"):
        NumpyMixture({other: 1, sl.Source(url, exclude=[5]): 1}, **options).load_state_dict(state)
    assert mean_length(mixture._datasets[1], "tok") * count == sum(i % 7 for i in selection[:].tolist())


# ---- states


def test_a_state_of_other_weights_is_an_error_that_shows_both(url):
    ds = stream(url, weights=WEIGHTS)
    take(iter(ds), 2)
    state = ds.state_dict()
    digest = ds._datasets[0].weights_digest
    for other in (None, WEIGHTS + 1, "balanced:flag"):
        shown = stream(url, weights=other)._datasets[0].weights_digest
        with pytest.raises(StateError, match=f"weights '{digest}' instead of {shown!r}"):
            stream(url, weights=other).load_state_dict(state)
    with pytest.raises(StateError, match=f"weights None instead of '{digest}'"):
        ds.load_state_dict(stream(url).state_dict())
    with pytest.raises(StateError, match="weights is 7"):
        ds.load_state_dict({**state, "weights": 7})
    stream(url, weights=(WEIGHTS * 4).tolist()).load_state_dict(state)  # the same proportions


# ---- what weights may be


def test_weights_are_a_field_an_array_or_a_file(animals, tmp_path, moto):
    np.save(tmp_path / "w.npy", WEIGHTS)
    (tmp_path / "w.txt").write_text("\n".join(map(repr, WEIGHTS.tolist())))
    remote, out = moto.url(), io.BytesIO()
    np.save(out, WEIGHTS)
    open_store(remote, moto.storage_options).put("w.npy", out.getvalue())
    choices = ["w", WEIGHTS, WEIGHTS.tolist(), torch.tensor(WEIGHTS), tmp_path / "w.npy", str(tmp_path / "w.txt")]
    choices.append(f"file://{tmp_path}/w.npy")
    assert len({stream(animals, weights=choice)._datasets[0].weights_digest for choice in choices}) == 1
    whole = drawn(stream(animals, weights="w"), 0)
    assert min(WEIGHTS[whole]) > 0
    datasets.write(remote, N, ["label"], options=moto.storage_options)
    stored = stream(remote, weights=f"{remote}/w.npy", storage_options=moto.storage_options)
    assert drawn(stored, 0) == whole


SHARES: list[tuple[Any, list[float]]] = [
    ("balanced:label", [1, 1, 1, 1]),
    ("balanced:kind", [1, 1, 1, 1]),
    ({"label": {"cat": 2, "dog": 1}}, [0, 0, 2, 1]),
    ({"kind": {"dog": 1, "cat": 2}}, [0, 0, 2, 1]),
    ({"label": {3: 1, np.int64(2): 2}}, [0, 0, 2, 1]),
    ({"label": {"ant": 0.1, "bee": 0.2, "cat": 0.3, "dog": 0}}, [1, 2, 3, 0]),
]


@pytest.mark.quick(11)
@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(("weights", "shares"), SHARES)
def test_classes_come_in_their_shares_exact_to_one_draw_in_each_epoch(animals, weights, shares, replacement):
    ds = stream(animals, weights=weights, replacement=replacement, exclude=range(20), fields=["label"])
    sizes, total = np.bincount(CLASSES[20:]), sum(shares)
    most = min(int(size * total) // share for size, share in zip(sizes.tolist(), shares, strict=True) if share)
    assert ds.num_samples == (N - 20 if replacement else most)
    for epoch in range(3):
        batches = list(ds)
        labels = np.concatenate([batch["label"][batch["valid"]] for batch in batches])
        samples = seen(batches)
        assert min(samples) >= 20
        assert (CLASSES[samples] == labels).all()
        counts = np.bincount(labels, minlength=4)
        assert np.abs(counts - ds.num_samples * np.array(shares) / total).max() < 1
        times = Counter(samples)
        if not replacement:
            assert max(times.values()) == 1
        for number in range(4):
            if shares[number]:
                each = [times[i] for i in range(20, N) if CLASSES[i] == number]
                assert max(each) - min(each) <= 1
        assert sorted(samples) == drawn(ds, epoch)


def test_classes_by_name_number_and_text_are_the_same_weights(animals):
    digests = [stream(animals, weights=weights)._datasets[0].weights_digest for weights, _ in SHARES]
    assert digests[0] == digests[1]
    assert digests[2] == digests[4]
    assert len({*digests}) == 3  # the classes of texts ascend as those of numbers do


INVALID: list[tuple[Any, str]] = [
    ("nothing", r"weights='nothing' is neither a field with a number per sample nor a file; such fields are label, w"),
    ("kind", "weights='kind' uses 'kind', which is text; fields with a number per sample are label, w"),
    ("balanced:w", "uses 'w', which is float64; fields with a whole number or a text per sample are label, kind"),
    ("balanced:x", "'x', which is not a field"),
    (np.ones(5), f"weights= has 5 values of float64, the dataset has {N} samples; .*also if where="),
    (["a"] * N, "values of <U1"),
    (np.ones((N, 1)), r"has the shape \(603, 1\)"),
    (-np.ones(N), r"weights= has -1\.0 at 0"),
    (np.zeros(N), "all are 0"),
    ({}, "name a field, and the weights of its classes"),
    ({"label": [1, 2]}, "name a field, and the weights"),
    ({"label": {"ant": 1}, "kind": {"ant": 1}}, "name a field, and the weights"),
    ({"label": {"ants": 1}}, "names 'ants', which is none of its classes; similar names are 'ant'"),
    ({"label": {"ant": 1, 0: 2}}, "has a class twice"),
    ({"label": {"ant": -1}}, "the weight -1 is negative"),
    ({"label": {"ant": 0}}, "all 0"),
    ({"label": {7: 1}}, "has 7, and none of 603 samples is of this class; leave the class out"),
    ({"label": {0.5: 1}}, "has the class 0.5; name classes by text or by whole number"),
    ({"kind": {0: 1}}, "has the class 0 of a field of texts"),
]


@pytest.mark.parametrize(("weights", "shown"), INVALID)
def test_invalid_weights_are_an_error_with_its_remedy(animals, weights, shown):
    with pytest.raises(SelectionError, match=shown):
        stream(animals, weights=weights)


def test_a_file_of_something_else_is_an_error(animals, tmp_path):
    for content in (b"1\n2\nthree", b"\x93NUMPY\x01"):
        (tmp_path / "w").write_bytes(content)
        with pytest.raises(SelectionError, match=f"weights={tmp_path}/w cannot be read: .*a number in each line"):
            stream(animals, weights=tmp_path / "w")


def test_arrays_in_place_have_no_weights(url):
    with pytest.raises(UsageError, match=r"weights= of arrays in place; mix a Source\(where=\)"):
        stream(url, sample_axis="sample", fields=["x"], weights=np.ones(N))


def test_a_sampler_is_an_error_that_names_weights(url):
    with pytest.raises(TypeError, match="weights= to draw them by weight"):
        stream(url, sampler=[1])


def test_a_plan_tells_how_often_samples_and_classes_come(animals, capsys):
    options = ["--batch-size", "8", "--weights", "balanced:label"]
    out = commands.run(capsys, "plan", animals, *options)[1]
    times = Counter(drawn(stream(animals, weights="balanced:label"), 0))
    assert f"weights   603 draws an epoch, of {len(times)} samples, one up to {max(times.values())} times\n" in out
    counts = np.bincount(CLASSES[list(times.elements())])
    assert f"          {', '.join(f'{n} {c / N:.2%}' for n, c in zip(NAMES, counts, strict=True))}\n" in out
    copies = json.loads(commands.run(capsys, "plan", animals, *options, "--no-replacement", "--json")[1])["copies"]
    least = int(np.bincount(CLASSES).min())
    assert copies == {"samples": 4 * least, "most": 1, "shares": dict.fromkeys(NAMES, 0.25)}
    by_field = json.loads(commands.run(capsys, "plan", animals, "--memory", "64MB", "--weights", "w", "--json")[1])
    assert by_field["copies"]["shares"] == {}
    assert by_field["kept"] == 0


def test_requests_of_a_plan_are_about_those_of_the_first_epoch(url):
    planned = forecast(url, ForecastOptions(batch_size=16, weights=WEIGHTS, fields=("x", "tok")))
    ds = stream(url, weights=WEIGHTS, fields=["x", "tok"])
    list(ds)
    assert planned.requests <= ds.stats().requests <= planned.requests + 2 * planned.lanes  # which may share blocks
    assert planned.num_samples == N
