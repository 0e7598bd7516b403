"""Make `input/` and what is expected of it: python formats/coco/make.py (needs pycocotools, Pillow and NumPy)."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pycocotools import mask
from pycocotools.coco import COCO

HERE = Path(__file__).parent
IMAGES = {139: "000000000139.jpg", 7: "000000000007.png", 285: "000000000285.jpg"}  # id: name, not in order
POINTS = ["nose", "left_eye", "right_eye"]
CATEGORIES = [
    {"id": 90, "name": "toothbrush", "supercategory": "indoor"},
    {"id": 1, "name": "person", "supercategory": "person", "keypoints": POINTS, "skeleton": [[1, 2], [1, 3]]},
    {"id": 18, "name": "dog", "supercategory": "animal"},
]
FIELDS = {"image": "bytes:mixed", "image_id": "int64", "width": "int64", "height": "int64"}
BOXES = {
    "boxes": "ragged:float32[4]",
    "labels": "ragged:int64",
    "area": "ragged:float32",
    "iscrowd": "ragged:bool",
    "annotation_ids": "ragged:int64",
}


def main() -> None:
    """Write images, three files of annotations, and what pycocotools reads from them."""
    rng = np.random.default_rng(7)
    images = []
    for number, name in IMAGES.items():
        for folder in ("train2017", "val2017"):  # the same names in another split, to be told apart
            file = HERE / "input" / folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (6 + number % 5, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file)
        images.append({"id": number, "file_name": name, "width": 8, "height": 6 + number % 5, "license": 1})
    crowd = np.zeros((6 + 139 % 5, 8), np.uint8, order="F")
    crowd[2:5, 1:4] = 1
    packed = mask.encode(crowd)
    loose = {"counts": [10, 5, len(crowd) * 8 - 15], "size": list(crowd.shape)}
    polygon = [[1.5, 2.25, 5.0, 2.1, 4.875, 4.0], [0, 0, 1, 0, 1, 1.3]]
    rows = [
        (1768, 139, 18, [1.07, 2.25, 4.5, 2.75], 7.1057499999998, 0, polygon),
        (900100000139, 139, 1, [1, 2, 3, 3], 9, 1, loose),
        (42, 7, 90, [0.5, 0.0, 2.5, 1.0], 2.5, 0, [[0.5, 0, 3, 0, 3, 1]]),
        (43, 139, 1, [0, 0, 8, 6], 48.0, 1, {"counts": packed["counts"].decode(), "size": packed["size"]}),
    ]
    keys = ("id", "image_id", "category_id", "bbox", "area", "iscrowd", "segmentation")
    instances = [dict(zip(keys, row, strict=True)) for row in rows]
    stray = {**instances[0], "id": 5, "image_id": 404}
    people = [{**one, "num_keypoints": 2, "keypoints": [3, 1, 2, 4.5, 2, 1, 0, 0, 0]} for one in instances[1::2]]
    captions = [
        {"id": 12, "image_id": 285, "caption": "A bear, Nº 1.\n"},
        {"id": 9, "image_id": 285, "caption": 'It says "grr".'},
        {"id": 10, "image_id": 7, "caption": "Noise."},
    ]
    common = {"info": {"year": 2017}, "licenses": [{"id": 1, "name": "none"}], "images": images}
    text = {"segmentation": "text"}
    write("instances", {**common, "annotations": [stray, *instances], "categories": CATEGORIES}, FIELDS | BOXES | text)
    points = {"keypoints": f"ragged:float32[{len(POINTS)},3]"}
    wanted = FIELDS | BOXES | points | text
    write("person_keypoints", {**common, "annotations": people, "categories": CATEGORIES[1:2]}, wanted)
    wanted = FIELDS | {"annotation_ids": "ragged:int64", "captions": "text"}
    write("captions", {**common, "annotations": captions}, wanted)


def write(kind: str, document: dict[str, Any], fields: dict[str, str]) -> None:
    """Write one file of annotations, and what is expected of it."""
    file = HERE / "input" / "annotations" / f"{kind}_train2017.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(document, ensure_ascii=False) + "\n")
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(file))
    samples = [sample(coco, number, fields) for number in sorted(coco.getImgIds())]
    name = "expected.json" if kind == "instances" else f"expected-{kind}.json"
    (HERE / name).write_text(json.dumps({"fields": fields, "samples": samples}, indent=1, ensure_ascii=False) + "\n")


def sample(coco: COCO, number: int, fields: dict[str, str]) -> dict[str, Any]:
    """Return one image and its annotations as pycocotools has them."""
    image, found = coco.imgs[number], coco.loadAnns(coco.getAnnIds(imgIds=[number]))
    data = (HERE / "input" / "train2017" / image["file_name"]).read_bytes()
    classes = sorted(coco.cats)
    values = {
        "image": {"sha256": hashlib.sha256(data).hexdigest()},
        "image_id": number,
        "width": image["width"],
        "height": image["height"],
        "boxes": lambda: np.float32([one["bbox"] for one in found]).tolist(),
        "labels": lambda: [classes.index(one["category_id"]) for one in found],
        "area": lambda: np.float32([one["area"] for one in found]).tolist(),
        "iscrowd": lambda: [bool(one["iscrowd"]) for one in found],
        "annotation_ids": [one["id"] for one in found],
        "keypoints": lambda: np.float32([np.reshape(one["keypoints"], (-1, 3)) for one in found]).tolist(),
        "segmentation": lambda: compact([one["segmentation"] for one in found]),
        "captions": lambda: compact([one["caption"] for one in found]),
    }
    return {name: value() if callable(value := values[name]) else value for name in fields}


def compact(value: Any) -> str:
    """Return JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    main()
