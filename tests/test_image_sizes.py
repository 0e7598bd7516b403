"""`Decode(size={samples: size})`: the size of images changes at a step that all ranks, workers and resumes agree on."""

import json
from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import SMALL, encoded, picture
from torch.utils.data import DataLoader

import streamloader as sl
from streamloader.errors import UsageError
from streamloader.loader.dataset import NumpyDataset, NumpyMixture

N = 50
SIZES = {0: (8, 12), 24: (16, 16), 60: (10, 20)}  # the second within the first epoch, the third within the second
EPOCHS = 3


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sizes") / "pictures"
    fields = {"image": "bytes:jpeg", "mask": "bytes:png", "boxes": "ragged:float32[4]"}
    with sl.Writer(path, fields, layout=SMALL, num_samples=N) as out:
        for number in range(N):
            image, mask = picture(number, 30, 40), np.full((30, 40), number, np.uint8)
            out.write({"image": encoded(image, "jpeg"), "mask": encoded(mask, "png"), "boxes": [[4, 6, 20, 15]]})
    return path


def decode_to(size: Any, **options: Any) -> dict[str, Any]:
    return {"image": sl.Decode(size=size, crop="random", boxes="boxes", masks="mask", **options)}


def opened(url: Path, size: Any = SIZES, batch: int = 12, **options: Any) -> NumpyDataset:
    given: dict[str, Any] = {"num_workers": 0, "seed": 3, "with_index": True, **options}
    return NumpyDataset(url, batch_size=batch, decode=decode_to(size), **given)


def expected_size(before: int) -> tuple[int, int]:
    return [size for samples, size in SIZES.items() if samples <= before][-1]


Batches = Iterable[dict[str, Any]]


def all_epochs(ds: Any, epochs: int = EPOCHS) -> list[dict[str, Any]]:
    return [batch for _ in range(epochs) for batch in ds]


def assert_equal(batch: dict[str, Any], other: dict[str, Any]) -> None:
    assert batch.keys() == other.keys()
    for name, column in batch.items():
        assert np.array_equal(column, other[name]), name


@pytest.fixture(scope="module")
def fixed(url: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The batches of three epochs with each size for the whole run."""
    return {size: all_epochs(opened(url, size)) for size in SIZES.values()}


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_each_step_has_the_images_masks_and_boxes_of_the_size_that_the_samples_before_it_name(url, fixed, workers):
    batches = all_epochs(opened(url, num_workers=workers))
    steps = [(epoch, step) for epoch in range(EPOCHS) for step in range(-(-N // 12))]
    sizes = [expected_size(epoch * N + step * 12) for epoch, step in steps]
    assert sizes[1:3] == [(8, 12), (16, 16)]
    assert set(sizes) == set(SIZES.values())
    for number, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        assert batch["image"].shape == (12, *size, 3)
        assert batch["mask"].shape == (12, *size)
        assert_equal(batch, fixed[size][number])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:3 consumers")
def test_ranks_change_the_size_at_the_same_step_also_after_a_resume_at_another_number(url):
    whole = [batch["image"].shape[1:3] for batch in all_epochs(opened(url))]
    for rank in range(2):
        ds = opened(url, batch=6, world=(rank, 2))
        assert [batch["image"].shape[1:3] for batch in islice(ds, 2)] == whole[:2]
        state = json.loads(json.dumps(ds.state_dict()))
    for rank in range(3):
        ds = opened(url, batch=4, world=(rank, 3))
        ds.load_state_dict(state)
        assert [batch["image"].shape[1:3] for batch in all_epochs(ds, 2)] == whole[2:10]


@pytest.mark.long
def test_a_state_within_a_run_of_other_batches_changes_the_size_at_the_first_step_after_the_point(url, fixed):
    begun = opened(url, batch=5)
    batches = list(islice(begun, 3))
    assert all(batch["image"].shape[1:3] == (8, 12) for batch in batches)
    ds = opened(url)
    ds.load_state_dict(begun.state_dict())  # at position 15: steps begin at 15, 27 and 39
    rest = all_epochs(ds, 1)
    assert [batch["image"].shape[1:3] for batch in rest] == [(8, 12), (16, 16), (16, 16)]
    pixels = {int(i): row for batch in fixed[16, 16][:4] for i, row in zip(batch["index"], batch["image"], strict=True)}
    assert all(np.array_equal(row, pixels[int(i)]) for i, row in zip(rest[1]["index"], rest[1]["image"], strict=True))


@pytest.mark.long
def test_skipped_and_replayed_steps_have_the_sizes_that_they_had(url):
    whole = all_epochs(opened(url))
    ds = opened(url, skip_steps={0: [1, 2], 1: [0]})
    for batch, step in zip(all_epochs(ds, 2), (0, 3, 4, 6, 7, 8, 9), strict=True):
        assert_equal(batch, whole[step])
    for epoch in range(2):
        for batch, step in zip(ds.replay(epoch, [1, 4]), (1, 4), strict=True):
            assert_equal(batch, whole[5 * epoch + step])
    pieces = opened(url, steps_per_epoch=4, remainder="drop")
    sizes = [batch["image"].shape[1:3] for batch in all_epochs(pieces, 2)]
    assert sizes == [expected_size(before) for before in (0, 12, 24, 36, 50, 62, 74, 86)]


@pytest.mark.long
def test_a_mixture_counts_the_samples_of_all_its_sources_over_its_epochs(url):
    first, second = sl.Source(url, where=slice(0, 20)), sl.Source(url, where=slice(20, N))

    def mixture(size: Any) -> NumpyMixture:
        return NumpyMixture(
            {first: 1, second: 1}, batch_size=8, decode=decode_to(size), num_workers=0, remainder="drop"
        )

    ds = mixture(SIZES)
    starts = [ds._first_share().at_epoch(epoch).samples_before for epoch in range(4)]
    counts = [(after - before) // 8 for before, after in pairwise(starts)]
    expected = [
        expected_size(start + 8 * step) for start, count in zip(starts, counts, strict=False) for step in range(count)
    ]
    batches = all_epochs(ds)
    assert [batch["image"].shape[1:3] for batch in batches] == expected
    assert set(expected) == set(SIZES.values())
    same = all_epochs(mixture(SIZES[0]))
    assert all(np.array_equal(batch["image"], other["image"]) for batch, other in zip(batches[:2], same, strict=False))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:1 DataLoader workers")
def test_transforms_layouts_and_dataloader_workers_get_the_size_of_the_step(url):
    given: dict[str, Any] = {"batch_size": 12, "seed": 3, "remainder": "drop"}

    def add_mean(sample: dict[str, Any]) -> dict[str, Any]:
        return {"image": sample["image"], "mean": np.float32(sample["image"].mean())}

    transformed = sl.StreamingDataset(url, decode=decode_to(SIZES), transform=add_mean, num_workers=0, **given)
    normalized = sl.StreamingDataset(url, decode=decode_to(SIZES, normalize="imagenet"), **given)
    sizes = [torch.Size(expected_size(12 * step)) for step in range(N // 12)]
    assert [batch["image"].shape[1:3] for batch in transformed] == sizes
    in_worker = DataLoader(normalized, batch_size=None, num_workers=1)
    assert [batch["image"].shape[2:] for batch in in_worker] == sizes


def test_memory_is_counted_for_the_largest_size(url):
    changing, largest = (opened(url, size) for size in (SIZES, (16, 16)))
    needs = [ds._engine().least_memory(ds._first_share()) for ds in (changing, largest)]
    assert needs[0] == needs[1]


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ({}, "give size as"),
        ({9: (8, 8)}, "give size as"),
        ({0: (8, 8), -1: (9, 9)}, "give size as"),
        ({0: (8, 8), 9.5: (9, 9)}, "give size as"),
        ({0: (8, 8), 9: 9}, "give size as"),
    ],
)
def test_sizes_without_a_first_one_and_invalid_ones_are_errors(size, shown):
    with pytest.raises(UsageError, match=shown):
        sl.Decode(size=size)


def test_single_samples_have_one_size(url):
    with pytest.raises(UsageError, match="by samples with batch_size=None; give a batch_size"):
        sl.StreamingDataset(url, batch_size=None, decode=decode_to(SIZES))
