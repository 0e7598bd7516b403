"""The recipes of docs/augmentation.md for torchvision and albumentations: the same images at any world size, in threads
and in processes, and of batches after a resume."""

import os
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from datasets import encoded, picture, write_images
from PIL import Image
from torchrun import TESTS

import streamloader as sl
from streamloader.options import Decode, RandomResizedCrop, View

BLOCK = re.compile(r"```python\n# (augmentations|vision|vision_mixing|multi_crop)\.py\n(.*?)```", re.DOTALL)


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """The modules of the page, as code by name; this and other processes may import those that are written there."""
    monkeypatch.syspath_prepend(tmp_path)
    found = dict(BLOCK.findall((TESTS.parent / "docs" / "augmentation.md").read_text()))
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
def vision(recipes, tmp_path):
    """Imports a recipe of torchvision by its name."""

    def load(name: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(f"import torchvision_of_any_build\n{recipes[name]}")
        return import_module(name)

    return load


@pytest.fixture
def torchvision(vision):
    """The transform of the recipe."""
    return vision("vision").transform


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


@pytest.mark.quick(1)
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


@pytest.fixture
def folder(tmp_path):
    """A dataset of 20 small JPEGs with labels from 0 to 19."""
    write_images(tmp_path / "jpegs", [encoded(picture(i, 30, 40), "jpeg") for i in range(20)])
    return tmp_path / "jpegs"


def test_mixup_and_cutmix_of_torchvision_are_the_same_with_workers_and_after_a_resume(vision, folder):
    mixed = vision("vision_mixing").mixed

    def make(**options: Any) -> sl.StreamingDataset:
        return sl.StreamingDataset(folder, batch_size=8, decode=Decode(size=(16, 16), normalize="imagenet"), **options)

    def epoch(dataset: sl.StreamingDataset) -> list[tuple[bytes, bytes]]:
        found = []
        for batch in dataset:
            batch["label"] %= 12
            before, count = torch.get_rng_state(), int(batch["valid"].sum())
            image, target = mixed(batch, dataset.batch_rng())
            assert torch.equal(torch.get_rng_state(), before), "torch's generator is as it was"
            assert (image.shape, target.shape) == ((count, 3, 16, 16), (count, 12))
            assert torch.allclose(target.sum(1), torch.ones(count))
            found.append((image.numpy().tobytes(), target.numpy().tobytes()))
            torch.rand(3)  # what the training loop draws does not matter
        return found

    alone = make(num_workers=0)
    first = epoch(alone)
    assert len(set(first)) == 3
    assert epoch(make(num_workers=2)) == first
    begun = make(num_workers=0)
    next(iter(begun))
    resumed = make(num_workers=0)
    resumed.load_state_dict(begun.state_dict())
    assert epoch(resumed) == first[1:]
    assert epoch(alone)[0] != first[0], "another epoch"


@pytest.mark.filterwarnings("ignore:.* consumers share")
def test_each_of_several_crops_gets_a_colour_of_its_own_wherever_it_is_transformed(vision, folder):
    crop = RandomResizedCrop(scale=(0.4, 1))
    decode = Decode(views={"global": View((24, 24), crop, count=2), "local": View((12, 12), crop, count=3)})
    transform = vision("multi_crop").transform

    def all_views(ranks: int, workers: int) -> set[bytes]:
        options = {"decode": decode, "transform": transform, "num_workers": workers, "remainder": "uneven"}
        found = set()
        for rank in range(ranks):
            for batch in sl.StreamingDataset(folder, batch_size=4, world=(rank, ranks), **options):
                assert batch["image_global"].shape[1:] == (2, 3, 24, 24)
                assert batch["image_local"].shape[1:] == (3, 3, 12, 12)
                found |= {view.numpy().tobytes() for row in batch["image_local"] for view in row}
        return found

    first = all_views(1, 0)
    assert len(first) == 20 * 3
    assert all_views(1, 2) == all_views(2, 0) == first


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
