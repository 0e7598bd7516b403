"""`Decode(device=)`: the pixels, crops, bad samples and states of images that a device decodes.

Without a GPU, or without TorchCodec and torchvision, they run with the device "cpu", which decodes whole pictures here
and does all other steps as a GPU does; it repeats chroma as nvJPEG does.
"""

import enum
import io
import json
import logging
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from amounts import examples
from datasets import assert_threads_end, write_images
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from test_crop import NOISE, as_jpeg
from test_targets import N as PICTURES
from test_targets import pictures
from torch.utils.data import DataLoader
from torchrun import run_python

import streamloader as sl
from streamloader.errors import DecodeError, StateError, UsageError
from streamloader.images.decode import device_exif
from streamloader.options import IMAGENET, CenterCrop, Decode, RandomResizedCrop, View
from streamloader.pytorch import images

__all__ = ["pictures"]  # a fixture
DEVICE = "cuda" if torch.cuda.is_available() and (find_spec("torchcodec") or find_spec("torchvision")) else "cpu"
RANDOM = RandomResizedCrop(scale=(0.2, 1), flip=0.5)


def turned(pixels: np.ndarray[Any, Any], turn: int, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = turn
    return as_jpeg(pixels, exif=exif, **options)


@cache
def photographs() -> list[np.ndarray[Any, Any]]:
    """Parts of scikit-learn's two photographs, of odd sizes."""
    from sklearn.datasets import load_sample_images

    rng, whole = np.random.default_rng(0), load_sample_images().images
    sizes = [(int(rng.integers(150, 427)), int(rng.integers(150, 640))) for _ in range(12)]
    return [whole[number % 2][-height:, :width] for number, (height, width) in enumerate(sizes)]


KINDS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "gray": {"mode": "L"},
    "progressive": {"subsampling": 0, "progressive": True},
}


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {}
    for kind, options in KINDS.items():
        paths[kind] = tmp_path_factory.mktemp("photos") / "d"
        write_images(paths[kind], [as_jpeg(pixels, **options) for pixels in photographs()])
    return paths


def batches(url: Any, decode: Decode, **options: Any) -> tuple[list[dict[str, Any]], Any]:
    """The batches of an epoch, on the CPU, and their dataset."""
    dataset = sl.StreamingDataset(url, **{"batch_size": 5, "num_workers": 0, **options}, decode=decode)
    made = list(dataset)
    assert decode.device is None or {batch["image"].device.type for batch in made} == {DEVICE}
    return [{name: column.cpu() for name, column in batch.items()} for batch in made], dataset


def both(url: Any, **options: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Any]:
    """The images of an epoch by the CPU and by a device, and the statistics of the latter."""
    usual, _ = batches(url, Decode(**options))
    on_device, dataset = batches(url, Decode(**options, device=DEVICE))
    for expected, got in zip(usual, on_device, strict=True):
        assert got.keys() == expected.keys()
        assert got["image"].shape == expected["image"].shape
        assert got["image"].stride() == expected["image"].stride()
        assert got["image"].dtype == expected["image"].dtype
        assert torch.equal(got["label"], expected["label"])
    images = (torch.cat([batch["image"] for batch in made]).double().numpy() for made in (usual, on_device))
    return (*images, dataset.stats())


CROPS: dict[str, dict[str, Any]] = {
    "whole": {"size": (224, 224)},
    "random": {"size": (96, 128), "crop": RANDOM},
    "center": {"size": (70, 60), "crop": CenterCrop(0.9)},
    "small": {"size": (20, 24), "crop": RANDOM},
    "L": {"size": (64, 64), "crop": RANDOM, "mode": "L"},
}
# Of 255: the mean difference, that which 99% of values are within, and the largest. Chroma that is repeated, and not
# interpolated, differs at the edges of colours.
TOLERANCE = {"4:2:0": (1.6, 12, 45), "4:2:2": (1.6, 12, 45)}
CLOSE = (0.5, 3, 8)


@pytest.mark.quick(1)
@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("kind", KINDS)
def test_photographs_are_those_of_the_cpu_within_the_tolerance(crop, kind, of_kind):
    expected, got, stats = both(of_kind[kind], **CROPS[crop])
    mean, most, largest = CLOSE if crop == "L" else TOLERANCE.get(kind, CLOSE)
    difference = np.abs(got - expected)
    assert difference.mean() <= mean
    assert np.percentile(difference, 99) <= most
    assert difference.max() <= largest
    assert abs((got - expected).mean()) <= 0.3
    assert stats.decoded_on_cpu == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("turn", range(1, 9))
def test_images_are_turned_and_flipped_before_they_are_resized(turn, tmp_path):
    y, x = np.mgrid[0:120, 0:200]
    pixels = np.stack([x, y * 2, (x + y) % 7 * 30], axis=2).astype(np.uint8)
    write_images(tmp_path / "d", [turned(pixels[: 120 - i, : 200 - 3 * i], turn, subsampling=0) for i in range(8)])
    for options in (CROPS["small"], CROPS["random"], {"size": (31, 17)}, {"size": (60, 60), "orientation": False}):
        expected, got, _ = both(tmp_path / "d", **options)
        assert np.abs(got - expected).mean() <= 1
        assert np.percentile(np.abs(got - expected), 99) <= 10


def test_decoders_that_turn_pictures_get_files_without_an_orientation(tmp_path, monkeypatch):
    def turn_pictures(files: list[torch.Tensor], _: torch.device, channels: int) -> list[torch.Tensor]:
        opened = [ImageOps.exif_transpose(Image.open(io.BytesIO(file.numpy().tobytes()))) for file in files]
        pixels = [np.array(image.convert("RGB" if channels == 3 else "L")) for image in opened]
        return [torch.from_numpy(array.reshape(*array.shape[:2], channels)).permute(2, 0, 1) for array in pixels]

    y, x = np.mgrid[0:60, 0:100]
    pixels = np.stack([x * 2, y * 4, x + y], axis=2).astype(np.uint8)
    write_images(tmp_path / "d", [turned(pixels[: 60 - i], i, subsampling=0) for i in range(1, 9)])
    monkeypatch.setattr(images, "_decode_here", turn_pictures)
    for options in ({}, {"orientation": False}, {"mode": "L", "crop": RANDOM}):
        expected, got, stats = both(tmp_path / "d", size=(41, 37), **options)
        assert np.abs(got - expected).max() <= 4
        assert stats.decoded_on_cpu == 0


def test_where_exif_data_begin():
    upright = as_jpeg(NOISE)
    data = turned(NOISE, 6)
    at = data.index(b"Exif\0\0MM")
    assert device_exif(memoryview(data)) == at
    assert device_exif(memoryview(upright)) == 0
    short = b"\xff\xe1\x00\x0fExif\0\0MM\0\x2a\0\0\0"
    assert device_exif(memoryview(upright[:2] + short + upright[2:])) == 0
    segment = data[at - 4 : at - 2 + int.from_bytes(data[at - 2 : at], "big")]
    twice = data[: at - 4] + segment + data[at - 4 :]
    assert device_exif(memoryview(twice)) is None
    behind = upright[:-2] + segment + upright[-2:]
    assert device_exif(memoryview(behind)) == 0, "what follows the header is data"


@pytest.mark.quick(2)
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (3, 5), (17, 9)])
def test_images_of_any_size_are_decoded(shape, tmp_path):
    write_images(tmp_path / "d", [as_jpeg(np.full((*shape, 3), 20 * i, np.uint8)) for i in range(8)])
    for options in (CROPS["whole"], CROPS["small"], {"size": (1, 1)}, {"size": (8, 400), "crop": "center"}):
        expected, got, stats = both(tmp_path / "d", **options)
        assert np.abs(got - expected).max() <= 4
        assert stats.decoded_on_cpu == 0


def test_noise_is_resized_by_the_rule_of_the_cpu(tmp_path):
    write_images(tmp_path / "d", [as_jpeg(np.roll(NOISE, i, 0), subsampling=0) for i in range(6)])
    for size in ((89, 69), (60, 50), (45, 35), (40, 30), (200, 200)):
        expected, got, _ = both(tmp_path / "d", size=size)
        assert np.abs(got - expected).max() <= (4 if min(size) >= 50 else 60)  # the codec scales by 2 another way
        assert np.abs(got - expected).mean() <= 1


@pytest.mark.long
def test_normalised_tensors_are_those_of_the_pixels(of_kind):
    pixels, _, _ = both(of_kind["4:4:4"], size=(50, 60), crop=RANDOM, layout="CHW")
    expected, got, _ = both(of_kind["4:4:4"], size=(50, 60), crop=RANDOM, normalize="imagenet")
    assert np.abs(got - expected).mean() <= 0.01
    (usual,), _ = batches(of_kind["4:4:4"], Decode(size=(50, 60), device=DEVICE), batch_size=12)
    (normal,), _ = batches(of_kind["4:4:4"], Decode(size=(50, 60), device=DEVICE, normalize="imagenet"), batch_size=12)
    mean, std = (torch.tensor(values)[:, None, None] for values in IMAGENET)
    assert torch.allclose(normal["image"], (usual["image"].movedim(-1, 1) / 255 - mean) / std, atol=1e-5)
    assert pixels.shape == got.shape


def test_what_the_device_cannot_decode_is_decoded_by_the_cpu_and_counted(tmp_path):
    out = io.BytesIO()
    Image.fromarray(NOISE).convert("CMYK").save(out, "jpeg")
    png = io.BytesIO()
    Image.fromarray(NOISE).save(png, "png")
    rgb = as_jpeg(NOISE, keep_rgb=True)
    behind = as_jpeg(NOISE) + b"more"
    others = [out.getvalue(), png.getvalue(), rgb, behind]
    assert not any(device_exif(memoryview(data)) is not None for data in others)
    usual = [as_jpeg(NOISE, **{"subsampling": 0, **options}) for options in KINDS.values()]
    assert all(device_exif(memoryview(data)) == 0 for data in usual)
    write_images(tmp_path / "d", others + usual, "mixed")
    for workers in (0, 2):
        decode = Decode(size=(90, 70), device=DEVICE)
        (batch,), dataset = batches(tmp_path / "d", decode, batch_size=9, num_workers=workers, shuffle=False)
        assert dataset.stats().decoded_on_cpu == len(others)
        (expected,), _ = batches(tmp_path / "d", Decode(size=(90, 70)), batch_size=9, shuffle=False)
        assert torch.equal(batch["image"][:4], expected["image"][:4])
        assert (batch["image"][4].int() - expected["image"][4].int()).abs().max() <= 4


@pytest.mark.usefixtures("two_workers")
def test_workers_and_threads_give_the_same_values(of_kind):
    decode = Decode(**CROPS["random"], device=DEVICE, with_crop=True)
    alone, _ = batches(of_kind["4:2:0"], decode)
    shared, _ = batches(of_kind["4:2:0"], decode, num_workers=2)
    for one, other in zip(alone, shared, strict=True):
        assert torch.equal(one["image"], other["image"])
        assert torch.equal(one["image_crop"], other["image_crop"])


def test_crops_boxes_points_and_masks_are_those_of_the_cpu(pictures):
    moved = {"boxes": "boxes", "keypoints": "keypoints", "masks": "mask", "with_crop": True}
    options = {"size": (36, 60), "crop": RANDOM, **moved}
    fields = {"fields": ["image", "mask", "boxes", "keypoints", "number"], "batch_size": 8}
    usual, _ = batches(pictures, Decode(**options), **fields)
    on_device, dataset = batches(pictures, Decode(**options, device=DEVICE), **fields)
    assert dataset.stats().decoded_on_cpu == PICTURES // 2  # the others are PNG
    for expected, got in zip(usual, on_device, strict=True):
        assert got.keys() == expected.keys()
        for name in expected.keys() - {"image"}:
            assert torch.equal(got[name], expected[name]), name
        assert (got["image"].int() - expected["image"].int()).abs().float().mean() < 2


# nvJPEG may decode what it finds of the last one
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "data", ["truncated", "wrong", "without tables", "cut, with an end"][: 4 if DEVICE == "cpu" else 3]
)
@pytest.mark.parametrize("workers", [0, 2])
def test_bad_files_follow_on_error(data, workers, tmp_path, caplog):
    good = [as_jpeg(np.roll(NOISE, 9 * i, 0), subsampling=0) for i in range(8)]
    whole = good[3]
    tables = whole.index(b"\xff\xdb")
    bad = {
        "truncated": whole[: len(whole) // 2],
        "wrong": b"\xff\xd8\xffnothing\xff\xd9",
        "without tables": whole[:tables] + whole[whole.index(b"\xff\xc0") :],
        "cut, with an end": whole[: len(whole) // 2] + b"\xff\xd9",
    }[data]
    write_images(tmp_path / "d", [*good[:3], bad, *good[4:]])
    options: dict[str, Any] = {"batch_size": 8, "num_workers": workers, "shuffle": False}
    decode, usual = Decode(size=(90, 70), device=DEVICE), Decode(size=(90, 70))
    for on_error in ("mask", "replace"):
        (expected,), reference = batches(tmp_path / "d", usual, on_error=on_error, max_bad=8, **options)
        with caplog.at_level(logging.WARNING, "streamloader"):
            (got,), dataset = batches(tmp_path / "d", decode, on_error=on_error, max_bad=8, **options)
        assert dataset.stats().bad_samples == reference.stats().bad_samples == (data != "cut, with an end")
        for name in expected.keys() - {"image"}:
            assert torch.equal(got[name], expected[name]), name
        assert (got["image"].int() - expected["image"].int()).abs().max() <= 4
        assert ("does not decode a batch" in caplog.text) == (data == "cut, with an end")  # Pillow fills the rest
    if data != "cut, with an end":
        with pytest.raises(DecodeError, match="sample 3"):
            batches(tmp_path / "d", decode, **options)
    assert_threads_end()


def test_sizes_that_change_are_decoded(of_kind):
    sizes = {0: (30, 40), 6: (50, 60)}
    made, _ = batches(of_kind["4:4:4"], Decode(size=sizes, device=DEVICE), batch_size=3)
    assert [tuple(batch["image"].shape[1:3]) for batch in made] == [(30, 40)] * 2 + [(50, 60)] * 2


def test_images_are_cast_and_masked_rows_are_zeros_as_on_any_device(tmp_path):
    bad = as_jpeg(NOISE)[:200]
    write_images(tmp_path / "d", [as_jpeg(NOISE), bad, as_jpeg(NOISE)])
    decode = Decode(size=(9, 8), normalize="imagenet", device=DEVICE)
    options: dict[str, Any] = {"on_error": "mask", "max_bad": 3, "shuffle": False, "graph_buffers": True}
    made, _ = batches(tmp_path / "d", decode, batch_size=3, cast="bfloat16", device=DEVICE, **options)
    assert made[0]["image"].dtype == torch.bfloat16
    assert [bool(row.any()) for row in made[0]["image"]] == [True, False, True]


def test_large_batches_are_decoded_in_parts(of_kind, monkeypatch):
    decode = Decode(**CROPS["random"], device=DEVICE)
    (whole,), _ = batches(of_kind["4:2:0"], decode, batch_size=12)
    monkeypatch.setattr(images, "PART_BYTES", 1 << 20)
    (parts,), _ = batches(of_kind["4:2:0"], decode, batch_size=12)
    assert (whole["image"].int() - parts["image"].int()).abs().max() <= 1


def test_states_have_the_decoder_and_others_resume_with_a_warning(of_kind, recwarn):
    url, decode = of_kind["4:4:4"], Decode(size=(30, 40))
    makers = {
        "usual": lambda: sl.StreamingDataset(url, batch_size=4, decode=decode, num_workers=0),
        "device": lambda: sl.StreamingDataset(
            url, batch_size=4, decode=Decode(size=(30, 40), device=DEVICE), num_workers=0
        ),
    }
    states = {}
    for kind, make in makers.items():
        dataset = make()
        next(iter(dataset))
        states[kind] = json.loads(json.dumps(dataset.state_dict()))
    assert "decoders" not in states["usual"]
    assert states["device"]["decoders"] == {"image": "whole" if DEVICE == "cpu" else "nvjpeg"}
    for kind, make in makers.items():
        make().load_state_dict(states[kind])
        assert not [each for each in recwarn if "decoder" in str(each.message)]
    for kind, other in (("usual", "device"), ("device", "usual")):
        dataset = makers[kind]()
        with pytest.warns(UserWarning, match="other decoders of images"):
            dataset.load_state_dict(states[other])
        assert len(list(dataset)) == 2
    with pytest.raises(StateError, match="decoders"):
        makers["usual"]().load_state_dict({**states["usual"], "decoders": 3})


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"device": "tpu", "size": (3, 3)}, "choose 'cuda'"),
        ({"device": "cuda:", "size": (3, 3)}, "choose 'cuda'"),
        ({"device": 0, "size": (3, 3)}, "choose 'cuda'"),
        ({"device": "cpu"}, "give size="),
        ({"device": "cpu", "views": {"a": View((3, 3))}}, "leave it or views= out"),
    ],
)
def test_options_that_a_device_does_not_have_are_errors(options, remedy):
    with pytest.raises(UsageError, match=remedy):
        Decode(**options)


def test_datasets_that_need_images_on_the_cpu_are_errors(of_kind):
    url, decode = of_kind["gray"], Decode(size=(4, 4), device="cpu")
    for functions in ({"transform": dict}, {"collate": list}):
        with pytest.raises(UsageError, match="which gets samples on the CPU"):
            sl.StreamingDataset(url, batch_size=4, decode=decode, **functions)
    with pytest.raises(UsageError, match="without torch"):
        sl.NumpyDataset(url, batch_size=4, decode=decode)
    with pytest.raises(UsageError, match="batch_size=None"):
        sl.StreamingDataset(url, batch_size=None, decode=decode)
    with pytest.raises(UsageError, match="'cpu', 'cuda'"):
        sl.StreamingDataset(url, batch_size=4, decode={"image": decode}, device="cuda")
    loader = DataLoader(sl.StreamingDataset(url, batch_size=4, decode=decode), batch_size=None, num_workers=1)
    with pytest.raises(UsageError, match="in a worker of a DataLoader"):
        next(iter(loader))


def module(name: str, **content: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(content)
    return made


class DoesNotLoad(types.ModuleType):
    """A package that was built for another torch."""

    def __getattr__(self, name: str) -> Any:
        raise OSError("libtorch_cuda.so: cannot open shared object file")


@pytest.fixture
def packages(monkeypatch) -> Iterator[Callable[[dict[str, types.ModuleType | None]], None]]:
    """A function that lets `nvjpeg` import the modules that it is given; None cannot be imported."""

    def use(modules: dict[str, types.ModuleType | None]) -> None:
        for name, made in modules.items():
            monkeypatch.setitem(sys.modules, name, made)
        images.nvjpeg.cache_clear()

    yield use
    images.nvjpeg.cache_clear()


@pytest.mark.long
def test_cuda_needs_a_gpu_and_a_package_that_calls_nvjpeg(of_kind, packages, monkeypatch):
    decode = Decode(size=(4, 4), device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="torch finds no GPU"):
        sl.StreamingDataset(of_kind["gray"], batch_size=4, decode=decode)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for torchvision in (None, DoesNotLoad("torchvision")):
        packages({"torchcodec": None, "torchvision": torchvision, "torchvision.io": torchvision})
        with pytest.raises(UsageError, match=r"pip install 'torchcodec>=0\.16'"):
            sl.StreamingDataset(of_kind["gray"], batch_size=4, decode=decode)
    packages({"torchcodec": None, "torchvision": None})
    with pytest.raises(UsageError, match="without TorchCodec or torchvision"):
        sl.StreamingDataset(of_kind["gray"], batch_size=4, decode=decode)


sides = st.integers(1, 70)


@settings(max_examples=examples(100))
@given(sides, sides, sides, sides, st.integers(0, 9))
def test_pictures_are_resized_as_by_opencv(height, width, rows, columns, seed):
    import cv2

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    shrinks = height / rows, width / columns
    rule = cv2.INTER_AREA if max(shrinks) > 2 else cv2.INTER_LINEAR
    expected = cv2.resize(pixels, (columns, rows), interpolation=rule).astype(int)
    crop = np.array([[0, 0, height, width, 0, height, width, 1, 1]])
    (got,) = images._resized([torch.from_numpy(pixels).permute(2, 0, 1)], crop, (rows, columns))
    if max(shrinks) > 2 and min(shrinks) < 1:  # one side grows: OpenCV picks single pixels, sometimes the next one
        return
    assert np.abs(got.numpy() - expected).max() <= 1


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900), st.sampled_from([1, 2, 4, 8])), max_size=40))
def test_parts_have_every_image_once_and_are_bounded(found):
    crops = np.zeros((len(found) + 5, 9), np.int64)
    rows = np.arange(len(found)) + 5
    for row, (height, width, scale) in zip(rows, found, strict=True):
        crops[row] = 0, 0, height, width, 0, height, 2 * width, scale, 1
    most = 4 << 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "PART_BYTES", most)
        parts = list(images._parts(rows, crops, (64, 48), 3))
    assert np.concatenate([rows[:0], *parts]).tolist() == rows.tolist()
    for part in parts:
        high, wide = (-(-crops[part, side] // crops[part, 7]) for side in (2, 3))
        floats = len(part) * (3 * high.max() * (wide.max() + 48) + 64 * high.max() + 48 * wide.max() + 3 * 64 * 48)
        pictures = 3 * (crops[part, 5] * crops[part, 6]).sum()
        assert len(part) == 1 or max(pictures, 4 * floats) <= most


def test_any_bytes_are_decided_by_their_header():
    rng = np.random.default_rng(0)
    whole = as_jpeg(NOISE)
    for length in range(0, 700):
        assert device_exif(memoryview(whole[:length] + b"\xff\xd9")) is None or length > whole.index(b"\xff\xda")
    for _ in range(2000):
        data = bytearray(whole[:640] + b"\xff\xd9")
        data[int(rng.integers(3, 640))] = int(rng.integers(0, 256))
        device_exif(memoryview(data))


def test_the_thread_that_decodes_has_the_device_and_a_stream_of_its_own(monkeypatch):
    """What `device_decoder` does for CUDA before a batch, with doubles."""
    calls: list[Any] = []
    stream = types.SimpleNamespace(synchronize=lambda: calls.append("complete"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: calls.append(("stream of", device)) or stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda chosen: calls.append(chosen is stream))
    monkeypatch.setattr(images, "_decode", lambda device, decode, *given: calls.append((device, decode.func, *given)))
    decode, wait = images.device_decoder("cuda")
    wait()
    assert not calls
    third = torch.device("cuda", 3)
    for number in range(2):
        decode("memory", number)
    batch = [("device", third), True, (third, images._decode_by_nvjpeg, "memory")]
    assert calls == [batch[0], ("stream of", third), True, (*batch[2], 0), batch[0], True, (*batch[2], 1)]
    wait()
    assert calls[-1] == "complete"
    assert images.device_decoder("cuda:3") == (decode, wait), "one stream for all datasets"


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("torchcodec", ["installed", "missing", "older", "does not load"])
def test_one_call_of_a_package_decodes_a_part_on_a_stream_that_is_complete(torchcodec, mode, packages):
    """The call that needs a GPU, with doubles of TorchCodec, torchvision and of the stream."""
    calls: list[Any] = []

    def decode_jpeg(files: list[torch.Tensor], *, mode: Any, device: torch.device) -> list[torch.Tensor]:
        calls.append((mode, device, len(files)))
        return images._decode_here(files, device, 3 if mode in ("RGB", 3) else 1)

    decoders: types.ModuleType | None = {
        "installed": module("torchcodec.decoders", decode_jpeg=decode_jpeg),
        "missing": None,
        "older": module("torchcodec.decoders"),
        "does not load": DoesNotLoad("torchcodec.decoders"),
    }[torchcodec]
    modes = enum.Enum("ImageReadMode", {"GRAY": 1, "RGB": 3})
    of_torchvision = {"decode_jpeg": lambda files, mode, device: decode_jpeg(files, mode=mode.value, device=device)}
    packages({"torchcodec": module("torchcodec"), "torchcodec.decoders": decoders})
    packages(
        {"torchvision": module("torchvision"), "torchvision.io": module("io", ImageReadMode=modes, **of_torchvision)}
    )
    stream: Any = types.SimpleNamespace(synchronize=lambda: calls.append("complete"))
    files = [torch.frombuffer(bytearray(as_jpeg(NOISE)), dtype=torch.uint8) for _ in range(3)]
    device, channels = torch.device("cpu"), 3 if mode == "RGB" else 1
    made = images._decode_by_nvjpeg(stream, files, device, channels)
    assert [tuple(each.shape) for each in made] == [(channels, *NOISE.shape[:2])] * 3
    named = ("RGB" if mode == "RGB" else "GRAY") if torchcodec == "installed" else channels
    assert calls == ["complete", (named, device, 3)]


LEAVING = """
import sys
import streamloader as sl

decode = sl.Decode(size=(128, 128), crop="random", normalize="imagenet", device="cpu")
dataset = sl.StreamingDataset(sys.argv[1], batch_size=64, decode=decode, seed=7)
images = next(iter(dataset))["image"]
print("left")
"""


@pytest.mark.long
def test_a_script_may_end_while_threads_of_the_loader_have_tensors(tmp_path):
    smooth = (np.add.outer(np.arange(150), np.arange(160)) % 256).astype(np.uint8)[:, :, None] * np.ones(3, np.uint8)
    with sl.Writer(tmp_path / "d", {"image": "bytes:jpeg"}) as out:
        for _ in range(300):
            out.write({"image": as_jpeg(smooth)})
    for _ in range(2):  # one of them aborts, as a rule, if the end does not wait
        done = run_python("-c", LEAVING, tmp_path / "d")
        assert (done.stdout, done.stderr) == ("left\n", "")


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pixels_do_not_depend_on_the_default_dtype_of_torch(of_kind, dtype, caplog):
    expected, _ = batches(of_kind["4:2:0"], Decode(size=(40, 40), device=DEVICE))
    torch.set_default_dtype(dtype)
    try:
        found, _ = batches(of_kind["4:2:0"], Decode(size=(40, 40), device=DEVICE))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(one["image"], other["image"]) for one, other in zip(expected, found, strict=True))
    assert not caplog.records
