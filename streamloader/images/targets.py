"""Boxes and key points of images, moved to the pixels of the cropped and resized image, many at a time."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def move_points(points: Array, crops: Array, size: tuple[int, int] | None) -> tuple[Array, Array]:
    """Return the points (n, ..., 2 or 3) in pixels of the results, and whether each one is inside.

    A point is x, y and perhaps its visibility, 0 for one that is not labelled. Row i of `crops` has the top, left,
    height and width of the crop of point i, and whether it is flipped. `size` is the (height, width) of the results,
    None that of the crops.
    """
    top, left, height, width, flipped = crops.T.reshape(5, -1, *[1] * (points.ndim - 2))
    rows, columns = (height, width) if size is None else size
    x = (points[..., 0] - left) * columns / width
    x, y = np.where(flipped, columns - x, x), (points[..., 1] - top) * rows / height
    inside = (x >= 0) & (x <= columns) & (y >= 0) & (y <= rows) & (points[..., 2:] > 0).all(-1)
    return np.concatenate([np.stack([x, y], -1), points[..., 2:]], -1, dtype=_floats(points)), inside


def move_boxes(boxes: Array, crops: Array, size: tuple[int, int] | None, form: str) -> tuple[Array, Array]:
    """Return the boxes (n, ..., 4) in pixels of the results, clipped to them, and whether anything is left of each.

    `form` is "xywh" for x, y, width, height, or "xyxy" for two corners.
    """
    first = boxes[..., :2].astype(np.float64)
    second = boxes[..., 2:] + (first if form == "xywh" else 0)
    ends = [move_points(corner, crops, size)[0] for corner in (first, second)]
    limits = (crops[:, 3:1:-1] if size is None else np.array([size[::-1]])).reshape(-1, *[1] * (boxes.ndim - 2), 2)
    low, high = (np.clip(end(*ends), 0, limits) for end in (np.minimum, np.maximum))
    last = high - low if form == "xywh" else high
    return np.concatenate([low, last], -1, dtype=_floats(boxes)), np.all(high > low, -1)


def _floats(values: Array) -> Any:
    return values.dtype if values.dtype.kind == "f" else np.float32
