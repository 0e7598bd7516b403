"""From values as Python has them to fields: what they are to the format, and which field holds several of them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import FieldError
from streamloader.format.manifest import Field
from streamloader.format.values import exact_in_float

Settled = NDArray[Any] | bytes | str

# the first bytes of encodings that decoders and people know by name
_MAGIC = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
    (b"ID3", "mp3"),
)
_RIFF = {b"WEBP": "webp", b"WAVE": "wav"}


def settle(value: Any, where: str) -> Settled:
    """Return a value as bytes, str, or an array: of numbers, lists of them, anything with `__dlpack__` or `__array__`.

    A PIL image becomes the bytes of a PNG, which lose nothing. Raises `FieldError`, which names `where`.
    """
    if isinstance(value, str):
        return str(value)  # also of numpy's own str_
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if value is None:
        raise FieldError(f"{where} is missing", "give every sample a value, or fill it in with --fill")
    if isinstance(value, Mapping):
        raise FieldError(f"{where} is a {type(value).__name__}", "give each value a field of its own")
    array = _dlpack(value) if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__") else None
    if array is None and hasattr(value, "save") and hasattr(value, "getbands"):
        return _png(value)
    try:
        array = np.asarray(value) if array is None else array
    except (ValueError, TypeError) as error:
        raise FieldError(f"{where} is no array of one shape ({error})", "give numbers, text, bytes or arrays") from None
    changed = changed_by_numpy(value, array) if isinstance(value, list | tuple) else ""
    if changed:
        raise FieldError(f"{where} is a list that holds {changed}", "give numbers of one type, or an array")
    if array.dtype.kind in "mM":
        raise FieldError(f"{where} holds {array.dtype}", "store times as whole numbers, values.astype('int64')")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        what = type(value).__name__ if array.dtype == object else f"{type(value).__name__} of {array.dtype}"
        raise FieldError(f"{where} is a {what}", "give numbers, text, bytes or arrays, or leave the field out")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def infer_field(name: str, values: Sequence[Settled]) -> Field:
    """Return the field that holds these values of different samples.

    Arrays of one shape give a tensor, of different lengths a ragged field; numbers of several dtypes the one that
    holds all. Raises `FieldError` for values that no field holds together.
    """
    kinds = {type(value) if isinstance(value, bytes | str) else np.ndarray for value in values}
    if kinds == {str}:
        return Field("text")
    if kinds == {bytes}:
        encodings = {sniff(value) for value in values}  # type: ignore[arg-type]
        return Field("bytes", encoding=encodings.pop() if len(encodings) == 1 else "")
    if kinds != {np.ndarray}:
        found = " and ".join(sorted(kind.__name__ for kind in kinds))
        raise FieldError(f"the field {name!r} holds {found} in different samples", "give all samples one kind of value")
    arrays: list[NDArray[Any]] = list(values)  # type: ignore[arg-type]
    filled = [array for array in arrays if array.size] or arrays  # an empty list has no dtype of its own
    dtype = _common_dtype(name, filled).name
    shapes = {array.shape for array in arrays}
    if len(shapes) == 1 and arrays[0].size:
        return Field("tensor", dtype, arrays[0].shape)
    inner = {array.shape[1:] for array in filled}
    if len(inner) == 1 and all(array.ndim for array in arrays):
        return Field("ragged", dtype, inner.pop())
    several = ", ".join(map(str, sorted(shapes)[:3]))
    raise FieldError(f"the field {name!r} has samples of the shapes {several}", "give all one shape, or store bytes")


def _common_dtype(name: str, arrays: Sequence[NDArray[Any]]) -> np.dtype[Any]:
    """Return the dtype that holds the values of all arrays. Raises `FieldError` where none does."""
    dtypes = {array.dtype for array in arrays}
    kinds = {dtype.kind for dtype in dtypes}
    if "b" in kinds and len(kinds) > 1:
        raise FieldError(f"the field {name!r} holds bool and numbers in different samples", "give all samples one kind")
    dtype = np.result_type(*dtypes)
    if dtype.kind == "f" and "f" not in kinds:  # int64 and uint64: numpy would round both to float64
        low, high = (int(limit) for limit in (min(a.min() for a in arrays), max(a.max() for a in arrays)))
        fitting = [np.dtype(kind) for kind in (np.int64, np.uint64) if np.iinfo(kind).min <= low]
        fitting = [dtype for dtype in fitting if high <= np.iinfo(dtype).max]
        if not fitting:
            problem = f"the field {name!r} holds whole numbers from {low} to {high}, which no integer type holds"
            raise FieldError(problem, "store them as text")
        return fitting[0]
    return dtype


def changed_by_numpy(value: Iterable[Any], array: NDArray[Any]) -> str:
    """Return what in a list of numbers, or of such lists, has another value in `array`, which numpy made of it."""
    items = value
    while (kinds := set(map(type, items))) <= {list, tuple} and kinds:
        items = list(chain.from_iterable(items))
    if kinds == {int} and array.dtype.kind == "f":
        return "whole numbers that no integer type holds together"
    if len(kinds) <= 1 and kinds != {np.ndarray}:
        return ""
    if kinds & {bool, np.bool_} and kinds - {bool, np.bool_}:
        return "true or false beside numbers"
    if array.dtype.kind != "f":
        return ""
    for item in items:
        whole = np.asarray(item)
        if whole.dtype.kind in "iu" and not exact_in_float(whole, array.dtype).all():
            return f"{item} beside fractions, which {array.dtype} does not hold"
    return ""


def sniff(data: bytes) -> str:
    """Return the encoding that the first bytes tell, such as "jpeg"; nothing where they are not known."""
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12], "")
    return next((encoding for magic, encoding in _MAGIC if data.startswith(magic)), "")


def flatten(sample: Any) -> dict[str, Any]:
    """Return a sample as one mapping: nested ones joined by `_`, positions of a tuple as names, else `data`."""
    if isinstance(sample, tuple) and hasattr(sample, "_asdict"):
        sample = sample._asdict()
    elif isinstance(sample, tuple | list):
        sample = {str(number): value for number, value in enumerate(sample)}
    elif not isinstance(sample, Mapping):
        return {"data": sample}
    out: dict[str, Any] = {}
    for key, value in sample.items():
        if isinstance(value, Mapping):
            out |= {f"{key}_{inner}": one for inner, one in flatten(value).items()}
        else:
            out[str(key)] = value
    return out


def _dlpack(value: Any) -> NDArray[Any] | None:
    """Return what any array library holds, also on a device; torch's own way where its tensor needs a gradient."""
    value = value.detach() if hasattr(value, "detach") else value
    try:
        return np.from_dlpack(value, device="cpu", copy=None)
    except (BufferError, RuntimeError, TypeError, ValueError, AttributeError):
        return None  # an exporter of before DLPack 1.0, or a dtype that it has no name for


def _png(image: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format="PNG")
    return out.getvalue()
