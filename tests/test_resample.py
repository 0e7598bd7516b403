"""Crops of real photographs: the same from every backend, exactly normalised, with no memory but the batch's own."""

from __future__ import annotations

import importlib.util
import io
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from streamloader.decode.image import ImageDecoder, Scratch
from streamloader.decode.resample import Normalizer, mirror
from streamloader.errors import DecodeError
from streamloader.options import IMAGENET, CenterCrop, Decode, RandomResizedCrop

SIZES = [(224, 224), (100, 80), (40, 40), (300, 600)]


@pytest.fixture(scope="module")
def photographs() -> list[bytes]:
    """Parts of scikit-learn's two photographs, JPEG of usual sampling and quality, 375 x 500 and one of 427 x 640."""
    from sklearn.datasets import load_sample_images

    parts = [pixels[y : y + 375, x : x + 500] for pixels in load_sample_images().images for y, x in ((0, 0), (52, 137))]
    return [as_jpeg(part) for part in [*parts, load_sample_images().images[0]]]


def as_jpeg(pixels: np.ndarray[Any, Any], **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(out, "jpeg", **{"quality": 90, **options})
    return out.getvalue()


def decoders(options: Decode) -> tuple[ImageDecoder, ImageDecoder, ImageDecoder]:
    """Decoders with both packages, without OpenCV, and with neither."""
    full = ImageDecoder.choose(options)
    assert full.fast
    assert full.opencv
    return full, replace(full, opencv=False), replace(full, fast=False, opencv=False)


def decode(decoder: ImageDecoder, data: bytes, sample: int = 0) -> np.ndarray[Any, Any]:
    return decoder.decode(memoryview(data), sample).astype(np.int64)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("crop", [None, "center", "random", RandomResizedCrop(flip=1)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_every_backend_gives_the_same_picture(photographs: list[bytes], size: Any, crop: Any, mode: Any) -> None:
    for sample, data in enumerate(photographs):
        best, no_opencv, pillow = (decode(d, data, sample) for d in decoders(Decode(size=size, crop=crop, mode=mode)))
        assert best.shape == (*size, 3 if mode == "RGB" else 1)
        assert np.abs(no_opencv - pillow).mean() < 0.5
        # OpenCV takes the four nearest pixels where Pillow averages: it is sharper where there is much detail
        assert np.abs(best - pillow).mean() < 6
        assert abs((best - pillow).mean()) < 0.5


@pytest.mark.parametrize("size", SIZES)
def test_a_crop_is_that_of_the_whole_picture(photographs: list[bytes], size: Any) -> None:
    crop = RandomResizedCrop(scale=(0.3, 1))
    for sample, data in enumerate(photographs):
        decoder = ImageDecoder.choose(Decode(size=size, crop=crop))
        (row,) = decoder.draws(0, 0, np.array([sample])) or []
        box = decoder._box(*decoder._measure(memoryview(data)), row)
        with Image.open(io.BytesIO(data)) as image:
            whole = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
            expected = np.asarray(whole.resize((size[1], size[0]), Image.Resampling.BILINEAR), np.int64)
        assert np.abs(decode(decoder, data, sample) - expected).mean() < 6


@pytest.mark.parametrize("sampling", [0, 1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_rows_that_are_not_decoded_change_nothing(
    photographs: list[bytes], size: Any, sampling: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    crop = RandomResizedCrop(scale=(0.05, 0.3))
    decoder = ImageDecoder.choose(Decode(size=size, crop=crop))
    with Image.open(io.BytesIO(photographs[0])) as image:
        data = as_jpeg(np.asarray(image), subsampling=sampling)
    less = [decode(decoder, data, sample) for sample in range(30)]
    monkeypatch.setattr("streamloader.decode.image.first_rows", lambda data, rows: None)
    for sample, pixels in enumerate(less):
        assert np.array_equal(pixels, decode(decoder, data, sample))


def test_a_mirror_image_is_one(photographs: list[bytes]) -> None:
    plain, mirrored = (
        decode(ImageDecoder.choose(Decode(size=(50, 70), crop=RandomResizedCrop(flip=flip))), photographs[0])
        for flip in (0, 1)
    )
    assert np.array_equal(mirrored, plain[:, ::-1])
    half = ImageDecoder.choose(Decode(size=(50, 70), crop=RandomResizedCrop(flip=0.5)))
    flips = np.array([row[0] < 0.5 for row in half.draws(3, 1, np.arange(1000)) or []])
    assert 430 < flips.sum() < 570
    for shape in ((5, 7, 3), (4, 8, 1)):
        pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
        for opencv in (True, False):
            turned = pixels.copy()
            mirror(turned, opencv=opencv)
            assert np.array_equal(turned, pixels[:, ::-1])


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("opencv", [True, False])
def test_normalised_values_are_the_nearest_floats(mode: Any, opencv: bool) -> None:
    mean, std = IMAGENET if mode == "RGB" else ((0.5,), (0.25,))
    options = Decode(mode=mode, normalize=(mean, std))
    pixels = np.random.default_rng(0).integers(0, 256, (31, 17, options.channels), np.uint8)
    out = np.empty(pixels.shape, np.float32)
    Normalizer.of((mean, std)).apply(pixels, out, opencv=opencv)
    assert np.array_equal(out, ((pixels / 255 - np.array(mean)) / np.array(std)).astype(np.float32))


def test_normalising_changes_the_numbers_only(photographs: list[bytes]) -> None:
    for size, crop in ((None, None), ((60, 90), "random")):
        plain = Decode(size=size, crop=crop)  # type: ignore[arg-type]
        pixels = decode(ImageDecoder.choose(plain), photographs[1])
        for decoder in decoders(replace(plain, normalize=((0, 0, 0), (1 / 255,) * 3)))[:2]:
            got = decoder.decode(memoryview(photographs[1]), 0)
            assert got.dtype == np.float32 == np.dtype(decoder.dtype)
            assert np.abs(got - pixels).max() < (1e-3 if decoder.opencv or size is None else 80)


@pytest.mark.parametrize("normalize", [None, "imagenet"])
def test_a_thread_that_has_begun_takes_no_more_memory(photographs: list[bytes], normalize: Any) -> None:
    decoder = ImageDecoder.choose(Decode(size=(224, 224), crop="random", normalize=normalize))
    out, scratch = np.empty((224, 224, 3), decoder.dtype), Scratch()
    data = memoryview(photographs[-1])
    rows = decoder.draws(0, 0, np.arange(40)) or []
    for row in rows:
        decoder.decode(data, 0, out, row, scratch)
    tracemalloc.start()
    try:
        for row in rows:
            decoder.decode(data, 0, out, row, scratch)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(data) + 16384, "the encoded image with a new head, and nothing of the size of pixels"


def test_an_image_comes_straight_into_the_batch(photographs: list[bytes]) -> None:
    for options in (Decode(), Decode(size=(30, 40)), Decode(size=(30, 40), crop="center", normalize="imagenet")):
        for decoder in decoders(options):
            data = memoryview(photographs[0])
            batch = np.full((3, *decoder.shape(data, 0)), 7, decoder.dtype)
            decoder.decode(data, 0, batch[1])
            assert np.array_equal(batch[1], decoder.decode(data, 0))
            assert (batch[[0, 2]] == 7).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (3, 5)])
@pytest.mark.parametrize("crop", [None, CenterCrop(0.01), RandomResizedCrop(ratio=(0.01, 100))])
def test_the_smallest_images_have_crops_too(shape: tuple[int, int], crop: Any) -> None:
    data = as_jpeg(np.full((*shape, 3), 200, np.uint8))
    for options in (Decode(size=(8, 8), crop=crop), Decode(size=(1, 1), crop=crop)):
        for decoder in decoders(options):
            for sample in range(20):
                assert np.abs(decode(decoder, data, sample) - 200).max() <= 4


@pytest.mark.parametrize("crop", [None, "center", "random"])
def test_unusual_files_are_decoded_as_pillow_does(photographs: list[bytes], crop: Any) -> None:
    with Image.open(io.BytesIO(photographs[0])) as image:
        rgb = image.convert("RGB")
    turned = Image.Exif()
    turned[0x0112] = 6  # "rotate by 90 degrees": the pixels come as they are stored
    files = {
        "cmyk": (rgb.convert("CMYK"), "jpeg", {}),
        "grey": (rgb.convert("L"), "jpeg", {}),
        "progressive": (rgb, "jpeg", {"progressive": True}),
        "turned": (rgb, "jpeg", {"exif": turned}),
        "restarts": (rgb, "jpeg", {"restart_marker_rows": 2}),
        "png": (rgb, "png", {}),
        "palette": (rgb.convert("P"), "png", {}),
    }
    for name, (image, kind, settings) in files.items():
        out = io.BytesIO()
        image.save(out, kind, **settings)
        best, _, pillow = (decode(d, out.getvalue()) for d in decoders(Decode(size=(100, 140), crop=crop)))
        assert np.abs(best - pillow).mean() < 8, name
        assert abs((best - pillow).mean()) < 1, name


@pytest.mark.parametrize("normalize", [None, "imagenet"])
@pytest.mark.parametrize("crop", [None, "random", "center"])
def test_what_is_no_whole_image_is_refused(photographs: list[bytes], crop: Any, normalize: Any) -> None:
    good = photographs[0]
    at = good.index(b"\xff\xc0") + 5
    empty = good[:at] + b"\0\0" + good[at + 2 :]
    cut = [good[: int(part * len(good))] for part in (0, 0.01, 0.3, 0.9, 0.999)]
    for decoder in decoders(Decode(size=(64, 64), crop=crop, normalize=normalize)):
        for bad in (*cut, empty, b"\xff\xd8\xff", good[2:]):
            for sample in range(4):
                with pytest.raises(DecodeError, match=f"sample {sample} does not decode as an image"):
                    decoder.decode(memoryview(bad), sample)


def test_whatever_the_bytes_are_the_answer_is_an_image_or_a_decode_error(photographs: list[bytes]) -> None:
    with Image.open(io.BytesIO(photographs[0])) as image:
        good = as_jpeg(np.asarray(image.resize((90, 60))))
    rng = np.random.default_rng(0)
    fast, _, pillow = decoders(Decode(size=(30, 40), crop="random", normalize="imagenet"))
    refused = 0
    for sample in range(300):
        bad = bytearray(good)
        for place in rng.integers(0, 700 if sample % 2 else len(bad), 3):
            bad[place] = rng.integers(0, 256)
        for decoder in (fast, pillow):
            try:
                assert np.isfinite(decoder.decode(memoryview(bytes(bad)), sample)).all()
            except DecodeError:
                refused += 1
    assert 0 < refused < 300


def test_two_headers_that_disagree_are_refused(photographs: list[bytes]) -> None:
    good = photographs[0]
    at = good.index(b"\xff\xc0")
    frame = good[at : at + 19]
    other = frame[:5] + b"\0\x10\0\x10" + frame[9:]
    for data in (good[:at] + other + good[at:], good[:at] + frame + other + good[at + 19 :]):
        for options in (Decode(), Decode(size=(50, 50)), Decode(size=(50, 50), crop="random")):
            for decoder in decoders(options)[:2]:
                with pytest.raises(DecodeError):
                    decoder.decode(memoryview(data), 0)


def test_a_bomb_takes_no_memory(photographs: list[bytes]) -> None:
    good = photographs[0]
    at = good.index(b"\xff\xc0") + 5
    bomb = memoryview(good[:at] + b"\xff\xdc\xff\xdc" + good[at + 4 :])  # says that it has 65,500 x 65,500 pixels
    for decoder in decoders(Decode(size=(64, 64), crop="random")):
        tracemalloc.start()
        try:
            with pytest.raises(DecodeError, match=r"does not decode.*(65500.*pixels|exceeds limit)"):
                decoder.decode(bomb, 0)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("missing", [{"cv2"}, {"cv2", "simplejpeg"}])
def test_without_the_fast_packages_pillow_does_it(missing: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else real(name))
    decoder = ImageDecoder.choose(Decode(size=(8, 9), crop="random", normalize="imagenet"))
    assert (decoder.fast, decoder.opencv) == ("simplejpeg" not in missing, False)
    assert decoder.decode(memoryview(as_jpeg(np.zeros((20, 20, 3), np.uint8))), 0).shape == (8, 9, 3)
