"""Which part of an image is taken, by which random numbers: pure arithmetic, pinned, since runs depend on it."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from streamloader.decode.crop import DRAWS, Box, center_box, random_box, reduction, snapped
from streamloader.decode.draws import draws
from streamloader.decode.jpeg import first_rows
from streamloader.errors import UsageError
from streamloader.options import IMAGENET, CenterCrop, Decode, RandomResizedCrop

WORD = st.integers(0, 2**64 - 1)
POSITIONS = st.lists(st.integers(0, 2**62), max_size=20)
SIDE = st.integers(1, 5000)
ROW = st.lists(st.floats(0, 1, exclude_max=True), min_size=DRAWS, max_size=DRAWS)


@given(WORD, st.integers(0, 2**63 - 1), POSITIONS, st.integers(0, 30))
def test_each_row_is_what_numpys_generator_of_its_position_draws(
    seed: int, epoch: int, positions: list[int], count: int
) -> None:
    rows = draws(seed, epoch, np.array(positions, np.int64), count)
    assert rows.shape == (len(positions), count)
    key = np.array([seed, epoch], np.uint64)
    for position, row in zip(positions, rows, strict=True):
        counter = np.array([0, 0, 1, position], np.uint64)
        assert np.array_equal(row, np.random.Generator(np.random.Philox(key=key, counter=counter)).random(count))


def test_numbers_and_boxes_are_pinned() -> None:
    rows = draws(7, 3, np.array([0, 1, 10**12]), DRAWS)
    assert rows[:, 0].tolist() == [0.8905560502271676, 0.23552256253609116, 0.5933941453822758]
    crop = RandomResizedCrop()
    assert [tuple(random_box(375, 500, crop, row)) for row in rows.tolist()] == [
        (56, 47, 318, 313),
        (25, 47, 332, 384),
        (22, 47, 321, 413),
    ]


@given(SIDE, SIDE, ROW, st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0.2, 5), st.floats(0.2, 5))
def test_a_random_box_lies_within_the_image_and_the_bounds(
    height: int, width: int, row: list[float], a: float, b: float, r: float, s: float
) -> None:
    crop = RandomResizedCrop(scale=(min(a, b), max(a, b)), ratio=(min(r, s), max(r, s)))
    box = random_box(height, width, crop, row)
    check_within(box, height, width)
    # each side is rounded to whole pixels, a middle box also cut to the image
    assert box.width + 1 >= crop.ratio[0] * (box.height - 1) or box.width == width
    assert box.width - 1 <= crop.ratio[1] * (box.height + 1)


def test_random_boxes_have_every_scale_ratio_and_place() -> None:
    rows = draws(1, 0, np.arange(4000), DRAWS).tolist()
    boxes = np.array([random_box(1000, 1000, RandomResizedCrop(), row) for row in rows], float)
    top, left, height, width = boxes.T
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
def test_a_center_box_is_in_the_middle_and_has_the_targets_shape(h: int, w: int, th: int, tw: int, part: float) -> None:
    box = center_box(h, w, CenterCrop(part), (th, tw))
    check_within(box, h, w)
    assert abs(2 * box.top + box.height - h) <= 1
    assert abs(2 * box.left + box.width - w) <= 1
    exact = min(h / th, w / tw) * part  # pixels of the image for one of the target
    assert box.height == pytest.approx(max(1, exact * th), abs=0.51)
    assert box.width == pytest.approx(max(1, exact * tw), abs=0.51)


def test_the_usual_evaluation_is_seven_eighths() -> None:
    assert center_box(256, 341, CenterCrop(), (224, 224)) == Box(16, 58, 224, 224)


@given(SIDE, SIDE, SIDE, SIDE)
def test_a_reduction_leaves_the_pixels_that_the_target_needs(h: int, w: int, th: int, tw: int) -> None:
    k = reduction(Box(0, 0, h, w), (th, tw))
    assert k in (1, 2, 4, 8)
    assert k == 1 or (h / k >= th and w / k >= tw)
    assert k == 8 or h / (2 * k) < th or w / (2 * k) < tw


@given(SIDE, SIDE, ROW, st.integers(1, 500), st.integers(1, 500))
def test_snapping_moves_an_edge_by_half_a_reduced_pixel_and_keeps_the_targets(
    height: int, width: int, row: list[float], th: int, tw: int
) -> None:
    box = random_box(height, width, RandomResizedCrop(), row)
    k = reduction(box, (th, tw))
    moved = snapped(box, k, height, width)
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


def jpeg(**options: Any) -> bytes:
    out = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (90, 70, 3), np.uint8)
    Image.fromarray(noise).convert(options.pop("mode", "RGB")).save(out, "jpeg", **options)
    return out.getvalue()


@pytest.mark.parametrize("options", [{"subsampling": s} for s in (0, 1, 2)] + [{"mode": "L"}, {"quality": 30}])
def test_the_first_rows_of_a_jpeg_are_an_image_of_its_own(options: dict[str, Any]) -> None:
    import simplejpeg

    data = jpeg(**options)
    whole = simplejpeg.decode_jpeg(data)
    for rows in range(17, 90, 9):
        head = first_rows(memoryview(data), rows)
        assert head is not None
        pixels = simplejpeg.decode_jpeg(head, strict=False)
        assert pixels.shape == (rows, 70, 3)
        assert np.array_equal(pixels[:-8], whole[: rows - 8])


def test_first_rows_are_not_taken_where_they_do_not_stand_first_or_the_end_is_lost() -> None:
    good = jpeg()
    assert first_rows(memoryview(good), 16) is not None
    for bad in (
        jpeg(progressive=True),
        good[:-1],
        good[:-2] + b"ab",
        good[: len(good) // 2],
        good[:30],
        b"\xff\xd8",
        b"",
    ):
        assert first_rows(memoryview(bad), 16) is None


@given(st.binary(max_size=200))
def test_first_rows_of_anything_do_not_raise(tail: bytes) -> None:
    head = first_rows(memoryview(b"\xff\xd8" + tail), 16)
    assert head is None or len(head) == len(tail) + 2


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: Decode(size=224), "size=224"),
        (lambda: Decode(size=(0, 5)), r"size=\(0, 5\)"),
        (lambda: Decode(size=(5, 5, 3)), r"size=\(5, 5, 3\)"),
        (lambda: Decode(crop="random"), "crop='random'.* without size"),
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
    ],
)
def test_wrong_options_are_refused_with_their_values(make: Any, shown: str) -> None:
    with pytest.raises(UsageError, match=shown) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_names_stand_for_values() -> None:
    assert Decode(size=(5, 5), crop="random").box == RandomResizedCrop((0.08, 1.0), (3 / 4, 4 / 3), 0.0)
    assert Decode(size=(5, 5), crop="center").box == CenterCrop(0.875)
    assert Decode(normalize="imagenet").normalization == IMAGENET
    assert Decode(size=(5, 5)).box is Decode().normalization is None
