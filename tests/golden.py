"""The golden datasets and what they must hold, for the tests that read them."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

V1 = Path(__file__).parent.parent / "formats" / "streamloader" / "v1"
GOLDEN = V1 / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def place(name: str) -> tuple[Path, str | None]:
    """Return the folder to open and the split to ask for."""
    folder, _, split = name.partition("/")
    return GOLDEN / folder, split or None


def expected_column(name: str, field: str) -> Any:
    """Return a column as expected.json says: an array, or a list of bytes, str or arrays."""
    return column_of_json(**EXPECTED[name]["fields"][field])


def column_of_json(spec: str, values: list[Any]) -> Any:
    """Return the JSON values of a field as a column."""
    head, _, inner = spec.partition("[")
    kind, _, of = head.partition(":")
    shape = tuple(int(n) for n in inner.rstrip("]").split(",") if n)
    if kind == "bytes":
        return [base64.b64decode(value) for value in values]
    if kind == "text":
        return values
    if kind == "ragged":
        return [array_of(value, of, (-1, *shape)) for value in values]
    return array_of(values, kind, (len(values), *shape))


def array_of(values: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return nested lists as an array of little-endian numbers."""
    return np.array([NUMBERS.get(one, one) for one in np.array(values, object).ravel()], dtype).reshape(shape)


def assert_same(found: Any, wanted: Any) -> None:
    """Fail unless two columns are the same, bit for bit."""
    if isinstance(wanted, np.ndarray):
        found = np.asarray(found)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()
        return
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, np.ndarray):
            assert_same(one, other)
        else:
            assert type(one) is type(other)
            assert one == other
