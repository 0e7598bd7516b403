"""Crops: which part of an image is taken, by which random numbers, is pinned, since runs depend on it; its pixels are
the same from every backend, exactly normalised, with no memory but the batch's own.
"""

import importlib.util
import io
import math
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from amounts import examples
from datasets import encoded, picture, within
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from streamloader.conversion.transforms import Recode
from streamloader.errors import DecodeError, UsageError
from streamloader.images import decode as decoding
from streamloader.images.decode import DRAWS, Box, ImageDecoder, draws, first_rows, normalize
from streamloader.images.pillow import orientation
from streamloader.options import IMAGENET, CenterCrop, Decode, RandomResizedCrop

WORD = st.integers(0, 2**64 - 1)
POSITIONS = st.lists(st.integers(0, 2**62), max_size=20)
SIDE = st.integers(1, 5000)
ROW = st.lists(st.floats(0, 1, exclude_max=True), min_size=DRAWS, max_size=DRAWS)


@given(WORD, st.integers(0, 2**63 - 1), POSITIONS, st.integers(0, 30))
def test_each_row_is_what_numpys_generator_of_its_position_draws(seed, epoch, positions, count):
    rows = draws(seed, epoch, np.array(positions, np.int64), count)
    assert rows.shape == (len(positions), count)
    key = np.array([seed, epoch], np.uint64)
    for position, row in zip(positions, rows, strict=True):
        counter = np.array([0, 0, 1, position], np.uint64)
        assert np.array_equal(row, np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count))


def test_numbers_and_boxes_are_pinned():
    rows = draws(7, 3, np.array([0, 1, 10**12]), DRAWS)
    assert rows[:, 0].tolist() == [0.8905560502271676, 0.23552256253609116, 0.5933941453822758]
    boxes = [tuple(decoding.random_box(375, 500, RandomResizedCrop(), row)) for row in rows.tolist()]
    assert boxes == [(56, 47, 318, 313), (25, 47, 332, 384), (22, 47, 321, 413)]


@settings(max_examples=examples(100))
@given(SIDE, SIDE, ROW, st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0.2, 5), st.floats(0.2, 5))
def test_a_random_box_lies_within_the_image_and_the_bounds(height, width, row, a, b, r, s):
    crop = RandomResizedCrop(scale=(min(a, b), max(a, b)), ratio=(min(r, s), max(r, s)))
    box = decoding.random_box(height, width, crop, row)
    check_within(box, height, width)
    # each side is rounded to whole pixels, a middle box also cut to the image
    assert box.width + 1 >= crop.ratio[0] * (box.height - 1) or box.width == width
    assert box.width - 1 <= crop.ratio[1] * (box.height + 1)


def test_random_boxes_have_every_scale_ratio_and_place():
    rows = draws(1, 0, np.arange(4000), DRAWS).tolist()
    boxes = [decoding.random_box(1000, 1000, RandomResizedCrop(), row) for row in rows]
    top, left, height, width = np.array(boxes, float).T
    area = np.sort(height * width / 1e6)
    assert area[0] == pytest.approx(0.08, abs=0.005)
    # an area a fits at shape r if a <= exp(-|log r|): the mean of those, with both drawn evenly
    fits = np.exp(-np.linspace(0, math.log(4 / 3), 1000))
    assert area.mean() == pytest.approx(((fits**2 - 0.08**2) / 2).sum() / (fits - 0.08).sum(), abs=0.01)
    assert np.log(width / height).mean() == pytest.approx(0, abs=0.02)
    assert (width / height).min() == pytest.approx(3 / 4, abs=0.02)
    assert (width / height).max() == pytest.approx(4 / 3, abs=0.02)
    for place, room in ((top, 1000 - height), (left, 1000 - width)):
        part = place[room > 50] / room[room > 50]
        assert (part.min(), part.mean(), part.max()) == pytest.approx((0, 0.5, 1), abs=0.02)


@given(SIDE, SIDE, SIDE, SIDE, st.floats(0.001, 1))
def test_a_center_box_is_in_the_middle_and_has_the_targets_shape(h, w, th, tw, part):
    box = decoding.center_box(h, w, CenterCrop(part), (th, tw))
    check_within(box, h, w)
    assert abs(2 * box.top + box.height - h) <= 1
    assert abs(2 * box.left + box.width - w) <= 1
    exact = min(h / th, w / tw) * part  # pixels of the image for one of the target
    assert box.height == pytest.approx(max(1, exact * th), abs=0.51)
    assert box.width == pytest.approx(max(1, exact * tw), abs=0.51)


def test_the_usual_evaluation_is_seven_eighths():
    assert decoding.center_box(256, 341, CenterCrop(), (224, 224)) == Box(16, 58, 224, 224)


@given(SIDE, SIDE, SIDE, SIDE)
def test_a_reduction_leaves_the_pixels_that_the_target_needs(h, w, th, tw):
    k = decoding.reduction(Box(0, 0, h, w), (th, tw))
    assert k in (1, 2, 4, 8)
    assert k == 1 or (h / k >= th and w / k >= tw)
    assert k == 8 or h / (2 * k) < th or w / (2 * k) < tw


@given(SIDE, SIDE, ROW, st.integers(1, 500), st.integers(1, 500))
def test_snapping_moves_an_edge_by_half_a_reduced_pixel_and_keeps_the_targets(height, width, row, th, tw):
    box = decoding.random_box(height, width, RandomResizedCrop(), row)
    k = decoding.reduction(box, (th, tw))
    moved = decoding.snapped(box, k, height, width)
    check_within(moved, height, width)
    if k == 1:
        assert moved == box
        return
    assert moved.top % k == moved.left % k == 0
    assert max(abs(moved.top - box.top), abs(moved.left - box.left)) <= k / 2
    assert -(-moved.height // k) >= th
    assert -(-moved.width // k) >= tw


def check_within(box: Box, height: int, width: int) -> None:
    assert min(box.height, box.width) >= 1
    assert min(box.top, box.left) >= 0
    assert box.top + box.height <= height
    assert box.left + box.width <= width


def as_jpeg(pixels: np.ndarray[Any, Any], mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).convert(mode).save(out, "jpeg", **{"quality": 90, **options})
    return out.getvalue()


NOISE = np.random.default_rng(0).integers(0, 256, (90, 70, 3), np.uint8)


@pytest.mark.parametrize("options", [{"subsampling": s} for s in (0, 1, 2)] + [{"mode": "L"}, {"quality": 30}])
def test_the_first_rows_of_a_jpeg_are_an_image_of_its_own(options):
    import simplejpeg

    data = as_jpeg(NOISE, **options)
    whole = simplejpeg.decode_jpeg(data)
    for rows in range(17, 90, 9):
        head = first_rows(memoryview(data), rows)
        assert head is not None
        pixels = simplejpeg.decode_jpeg(head, strict=False)
        assert pixels.shape == (rows, 70, 3)
        assert np.array_equal(pixels[:-8], whole[: rows - 8])


def test_first_rows_are_not_taken_from_progressive_or_cut_images():
    good = as_jpeg(NOISE)
    assert first_rows(memoryview(good), 16) is not None
    cut = (good[:-1], good[:-2] + b"ab", good[: len(good) // 2], good[:30], b"\xff\xd8", b"")
    for bad in (as_jpeg(NOISE, progressive=True), *cut):
        assert first_rows(memoryview(bad), 16) is None


@given(st.binary(max_size=200))
def test_first_rows_of_anything_do_not_raise(tail):
    head = first_rows(memoryview(b"\xff\xd8" + tail), 16)
    assert head is None or len(head) == len(tail) + 2


WRONG = [
    (lambda: Decode("opencv"), "backend='opencv'"),
    (lambda: Decode(layout="NCHW"), "layout='NCHW'"),
    (lambda: Decode(size=224), "size=224"),
    (lambda: Decode(size=(0, 5)), r"size=\(0, 5\)"),
    (lambda: Decode(size=(5, 5, 3)), r"size=\(5, 5, 3\)"),
    (lambda: Decode(crop="random"), "crop='random'.*a crop needs size"),
    (lambda: Decode(size=(5, 5), crop="corner"), "crop='corner'"),
    (lambda: Decode(size=(5, 5), crop=0.5), "crop=0.5"),
    (lambda: Decode(normalize="cifar"), "normalize='cifar'"),
    (lambda: Decode(normalize=(0.5, 0.5)), r"normalize=\(0.5, 0.5\)"),
    (lambda: Decode(normalize=((0.5,), (0.5,))), "each of 3 numbers"),
    (lambda: Decode(normalize="imagenet", mode="L"), "each of 1 numbers"),
    (lambda: Decode(normalize=((0, 0, 0), (1, 0, 1))), "std not 0"),
    (lambda: Decode(normalize=((0, 0, math.nan), (1, 1, 1))), "nan"),
    (lambda: RandomResizedCrop(scale=(0, 1)), r"scale=\(0, 1\)"),
    (lambda: RandomResizedCrop(scale=(0.5, 2)), r"scale=\(0.5, 2\)"),
    (lambda: RandomResizedCrop(ratio=(2, 1)), r"ratio=\(2, 1\)"),
    (lambda: RandomResizedCrop(flip=1.5), "flip=1.5"),
    (lambda: CenterCrop(0), r"part=0"),
]


@pytest.mark.parametrize(("make", "shown"), WRONG)
def test_wrong_options_are_refused_with_their_values(make, shown):
    with pytest.raises(UsageError, match=shown) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_names_stand_for_values():
    assert Decode(size=(5, 5), crop="random").box == RandomResizedCrop((0.08, 1.0), (3 / 4, 4 / 3), 0.0)
    assert Decode(size=(5, 5), crop="center").box == CenterCrop(0.875)
    assert Decode(normalize="imagenet").normalization == IMAGENET
    assert Decode(size=(5, 5)).box is Decode().normalization is None


SIZES = [(224, 224), (100, 80), (40, 40), (300, 600)]


@pytest.fixture(scope="module")
def photographs() -> list[bytes]:
    """Parts of scikit-learn's two photographs, JPEG of usual sampling and quality, 375 x 500 and one of 427 x 640."""
    from sklearn.datasets import load_sample_images

    parts = [pixels[y : y + 375, x : x + 500] for pixels in load_sample_images().images for y, x in ((0, 0), (52, 137))]
    return [as_jpeg(part) for part in [*parts, load_sample_images().images[0]]]


def decoders(options: Decode) -> tuple[ImageDecoder, ImageDecoder, ImageDecoder]:
    """Decoders with both packages, without OpenCV, and with neither."""
    full = ImageDecoder.choose(options)
    assert full.fast
    assert full.opencv
    return full, replace(full, opencv=False), replace(full, fast=False, opencv=False)


def decode(decoder: ImageDecoder, data: bytes, sample: int = 0) -> np.ndarray[Any, Any]:
    return decoder.decode(memoryview(data), sample).astype(np.int64)


@pytest.mark.quick(6)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("crop", [None, "center", "random", RandomResizedCrop(flip=1)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_every_backend_gives_the_same_picture(photographs, size, crop, mode):
    for sample, data in enumerate(photographs):
        best, no_opencv, pillow = (decode(d, data, sample) for d in decoders(Decode(size=size, crop=crop, mode=mode)))
        assert best.shape == (*size, 3 if mode == "RGB" else 1)
        assert np.abs(no_opencv - pillow).mean() < 0.5
        # OpenCV takes the four nearest pixels where Pillow averages: it is sharper where there is much detail
        assert np.abs(best - pillow).mean() < 6
        assert abs((best - pillow).mean()) < 0.5


@pytest.mark.parametrize("size", SIZES)
def test_a_crop_is_that_of_the_whole_picture(photographs, size):
    crop = RandomResizedCrop(scale=(0.3, 1))
    for sample, data in enumerate(photographs):
        decoder = ImageDecoder.choose(Decode(size=size, crop=crop))
        (row,) = decoder.draws(0, 0, np.array([sample])) or []
        ((box, _),) = decoder._crops(decoder.measure(memoryview(data), sample).size, row)
        with Image.open(io.BytesIO(data)) as image:
            whole = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
            expected = np.asarray(whole.resize((size[1], size[0]), Image.Resampling.BILINEAR), np.int64)
        assert np.abs(decode(decoder, data, sample) - expected).mean() < 6


@pytest.mark.quick(1)
@pytest.mark.parametrize("sampling", [0, 1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_rows_that_are_not_decoded_change_nothing(photographs, size, sampling, monkeypatch):
    crop = RandomResizedCrop(scale=(0.05, 0.3))
    decoder = ImageDecoder.choose(Decode(size=size, crop=crop))
    with Image.open(io.BytesIO(photographs[0])) as image:
        data = as_jpeg(np.asarray(image), subsampling=sampling)
    less = [decode(decoder, data, sample) for sample in range(30)]
    monkeypatch.setattr("streamloader.images.decode.first_rows", lambda data, rows: None)
    for sample, pixels in enumerate(less):
        assert np.array_equal(pixels, decode(decoder, data, sample))


def test_a_mirror_image_is_one(photographs):
    for mode in ("RGB", "L"):
        ways = [decoders(Decode(size=(50, 71), crop=RandomResizedCrop(flip=flip), mode=mode)) for flip in (0, 1)]
        for plain, mirrored in zip(*ways, strict=True):
            assert np.array_equal(decode(mirrored, photographs[0]), decode(plain, photographs[0])[:, ::-1])
    half = ImageDecoder.choose(Decode(size=(50, 70), crop=RandomResizedCrop(flip=0.5)))
    flips = np.array([row[0] < 0.5 for row in half.draws(3, 1, np.arange(1000)) or []])
    assert 430 < flips.sum() < 570


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("opencv", [True, False])
def test_normalised_values_are_the_nearest_floats(mode, opencv):
    mean, std = IMAGENET if mode == "RGB" else ((0.5,), (0.25,))
    options = Decode(mode=mode, normalize=(mean, std))
    pixels = np.random.default_rng(0).integers(0, 256, (31, 17, options.channels), np.uint8)
    out = np.empty(pixels.shape, np.float32)
    normalize(pixels, decoding.normalized_values((mean, std)), out, opencv=opencv)
    assert np.array_equal(out, ((pixels / 255 - np.array(mean)) / np.array(std)).astype(np.float32))


def test_normalising_changes_the_numbers_only(photographs):
    for size, crop in ((None, None), ((60, 90), "random")):
        plain = Decode(size=size, crop=crop)  # type: ignore[arg-type]
        pixels = decode(ImageDecoder.choose(plain), photographs[1])
        for decoder in decoders(replace(plain, normalize=((0, 0, 0), (1 / 255,) * 3)))[:2]:
            got = decoder.decode(memoryview(photographs[1]), 0)
            assert got.dtype == np.float32 == np.dtype(decoder.dtype)
            assert np.abs(got - pixels).max() < (1e-3 if decoder.opencv or size is None else 80)


@pytest.mark.long
@pytest.mark.parametrize("normalize", [None, "imagenet"])
def test_a_thread_that_has_begun_takes_no_more_memory(photographs, normalize):
    decoder = ImageDecoder.choose(Decode(size=(224, 224), crop="random", normalize=normalize))
    out = np.empty((224, 224, 3), decoder.dtype)
    data = memoryview(photographs[-1])
    rows = decoder.draws(0, 0, np.arange(40)) or []
    for row in rows:
        decoder.decode(data, 0, out, row)
    with within(len(data) + 16384):  # the encoded image with a new head, and nothing of the size of pixels
        for row in rows:
            decoder.decode(data, 0, out, row)


def test_an_image_comes_straight_into_the_batch(photographs):
    for options in (Decode(), Decode(size=(30, 40)), Decode(size=(30, 40), crop="center", normalize="imagenet")):
        for decoder in decoders(options):
            data = memoryview(photographs[0])
            batch = np.full((3, *decoder.shape(data, 0)), 7, decoder.dtype)
            decoder.decode(data, 0, batch[1])
            assert np.array_equal(batch[1], decoder.decode(data, 0))
            assert (batch[[0, 2]] == 7).all()


@pytest.mark.quick(5)
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (3, 5)])
@pytest.mark.parametrize("crop", [None, CenterCrop(0.01), RandomResizedCrop(ratio=(0.01, 100))])
def test_the_smallest_images_have_crops_too(shape, crop):
    data = as_jpeg(np.full((*shape, 3), 200, np.uint8))
    for options in (Decode(size=(8, 8), crop=crop), Decode(size=(1, 1), crop=crop)):
        for decoder in decoders(options):
            for sample in range(20):
                assert np.abs(decode(decoder, data, sample) - 200).max() <= 4


@pytest.mark.quick(1)
@pytest.mark.parametrize("crop", [None, "center", "random"])
def test_unusual_files_are_decoded_as_pillow_does(photographs, crop):
    with Image.open(io.BytesIO(photographs[0])) as image:
        rgb = image.convert("RGB")
    turned = Image.Exif()
    turned[0x0112] = 6  # "rotate by 90 degrees"
    files = {
        "cmyk": (rgb.convert("CMYK"), "jpeg", {}),
        "grey": (rgb.convert("L"), "jpeg", {}),
        "progressive": (rgb, "jpeg", {"progressive": True}),
        "turned": (rgb, "jpeg", {"exif": turned}),
        "restarts": (rgb, "jpeg", {"restart_marker_rows": 2}),
        "png": (rgb, "png", {}),
        "palette": (rgb.convert("P"), "png", {}),
    }
    for name, (image, kind, options) in files.items():
        out = io.BytesIO()
        image.save(out, kind, **options)
        best, _, pillow = (decode(d, out.getvalue()) for d in decoders(Decode(size=(100, 140), crop=crop)))
        assert np.abs(best - pillow).mean() < 8, name
        assert abs((best - pillow).mean()) < 1, name


SMOOTH = np.asarray(Image.fromarray(NOISE[:6, :4]).resize((90, 130), Image.Resampling.BICUBIC))


def with_orientation(kind: str, turn: int, pixels: np.ndarray[Any, Any] = SMOOTH) -> bytes:
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "a camera", turn
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, exif=exif, **{"quality": 95} if kind == "jpeg" else {"lossless": True})
    return out.getvalue()


@pytest.mark.quick(4)
@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_an_image_is_what_its_exif_orientation_says_before_it_is_cropped(kind, turn):
    """The oracle is Pillow's transposition, stored as an image without a tag."""
    data = with_orientation(kind, turn)
    with Image.open(io.BytesIO(data)) as image:
        upright = with_orientation("png", 1, np.asarray(ImageOps.exif_transpose(image)))
    flipped = RandomResizedCrop(scale=(0.2, 0.5), flip=1)
    choices: list[dict[str, Any]] = [
        *({}, {"mode": "L"}, {"normalize": ((0,) * 3, (1 / 255,) * 3)}, {"size": (61, 40)}),
        *({"size": (20, 33), "crop": "center"}, {"size": (20, 33), "crop": flipped}),
    ]
    for choice in choices:
        for decoder in decoders(Decode(**choice)):
            expected = decode(decoder, upright)
            assert decoder.shape(memoryview(data), 0) == expected.shape
            # edges are rounded to pixels of the reduced image; of another orientation it is more than 40
            assert np.abs(decode(decoder, data) - expected).mean() < (10 if "size" in choice else 3), choice
    stored = ImageDecoder.choose(Decode(orientation=False))
    assert np.abs(decode(stored, data) - SMOOTH).mean() < 3


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def unusual_orientations() -> dict[str, bytes]:
    """Files that say in an unusual place or type that they are to be turned by 90 degrees."""
    png, jpeg = with_orientation("png", 1), with_orientation("jpeg", 1)
    begin, end = png[:33], png[33:-12]  # IHDR; without IEND
    end = end[end.index(b"IDAT") - 4 :]
    exif = b"MM\0*\0\0\0\x08\0\x01" + struct.pack(">HHII", 0x0112, 4, 1, 6) + bytes(4)  # of type LONG
    xmp = b'<rdf:Description tiff:Orientation="6"/>'
    profile = b"Raw profile type exif\0\0" + zlib.compress(f"\nexif\n{len(exif)}\n{exif.hex()}\n".encode())
    text = b"XML:com.adobe.xmp" + bytes(5) + xmp
    chunks = {"eXIf": (b"eXIf", exif), "profile": (b"zTXt", profile), "XMP": (b"iTXt", text)}
    files = {f"png, {name} before": begin + png_chunk(*chunk) + end + png[-12:] for name, chunk in chunks.items()}
    files |= {f"png, {name} after": begin + end + png_chunk(*chunk) + png[-12:] for name, chunk in chunks.items()}
    rest = jpeg[jpeg.index(b"\xff\xdb") :]
    for name, content in (("LONG", b"Exif\0\0" + exif), ("XMP", b"http://ns.adobe.com/xap/1.0/\0" + xmp)):
        segment = b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content
        files |= {
            f"jpeg, {name}, {len(fill)} fill bytes": b"\xff\xd8" + fill + segment + rest for fill in (b"", b"\xff\xff")
        }
    return files


@pytest.mark.parametrize("place", UNUSUAL := unusual_orientations())
def test_an_orientation_is_found_wherever_pillow_finds_it(place):
    data = UNUSUAL[place]
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image), np.int64)
    assert expected.shape == (90, 130, 3)
    for decoder in decoders(Decode()):
        assert decoder.shape(memoryview(data), 0) == expected.shape
        assert np.abs(decode(decoder, data) - expected).mean() < 3
    with Image.open(io.BytesIO(Recode(quality=95).image(data))) as image:
        assert np.abs(np.asarray(image, np.int64) - expected).mean() < 3


@pytest.mark.long
def test_floats_take_no_more_memory_than_is_claimed():
    out = io.BytesIO()
    Image.new("F", (1000, 1000), 0.5).save(out, "tiff", compression="tiff_adobe_deflate")
    data, decoder = memoryview(out.getvalue()), ImageDecoder.choose(Decode(mode="L", size=(9, 9)))
    by_pillow = (4 + 1) * 1000**2  # not seen by Python: the image, and the result
    with within(decoder.scratch_bytes(data, decoder.measure(data, 0)) - by_pillow):
        decoder.decode(data, 0)


@pytest.mark.parametrize("turn", [1, 6])
def test_pillow_turns_tiff_itself_in_any_case(turn):
    data = with_orientation("tiff", turn)
    expected = np.rot90(SMOOTH, -1) if turn == 6 else SMOOTH
    for options in (Decode(), Decode(orientation=False)):
        assert np.array_equal(decode(ImageDecoder.choose(options), data), expected)


@given(st.binary(max_size=60), st.sampled_from([b"", b"Exif\0\0MM\0*\0\0\0\x08", b"II*\0\x08\0\0\0"]))
def test_damaged_exif_data_are_no_error(tail, head):
    assert 1 <= orientation(head + tail) <= 8


@pytest.mark.quick(1)
@pytest.mark.parametrize("normalize", [None, "imagenet"])
@pytest.mark.parametrize("crop", [None, "random", "center"])
def test_an_incomplete_image_is_an_error(photographs, crop, normalize):
    good = photographs[0]
    at = good.index(b"\xff\xc0") + 5
    empty = good[:at] + b"\0\0" + good[at + 2 :]
    cut = [good[: int(part * len(good))] for part in (0, 0.01, 0.3, 0.9, 0.999)]
    png = encoded(picture(1), "png")
    cut += [png[: int(part * len(png))] for part in (0.01, 0.1, 0.5, 0.7)]
    whole = [] if crop else decoders(Decode(normalize=normalize))
    for decoder in (*decoders(Decode(size=(64, 64), crop=crop, normalize=normalize)), *whole):
        for bad in (*cut, empty, b"\xff\xd8\xff", good[2:]):
            for sample in range(4):
                with pytest.raises(DecodeError, match=f"sample {sample} does not decode as an image"):
                    decoder.decode(memoryview(bad), sample)


def test_whatever_the_bytes_are_the_answer_is_an_image_or_a_decode_error(photographs):
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


def test_two_headers_that_disagree_are_refused(photographs):
    good = photographs[0]
    at = good.index(b"\xff\xc0")
    frame = good[at : at + 19]
    other = frame[:5] + b"\0\x10\0\x10" + frame[9:]
    for data in (good[:at] + other + good[at:], good[:at] + frame + other + good[at + 19 :]):
        for options in (Decode(), Decode(size=(50, 50)), Decode(size=(50, 50), crop="random")):
            for decoder in decoders(options)[:2]:
                with pytest.raises(DecodeError):
                    decoder.decode(memoryview(data), 0)


@pytest.mark.long
def test_a_bomb_takes_no_memory(photographs):
    good = photographs[0]
    at = good.index(b"\xff\xc0") + 5
    bomb = memoryview(good[:at] + b"\xff\xdc\xff\xdc" + good[at + 4 :])  # says that it has 65,500 x 65,500 pixels
    for decoder in decoders(Decode(size=(64, 64), crop="random")):
        with within(1 << 20), pytest.raises(DecodeError, match=r"does not decode.*(65500.*pixels|exceeds limit)"):
            decoder.decode(bomb, 0)


@pytest.mark.parametrize("missing", [{"cv2"}, {"cv2", "simplejpeg"}])
def test_without_the_fast_packages_pillow_does_it(missing, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else real(name))
    decoder = ImageDecoder.choose(Decode(size=(8, 9), crop="random", normalize="imagenet"))
    assert (decoder.fast, decoder.opencv) == ("simplejpeg" not in missing, False)
    assert decoder.decode(memoryview(as_jpeg(np.zeros((20, 20, 3), np.uint8))), 0).shape == (8, 9, 3)
