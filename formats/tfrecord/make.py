"""Make `input/` and `expected.json` beside this file: python formats/tfrecord/make.py (needs tensorflow)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
PER_FILE = 3


def main() -> None:
    """Write two files with TensorFlow, and what TensorFlow reads from them."""
    rng = np.random.default_rng(7)
    (HERE / "input").mkdir(exist_ok=True)
    paths = []
    for file in range(2):
        path = HERE / "input" / f"data.tfrecord-{file:05}-of-00002"
        paths.append(str(path))
        with tf.io.TFRecordWriter(str(path)) as writer:
            for number in range(PER_FILE):
                writer.write(example(rng, file, number).SerializeToString(deterministic=True))
    samples = [sample(tf.train.Example.FromString(data)) for data in tf.data.TFRecordDataset(paths).as_numpy_iterator()]
    fields = {
        "image_class_label": "int64",
        "image_encoded": "bytes:png",
        "image_text": "bytes",
        "bbox_xmin": "ragged:float32",
        "ids": "ragged:int64",
        "score": "float32",
        "vector": "float32[3]",
    }
    expected = {"fields": dict(sorted(fields.items())), "samples": samples}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


def example(rng: np.random.Generator, file: int, number: int) -> Any:
    """Return an Example: numbers below and above what one byte of a varint holds, lists of several lengths."""
    image = tf.io.encode_png(rng.integers(0, 256, (3, 4 + number, 3), dtype=np.uint8)).numpy()
    boxes = rng.random(number).astype(np.float32)
    ids = rng.integers(-(1 << 62), 1 << 62, 20 * number)
    features = {
        "image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "image/text": tf.train.Feature(bytes_list=tf.train.BytesList(value=[f"a caption, Nº {number}".encode()])),
        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[1000 * file - number])),
        "score": tf.train.Feature(float_list=tf.train.FloatList(value=[number / 3])),
        "vector": tf.train.Feature(float_list=tf.train.FloatList(value=rng.random(3))),
        "bbox/xmin": tf.train.Feature(float_list=tf.train.FloatList(value=boxes)),
        "ids": tf.train.Feature(int64_list=tf.train.Int64List(value=ids)),
    }
    return tf.train.Example(features=tf.train.Features(feature=features))


def sample(example: Any) -> dict[str, Any]:
    """Return what an Example holds, under the names of the fields."""
    out: dict[str, Any] = {}
    for key, feature in example.features.feature.items():
        values = list(getattr(feature, feature.WhichOneof("kind")).value)
        name = key.replace("/", "_")
        if isinstance(next(iter(values), None), bytes):
            out[name] = {"sha256": hashlib.sha256(values[0]).hexdigest()}
        else:
            out[name] = values[0] if name in ("image_class_label", "score") else values
    return dict(sorted(out.items()))


if __name__ == "__main__":
    main()
