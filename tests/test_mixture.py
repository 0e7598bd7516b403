"""Mixtures of real datasets: exact shares, epochs of each source, the same at every world size, exact resume."""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import SMALL, flat
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from streamloader import errors
from streamloader.format.writer import Writer
from streamloader.loader.arguments import Source
from streamloader.options import Shuffle
from streamloader.pytorch.dataset import Mixture, StreamingDataset

COUNTS = {"a": 500, "b": 203, "c": 90}
FIELDS = {"x": "float32[300]", "label": "int64", "name": "text", "tok": "ragged:int32"}
WEIGHTS = {"a": 3, "b": 1}
FIRST = {"a": 0, "b": 1000, "c": 2000}  # of the labels


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the datasets a, b and c, and one with another field."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, count in COUNTS.items():
        with Writer(folder / name, FIELDS, layout=SMALL, num_samples=count) as out:
            for i in range(FIRST[name], FIRST[name] + count):
                tok = np.arange(i, i + i % 5, dtype=np.int32)
                out.write({"x": np.full(300, i, np.float32), "label": np.int64(i), "name": f"sample {i}", "tok": tok})
    with Writer(folder / "other", {"x": "float32[30]", "label": "int64"}, layout=SMALL, num_samples=10) as out:
        for i in range(10):
            out.write({"x": np.zeros(30, np.float32), "label": np.int64(i)})
    return folder


def open_mixture(url: Path, weights: dict[str, float], batch: int = 16, **arguments: Any) -> Mixture:
    sources = {str(url / name): weight for name, weight in weights.items()}
    return Mixture(sources, batch_size=batch, **{"fields": ["x", "label"], "with_index": True, **arguments})


def labels(batch: dict[str, Any]) -> list[int]:
    """The valid samples of a batch, by their label, which no other sample of any source has."""
    return batch["label"][batch["valid"]].tolist() if "valid" in batch else batch["label"].tolist()


def take(batches: Iterable[dict[str, Any]], count: int = 10**6) -> list[list[int]]:
    return [labels(batch) for batch in islice(batches, count)]


def ranks_of(url: Path, weights: dict[str, float], size: int, batch: int, **options: Any) -> list[list[list[int]]]:
    """The batches of every rank, of so many samples together."""
    worlds = [(rank, size) for rank in range(size)]
    return [take(open_mixture(url, weights, batch // size, world=one, **options)) for one in worlds]


def assert_once(seen: list[int], slack: int) -> None:
    """Every sample of the source that ends the epoch came; up to `slack` of its next epoch, to the end of the turn."""
    found = Counter(i for i in seen if source_of(i) == "a")
    assert set(found) == set(range(COUNTS["a"]))
    assert found.total() < COUNTS["a"] + slack


def source_of(label: int) -> str:
    return "abc"[label // 1000]


def test_every_row_is_the_sample_that_source_and_index_name(url):
    ds = open_mixture(url, {"a": 2, "c": 1, "b": 1}, fields=None)
    firsts = np.array([FIRST["a"], FIRST["c"], FIRST["b"]])
    for batch in ds:
        label = firsts[batch["source"].numpy()] + batch["index"].numpy()
        assert batch["label"].tolist() == label.tolist()
        assert (batch["x"].numpy() == label[:, None]).all()
        assert batch["name"] == [f"sample {i}" for i in label]
        assert batch["tok"].tolist() == np.concatenate([np.arange(i, i + i % 5) for i in label.tolist()]).tolist()
    assert [Path(one.url).name for one in ds.sources] == ["a", "c", "b"]


@pytest.mark.parametrize(("unit", "within"), [(None, 8), (1, 1), (4, 4)])
def test_each_batch_and_each_window_of_batches_has_the_shares(url, unit, within):
    ds = open_mixture(url, {"a": 0.7, "b": 0.3}, 40, stop="last", unit=unit)
    counts = np.cumsum([[0, 0], *(np.bincount([i // 1000 for i in part], minlength=2) for part in take(ds)[:-1])], 0)
    for begin in range(len(counts)):
        for end in range(begin + 1, len(counts)):
            assert abs(counts[end, 0] - counts[begin, 0] - 0.7 * 40 * (end - begin)) < 2 * within


def test_each_source_goes_through_epochs_of_its_own(url):
    ds = open_mixture(url, {"a": 0.5, "b": 0.3, "c": 0.2}, stop="last")
    seen: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for epoch in range(3):
        assert ds.epoch == epoch
        count = len(ds)
        passed = take(ds)
        assert len(passed) == count
        for label in flat(passed):
            seen[source_of(label)].append(label - FIRST[source_of(label)])
    for name, count in COUNTS.items():
        whole = [seen[name][at : at + count] for at in range(0, len(seen[name]) - count + 1, count)]
        assert len(whole) >= 3
        assert all(sorted(part) == list(range(count)) for part in whole)
        assert whole[0] != whole[1]


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:3 consumers do not divide")
@pytest.mark.parametrize("weights", [{"a": 0.7, "b": 0.3}, {"a": 5, "b": 3, "c": 1}])
@pytest.mark.parametrize("batches", ["mixed", "homogeneous"])
def test_the_same_global_batch_at_any_world_size_has_the_same_samples(url, weights, batches):
    runs = []
    for size in (1, 2, 4, 3):  # 3 divides neither turns nor lanes
        ranks = ranks_of(url, weights, size, 48, batches=batches)
        runs.append([sorted(flat(step)) for step in zip(*ranks, strict=True)])
    assert runs == [runs[0]] * 4
    if batches == "homogeneous":
        assert all(len(set(map(source_of, step))) == 1 for step in runs[0])


@pytest.mark.quick(3)
@pytest.mark.filterwarnings("ignore:3 consumers do not divide")
@pytest.mark.parametrize(("size", "batch"), [(1, 16), (2, 8), (4, 12), (3, 16)])
@pytest.mark.parametrize("batches", ["mixed", "homogeneous"])
def test_a_run_resumes_exactly_at_another_world_and_batch_size(url, size, batch, batches):
    options = {"stop": "last", "batches": batches, "seed": 5}
    first = open_mixture(url, {"a": 2, "b": 1}, **options)
    iterator = iter(first)
    begun = take(iterator, 9)
    state = json.loads(json.dumps(first.state_dict()))
    ahead = take(iterator)
    seen, epochs = list(flat(begun)), []
    for rank in range(size):
        other = open_mixture(url, {"a": 2, "b": 1}, batch, world=(rank, size), **options)
        other.load_state_dict(state)
        rest = take(other)
        seen += flat(rest)
        epochs.append(other.epoch)
        if size == 1:
            assert rest == ahead
    assert epochs == [1] * size
    assert_once(seen, 48)
    if batches == "mixed":
        assert Counter(seen) == Counter(flat(begun) + flat(ahead))


@pytest.mark.quick(2)
@pytest.mark.parametrize("batch", [1, 6, 7, 12, 30])
def test_a_run_resumes_exactly_with_a_batch_that_cuts_its_turns(url, batch):
    later = {20: {str(url / "a"): 1, str(url / "b"): 1}}
    first = open_mixture(url, {"a": 2, "b": 1}, stop="last", schedule=later)
    begun = take(iter(first), 9)
    state = json.loads(json.dumps(first.state_dict()))
    for _ in range(2):  # the second time from a state of turns that have become smaller
        other = open_mixture(url, {"a": 2, "b": 1}, batch, stop="last", schedule=later)
        other.load_state_dict(state)
        iterator = iter(other)
        begun += take(iterator, 5)
        state = json.loads(json.dumps(other.state_dict()))
    seen = flat(begun + take(iterator))
    assert_once(seen, 8)
    assert other.epoch == 1
    of_b = [i for i in seen if source_of(i) == "b"]
    assert sorted(of_b[: COUNTS["b"]]) == list(range(1000, 1000 + COUNTS["b"]))


def test_states_are_of_what_was_handed_out_and_of_k_trained(url):
    ds = open_mixture(url, WEIGHTS)
    assert ds.state_dict(batches=5)["position"] == 80
    iterator = iter(ds)
    take(iterator, 5)
    assert ds.state_dict() == ds.state_dict(batches=5)
    other = open_mixture(url, WEIGHTS)
    other.load_state_dict(ds.state_dict(batches=4))
    assert take(iter(other), 3)[1:] == take(iterator, 2)


def test_weights_follow_a_schedule_of_steps(url):
    schedule = {10: {str(url / "b"): 1}, 15: {str(url / "a"): 1, str(url / "b"): 1}}
    sources = {str(url / "a"): 1, str(url / "b"): 0}
    mixed = Mixture(sources, schedule=schedule, batch_size=16, fields=["label"], stop="last")
    iterator = iter(mixed)
    shares = [sum(source_of(i) == "a" for i in step) for step in take(iterator, 20)]
    assert shares == [16] * 10 + [0] * 5 + [8] * 5
    later = Mixture(sources, schedule=schedule, batch_size=16, fields=["label"], stop="last")
    state = mixed.state_dict()
    assert [phase[0] for phase in state["phases"]] == [0, 160, 240]
    later.load_state_dict(state)
    assert take(iter(later), 5) == take(iterator, 5)


def test_a_nested_mixture_shares_its_weight(url):
    a, b, c = (str(url / name) for name in "abc")
    inner = Mixture({b: 2, c: 1}, batch_size=None)
    nested = Mixture({a: 0.4, inner: 0.6}, batch_size=20, unit=1, fields=["label"])
    plain = Mixture({a: 2, b: 2, c: 1}, batch_size=20, unit=1, fields=["label"])
    assert take(nested) == take(plain)


@pytest.mark.long
def test_a_source_that_is_added_on_resume_is_mixed_in_from_there_and_recorded(url):
    first = open_mixture(url, WEIGHTS, stop="last")
    iterator = iter(first)
    begun = take(iterator, 9)
    state = first.state_dict()
    more = open_mixture(url, {"c": 2, "a": 1, "b": 1}, stop="last")
    more.load_state_dict(state)
    rest = take(iter(more), 12)
    assert abs(Counter(map(source_of, flat(rest)))["c"] - 96) <= 8
    assert not set(flat(begun)) & set(flat(rest))  # the others went on where they were
    recorded = more.state_dict()
    assert [phase[2:] for phase in recorded["phases"]] == [[[3, 1], [1, 2]], [[2, 1, 1], [0, 1, 2]]]
    again = open_mixture(url, {"c": 2, "a": 1, "b": 1}, stop="last")
    again.load_state_dict(json.loads(json.dumps(recorded)))
    assert again.state_dict() == recorded  # the same weights once more change nothing
    more.load_state_dict(recorded)
    assert take(again) == take(more)


def test_sources_may_be_parts_of_datasets(url):
    a, b = Source(url / "a", where="label < 100 or label == 450"), Source(url / "b", where=slice(100, 203))
    ds = Mixture({a: 1, b: 1}, batch_size=8, with_index=True, stop="last", unit=2)
    seen: Counter[int] = Counter()
    for batch in ds:
        firsts = np.array([0, 1000])[batch["source"].numpy()]
        assert batch["label"].tolist() == (firsts + batch["index"].numpy()).tolist()
        seen.update(labels(batch))
    assert {i for i in seen if i < 1000} == {*range(100), 450}
    assert {i for i in seen if i >= 1000} == set(range(1100, 1203))


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [1, 2])
def test_samples_names_each_step_and_steps_can_be_skipped_and_replayed(url, size):
    world = (size - 1, size)
    ds = open_mixture(url, WEIGHTS, world=world)
    whole = [(labels(batch), batch["source"].tolist(), batch["index"].tolist()) for batch in ds]
    for step, (_, source, index) in enumerate(whole):
        found = ds.samples(0, step, world[0])
        assert (found["source"].tolist(), found["index"].tolist()) == (source, index)
    assert take(ds.replay(0, [2, 5])) == [whole[2][0], whole[5][0]]
    left = open_mixture(url, WEIGHTS, world=world, skip_steps={0: [1, 3]})
    assert take(left) == [batch for step, (batch, _, _) in enumerate(whole) if step not in (1, 3)]
    with pytest.raises(errors.UsageError, match="no step starts"):
        ds.samples(0, 10_000)


def test_without_shuffle_sources_come_as_they_are_stored(url):
    for size in (1, 2):
        ranks = ranks_of(url, {"a": 1, "b": 1}, size, 16, shuffle=False)
        rows = [i for step in zip(*ranks, strict=True) for i in sorted(flat(step))]
        assert [i for i in rows if i < 1000] == list(range(sum(i < 1000 for i in rows)))


@pytest.mark.quick(1)
@pytest.mark.filterwarnings("ignore:2 DataLoader workers", "ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("batches", ["mixed", "homogeneous"])
def test_workers_see_each_sample_once_and_resume_from_a_state(url, workers, batches):
    context = {"multiprocessing_context": "fork"} if workers else {}

    def opened() -> Mixture:
        return open_mixture(url, {"a": 2, "c": 1}, stop="last", batches=batches)

    def loader(ds: Mixture, kind: type[DataLoader[Any]] = DataLoader) -> Any:
        return kind(ds, batch_size=None, num_workers=workers, **context)

    whole = take(iter(loader(opened())))
    assert_once(flat(whole), 32)
    if batches == "homogeneous":
        assert all(len(set(map(source_of, batch))) == 1 for batch in whole if batch)
    other = opened()
    other.load_state_dict(opened().state_dict(batches=5, workers=max(1, workers)))
    assert take(loader(other)) == whole[5:]
    first, second = (loader(opened(), StatefulDataLoader) for _ in range(2))
    take(iter(first), 5)
    second.load_state_dict(first.state_dict())
    assert take(second) == whole[5:]


def test_samples_come_singly_too(url):
    ds = open_mixture(url, WEIGHTS, batch=None)  # type: ignore[arg-type]
    singly = [int(sample["label"]) for sample in islice(ds, 40)]
    assert singly == flat(take(iter(open_mixture(url, WEIGHTS, batch=40, unit=1)), 1))


BAD: list[tuple[Any, dict[str, Any], type[errors.StreamloaderError], str]] = [
    ({}, {}, errors.MixtureError, "a mixture of {}"),
    (["a"], {}, errors.MixtureError, "give a weight for each source"),
    ({"nowhere": -1, "b": 2}, {}, errors.MixtureError, "weight -1 is negative"),
    ({"nowhere": 0, "b": 0}, {}, errors.MixtureError, "all 0"),
    ({"nowhere": "x"}, {}, errors.MixtureError, "'x' is not a number"),
    ({3: 1}, {}, errors.MixtureError, "a source 3"),
    ({"a": 1}, {"schedule": {5: {"b": 1}}}, errors.MixtureError, "the mixture's own sources"),
    ({"a": 1}, {"schedule": {-1: {"a": 1}}}, errors.MixtureError, "whole steps"),
    ({"a": 1}, {"schedule": {5: {"a": 0}}}, errors.MixtureError, "all 0"),
    ({"a": 1}, {"stop": "never"}, errors.UsageError, "stop='never'"),
    ({"a": 1}, {"batches": "both"}, errors.UsageError, "batches='both'"),
    ({"a": 1}, {"unit": 0}, errors.UsageError, "unit=0"),
    ({"a": 1}, {"unit": 4, "batches": "homogeneous"}, errors.UsageError, "a turn is a whole batch"),
    ({"a": 1}, {"remainder": "uneven"}, errors.MixtureError, "has no end"),
    ({"a": 1}, {"batch_size": 0}, errors.BatchError, "batch_size=0"),
    ({Source("a", where="open('x')"): 1}, {}, errors.SelectionError, "open"),
]


@pytest.mark.parametrize(("sources", "arguments", "error", "shown"), BAD)
def test_invalid_mixtures_are_errors_before_anything_is_opened(sources, arguments, error, shown):
    with pytest.raises(error) as raised:
        Mixture(sources, **{"batch_size": 16, **arguments})
    assert shown in str(raised.value)


def test_sources_that_do_not_fit_are_errors_that_name_them(url, tmp_path):
    for name, specs, count in (("empty", {"label": "int64"}, 0), ("named", {"source": "int64"}, 1)):
        with Writer(tmp_path / name, specs, num_samples=count) as out:
            out.write_batch({field: np.arange(count) for field in specs})
    for sources, options, error, shown in (
        (("a", "other"), {}, errors.MixtureError, "do not both have name, tok"),
        (("a", "other"), {"fields": ["x"]}, errors.MixtureError, r"x is float32\[300\] .* and float32\[30\]"),
        ((str(url / "a"), url / "a"), {}, errors.MixtureError, "the same samples of .* twice"),
        ((tmp_path / "empty", "a"), {}, errors.MixtureError, "has no samples"),
        (("a", "b"), {"unit": 32}, errors.BatchError, "cuts turns of 32"),
        ((tmp_path / "named",), {"with_index": True}, errors.FieldError, "'source'"),
    ):
        places = [url / one if one in ("a", "b", "other") else one for one in sources]
        with pytest.raises(error, match=shown):
            iter(Mixture(dict.fromkeys(places, 1), batch_size=16, **options))


def test_a_state_of_another_mixture_is_an_error(url):
    ds = open_mixture(url, WEIGHTS)
    state = ds.state_dict()
    alone = StreamingDataset(url / "a", batch_size=16)
    others: list[tuple[Any, Any, str]] = [
        (ds, alone.state_dict(), "of a single dataset"),
        (alone, state, "of a mixture"),
        (open_mixture(url, {"a": 3, "c": 1}), state, "the state has a source .* none of"),
        (open_mixture(url, WEIGHTS, seed=1, stop="last"), state, "stop 'first' instead of 'last', seed 0 instead of 1"),
        (open_mixture(url, WEIGHTS, shuffle=Shuffle(lanes=1)), state, "a source"),
    ]
    invalid = [("phases", []), ("phases", [[0, 8]]), ("phases", [[0, 8, [1, 1], [0, 2]]]), ("anchor", [1])]
    invalid += [("sources", [3]), ("position", 10**9)]
    others += [(ds, {**state, name: value}, name.removesuffix("s")) for name, value in invalid]
    forced = {**state, "sources": [{**one, "digest": "of a copy"} for one in state["sources"]]}
    for loader, given, shown in [*others, (ds, forced, "a source")]:
        with pytest.raises(errors.StateError, match=shown):
            loader.load_state_dict(given)
    ds.load_state_dict(forced, force=True)
    assert ds.state_dict() == state


def test_weights_count_the_elements_of_a_field_where_they_are_asked_to(tmp_path):
    lengths = {"long": (200, 12), "short": (600, 3), "mixed": (400, 6)}
    for name, (count, mean) in lengths.items():
        with Writer(tmp_path / name, {"tok": "ragged:int32"}, layout=SMALL) as out:
            for i in range(count):
                out.write({"tok": np.zeros(mean + (i % 3 - 1) * (mean > 3), np.int32)})
    long, short, mixed = (
        Source(tmp_path / name, where=slice(0, count // 3 * 3)) for name, (count, _) in lengths.items()
    )
    weights = {long: 0.6, short: 0.3, mixed: 0.1}
    options: dict[str, Any] = {"batch_size": 64, "with_index": True, "stop": "last"}
    ds = Mixture(weights, weigh="tok", **options)
    assert list(ds.shares("tok").values()) == pytest.approx([0.6, 0.3, 0.1], abs=0.001)
    assert list(ds.shares().values()) == pytest.approx([0.3, 0.6, 0.1], abs=0.001)
    tokens = np.zeros(3)
    for batch in islice(ds, 30):
        np.add.at(tokens, batch["source"].numpy(), np.diff(batch["tok_offsets"].numpy()))
    assert (tokens / tokens.sum()).tolist() == pytest.approx([0.6, 0.3, 0.1], abs=0.01)
    plain = Mixture(weights, **options)
    assert list(plain.shares().values()) == pytest.approx([0.6, 0.3, 0.1])
    assert list(plain.shares("tok").values()) == pytest.approx([0.828, 0.103, 0.069], abs=0.001)
    resumed = Mixture(weights, weigh="tok", **options)
    resumed.load_state_dict(ds.state_dict())
    assert next(iter(resumed))["index"].tolist() == ds.samples(0, 30)["index"].tolist()
    changed = Mixture({long: 1, short: 0}, weigh="tok", schedule={5: {short: 1, long: 1}}, **options)
    assert list(changed.shares(step=4).values()) == [1, 0]
    assert list(changed.shares(step=5).values()) == pytest.approx([0.2, 0.8], abs=0.001)
    nested = Mixture({Mixture({long: 1, short: 1}, weigh="tok", **options): 1, mixed: 1}, **options)
    assert list(nested.shares().values()) == pytest.approx([0.1, 0.4, 0.5], abs=0.001)
    for error, keys, shown in [
        (errors.FieldError, {long: 1}, "no variable-length field 'label' to weigh by; name one of tok; "),
        (errors.MixtureError, {Mixture({long: 1, short: 1}, **options): 1}, "weigh='label' of nested mixtures"),
    ]:
        with pytest.raises(error, match=shown):
            Mixture(keys, weigh="label", **options)


def test_a_source_is_checked_when_it_is_made_and_hides_its_storage_options():
    with pytest.raises(errors.UsageError, match="windows=3; give a Window"):
        Source("memory://x", windows=3)  # type: ignore[arg-type]
    first, second = (Source("memory://x", storage_options={"secret": "hidden"}, sample_axis=np.int64(1)) for _ in "ab")  # type: ignore[arg-type]
    assert "hidden" not in repr(first)
    assert type(first.sample_axis) is int
    assert len({first: 1, second: 2}) == 2
