"""Views: several crops of an image that is decoded once, each the crop that its own random numbers say.

The oracle of a view is a `Decode` with its size and its crop, and the numbers of the view.
"""

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import encoded, least_memory, numbers, picture
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transform_tasks import mean_of_views

import streamloader as sl
from streamloader.engine.budget import LIVE_BATCHES
from streamloader.errors import UsageError
from streamloader.images.decode import DRAWS, ImageDecoder, draws, reduction
from streamloader.options import CenterCrop, Decode, RandomResizedCrop, View

N = 40
LARGE, SMALL = RandomResizedCrop(scale=(0.4, 1), flip=0.5), RandomResizedCrop(scale=(0.05, 0.4), flip=0.5)
DINO = {"global": View((224, 224), LARGE, count=2), "local": View((96, 96), SMALL, count=8)}
TINY = {"global": View((16, 18), LARGE, count=2), "local": View((7, 6), SMALL, count=3), "whole": View((8, 8))}
WORD = st.integers(0, 2**64 - 1)


@given(WORD, st.integers(0, 2**63 - 1), st.lists(st.integers(0, 2**62), max_size=5), st.integers(1, 5))
def test_each_view_has_the_numbers_of_numpys_generator_of_its_own(seed, epoch, positions, views):
    rows = draws(seed, epoch, np.array(positions, np.int64), 4, views).reshape(-1, views, 4)
    key = np.array([seed, epoch], np.uint64)
    for position, row in zip(positions, rows, strict=True):
        for view in range(views):
            counter = np.array([0, view, 1, position], np.uint64)
            expected = np.random.Generator(np.random.Philox(key=key, counter=counter)).random(4)
            assert np.array_equal(row[view], expected)


def test_numbers_of_views_are_pinned_and_the_first_ones_are_those_without_views():
    rows = draws(7, 3, np.array([0, 10**12]), DRAWS, 3)
    assert rows.shape == (2, 3 * DRAWS)
    assert rows[:, ::DRAWS].tolist() == [
        [0.8905560502271676, 0.20377619254546164, 0.4956596595170817],
        [0.5933941453822758, 0.18468490857610698, 0.48247626220193374],
    ]
    assert np.array_equal(rows[:, :DRAWS], draws(7, 3, np.array([0, 10**12]), DRAWS))


@pytest.fixture(scope="module")
def photographs() -> list[bytes]:
    """Scikit-learn's two photographs, 427 x 640, upright and turned by an EXIF orientation, as JPEG and PNG."""
    from sklearn.datasets import load_sample_images

    turned = Image.Exif()
    turned[0x0112] = 6
    found = []
    for pixels in load_sample_images().images:
        for kind, options in (("jpeg", {}), ("jpeg", {"exif": turned}), ("jpeg", {"progressive": True}), ("png", {})):
            out = io.BytesIO()
            Image.fromarray(pixels).save(out, kind, **options)
            found.append(out.getvalue())
    return found


def decoders(options: Decode) -> list[ImageDecoder]:
    """Decoders with both packages, and with neither."""
    full = ImageDecoder.choose(options, "image")
    return [full, replace(full, fast=False, opencv=False)]


def views_of(decoder: ImageDecoder, data: bytes, row: list[float]) -> list[np.ndarray[Any, Any]]:
    """The views of an image, one after another."""
    outs = [np.empty(shape, decoder.dtype) for shape in decoder.view_shapes.values()]
    decoder.decode_views(memoryview(data), 0, outs, row)
    return [view for out in outs for view in out]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("mode", "normalize"), [("RGB", None), ("L", ((0.5,), (0.25,)))])
def test_a_view_is_what_decode_gives_with_its_size_crop_and_numbers(photographs, mode, normalize):
    """Exactly, if both scale the JPEG alike; otherwise they differ as two scales of a picture do."""
    options = Decode(
        mode=mode, normalize=normalize, views={**DINO, "middle": View((60, 90), "center"), "all": View((30, 40))}
    )
    views = [view for view in (options.views or {}).values() for _ in range(view.count)]
    exact = 0
    for decoder, kind in zip(decoders(options), ("fast", "pillow"), strict=True):
        rows = decoder.draws(5, 1, np.arange(len(photographs))) or []
        for data, row in zip(photographs, rows, strict=True):
            found = views_of(decoder, data, row)
            size = decoder.measure(memoryview(data), 0).size
            boxes = [box for box, _ in decoder._crops(size, row)]
            scale = min(reduction(box, view.size) for box, view in zip(boxes, views, strict=True))
            for number, (view, box) in enumerate(zip(views, boxes, strict=True)):
                alone = decoders(replace(options, views=None, size=view.size, crop=view.crop))[kind == "pillow"]
                expected = alone.decode(memoryview(data), 0, None, row[number * DRAWS : (number + 1) * DRAWS])
                assert found[number].dtype == expected.dtype
                if reduction(box, view.size) == scale:
                    exact += 1
                    assert np.array_equal(found[number], expected)
                else:
                    unit = 255 if normalize is None else 4
                    assert np.abs(found[number].astype(float) - expected).mean() < unit * 0.05
    assert exact >= 4 * len(photographs)


@pytest.mark.parametrize("backend", ["auto", "pillow"])
def test_an_image_is_decoded_once_for_all_its_views(photographs, backend, monkeypatch):
    sizes, read = [], ImageDecoder._read

    def counted(self: ImageDecoder, data: memoryview, k: int, *rest: Any) -> Any:
        sizes.append(k)
        return read(self, data, k, *rest)

    monkeypatch.setattr(ImageDecoder, "_read", counted)
    wide = {"a": View((48, 60), RandomResizedCrop((0.9, 1)), count=5), "b": View((50, 50), "center", count=2)}
    decoder = ImageDecoder.choose(Decode(backend, views=wide), "image")
    (row,) = decoder.draws(0, 0, np.array([3])) or []
    assert len(views_of(decoder, photographs[0], row)) == 7
    assert sizes == [4], "once, at the scale that the largest view needs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views") / "images"
    datasets.write_images(
        path, [encoded(picture(i, 40, 50 + i % 3), "png" if i % 2 else "jpeg") for i in range(N)], "image"
    )
    return path


OPTIONS: dict[str, Any] = {"decode": Decode(views=TINY), "with_index": True, "seed": 5, "num_workers": 0}
OPTIONS["shuffle"] = sl.Shuffle(lanes=2)


def by_number(ds: Any) -> dict[int, bytes]:
    """All views of what is left of an epoch, by sample."""
    found = {}
    for batch in ds:
        rows = zip(*(batch[f"image_{name}"].numpy() for name in TINY), strict=True)
        images = [b"".join(view.tobytes() for view in views) for views in rows]
        found |= {i: images[row] for row, i in enumerate(numbers(batch))}
    return found


def test_a_batch_has_a_column_for_each_name_of_the_views_in_place_of_the_image(folder):
    for floats in (False, True):
        decode = Decode(views=TINY, normalize="imagenet" if floats else None)
        for batch in sl.StreamingDataset(folder, batch_size=8, **{**OPTIONS, "decode": decode}):
            assert [*batch][:4] == ["image_global", "image_local", "image_whole", "label"]
            shapes = {name: tuple(batch[f"image_{name}"].shape) for name in TINY}
            if floats:
                assert shapes == {"global": (8, 2, 3, 16, 18), "local": (8, 3, 3, 7, 6), "whole": (8, 1, 3, 8, 8)}
                assert batch["image_local"].dtype == torch.float32
                flat = batch["image_local"].flatten(0, 1)
                assert flat.data_ptr() == batch["image_local"].data_ptr(), "without a copy"
                assert flat.is_contiguous(memory_format=torch.channels_last)
            else:
                assert shapes == {"global": (8, 2, 16, 18, 3), "local": (8, 3, 7, 6, 3), "whole": (8, 1, 8, 8, 3)}
                assert batch["image_local"].dtype == torch.uint8
                assert not torch.equal(batch["image_local"][:, 0], batch["image_local"][:, 1])
    decoder = ImageDecoder.choose(OPTIONS["decode"], "image")
    rows = decoder.draws(5, 0, np.arange(8)) or []
    stored = next(iter(sl.StreamingDataset(folder, batch_size=8, shuffle=False)))["image"]
    batch = next(iter(sl.StreamingDataset(folder, batch_size=8, **{**OPTIONS, "shuffle": False})))
    for number, (data, row) in enumerate(zip(stored, rows, strict=True)):
        found = [view.numpy() for name in TINY for view in batch[f"image_{name}"][number]]
        assert all(map(np.array_equal, found, views_of(decoder, data, row)))
    (sample, *_) = sl.StreamingDataset(folder, batch_size=None, **OPTIONS)
    assert sample["image_global"].shape == (2, 16, 18, 3)


@pytest.mark.usefixtures("two_workers")
def test_views_are_those_of_the_sample_with_any_workers_world_size_and_after_a_resume(folder):
    alone = sl.StreamingDataset(folder, batch_size=16, **OPTIONS)
    first = by_number(alone)
    assert len(first) == N == len(set(first.values()))
    workers = sl.StreamingDataset(folder, batch_size=16, **{**OPTIONS, "num_workers": 2})
    assert by_number(workers) == first
    two: dict[int, bytes] = {}
    for rank in range(2):
        two |= by_number(sl.StreamingDataset(folder, batch_size=5, world=(rank, 2), **OPTIONS))
    assert two == first
    resumed = sl.StreamingDataset(folder, batch_size=8, **OPTIONS)
    resumed.load_state_dict(sl.StreamingDataset(folder, batch_size=8, **OPTIONS).state_dict(batches=2))
    rest = by_number(resumed)
    assert len(rest) == N - 16
    assert rest.items() <= first.items()
    assert all(image != first[i] for i, image in by_number(alone).items()), "another epoch, other crops"


@pytest.mark.usefixtures("two_workers")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_gets_the_views_of_a_sample(folder, workers):
    plain = sl.NumpyDataset(folder, batch_size=8, **OPTIONS)
    means = sl.NumpyDataset(folder, batch_size=8, **{**OPTIONS, "num_workers": workers}, transform=mean_of_views)
    for batch, reduced in zip(plain, means, strict=True):
        assert reduced["shape"].tolist() == [[3, 7, 6, 3]] * 8
        assert np.allclose(reduced["mean"], batch["image_local"].mean((2, 3, 4)))


@pytest.mark.usefixtures("two_workers")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["mask", "replace"])
def test_all_views_of_a_bad_image_are_zeros_or_those_of_another(folder, kind, workers, tmp_path):
    images = [encoded(picture(i, 40, 50 + i % 3), "png" if i % 2 else "jpeg") for i in range(N)]
    images[11] = images[11][: len(images[11]) // 2]
    datasets.write_images(tmp_path / "bad", images, "image")
    options = {**OPTIONS, "shuffle": False}
    good = {int(s["index"]): s for s in sl.StreamingDataset(folder, batch_size=None, **options)}
    options |= {"on_error": kind, "max_bad": 1, "num_workers": workers}
    ds = sl.StreamingDataset(tmp_path / "bad", batch_size=8, **options)
    seen = 0
    for batch in ds:
        for row, i in enumerate(batch["index"].tolist()):
            bad = bool(batch["error" if kind == "mask" else "replaced"][row])
            seen += bad
            for name in TINY:
                if kind == "mask" and bad:
                    assert not batch[f"image_{name}"][row].any()
                elif not bad:
                    assert torch.equal(batch[f"image_{name}"][row], good[i][f"image_{name}"])
    assert seen == 1


def test_memory_counts_all_views(folder):
    def least(count: int) -> int:
        views = {"one": View((50, 40), "random"), "more": View((30, 20), "random", count=count)}
        return least_memory(folder, batch_size=8, num_workers=0, decode=Decode(views=views))

    assert least(9) - least(1) == LIVE_BATCHES * 8 * 8 * math.prod((30, 20, 3))


WRONG = [
    (lambda: Decode(views={}), r"views=\{\}.*give a View\(size, crop, count\) for each name"),
    (lambda: Decode(views={"a": (8, 8)}), "give a View"),
    (lambda: Decode(views=[View((8, 8))]), "give a View"),
    (lambda: Decode(views={"": View((8, 8))}), "give a View"),
    (lambda: Decode(views=TINY, size=(8, 8)), r"size=\(8, 8\).*each View has a size of its own"),
    (lambda: Decode(views=TINY, boxes="boxes"), "boxes='boxes'.*leave it or views= out"),
    (lambda: Decode(views=TINY, keypoints="points"), "keypoints='points'.*leave it or views= out"),
    (lambda: Decode(views=TINY, masks="mask"), "masks='mask'.*leave it or views= out"),
    (lambda: Decode(views=TINY, with_crop=True), "with_crop=True.*leave it or views= out"),
    (lambda: View(8), "size=8.*give size as"),
    (lambda: View((8, 0)), r"size=\(8, 0\)"),
    (lambda: View((8, 8), "corner"), "crop='corner'"),
    (lambda: View((8, 8), count=0), "count=0"),
]


@pytest.mark.parametrize(("make", "shown"), WRONG)
def test_wrong_views_are_refused_with_their_values(make, shown):
    with pytest.raises(UsageError, match=shown):
        make()


def test_a_name_of_the_crop_stands_for_its_values():
    assert View((8, 8), "random").box == RandomResizedCrop()
    assert View((8, 8), "center").box == CenterCrop()
    assert View((np.int64(8), 8), count=np.int64(3)) == View((8, 8), count=3)


def test_columns_that_would_be_twice_in_a_batch_and_boxes_that_stay_behind_are_refused(tmp_path):
    fields = {"image": "bytes:png", "image_local": "int64", "boxes": "ragged:float32[4]"}
    with sl.Writer(tmp_path / "d", fields) as out:
        out.write({"image": encoded(picture(0), "png"), "image_local": 3, "boxes": [[0, 0, 5, 5]]})
    with pytest.raises(UsageError, match="the column 'image_local' twice"):
        sl.StreamingDataset(tmp_path / "d", batch_size=1, decode=Decode(views=TINY), fields=["image", "image_local"])
    with pytest.raises(UsageError, match=r"Decode\(views=\) moves the pixels.*leave the field out with fields="):
        sl.StreamingDataset(tmp_path / "d", batch_size=1, decode=Decode(views=TINY), fields=["image", "boxes"])
    with pytest.raises(UsageError, match=r"layout='CHW'.*with a transform"):
        decode = Decode(views=TINY, layout="CHW")
        sl.StreamingDataset(tmp_path / "d", batch_size=1, decode=decode, fields=["image"], transform=dict)
