"""The recipe of docs/training.md for albumentations: the same images at any world size, in threads and in processes."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from torchrun import TESTS

import streamloader as sl

BLOCK = re.compile(r"```python\n# (augmentations\.py)\n(.*?)```", re.DOTALL)


@pytest.fixture
def compose(tmp_path, monkeypatch):
    """An `Albumentations` of the recipe, whose file may be imported here and in other processes."""
    monkeypatch.setitem(os.environ, "NO_ALBUMENTATIONS_UPDATE", "1")  # it asks for a newer version when it is imported
    name, code = BLOCK.search((TESTS.parent / "docs" / "training.md").read_text()).groups()
    (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "augmentations", raising=False)
    from albumentations import Compose, HorizontalFlip, RandomBrightnessContrast, RandomCrop
    from augmentations import Albumentations

    return Albumentations(Compose([RandomCrop(24, 24), HorizontalFlip(p=0.5), RandomBrightnessContrast(p=0.5)]))


def images(url: Path, ranks: int, **options: object) -> dict[int, np.ndarray]:
    """The augmented image of each sample, by its number."""
    found = {}
    for rank in range(ranks):
        dataset = sl.StreamingDataset(
            url, batch_size=8, with_index=True, world=(rank, ranks), remainder="uneven", **options
        )
        for batch in dataset:
            found |= dict(zip(batch["index"].tolist(), batch["image"].numpy(), strict=True))
        dataset.close()
    return found


@pytest.mark.filterwarnings("ignore:.* consumers share")
def test_albumentations_draws_the_same_numbers_for_a_sample_wherever_it_is_transformed(compose, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    with sl.Writer(tmp_path / "data", {"image": "uint8[32, 32, 3]"}) as out:
        out.write_batch({"image": pixels})
    runs = [
        images(tmp_path / "data", ranks, transform=compose, transform_workers=n)
        for ranks, n in ((1, 0), (2, 0), (1, 2))
    ]
    assert len(runs[0]) == 40
    assert len({image.tobytes() for image in runs[0].values()}) == 40
    for other in runs[1:]:
        assert all(np.array_equal(image, other[number]) for number, image in runs[0].items())
