"""The recipes of docs/training.md for torchvision and albumentations: the same images at any world size, in threads and
in processes."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchrun import TESTS

import streamloader as sl

BLOCK = re.compile(r"```python\n# (augmentations|vision)\.py\n(.*?)```", re.DOTALL)


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """The modules of the page, as code by name; this and other processes may import those that are written there."""
    monkeypatch.syspath_prepend(tmp_path)
    found = dict(BLOCK.findall((TESTS.parent / "docs" / "training.md").read_text()))
    for name in found:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return found


@pytest.fixture
def albumentations(recipes, tmp_path, monkeypatch):
    """An `Albumentations` of the recipe."""
    monkeypatch.setitem(os.environ, "NO_ALBUMENTATIONS_UPDATE", "1")  # it asks for a newer version when it is imported
    (tmp_path / "augmentations.py").write_text(recipes["augmentations"])
    from albumentations import Compose, HorizontalFlip, RandomBrightnessContrast, RandomCrop
    from augmentations import Albumentations

    return Albumentations(Compose([RandomCrop(24, 24), HorizontalFlip(p=0.5), RandomBrightnessContrast(p=0.5)]))


@pytest.fixture
def torchvision(recipes, tmp_path):
    """The transform of the recipe."""
    (tmp_path / "vision.py").write_text(f"import torchvision_of_any_build\n{recipes['vision']}")
    from vision import transform

    return transform


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
@pytest.mark.parametrize("library", ["albumentations", "torchvision"])
def test_a_library_draws_the_same_numbers_for_a_sample_wherever_it_is_transformed(library, request, tmp_path):
    transform = request.getfixturevalue(library)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    with sl.Writer(tmp_path / "data", {"image": "uint8[32, 32, 3]", "label": "int64"}) as out:
        out.write_batch({"image": pixels, "label": np.arange(40)})
    runs = [
        images(tmp_path / "data", ranks, transform=transform, num_workers=n) for ranks, n in ((1, 0), (2, 0), (1, 2))
    ]
    assert len(runs[0]) == 40
    assert len({image.tobytes() for image in runs[0].values()}) == 40
    for other in runs[1:]:
        assert all(np.array_equal(image, other[number]) for number, image in runs[0].items())


def test_an_image_folder_of_torchvision_keeps_its_files_and_class_names(tmp_path):
    import torchvision_of_any_build  # noqa: F401
    from torchvision.datasets import ImageFolder

    pixels = np.random.default_rng(0).integers(0, 256, (6, 20, 30, 3), dtype=np.uint8)
    files = [tmp_path / "photos" / ("ant", "bee")[i % 2] / f"{i}.{('png', 'jpg')[i // 3]}" for i in range(6)]
    for path, image in zip(files, pixels, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    sl.convert(ImageFolder(tmp_path / "photos"), tmp_path / "out", workers=0)
    ds = sl.open(tmp_path / "out")
    assert ds.manifest.classes == {"label": ("ant", "bee")}
    expected = [(path.read_bytes(), path.parent.name == "bee") for path in sorted(files)]
    assert [(sample["image"], sample["label"]) for sample in ds] == expected
