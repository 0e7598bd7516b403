"""The random generator of a batch: a pure function of the seed, the epoch, the batch's position and the rank."""

import random
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from datasets import write
from torch.utils.data import DataLoader

import streamloader as sl
from streamloader.errors import StateError

ROOT = Path(__file__).parent.parent
N = 90
Drawn = list[float]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rng") / "d"
    write(path, N, ["label", "x"])
    return path


def make(path: Path, **options: Any) -> sl.StreamingDataset:
    given = {"batch_size": 12, "seed": 7, "num_workers": 0, "shuffle": sl.Shuffle(lanes=2)}
    return sl.StreamingDataset(path, **{**given, **options})


def drawn(ds: Any, batches: Any = None) -> Drawn:
    """The first number of the generator of each batch."""
    return [ds.batch_rng().random() for _ in (ds if batches is None else batches)]


def by_rule(seed: int, epoch: int, position: int, rank: int) -> float:
    key, counter = np.array([seed, epoch], np.uint64), np.array([0, rank, 2, position], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def test_numbers_of_batches_are_pinned_and_follow_the_rule(path):
    ds = make(path)
    first, second = drawn(ds), drawn(ds)
    assert first[:2] == [0.9063653532456504, 0.6261084934061841]
    assert first == [by_rule(7, 0, position, 0) for position in range(0, N, 12)]
    assert second == [by_rule(7, 1, position, 0) for position in range(0, N, 12)]
    assert ds.batch_rng().random() == second[-1], "also after the last batch of a pass"
    assert ds.batch_rng().random(3).tolist() == ds.batch_rng().random(3).tolist(), "each call begins anew"


@pytest.mark.usefixtures("two_workers")
def test_they_are_the_same_with_workers_and_after_a_resume(path):
    expected = drawn(make(path))
    assert drawn(make(path, num_workers=2)) == expected
    begun = make(path)
    for number, _ in enumerate(begun, 1):
        if number == 3:
            break
    resumed = make(path)
    resumed.load_state_dict(begun.state_dict())
    assert drawn(resumed) == expected[3:]
    numpy = sl.NumpyDataset(path, batch_size=12, seed=7, shuffle=sl.Shuffle(lanes=2))
    assert drawn(numpy) == expected


def test_each_rank_has_numbers_of_its_own_at_the_positions_of_its_steps(path):
    for rank in range(2):
        assert drawn(make(path, batch_size=6, world=(rank, 2))) == [by_rule(7, 0, at, rank) for at in range(0, N, 12)]


def test_loops_of_steps_and_single_samples_and_replays_have_the_positions_of_the_data(path):
    expected = drawn(make(path))
    loops = make(path, steps_per_epoch=3)
    assert [*drawn(loops), *drawn(loops), *drawn(loops)][: len(expected)] == expected
    samples = make(path, batch_size=None)
    assert drawn(samples) == [by_rule(7, 0, position, 0) for position in range(N)]
    again = make(path)
    assert drawn(again, again.replay(0, [2, 5])) == [expected[2], expected[5]]
    skipping = make(path, skip_steps={0: [1]})
    assert drawn(skipping) == [expected[0], *expected[2:]]


def test_a_mixture_has_the_positions_of_all_its_sources(path, tmp_path):
    write(tmp_path / "other", N - 10, ["label", "x"])
    mixture = sl.Mixture({path: 0.5, tmp_path / "other": 0.5}, batch_size=12, seed=7, num_workers=0)
    next(iter(mixture))
    assert mixture.batch_rng().random() == by_rule(7, 0, 0, 0)


def test_no_other_generator_is_touched(path):
    ds = make(path)
    next(iter(ds))
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    ds.batch_rng().random(100)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_there_is_none_before_the_first_batch(path):
    ds = make(path)
    with pytest.raises(StateError, match=r"before the first batch.*call it after a batch was returned"):
        ds.batch_rng()
    next(iter(ds))
    ds.load_state_dict(ds.state_dict())
    with pytest.raises(StateError, match="before the first batch"):
        ds.batch_rng()


@pytest.mark.filterwarnings("ignore:.*DataLoader workers")
def test_dataloader_workers_have_their_own(path):
    ds = make(path)
    with pytest.raises(StateError, match=r"DataLoader workers read this dataset.*give num_workers= to the dataset"):
        drawn(ds, DataLoader(ds, batch_size=None, num_workers=1))
    passing = make(path)
    assert drawn(passing, DataLoader(passing, batch_size=None)) == drawn(make(path))


@pytest.fixture(scope="module")
def mixing() -> ModuleType:
    """The recipe of docs/augmentation.md."""
    (code,) = re.findall(r"```python\n# mixing\.py\n(.*?)```", (ROOT / "docs/augmentation.md").read_text(), re.DOTALL)
    module = ModuleType("mixing")
    exec(code, vars(module))
    return module


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_the_recipe_mixes_images_and_labels_alike_and_only_rows_that_are_valid(mixing, kind):
    """Images of one colour, which is the number of their row: their mean tells what they are mixed of."""
    count, rng = 12, np.random.default_rng(3)
    valid = torch.arange(count) % 4 != 3
    images = torch.arange(count, dtype=torch.float32).reshape(-1, 1, 1, 1).expand(-1, 3, 20, 30)
    targets = torch.eye(count)
    changed = 0
    for _ in range(40):
        mixed, labels = getattr(mixing, kind)(images, targets, valid, rng)
        assert mixed.shape == images.shape
        assert torch.allclose(labels.sum(1), torch.ones(count))
        assert torch.allclose(mixed.mean((1, 2, 3)), labels @ torch.arange(count, dtype=torch.float32), atol=1e-4)
        assert torch.equal(labels[~valid], targets[~valid])
        assert not labels[:, ~valid][valid].any()
        changed += not torch.equal(labels, targets)
    assert changed > 20
