"""Laws of runs with any features together: selections, weights, joins, buckets, packing, bad samples, collation."""

import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import streamloader as sl
from streamloader.loader.dataset import NumpyMixture

N, GLOBAL = 157, 12
BAD = (7, 8, 60, 151)
LENGTHS = np.random.default_rng(1).integers(0, 30, N)
LABELS = np.random.default_rng(2).integers(0, 4, N)
DELETED = (0, 30, 31, 32, 99, N - 1)
LAYOUT = sl.Layout(chunk_size=1 << 11, block_size=1 << 12, samples_per_shard=64)
Rows = Counter[str]
Run = tuple[bool, list[dict[str, Any]], dict[str, Any]]
pytestmark = [pytest.mark.usefixtures("two_workers"), pytest.mark.filterwarnings("ignore:.*consumers")]


def encoded(i: int) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(data, "PNG")
    return data.getvalue()[: 20 if i in BAD else None]


def write(path: Path) -> str:
    fields = {"key": "int64", "label": "int64", "tok": "ragged:int32", "image": "bytes:png"}
    with sl.Writer(path, fields, layout=LAYOUT, num_samples=N) as out:
        for i in range(N):
            out.write({"key": i, "label": LABELS[i], "tok": np.full(LENGTHS[i], i, np.int32), "image": encoded(i)})
    return str(path)


def write_notes(path: Path) -> str:
    """Write what is joined to the samples, in another order."""
    with sl.Writer(path, {"key": "int64", "note": "ragged:int16"}, layout=LAYOUT, num_samples=N) as out:
        for i in np.random.default_rng(3).permutation(N):
            out.write({"key": i, "note": np.full(3 + i % 2 * 40, i, np.int16)})
    return str(path)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Two datasets, the second a version with deleted samples, and one that is joined to them."""
    folder = tmp_path_factory.mktemp("together")
    whole, living = write(folder / "whole"), write(folder / "living")
    sl.delete(living, ids=np.array(DELETED))
    return whole, living, write_notes(folder / "notes")


def transformed(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["label"] == 3 and len(sample["tok"]) == 5:
        raise ValueError("a transform that fails")
    return {**sample, "double": sample["tok"][:1].sum() * 2}


@st.composite
def selections(draw: st.DrawFn) -> dict[str, Any]:
    """Which samples of a dataset a run has, and how often."""
    return {
        "exclude": draw(st.lists(st.integers(0, N - len(DELETED) - 1), max_size=9, unique=True)) or None,
        "where": draw(st.sampled_from([None, "label != 2"])),
        "weights": draw(st.sampled_from([None, None, "balanced:label", {"label": {0: 1, 1: 2.5}}, "label"])),
        "replacement": draw(st.booleans()),
    }


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Whether sources are joined with notes, the selections of one or two sources, and the options of a run."""
    sources = draw(st.lists(selections(), min_size=1, max_size=2))
    on_error = draw(st.sampled_from(["mask", "replace"]))
    options: dict[str, Any] = {
        "seed": draw(st.integers(0, 3)),
        "remainder": draw(st.sampled_from(["pad", "drop"])),
        "collate": draw(st.sampled_from([None, "pad", "list", {"tok": sl.Pad(-1, side="left")}])),
        "skip_steps": {0: draw(st.lists(st.integers(0, 1), max_size=2, unique=True))},
        "num_workers": draw(st.sampled_from([0, 0, 0, 2])),
        "on_error": on_error,
        "shuffle": sl.Shuffle(lanes=draw(st.sampled_from([4, 12]))),
        "max_bad": 10**6,
        "decode": sl.Decode(size=(8, 8)),
    }
    if draw(st.booleans()):
        options["transform"] = transformed
    if packs := draw(st.integers(0, 3)) == 0:
        balance = draw(st.sampled_from([None, "attention"]))
        options |= {"pack": {"tok": sl.Pack(24, fit="best", balance=balance)}, "fields": ["tok"], "decode": None}
        options |= {"collate": None, "transform": None}
        sources = [{**source, "weights": None} for source in sources]
    elif draw(st.booleans()):
        budget = draw(st.sampled_from([None, 360, 500]))
        options |= {"bucket_by": "tok", "bucket_steps": draw(st.integers(2, 5)), "max_tokens": budget}
    return draw(st.booleans()) and not packs, sources, options


def opened(urls: tuple[str, ...], run: Run, world: tuple[int, int]) -> Any:
    joins, sources, options = run
    options = {**options, "world": world, "batch_size": GLOBAL // world[1], "with_index": True}
    if options.get("max_tokens") is not None:
        options["max_tokens"] //= world[1]
    left = [sl.Join(url, urls[2], on="key") if joins else url for url in urls[:2]]
    if len(sources) == 1:
        return sl.NumpyDataset(left[1], **sources[0], **options)
    pair = [sl.Source(url, **source) for url, source in zip(left, sources, strict=True)]
    return NumpyMixture({pair[0]: 2, pair[1]: 1}, unit=4, **options)


BESIDE = ("_offsets", "_lengths", "_cu_seqlens")


def rows_of(batch: Mapping[str, Any]) -> Rows:
    """The rows of a batch, but for those that were replaced, which depends on the batch of the rank."""
    flags, rows = batch.get("replaced", np.zeros(len(batch["index"]), bool)), []
    for i in np.flatnonzero(~flags).tolist():
        row: dict[str, Any] = {}
        for name, column in batch.items():
            if (offsets := batch.get(f"{name}_offsets")) is not None:
                row[name] = column[offsets[i] : offsets[i + 1]]
            elif (
                lengths := batch.get(f"{name}_lengths")
            ) is not None:  # all values are one number, and not less than pad
                row[name] = np.sort(column[i])[column.shape[1] - lengths[i] :]
            elif not name.endswith(BESIDE):
                row[name] = column[i]
        # the size of zeros in a list is that of another row of the batch
        masked = "error" in row and row["error"] and "tok_documents" not in row
        shown = {name: np.any(value) if masked and np.ndim(value) else value for name, value in row.items()}
        rows.append(repr({name: np.asarray(shown[name]).tolist() for name in sorted(shown)}))
    return Counter(rows)


def steps_of(ranks: list[Any], count: int | None = None) -> list[Rows]:
    """The rows of each global step, of some steps or of all that are left: as many on each rank."""
    by_rank = [[rows_of(batch) for batch in islice(rank, count)] for rank in ranks]
    assert len({len(steps) for steps in by_rank}) == 1
    return [sum(step, Counter()) for step in zip(*by_rank, strict=True)]


def together(steps: list[Rows]) -> Rows:
    """The rows of all steps, without those that padding repeats."""
    return Counter({row: count for row, count in sum(steps, Counter()).items() if "'valid': False" not in row})


@settings(max_examples=examples(25), deadline=None)
@given(runs(), st.integers(0, 9), st.sampled_from([(1, 3), (2, 1), (3, 2), (2, 4)]))
def test_runs_have_the_same_steps_at_any_world_size_and_go_on_at_another(urls, run, done, sizes):
    cut = run[2].get("max_tokens") is not None  # each number of ranks cuts the order into steps of its own
    if cut:
        run = (*run[:2], {**run[2], "skip_steps": None, "remainder": "pad"})
    before, after = ([opened(urls, run, (rank, size)) for rank in range(size)] for size in sizes)
    passes = [iter(rank) for rank in before]
    begun = steps_of(passes, done % max(1, len(before[0])))
    state = json.loads(json.dumps(before[-1].state_dict()))
    for rank in after:
        rank.load_state_dict(state)
    whole, rest, one = begun + steps_of(passes), steps_of(after), steps_of([opened(urls, run, (0, 1))])
    if cut:
        if run[2]["on_error"] == "mask":
            all_once, resumed = together(one), together(begun + rest)
            assert together(whole) == all_once
            assert not all_once - resumed
            assert (resumed - all_once).total() < sizes[1]  # ranks that cannot share the rest of a step repeat some
        return
    if run[2]["on_error"] == "mask":
        assert rest == whole[len(begun) :]
    assert len(one) == len(whole) == len(begun) + len(rest)
    if run[2]["on_error"] == "mask":
        assert begun + rest == one


def shown(batches: Iterator[Mapping[str, Any]]) -> list[str]:
    """Every value of each batch, in order."""
    with np.printoptions(threshold=10**9):
        return [repr({name: batch[name] for name in sorted(batch)}) for batch in batches]


@pytest.mark.long
@settings(max_examples=examples(15), deadline=None)
@given(runs(), st.integers(0, 9), st.sampled_from([(0, 1), (1, 2), (2, 3)]))
def test_a_rank_goes_on_exactly_and_knows_its_samples_without_reading(urls, run, done, world):
    whole, again = (opened(urls, run, world) for _ in range(2))
    batches = list(whole)
    resumed = opened(urls, run, world)
    done %= max(1, len(batches))
    passing = iter(again)
    first = list(islice(passing, done))
    state = again.state_dict()
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert shown(first + rest) == shown(batches)
    if 0 < done < len(batches) - 1:
        next(passing)
        assert len(json.dumps(again.state_dict())) - len(json.dumps(state)) <= 2  # a digit of the position, or two
    skipped = run[2]["skip_steps"][0]
    steps = [step for step in range(len(batches) + len(skipped)) if step not in skipped][: len(batches)]
    for step, batch in zip(steps, batches, strict=True):
        samples = whole.samples(0, step, world[0])
        kept = ~batch.get("replaced", np.zeros(len(batch["index"]), bool))
        expected = samples if isinstance(samples, np.ndarray) else samples["index"]
        assert batch["index"][kept].tolist() == expected[kept].tolist()
    if steps:
        (last,) = whole.replay(0, steps[-1:])
        assert shown([last]) == shown(batches[-1:])
