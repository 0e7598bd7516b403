"""The columns that `sl.tf_dataset` and `sl.jax_batches` know before data is read: those of each batch."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import videos
from PIL import Image
from zarr_stores import url_of

import streamloader as sl
from streamloader.errors import UsageError
from streamloader.loader.columns import batch_columns
from streamloader.loader.dataset import NumpyMixture
from streamloader.options import View

N = 40
FIELDS = {
    "image": "bytes:mixed",
    "mask": "bytes:png",
    "boxes": "ragged:float32[4]",
    "tokens": "ragged:int32",
    "weights": "ragged:uint8",
    "wide": "uint16[3,2]",
    "half": "float16",
    "flag": "bool",
    "raw": "bytes",
    "name": "text",
}
PACK = sl.Pack(16, fit="best")


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns") / "d"
    with sl.Writer(folder, FIELDS) as out:
        for i in range(N):
            pixels = np.full((8 + i % 3, 10 + i % 2, 3), i, np.uint8)
            tokens = np.arange(1 + i % 7)
            numbers = {"wide": np.full((3, 2), i), "half": i, "flag": i % 2 == 0, "tokens": tokens, "weights": tokens}
            images = {"image": png(pixels), "mask": png(pixels[:, :, 0]), "boxes": [[0, 0, 4, 4]] * (i % 3)}
            out.write(numbers | images | {"raw": b"\0" * (i % 4), "name": "x" * (i % 3)})
    return folder


def found(value: Any) -> tuple[str, tuple[int, ...]]:
    """The dtype and the shape of a column, as `batch_columns` has them."""
    if isinstance(value, list):
        return "bytes" if isinstance(value[0], bytes) else "text", (len(value),)
    return value.dtype.name, value.shape


def check(dataset: Any) -> dict[str, Any]:
    """Assert that each batch has the columns that are known before, with sizes that vary where they are None."""
    columns, batches = batch_columns(dataset), list(dataset)
    assert all(batch.keys() == columns.keys() for batch in batches)
    for name, column in columns.items():
        assert column is not None, name
        dtype, shape = column
        shapes = [found(batch[name]) for batch in batches]
        assert {kind for kind, _ in shapes} == {dtype}
        for axis, size in enumerate(shape):
            sizes = {of[axis] for _, of in shapes}
            assert sizes == {size} if size is not None else len(sizes) > 1, (name, shape, sizes)
    return columns


@pytest.mark.quick(11)
@pytest.mark.parametrize(
    "options",
    [
        {"with_index": True},
        {"remainder": "drop", "fields": ["wide", "flag", "name"]},
        {"remainder": "uneven", "fields": ["half", "raw"]},
        {"on_error": "mask", "fields": ["half"]},
        {"on_error": "replace", "fields": ["half"]},
        {"fields": ["tokens", "boxes"], "collate": {"tokens": "pad", "boxes": sl.Pad(mask=True)}, "batch_size": 1},
        {"fields": ["tokens"], "collate": sl.Pad(to=(9,), mask=True)},
        {"fields": ["tokens"], "collate": "pad", "bucket_by": "tokens", "max_tokens": 30, "bucket_steps": 2},
        {"fields": ["image", "wide"], "decode": sl.Decode(size=(4, 6))},
        {"fields": ["image"], "decode": sl.Decode(size=(4, 6), normalize="imagenet", with_crop=True)},
        {"fields": ["image", "mask"], "decode": {"image": sl.Decode(size=(4, 6), masks="mask")}},
        {"fields": ["image"], "decode": sl.Decode(), "collate": "pad", "batch_size": 1},
        {"fields": ["image"], "decode": sl.Decode(layout="CHW"), "batch_size": 1},
        {"fields": ["tokens"], "pack": {"tokens": PACK}, "batch_size": 3, "remainder": "drop"},
        {"fields": ["tokens", "weights"], "pack": {"tokens": PACK, "weights": PACK}, "batch_size": 3},
    ],
    ids=str,
)
def test_every_batch_has_the_columns_that_are_known_before(options, path):
    check(sl.NumpyDataset(path, **{"batch_size": 7, "seed": 1, "num_workers": 0, **options}))


def test_views_of_images_are_known(path):
    views = {"big": View((8, 8), "random"), "small": View((4, 4), count=3)}
    columns = check(sl.NumpyDataset(path, batch_size=8, fields=["image"], decode=sl.Decode(views=views)))
    assert columns["image_small"] == ("uint8", (8, 3, 4, 4, 3))


def test_a_mixture_has_the_columns_of_its_sources(path):
    columns = check(
        NumpyMixture(
            {sl.Source(path, where=slice(0, 30)): 0.5, sl.Source(path, where=slice(30, 40)): 0.5},
            batch_size=4,
            fields=["wide"],
            with_index=True,
        )
    )
    assert columns["source"] == ("int64", (4,))


@pytest.mark.parametrize(
    "options",
    [
        {"windows": sl.Window(history=2, lead=1)},
        {"patches": sl.Patch({"lat": 2, "lon": 3}), "normalize": {"t2m": (0, 1), "z": (0, 1)}, "with_index": True},
    ],
    ids=str,
)
def test_windows_and_patches_of_arrays_are_known(options):
    check(sl.NumpyDataset(url_of("xarray2.zarr"), batch_size=2, sample_axis="time", **options))


@pytest.mark.parametrize("size", [None, (16, 24)])
def test_clips_are_known(size, tmp_path):
    with sl.Writer(tmp_path / "d", {"video": "video", "label": "int64"}) as out:
        for number in range(2):
            out.write({"video": videos.encode("vp9", frames=20, seed=number), "label": number})
    dataset = sl.NumpyDataset(tmp_path / "d", batch_size=2, clips={"video": sl.Clips(4, size=size)})
    shape = batch_columns(dataset)["video"]
    assert shape == ("uint8", (2, 4, *(size or (None, None)), 3))
    for batch in dataset:
        assert {name: found(value)[0] for name, value in batch.items()} == {
            name: dtype for name, (dtype, _) in batch_columns(dataset).items()
        }


def test_columns_that_only_the_data_tell_are_unknown(path):
    def unknown(**options: Any) -> set[str]:
        columns = batch_columns(sl.NumpyDataset(path, batch_size=4, **options))
        return {name for name, column in columns.items() if column is None}

    assert unknown(fields=["tokens"], collate="list") == {"tokens"}
    assert unknown(fields=["image"], decode=True, collate="list") == {"image"}
    assert unknown(fields=["tokens"], pack={"tokens": 16}) == {"tokens"}
    moved = {"image": sl.Decode(size=(4, 4), boxes="boxes")}
    assert unknown(fields=["image", "boxes"], decode=moved) == {"boxes", "boxes_valid"}
    for options, shown in (({"transform": dict}, "transform="), ({"collate": list}, "collate=")):
        with pytest.raises(UsageError, match=shown):
            batch_columns(sl.NumpyDataset(path, batch_size=4, **options))


@pytest.mark.parametrize("export", [sl.jax_batches, sl.tf_dataset])
def test_single_samples_and_batches_on_a_device_are_not_given_to_a_framework(export, path):
    for options, shown in (
        ({"batch_size": None}, "single samples"),
        ({"device": "cpu"}, "device="),
        ({"cast": "bfloat16"}, "cast="),
    ):
        with pytest.raises(UsageError, match=shown):
            export(sl.StreamingDataset(path, **{"batch_size": 4, "fields": ["half"], **options}))
