"""Encoded images become tensors: the right pixels, whatever decodes them; a bad one is named."""

import io
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import datasets
import numpy as np
import pytest
import torch
from datasets import before_error, encoded, numbers, picture, seen
from PIL import Image
from torchrun import run_python

from streamloader.conversion.api import convert
from streamloader.errors import DecodeError, StreamloaderError, UsageError
from streamloader.images.decode import DRAWS, ImageDecoder
from streamloader.images.pillow import encode
from streamloader.options import Decode, RandomResizedCrop
from streamloader.pytorch.dataset import StreamingDataset

N = 70


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images")
    for kind in ("jpeg", "png"):
        datasets.write_images(path / kind, [encoded(picture(i), kind) for i in range(N)], kind)
    mixed = [encoded(picture(i, 10 + i % 3, 12), "png" if i % 2 else "jpeg") for i in range(N)]
    datasets.write_images(path / "mixed", mixed, "image")
    broken = [encoded(picture(i), "jpeg") for i in range(N)]
    broken[41] = b"this is no image"
    datasets.write_images(path / "broken", broken)
    return path


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", ["jpeg", "png"])
@pytest.mark.parametrize("decode", [True, "pillow", "simplejpeg", Decode("pillow"), {"image": True}])
def test_images_come_as_their_pixels(folder, kind, decode):
    batches = list(StreamingDataset(folder / kind, batch_size=16, decode=decode, with_index=True))
    assert sorted(seen(batches)) == list(range(N))
    for batch in batches:
        image = batch["image"]
        assert (image.dtype, image.shape) == (torch.uint8, (16, 24, 32, 3))
        assert batch["label"].tolist() == batch["index"].tolist()
        for row, i in enumerate(batch["index"].tolist()):
            difference = np.abs(image[row].numpy().astype(int) - picture(i).astype(int))
            assert difference.max() <= (0 if kind == "png" else 24)
            assert difference.mean() <= (0 if kind == "png" else 4)


def test_both_jpeg_decoders_see_the_same_image(folder):
    ways = [StreamingDataset(folder / "jpeg", batch_size=N, decode=way) for way in ("pillow", "simplejpeg")]
    one, other = (next(iter(ds))["image"].numpy().astype(int) for ds in ways)
    assert np.abs(one - other).max() <= 2


@pytest.mark.parametrize("kind", ["jpeg", "png", "mixed"])
def test_a_size_makes_images_alike(folder, kind):
    ds = StreamingDataset(folder / kind, batch_size=10, decode=Decode(size=(6, 9)), with_index=True)
    for batch in ds:
        assert batch["image"].shape == (10, 6, 9, 3)
        i = batch["index"][0].item()
        red = batch["image"][0, :, :, 0].float().mean().item()
        assert abs(red - picture(i)[0, 0, 0]) < 12


def test_single_samples_keep_each_its_own_size(folder):
    normalized = Decode(normalize=((0.5,) * 3, (0.5,) * 3), layout="HWC")
    for decode, dtype, most in ((True, torch.uint8, 255), (normalized, torch.float32, 1)):
        ds = StreamingDataset(folder / "mixed", batch_size=None, decode=decode, with_index=True)
        shapes = {int(sample["index"]): tuple(sample["image"].shape) for sample in ds}
        assert shapes == {i: (10 + i % 3, 12, 3) for i in range(N)}
        assert all(sample["image"].dtype == dtype and sample["image"].float().abs().max() <= most for sample in ds)


def test_what_libjpeg_only_warns_of_is_no_error():
    good = encoded(picture(3), "jpeg")
    padded = good[:-2] + b"abc" + good[-2:]  # "extraneous bytes before marker", which cameras do write
    fast, slow = (ImageDecoder.choose(Decode(backend)) for backend in ("simplejpeg", "pillow"))
    assert np.array_equal(fast.decode(memoryview(padded), 0), slow.decode(memoryview(padded), 0))


def test_grey_images_have_one_channel(folder):
    for size in (None, (8, 8)):
        decode = Decode(mode="L", size=size)
        for kind in ("jpeg", "png"):
            (batch,) = StreamingDataset(folder / kind, batch_size=N, decode=decode, with_index=True)
            assert batch["image"].shape == (N, *(size or (24, 32)), 1)
            if size is None:
                i = batch["index"][3].item()
                expected = np.asarray(Image.fromarray(picture(i)).convert("L"), int)
                assert np.abs(batch["image"][3, :, :, 0].numpy().astype(int) - expected).mean() < 4


def test_without_decode_the_bytes_are_what_was_written(folder):
    for decode in (None, False, {}):
        for batch in StreamingDataset(folder / "png", batch_size=16, with_index=True, decode=decode):
            assert batch["image"] == [encoded(picture(i), "png") for i in batch["index"].tolist()]


def test_images_of_several_sizes_need_a_size_or_a_transform(folder):
    for on_error in ("raise", "mask", "replace"):  # none of them is bad
        with pytest.raises(UsageError, match=r"decodes to shape \(1\d, 12, 3\), others of its batch to \(1\d, 12, 3\)"):
            list(StreamingDataset(folder / "mixed", batch_size=16, decode=True, on_error=on_error))
    for batch in StreamingDataset(folder / "mixed", batch_size=16, decode=True, collate="pad"):  # as the error says
        assert batch["image"].shape[0] == 16

    def crop(sample: dict[str, Any]) -> dict[str, Any]:
        assert sample["image"].dtype == np.uint8
        return {"image": sample["image"][:8, :8], "label": sample["label"]}

    for batch in StreamingDataset(folder / "mixed", batch_size=16, decode=True, transform=crop):
        assert batch["image"].shape == (16, 8, 8, 3)
    for sample in StreamingDataset(folder / "mixed", batch_size=None, decode=Decode(size=(4, 5)), remainder="drop"):
        assert sample["image"].shape == (4, 5, 3)


@pytest.mark.long
@pytest.mark.parametrize("decode", [True, "pillow", Decode(size=(8, 8))])
def test_a_bad_image_is_named_after_the_batches_before_it(folder, decode):
    ds = StreamingDataset(folder / "broken", batch_size=8, decode=decode, shuffle=False, with_index=True)
    shown = r"sample 41 of field 'image' does not decode as an image \(16 bytes beginning 74686973.*on_error='mask'"
    assert before_error(ds, DecodeError, shown)[0] == list(range(40))
    datasets.assert_threads_end()
    ds.load_state_dict(ds.state_dict())
    assert before_error(ds, DecodeError, "sample 41")[0] == []
    (batch, *_) = StreamingDataset(folder / "broken", batch_size=N, shuffle=False)
    assert batch["image"][41] == b"this is no image"


# a DDS header with a pixel format that Pillow does not implement
DDS = b"DDS " + np.array([124, 0x1007, 8, 8, *[0] * 14, 32, 4, 0x21212121, *[0] * 10], "<u4").tobytes()


RAISED = [TypeError, NotImplementedError, RuntimeError, MemoryError, struct.error, cv2.error, KeyError, None]


@pytest.mark.quick(7)
@pytest.mark.parametrize("error", RAISED)
@pytest.mark.parametrize("decode", [True, Decode(size=(8, 8))])
def test_whatever_a_codec_raises_is_the_error_of_its_sample(tmp_path, monkeypatch, error, decode):
    images = [encoded(picture(i), "jpeg") for i in range(16)]
    images[9] = DDS
    datasets.write_images(tmp_path / "d", images, "image")
    plain = Image.open

    def open_image(source: io.BytesIO) -> Image.Image:
        if error is not None and source.getvalue() == DDS:
            raise error("what the codec said")
        return plain(source)

    monkeypatch.setattr("streamloader.images.decode.Image.open", open_image)
    ds = StreamingDataset(tmp_path / "d", batch_size=4, decode=decode, shuffle=False, with_index=True)
    found, shown = before_error(ds, DecodeError, "sample 9 of field 'image' does not decode as an image")
    assert found == list(range(8))
    assert isinstance(shown.__cause__, error or NotImplementedError)


def test_an_image_that_is_a_program_is_not_run(tmp_path, monkeypatch):
    ran = list[object]()
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *given: ran.append(given))
    datasets.write_images(tmp_path / "d", [datasets.EPS] * 2, "image")
    for decode in (True, Decode(size=(8, 8))):
        ds = StreamingDataset(tmp_path / "d", batch_size=1, decode=decode, shuffle=False, with_index=True)
        before_error(ds, DecodeError, "EPS is not decoded, since Ghostscript would run it")
    (tmp_path / "files" / "k").mkdir(parents=True)
    (tmp_path / "files" / "k" / "a.jpg").write_bytes(datasets.EPS)
    for options in ({}, {"resize": 32}):
        with pytest.raises(StreamloaderError, match="EPS is not decoded"):
            convert(tmp_path / "files", tmp_path / "c", workers=0, **options)
    assert not ran


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA", "I;16", "1", "CMYK"])
@pytest.mark.parametrize("size", [None, (5, 6)])
def test_images_of_every_mode_become_rgb(mode, size):
    image = Image.fromarray(picture(3))
    image = image.convert("L").convert("I").convert("I;16") if mode == "I;16" else image.convert(mode)
    out = io.BytesIO()
    image.save(out, "tiff" if mode == "CMYK" else "png")
    decoder = ImageDecoder.choose(Decode(size=size))
    pixels = decoder.decode(memoryview(out.getvalue()), 0)
    assert pixels.shape == (*(size or (24, 32)), 3)
    assert pixels.dtype == np.uint8
    assert decoder.shape(memoryview(out.getvalue()), 0) == pixels.shape


SIXTEEN = np.array([[0, 256, 32768, 65535]], np.uint16)
GREYS = {
    "16 bits": (Image.fromarray(SIXTEEN), "png"),
    "16 bits, big-endian": (Image.frombytes("I;16B", (4, 1), SIXTEEN.byteswap().tobytes()), "tiff"),
    "16 bits in JPEG 2000": (Image.fromarray(np.tile(SIXTEEN, (4, 1))), "jpeg2000"),
    "16 bits in PGM": (Image.fromarray(SIXTEEN), "ppm"),
    "floats": (Image.fromarray((SIXTEEN / 65535).astype(np.float32)), "tiff"),
}


@pytest.mark.parametrize("case", GREYS)
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_grey_of_more_than_8_bits_is_scaled(case, mode):
    out = io.BytesIO()
    GREYS[case][0].save(out, GREYS[case][1])
    pixels = ImageDecoder.choose(Decode(mode=mode)).decode(memoryview(out.getvalue()), 0)
    assert pixels[0].tolist() == [[v] * pixels.shape[2] for v in (0, 1, 128, 255)]


@pytest.mark.parametrize(
    "values", [np.float32([[0, 2]]), np.float32([[0, np.nan]]), np.int32([[-1, 0]]), np.int32([[0, 256]])]
)
def test_greys_of_which_the_white_is_unknown_are_an_error(values):
    out = io.BytesIO()
    Image.fromarray(values).save(out, "tiff")
    with pytest.raises(DecodeError, match=r"its values are from .* expected 0 to (1|255)\)"):
        ImageDecoder.choose(Decode()).decode(memoryview(out.getvalue()), 0)


def test_32_bits_up_to_255_are_kept():
    """As of an image of 8 bits that was converted, which Pillow does for arithmetic."""
    out = io.BytesIO()
    Image.fromarray(picture(3)).convert("L").convert("I").save(out, "tiff")
    pixels = ImageDecoder.choose(Decode(mode="L")).decode(memoryview(out.getvalue()), 0)[:, :, 0]
    assert np.array_equal(pixels, np.asarray(Image.fromarray(picture(3)).convert("L")))


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I;16L", "I;16N", "PGM"])
def test_a_stored_image_object_of_16_bits_keeps_all_of_them(mode):
    values = SIXTEEN.byteswap() if mode == "I;16B" else SIXTEEN
    pgm = io.BytesIO(b"P5 4 1 65535\n" + SIXTEEN.byteswap().tobytes())
    image = Image.open(pgm) if mode == "PGM" else Image.frombytes(mode, (4, 1), values.tobytes())
    with Image.open(io.BytesIO(encode(image))) as stored:
        assert (stored.format, np.asarray(stored).tolist()) == ("PNG", SIXTEEN.tolist())


AUGMENT = Decode(size=(12, 16), crop=RandomResizedCrop(flip=0.5), normalize="imagenet")


def by_number(ds: StreamingDataset) -> dict[int, bytes]:
    """The valid images of what is left of an epoch, as bytes."""
    found = {}
    for batch in ds:
        assert batch["image"].dtype == torch.float32
        found |= {i: batch["image"][row].numpy().tobytes() for row, i in enumerate(numbers(batch))}
    return found


@pytest.mark.long
def test_random_crops_are_those_of_the_sample_at_any_world_size_batch_and_resume(folder):
    arguments: dict[str, Any] = {"decode": AUGMENT, "with_index": True, "seed": 5}
    alone = StreamingDataset(folder / "jpeg", batch_size=16, **arguments)
    first = by_number(alone)
    assert len(first) == N == len(set(first.values()))
    two: dict[int, bytes] = {}
    for rank in range(2):
        two |= by_number(StreamingDataset(folder / "jpeg", batch_size=5, world=(rank, 2), **arguments))
    assert two == first
    begun = StreamingDataset(folder / "jpeg", batch_size=8, **arguments)
    resumed = StreamingDataset(folder / "jpeg", batch_size=16, **arguments)
    resumed.load_state_dict(begun.state_dict(batches=3))
    rest = by_number(resumed)
    assert len(rest) == N - 24
    assert rest.items() <= first.items()
    second = by_number(alone)
    assert sorted(second) == sorted(first)
    assert all(second[i] != first[i] for i in first), "another epoch, another crop"
    other = by_number(StreamingDataset(folder / "jpeg", batch_size=16, **{**arguments, "seed": 6}))
    assert all(other[i] != first[i] for i in first)


def test_a_random_crop_and_a_transform_draw_different_numbers(folder):
    def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        assert sample["image"].dtype == np.float32
        return {"image": sample["image"], "index": sample["label"], "noise": rng.random(DRAWS)}

    ds = StreamingDataset(folder / "jpeg", batch_size=N, decode=AUGMENT, with_index=True, seed=5, transform=noisy)
    (batch,) = ds
    as_transformed = replace(AUGMENT, layout="HWC")
    plain = by_number(StreamingDataset(folder / "jpeg", batch_size=16, decode=as_transformed, with_index=True, seed=5))
    for image, i in zip(batch["image"].numpy(), batch["index"].tolist(), strict=True):
        assert image.tobytes() == plain[i]
    crops = ImageDecoder.choose(AUGMENT).draws(5, 0, np.arange(N))
    assert not {number for row in crops or [] for number in row} & set(batch["noise"].flatten().tolist())


def test_evaluation_takes_the_middle(folder):
    decode = Decode(size=(12, 16), crop="center", normalize=((0, 0, 0), (1 / 255,) * 3))
    for batch in StreamingDataset(folder / "png", batch_size=16, shuffle=False, decode=decode, with_index=True):
        for image, i in zip(batch["image"].numpy(), batch["index"].tolist(), strict=True):
            whole = picture(i).astype(float)
            assert np.abs(image.mean((1, 2)) - whole.mean((0, 1))).max() < 6  # half a row of 24
            assert image[1].min() > whole[:, 1:, 1].min() + 3, "a sixteenth is missing on each side"


@pytest.mark.quick(3)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("floats", [True, False])
@pytest.mark.parametrize("layout", [None, "CHW", "HWC"])
def test_float_images_come_as_models_take_them_without_a_copy(folder, mode, floats, layout):
    channels = 3 if mode == "RGB" else 1
    normalize = ((0.5,) * channels, (0.5,) * channels) if floats else None
    options: dict[str, Any] = {"batch_size": 8, "shuffle": False}
    decode = Decode(size=(12, 16), mode=mode, normalize=normalize, layout=layout)
    batch = next(iter(StreamingDataset(folder / "png", decode=decode, **options)))["image"]
    stored = next(iter(StreamingDataset(folder / "png", decode=replace(decode, layout="HWC"), **options)))["image"]
    first = layout == "CHW" or (layout is None and floats)
    assert batch.shape == ((8, channels, 12, 16) if first else (8, 12, 16, channels))
    assert batch.equal(stored.permute(0, 3, 1, 2) if first else stored)
    if first:
        assert batch.is_contiguous(memory_format=torch.channels_last)
    sample = next(iter(StreamingDataset(folder / "png", decode=decode, batch_size=None, shuffle=False)))["image"]
    assert sample.equal(batch[0])


def test_a_layout_that_a_transform_would_not_see_is_refused(folder):
    with pytest.raises(UsageError, match=r"layout='CHW'.*a transform, which gets height x width x channels"):
        StreamingDataset(folder / "png", batch_size=8, decode=Decode(layout="CHW"), transform=dict)


@pytest.mark.alone
def test_a_transform_that_holds_pythons_lock_does_not_starve_the_fetch(folder):
    def count(sample: dict[str, Any]) -> dict[str, Any]:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return {"label": sample["label"]}

    ds = StreamingDataset(folder / "jpeg", batch_size=5, decode=AUGMENT, transform=count, remainder="drop")
    batches = iter(ds)
    next(batches)
    begun = ds.stats()
    left = sum(1 for _ in batches)
    done = ds.stats()
    assert left == N // 5 - 1
    assert done.transform_seconds - begun.transform_seconds > 0.05 * (left - 4)
    waited = done.wait_seconds - begun.wait_seconds
    assert done.fetch_wait_seconds - begun.fetch_wait_seconds < 0.2 * waited
    assert done.transform_wait_seconds - begun.transform_wait_seconds > 0.8 * waited


LEAVING = """
import sys, cv2, numpy as np, streamloader as sl

def blur(sample):
    return {"image": cv2.GaussianBlur(np.zeros((300, 300, 3), np.float32), (9, 9), 0)}

# so much to do that the threads are in OpenCV when the script ends
side, transform = (1500, None) if sys.argv[2] == "decode" else (200, blur)
decode = sl.Decode(size=(side, side), normalize="imagenet")
ds = sl.StreamingDataset(sys.argv[1], batch_size=16, decode=decode, transform=transform)
batches = iter(ds)
next(batches)
print("left")
"""


@pytest.mark.long
@pytest.mark.parametrize("work", ["decode", "transform"])
def test_a_script_may_end_in_the_middle_of_a_pass(folder, work):
    done = run_python("-c", LEAVING, folder / "jpeg", work)
    assert (done.stdout, done.stderr) == ("left\n", "")


SLOW = """
import atexit, sys, threading, time
inside = 0

def slow(call):
    def slowed(*args, **options):
        global inside
        inside += 1
        result = call(*args, **options)
        time.sleep(0.8)  # a batch takes longer than the exit waits
        inside -= 1
        return result
    return slowed

atexit.register(lambda: print(inside))  # called last
import cv2, streamloader as sl
transform = slow(dict) if sys.argv[2] == "transform" else None
cv2.resize = slow(cv2.resize) if transform is None else cv2.resize
decode = sl.Decode(size=(5, 5))
if sys.argv[2] == "bench":
    from streamloader.measure.ceiling import image_ceiling
    threading.Thread(target=image_ceiling, args=(sys.argv[1], None, "image", decode), daemon=True).start()
else:
    ds = sl.StreamingDataset(sys.argv[1], batch_size=32, decode=decode, transform=transform)
    batches = iter(ds)
while not inside:
    time.sleep(0.01)
"""


@pytest.mark.long
@pytest.mark.parametrize("work", ["decode", "transform", "bench"])
def test_the_end_of_a_script_waits_for_the_sample_in_hand_and_not_for_its_batch(folder, work):
    assert run_python("-c", SLOW, folder / "jpeg", work).stdout == "0\n"
