"""Curricula: schedules by steps, samples and elements, and sources that are parts of one dataset."""

import json
from collections.abc import Iterable
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import SMALL, flat
from hypothesis import given
from hypothesis import strategies as st

import streamloader as sl
from streamloader import errors
from streamloader.engine.dataset import index_bytes
from streamloader.format.writer import Writer
from streamloader.loader.arguments import Source
from streamloader.loader.dataset import NumpyDataset
from streamloader.order.mixture import elements_before, position_after
from streamloader.pytorch.dataset import Mixture, StreamingDataset

COUNT = 1200
LENGTHS = np.random.default_rng(3).integers(1, 60, COUNT)
SHORT = LENGTHS < 20
LABELS = np.random.default_rng(4).choice(3, COUNT, p=[0.8, 0.15, 0.05])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents whose tokens are their number, and their class."""
    path = tmp_path_factory.mktemp("curricula") / "documents"
    with Writer(path, {"tokens": "ragged:int32", "label": "uint8"}, layout=SMALL, num_samples=COUNT) as out:
        for number, (length, label) in enumerate(zip(LENGTHS.tolist(), LABELS.tolist(), strict=True)):
            out.write({"tokens": np.full(length, number, np.int32), "label": np.uint8(label)})
    return str(path)


Kind = tuple[Any, ...]  # of a curriculum: its sources, and the weights of each of its phases


def by_length(url: str) -> Kind:
    return Source(url, where=SHORT), Source(url, where=~SHORT)


def by_class(url: str) -> Kind:
    return Source(url), Source(url, weights="balanced:label")


KINDS = pytest.mark.parametrize("kind", [by_length, by_class])
BY = pytest.mark.parametrize(("by", "later"), [("steps", (6, 11)), ("samples", (150, 270)), ("tokens", (1500, 5000))])
TWICE = pytest.mark.filterwarnings("ignore:3 consumers do not divide")


def curriculum(sources: Kind, by: str, later: tuple[int, int], batch: int = 24, **options: Any) -> Mixture:
    first, second = sources
    schedule = {later[0]: {first: 1, second: 1}, later[1]: {second: 1}}
    given: dict[str, Any] = {"stop": "last", "with_index": True, "num_workers": 0, **options}
    return Mixture({first: 1, second: 0}, schedule=schedule, schedule_by=by, batch_size=batch, **given)


Rows = list[tuple[int, int]]  # (source, index) of each valid row


def rows(batch: dict[str, Any]) -> Rows:
    valid = batch["valid"].tolist()
    pairs = zip(batch["source"].tolist(), batch["index"].tolist(), valid, strict=True)
    return [(source, index) for source, index, of_epoch in pairs if of_epoch]


def take(batches: Iterable[dict[str, Any]], count: int | None = None) -> list[Rows]:
    return [rows(batch) for batch in islice(batches, count)]


def together(url: str, kind: Any, size: int, state: Any = None, steps: int = 18, **given: Any) -> tuple[Any, Any]:
    """The next global batches, each sorted, of all ranks, and their state."""
    ranks = [curriculum(kind(url), batch=24 // size, world=(rank, size), **given) for rank in range(size)]
    for rank in ranks:
        if state is not None:
            rank.load_state_dict(json.loads(json.dumps(state)))
    parts = [take(iter(rank), steps) for rank in ranks]
    assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)
    return [sorted(flat(step)) for step in zip(*parts, strict=True)], ranks[0].state_dict()


@pytest.mark.quick(1)
@TWICE
@KINDS
@BY
def test_a_curriculum_is_the_same_at_any_number_of_ranks_and_resumes_at_another(url, kind, by, later):
    whole, _ = together(url, kind, 1, by=by, later=later)
    shares = [sum(source for source, _ in step) / 24 for step in whole]
    assert (shares[0], shares[-1]) == (0, 1)
    assert any(0.2 < share < 0.8 for share in shares)
    for size, other in ((2, 3), (3, 4), (4, 1)):
        begun, state = together(url, kind, size, steps=8, by=by, later=later)
        assert len(json.dumps(state)) < 1500
        rest, _ = together(url, kind, other, state, 10, by=by, later=later)
        assert begun + rest == whole


@pytest.mark.quick(1)
@KINDS
def test_workers_skipped_steps_replays_and_the_plan_agree_with_a_curriculum(url, kind):
    given: dict[str, Any] = {"by": "samples", "later": (150, 270)}
    alone = curriculum(kind(url), **given)
    whole = take(iter(alone), 18)
    assert take(iter(curriculum(kind(url), num_workers=2, **given)), 18) == whole
    for step in (0, 7, 17):
        found = alone.samples(0, step)
        assert list(zip(found["source"].tolist(), found["index"].tolist(), strict=True)) == whole[step]
    assert take(alone.replay(0, [5, 8])) == [whole[5], whole[8]]
    left = curriculum(kind(url), skip_steps={0: [1, 8]}, **given)
    assert take(iter(left), 16) == [batch for step, batch in enumerate(whole) if step not in (1, 8)]
    pieces = curriculum(kind(url), steps_per_epoch=6, **given)
    assert [batch for _ in range(3) for batch in take(pieces)] == whole


def test_parts_by_length_have_their_documents_and_each_sample_comes_as_it_is_stored(url):
    ds = curriculum(by_length(url), "steps", (6, 11))
    for batch in islice(ds, 20):
        of, lengths = batch["index"].numpy(), np.diff(batch["tokens_offsets"].numpy())
        assert lengths.tolist() == LENGTHS[of].tolist()
        assert (batch["tokens"].numpy() == np.repeat(of, lengths)).all()
        assert (SHORT[of] == (batch["source"].numpy() == 0)).all()


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    st.integers(0, 10**5),
)
def test_a_number_of_elements_is_reached_at_one_position(phases, elements):
    starts = np.cumsum([0, *(length for length, *_ in phases[:-1])]).tolist()
    weights = [(start, (a, b + 1)) for start, (_, a, b) in zip(starts, phases, strict=True)]
    means = [Fraction(7, 3), Fraction(5)]
    position = position_after(elements, weights, means)
    assert elements_before(position, weights, means) >= elements
    assert not position or elements_before(position - 1, weights, means) < elements


@pytest.mark.long
def test_a_schedule_by_samples_or_tokens_is_one_by_steps_at_the_position(url):
    short, long = float(LENGTHS[SHORT].mean()), float(LENGTHS[~SHORT].mean())
    by_steps = take(iter(curriculum(by_length(url), "steps", (10, 20))), 30)
    by_samples = take(iter(curriculum(by_length(url), "samples", (240, 480))), 30)
    tokens = int(240 * short), int(240 * short + 240 * (short + long) / 2)
    ds = curriculum(by_length(url), "tokens", tokens)
    assert by_steps == by_samples == take(iter(ds), 30)
    assert [phase[0] for phase in ds.state_dict()["phases"]] == [0, 240, 480]
    shares = [list(ds.shares(step=tokens[0] + more).values()) for more in (-1, 0)]
    assert shares == [[1, 0], [0.5, 0.5]]
    other = curriculum(by_length(url), "samples", (240, 480))
    other.load_state_dict(ds.state_dict())
    assert other.state_dict()["phases"] == ds.state_dict()["phases"]  # the same positions change nothing


@pytest.mark.long
def test_the_tokens_seen_before_a_change_are_those_of_the_schedule(url):
    batches = islice(curriculum(by_length(url), "tokens", (3000, 15000), unit=2), 200)
    tokens, before = 0, {}  # the tokens before the last batch of each kind: of the first source, of both
    for batch in batches:
        tokens += len(batch["tokens"])
        if not batch["source"].any():
            before["first"] = tokens
        elif not batch["source"].all():
            before["mixed"] = tokens
    assert before["first"] == pytest.approx(3000, rel=0.1)
    assert before["mixed"] == pytest.approx(15000, rel=0.1)


def test_packed_rows_of_each_part_count_their_tokens_without_padding(url):
    ds = curriculum(
        by_length(url), "tokens", (2000, 4000), 4, fields=["tokens"], pack={"tokens": sl.Pack(64, fit="best")}
    )
    means = [LENGTHS[of].sum() / data.num_samples for of, data in zip((SHORT, ~SHORT), ds._datasets, strict=True)]
    phases = [phase[0] for phase in ds.state_dict()["phases"]]
    expected = [2000 / means[0], 2000 / means[0] + 2000 / np.mean(means)]
    assert phases[1:] == pytest.approx(expected, abs=4)  # a turn
    batches = list(islice(ds, 25))
    assert {tuple(batch["tokens"].shape) for batch in batches} == {(4, 64)}
    for source, batch in ((0, batches[0]), (1, batches[-1])):
        documents = batch["tokens"][batch["tokens_documents"] > 0].unique().numpy()
        assert (SHORT[documents] == (source == 0)).all()


def test_a_nested_mixture_counts_as_the_one_around_it(url):
    first, second = by_length(url)
    third = Source(url, weights="balanced:label")
    inner = curriculum((first, second), "samples", (240, 480))
    nested = Mixture({inner: 1, third: 1}, schedule_by="samples", batch_size=24, stop="last", with_index=True)
    assert [list(nested.shares(step=step).values()) for step in (239, 240, 480)] == [
        [0.5, 0, 0.5],
        [0.25, 0.25, 0.5],
        [0, 0.5, 0.5],
    ]
    with pytest.raises(errors.MixtureError, match=r"schedule_by='steps' with a nested mixture .* counts samples"):
        Mixture({inner: 1, third: 1}, batch_size=24)


def test_two_sources_of_one_dataset_keep_its_chunk_tables_once(url):
    alone = StreamingDataset(url, batch_size=24)._engine()
    both = curriculum(by_class(url), "steps", (6, 11))
    engine = both._engine()
    first, second = engine.datasets
    assert first.readers is second.readers
    assert index_bytes(engine.datasets) - index_bytes(alone.datasets) == second.selection_bytes
    other = Source(url, weights="balanced:label", storage_options={"auto_mkdir": False})
    first, second = curriculum((Source(url), other), "steps", (6, 11))._engine().datasets
    assert first.readers is not second.readers  # whose credentials may differ


def test_what_a_schedule_cannot_count_is_an_error_that_says_so(url, tmp_path):
    first, second = by_length(url)
    with Writer(tmp_path / "empty", {"tokens": "ragged:int32", "label": "uint8"}, num_samples=9) as out:
        for _ in range(9):
            out.write({"tokens": np.zeros(0, np.int32), "label": np.uint8(0)})
    empty = Source(tmp_path / "empty")
    cases: list[tuple[Any, dict[str, Any], type[errors.StreamloaderError], str]] = [
        ({first: 1}, {"schedule_by": 3}, errors.UsageError, "schedule_by=3"),
        (
            {first: 1, second: 1},
            {"schedule": {1.5: {first: 1}}, "schedule_by": "samples"},
            errors.MixtureError,
            "whole",
        ),
        ({first: 1}, {"schedule": {9: {first: 1}}, "schedule_by": "label"}, errors.FieldError, "no variable-length"),
        ({empty: 1}, {"schedule": {9: {empty: 1}}, "schedule_by": "tokens"}, errors.MixtureError, "9 elements"),
    ]
    for sources, options, error, shown in cases:
        with pytest.raises(error, match=shown):
            Mixture(sources, batch_size=8, **options)


@pytest.mark.parametrize("name", ["schedule", "schedule_by"])
def test_a_dataset_with_a_schedule_is_led_to_a_mixture_of_its_parts(url, name):
    with pytest.raises(TypeError, match=rf"'{name}': use Mixture\(..., {name}=\).* Source\(url, where=\)"):
        StreamingDataset(url, batch_size=8, **{name: {9: {url: 1}}})
    with pytest.raises(errors.SelectionError, match=r"a schedule of sl.Mixture with a Source\(url, weights=\)"):
        NumpyDataset(Path(url), batch_size=8, weights={0: "balanced:label"})  # type: ignore[dict-item]
