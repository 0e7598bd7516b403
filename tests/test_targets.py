"""Boxes, key points and masks move with the pixels of their image, or the batch says how these were cropped.

The oracle is the picture: a white rectangle, whose place in the decoded image is where its box must be.
"""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import streamloader as sl
from streamloader.errors import DecodeError, FieldError, UsageError
from streamloader.images.pillow import class_numbers
from streamloader.images.targets import move_boxes, move_points
from streamloader.options import RandomResizedCrop

N = 24
FIELDS = {
    "image": "bytes:mixed",
    "mask": "bytes:png",
    "boxes": "ragged:float32[4]",
    "corners": "int32[2,4]",
    "keypoints": "ragged:float32[2,3]",
    "centre": "float64[2]",
    "number": "int64",
}
HEIGHT, WIDTH = 96, 128  # of the picture after it is turned
CLASS = 201  # the number in the palette of the mask


def encoded(pixels: np.ndarray[Any, Any], turn: int, kind: str = "png", palette: bool = False) -> bytes:
    """The picture as a file that is stored so that an orientation turns it upright."""
    back = {6: np.rot90, 3: lambda p: p[::-1, ::-1], 2: lambda p: p[:, ::-1]}.get(turn, lambda p: p)
    image = Image.fromarray(np.ascontiguousarray(back(pixels)))
    if palette:
        image.putpalette([value for i in range(256) for value in (255 - i, 0, 0)])
    exif = Image.Exif()
    exif[0x0112] = turn
    out = io.BytesIO()
    image.save(out, kind, exif=exif, **{"quality": 95, "subsampling": 0} if kind == "jpeg" else {})
    return out.getvalue()


def sample(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    x, y = int(rng.integers(0, WIDTH - 44)), int(rng.integers(0, HEIGHT - 34))
    w, h = int(rng.integers(20, 44)), int(rng.integers(20, 34))
    picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    picture[y : y + h, x : x + w] = 255
    turn = (1, 6, 3, 2)[number % 4]
    middle = [x + w / 2, y + h / 2]
    boxes = [[x, y, w, h], [0, 0, WIDTH, HEIGHT], [x, y, 0, 0]][: 1 + number % 3]
    return {
        "image": encoded(picture, turn, "jpeg" if number % 2 else "png"),
        "mask": encoded(picture[:, :, 0] // 255 * CLASS, turn, palette=True),
        "boxes": boxes,
        "corners": [[x, y, x + w, y + h], [0, 0, 1, 1]],
        "keypoints": [[[*middle, 2], [0, 0, 0]]] * (1 + number % 3),
        "centre": middle,
        "number": number,
    }


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("targets") / "pictures"
    with sl.Writer(path, FIELDS) as out:
        for number in range(N):
            out.write(sample(number))
    return path


def place(white: np.ndarray[Any, Any]) -> list[float] | None:
    """Left, top, right and bottom of what is white."""
    rows, columns = np.flatnonzero(white.any(1)), np.flatnonzero(white.any(0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1] if len(rows) else None


CROPS: dict[str, Any] = {
    "whole": {"size": (48, 50)},
    "centre": {"size": (40, 40), "crop": "center"},
    "random": {"size": (36, 60), "crop": RandomResizedCrop(scale=(0.1, 0.6), flip=0.5)},
    "as it is": {},
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("backend", ["auto", "pillow"])
def test_boxes_points_and_masks_are_where_the_picture_is(pictures, crop, backend):
    decode = sl.Decode(backend, **CROPS[crop], boxes="boxes", keypoints="keypoints", masks="mask", with_crop=True)
    seen, cut = 0, 0
    for epoch in range(3):
        ds = sl.StreamingDataset(pictures, batch_size=8, decode={"image": decode}, seed=epoch)
        for batch in ds:
            seen, cut = seen + 8, cut + check(batch, range(8))
    assert seen == 3 * N
    assert (cut > 0) is (crop == "random"), "some rectangles are cut away"


def check(batch: dict[str, Any], rows: range) -> int:
    cut = 0
    edges = batch["boxes_valid_offsets"].tolist()
    assert edges == batch["boxes_offsets"].tolist() == batch["keypoints_valid_offsets"].tolist()
    height, width = batch["image"].shape[1:3]
    for row in rows:
        given = sample(int(batch["number"][row]))
        boxes, valid = (batch[name][edges[row] : edges[row + 1]].numpy() for name in ("boxes", "boxes_valid"))
        found = place(batch["image"][row, :, :, 0].numpy() > 127)
        assert bool(valid[0]) or found is None
        if found is not None and valid[0]:
            corners = [*boxes[0, :2], *(boxes[0, :2] + boxes[0, 2:])]
            assert np.abs(np.array(corners) - found).max() < 2.5, "a pixel, and its rounding to a reduced JPEG"
        cut += not valid[0]
        if len(boxes) > 1:  # the whole picture fills every crop
            assert np.abs(boxes[1] - [0, 0, width, height]).max() < 1e-3
        assert not valid[2:].any(), "an empty box"
        mask = batch["mask"][row].numpy()
        assert set(np.unique(mask)) <= {0, CLASS}
        assert mask.shape == (height, width)
        masked = place(mask == CLASS)
        if found is not None and masked is not None:
            assert np.abs(np.array(found) - masked).max() <= 2
        points, visible = (batch[name][edges[row]].numpy() for name in ("keypoints", "keypoints_valid"))
        x, y, _ = points[0]
        assert bool(visible[0]) is bool(0 <= x <= width and 0 <= y <= height)
        if visible[0] and valid[0] and 3 < x < width - 3 and 3 < y < height - 3:
            assert batch["image"][row, int(y), int(x), 0] > 127
        assert not visible[1], "not labelled"
        top, left, h, w, flipped = batch["image_crop"][row].tolist()
        u = (given["centre"][0] - left) * width / w
        assert abs(x - (width - u if flipped else u)) < 1e-3
        assert abs(y - (given["centre"][1] - top) * height / h) < 1e-3
    return cut


@pytest.mark.parametrize("turn", [3, 6, 2])
@pytest.mark.parametrize("backend", ["auto", "pillow"])
def test_a_box_is_in_place_in_a_turned_jpeg_of_an_odd_size(turn, backend, tmp_path):
    """Such a JPEG is decoded at reduced size if its sides are multiples of the reduction only."""
    picture = np.zeros((601, 603, 3), np.uint8)
    picture[300:340, 200:240] = 255
    with sl.Writer(tmp_path / "d", {"image": "bytes:jpeg", "boxes": "float32[4]"}) as out:
        out.write({"image": encoded(picture, turn, "jpeg"), "boxes": [200, 300, 40, 40]})
    decode = sl.Decode(backend, size=(64, 64), boxes="boxes")
    (batch,) = sl.StreamingDataset(tmp_path / "d", batch_size=1, decode=decode)
    white = batch["image"][0, :, :, 0].numpy().astype(float)
    left, top, width, height = batch["boxes"][0].tolist()
    for axis, middle in ((0, left + width / 2), (1, top + height / 2)):
        assert abs((np.arange(64) + 0.5) @ white.sum(axis) / white.sum() - middle) < 0.15


def test_the_boxes_of_coco_are_cropped_with_their_image(tmp_path):
    coco = Path(__file__).parents[1] / "formats/coco/input::/annotations/person_keypoints_train2017.json"
    sl.convert(str(coco), tmp_path / "coco", format="coco", workers=0)
    stored = sl.open(tmp_path / "coco")
    decode = sl.Decode(size=(32, 48), crop="random", boxes="boxes", keypoints="keypoints", with_crop=True)
    ds = sl.StreamingDataset(tmp_path / "coco", batch_size=len(stored), decode=decode, shuffle=False)
    (batch,) = ds
    for row in range(len(stored)):
        top, left, height, width, _ = batch["image_crop"][row].tolist()
        scale, origin = np.array([48 / width, 32 / height]), np.array([left, top])
        corners = [stored[row]["boxes"][:, :2], stored[row]["boxes"][:, :2] + stored[row]["boxes"][:, 2:]]
        low, high = (np.clip((corner - origin) * scale, 0, [48, 32]) for corner in corners)
        edges = slice(*batch["boxes_offsets"][row : row + 2].tolist())
        assert np.allclose(batch["boxes"][edges], np.concatenate([low, high - low], 1), atol=1e-3)
        assert batch["boxes_valid"][edges].tolist() == (high > low).all(1).tolist()
        points = stored[row]["keypoints"]
        assert np.allclose(batch["keypoints"][edges, :, :2], (points[..., :2] - origin) * scale, atol=1e-3)
        assert np.array_equal(batch["keypoints"][edges, :, 2], points[..., 2])


def test_fixed_shapes_and_corners_move_too(pictures):
    decode = sl.Decode(**CROPS["random"], boxes="corners", box_format="xyxy", keypoints="centre")
    fields = ["image", "corners", "centre", "number"]
    (batch,) = sl.StreamingDataset(pictures, batch_size=N, decode={"image": decode}, fields=fields)
    assert batch["corners"].dtype == torch.float32
    assert batch["corners"].shape == (N, 2, 4)
    assert (batch["centre"].dtype, batch["centre_valid"].shape) == (torch.float64, (N,))
    for row in range(N):
        found, valid = place(batch["image"][row, :, :, 0].numpy() > 127), batch["corners_valid"][row, 0]
        if found is not None and valid:
            assert np.abs(batch["corners"][row, 0].numpy() - found).max() < 2.5


def test_a_transform_and_single_samples_get_them_by_sample(pictures):
    decode = sl.Decode(**CROPS["random"], boxes="boxes", masks="mask", with_crop=True)

    def keep(sample: dict[str, Any]) -> dict[str, Any]:
        assert sample["mask"].ndim == 2
        return {"kept": len(sample["boxes"][sample["boxes_valid"]]), "crop": sample["image_crop"]}

    options: dict[str, Any] = {"decode": {"image": decode}, "shuffle": False, "seed": 3}
    (batch,) = sl.StreamingDataset(pictures, batch_size=N, **options)
    kept = sl.StreamingDataset(pictures, batch_size=N, transform=keep, **options)
    (transformed,) = kept
    assert transformed["crop"].equal(batch["image_crop"])
    assert transformed["kept"].sum() == batch["boxes_valid"].sum()
    for row, single in enumerate(sl.StreamingDataset(pictures, batch_size=None, **options)):
        edges = slice(*batch["boxes_offsets"][row : row + 2].tolist())
        assert single["boxes"].equal(batch["boxes"][edges])
        assert single["boxes_valid"].equal(batch["boxes_valid"][edges])
        assert single["image_crop"].equal(batch["image_crop"][row])
        assert single["mask"].equal(batch["mask"][row])


def test_boxes_that_would_stay_behind_are_an_error(pictures):
    for crop in (CROPS["whole"], CROPS["random"]):
        with pytest.raises(UsageError, match=r"give Decode\(boxes='boxes'\).*Decode\(with_crop=True\)"):
            sl.StreamingDataset(pictures, batch_size=8, decode={"image": sl.Decode(**crop)})
        for decode in (sl.Decode(**crop, boxes="boxes"), sl.Decode(**crop, with_crop=True)):
            sl.StreamingDataset(pictures, batch_size=8, decode={"image": decode})
        sl.StreamingDataset(pictures, batch_size=8, decode={"image": sl.Decode(**crop)}, fields=["image"])
    sl.StreamingDataset(pictures, batch_size=8, decode={"image": sl.Decode()})
    with pytest.raises(UsageError, match="'boxes' would keep its coordinates; resize when you read"):
        sl.convert(pictures, pictures.parent / "smaller", resize=32, workers=0)


WRONG = [
    (
        sl.Decode(boxes="number"),
        FieldError,
        r"Decode\(boxes='number'\) names a field that is int64; choose from boxes, corn",
    ),
    (sl.Decode(keypoints="boxes"), FieldError, r"keypoints='boxes'\) names a field that is ragged:float32\[4\]"),
    (sl.Decode(masks="absent"), FieldError, r"masks='absent'\) names a field that is not fetched"),
    (sl.Decode(masks="boxes"), FieldError, "masks are encoded images"),
    (sl.Decode(boxes="boxes", keypoints="boxes"), FieldError, "key points 2 or 3"),
]


@pytest.mark.parametrize(("decode", "kind", "shown"), WRONG)
def test_fields_that_cannot_be_moved_are_refused(pictures, decode, kind, shown):
    with pytest.raises(kind, match=shown):
        sl.StreamingDataset(pictures, batch_size=8, decode={"image": decode})


def test_a_field_moves_with_one_image_only(pictures):
    decode = sl.Decode(size=(8, 8), boxes="boxes")
    with pytest.raises(UsageError, match="would have the column 'boxes' twice; name it for one image"):
        sl.StreamingDataset(pictures, batch_size=8, decode={"image": decode, "mask": decode})


def test_added_columns_do_not_replace_fields(tmp_path):
    fields = {"image": "bytes:png", "boxes": "float32[4]", "boxes_valid": "bool"}
    with sl.Writer(tmp_path / "d", fields) as out:
        out.write({"image": sample(0)["image"], "boxes": [0, 0, 1, 1], "boxes_valid": True})
    with pytest.raises(UsageError, match="would have the column 'boxes_valid' twice"):
        sl.StreamingDataset(tmp_path / "d", batch_size=1, decode=sl.Decode(boxes="boxes"))


@pytest.mark.parametrize("mask", [np.zeros((9, 9), np.uint8), np.full((HEIGHT, WIDTH), 256, np.uint16)])
def test_a_mask_of_another_size_or_with_larger_numbers_is_an_error(mask, tmp_path):
    with sl.Writer(tmp_path / "d", {"image": "bytes:png", "mask": "bytes:png"}) as out:
        for number in (0, 4):
            pictures = {name: sample(number)[name] for name in ("image", "mask")}
            out.write(pictures if number == 0 else {**pictures, "mask": encoded(mask, 1)})
    decode = sl.Decode(size=(8, 8), masks="mask")
    with pytest.raises(DecodeError, match=r"sample 1: 'mask' differs in size from its image|from 0 to 255"):
        list(sl.StreamingDataset(tmp_path / "d", batch_size=2, decode=decode))


@pytest.mark.quick(6)
@pytest.mark.parametrize("crop", [None, "center", RandomResizedCrop(flip=0.5)])
@pytest.mark.parametrize("turn", [1, 2, 3, 6])
def test_a_mask_without_orientation_lies_on_a_turned_photograph_of_odd_size(turn, crop, tmp_path):
    picture = np.zeros((375, 501, 3), np.uint8)
    picture[100:300, 150:400] = 255
    mask = encoded(picture[:, :, 0] // 255, 1)
    with sl.Writer(tmp_path / "d", {"image": "bytes:jpeg", "mask": "bytes:png"}) as out:
        for _ in range(20):
            out.write({"image": encoded(picture, turn, "jpeg"), "mask": mask})
    decode = sl.Decode(size=(40, 40), crop=crop, masks="mask")
    (batch,) = sl.StreamingDataset(tmp_path / "d", batch_size=20, decode={"image": decode})
    light = batch["image"][..., 0].int()
    assert not (light[batch["mask"] == 1] < 20).any()
    assert not (light[batch["mask"] == 0] > 235).any()
    assert (batch["mask"] == 1).any()


def test_a_mask_of_few_bits_has_the_numbers_that_are_stored():
    """PNG has 1, 2 or 4 bits, of grey or a palette, and PGM its own greatest number; Pillow scales all grey to 255."""
    numbers = np.array([[0, 1, 2, 3]], np.uint8)
    files = [f"P5 4 1 {greatest}\n".encode() + numbers.tobytes() for greatest in (3, 9, 254, 255)]
    files += [b"P2 4 1 1000\n0 1 2 3\n", b"P5 4 1 65535\n" + numbers.astype(">u2").tobytes()]
    for bits in (2, 4, 8):
        for mode in ("L", "P"):
            out = io.BytesIO()
            image = Image.frombytes(mode, (4, 1), numbers.tobytes())
            if mode == "P":
                image.putpalette(bytes(3 * 2**bits))
            image.save(out, "png", bits=bits)
            files.append(out.getvalue())
    # 4 bits of grey, which Pillow writes with a palette only
    header = struct.pack(">IIBBBBB", 4, 1, 4, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0\x01\x23")), (b"IEND", b"")]
    four = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    files.append(b"\x89PNG\r\n\x1a\n" + b"".join(four))
    for file in files:
        with Image.open(io.BytesIO(file)) as image:
            assert np.array_equal(class_numbers(image), numbers), (file[:12], image.mode)


SIDE = st.integers(1, 300)


@given(SIDE, SIDE, SIDE, SIDE, st.booleans(), st.integers(0, 4), st.sampled_from([None, (24, 17)]))
def test_a_box_and_its_corners_move_alike(top, left, height, width, flipped, count, size):
    rng = np.random.default_rng(top)
    crops = np.repeat([[top, left, height, width, flipped]], count, axis=0)
    corners = np.sort(rng.uniform(-50, 400, (count, 2, 2)), axis=1).reshape(count, 4)
    boxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1)
    one, valid = move_boxes(corners, crops, size, "xyxy")
    other, also_valid = move_boxes(boxes, crops, size, "xywh")
    assert np.allclose(one[:, 2:], other[:, :2] + other[:, 2:])
    assert np.array_equal(valid, also_valid)
    rows, columns = size or (height, width)
    assert (one >= 0).all()
    assert (one <= [columns, rows, columns, rows]).all()
    middle, inside = move_points((corners[:, :2] + corners[:, 2:]) / 2, crops, size)
    assert not (inside & ~valid).any(), "a box whose middle is inside is not cut away"
    within = inside & (one > 1e-6).all(1) & (one < np.array([columns, rows] * 2) - 1e-6).all(1)
    assert np.allclose(middle[within], (one[within, :2] + one[within, 2:]) / 2)
