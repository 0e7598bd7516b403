"""Checks written values and converts them to columns: arrays of the field's dtype, or lists of bytes."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import DecodeError, FieldError
from streamloader.format.codecs import Column
from streamloader.format.manifest import Field


def check_names(fields: Mapping[str, Field], values: Mapping[str, Any], owner: str) -> None:
    """Raise `FieldError` unless `values` has exactly the fields. `owner` names the sample or batch in the message."""
    missing = sorted(set(fields) - set(values))
    unknown = sorted(str(name) for name in set(values) - set(fields))
    if missing or unknown:
        problem = f"{owner} has no field {missing[0]!r}" if missing else f"{owner} has an unknown field {unknown[0]!r}"
        raise FieldError(problem, f"give exactly the fields {', '.join(fields)}")


def to_columns(fields: Mapping[str, Field], batch: Mapping[str, Any], first: int) -> tuple[int, dict[str, Column]]:
    """Return the number of samples of a batch and its checked columns; `first` is the number of its first sample.

    Raises `FieldError` for missing or unknown fields, unequal lengths, and values that do not fit their field.
    """
    check_names(fields, batch, f"the batch from sample {first} on")
    lengths: dict[str, int] = {}
    for name, values in batch.items():
        if not isinstance(values, (list, tuple)) and getattr(values, "ndim", 0) == 0:
            problem = f"field {name!r} of a batch is a {type(values).__name__}"
            raise FieldError(problem, "give one value for each sample")
        lengths[name] = len(values)
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
        raise FieldError(f"the columns of a batch have unequal lengths: {counts}", "give one value for each sample")
    columns = {name: to_column(name, field, batch[name], first) for name, field in fields.items()}
    return next(iter(lengths.values())), columns


def to_column(name: str, field: Field, values: Any, first: int) -> Column:
    """Return one field's column of a batch. Raises `FieldError`, which names the first sample with an invalid value."""
    if field.fixed:
        array = None
        with suppress(ValueError, TypeError):  # lists of unequal lengths
            array = as_array(values)
        if array is not None and array.shape[1:] == field.shape:
            return _cast(array, np.dtype(field.dtype), f"field {name!r} of samples {first} to {first + len(array) - 1}")
        rows = [to_value(name, field, value, first + i) for i, value in enumerate(values)]
        return np.stack(rows) if rows else np.empty((0, *field.shape), field.dtype)
    return [to_value(name, field, value, first + i) for i, value in enumerate(values)]  # type: ignore[misc]


def to_value(name: str, field: Field, value: Any, sample: int | str) -> NDArray[Any] | bytes:
    """Return one value as an array of the field's shape and dtype, or as bytes.

    `sample` is its number or name for messages. Raises `FieldError`.
    """
    where = f"field {name!r} of sample {sample}"
    if field.kind == "bytes":
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise FieldError(f"{where} is a {type(value).__name__}", "give bytes")
        return bytes(value)
    if field.kind == "text":
        return _encode(value, where)
    if value is None or (value is np.ma.masked and not field.dtype.startswith("float")):
        raise FieldError(f"{where} is missing", f"give {field}")
    try:
        array = as_array(value)
    except (ValueError, TypeError) as error:
        raise FieldError(f"{where} is not an array of {field.dtype}: {error}", f"give {field}") from None
    if field.kind == "ragged":
        if array.size == 0:
            return b""
        if array.ndim == 0 or array.shape[1:] != field.shape:
            expected = ", ".join(["any", *map(str, field.shape)])
            raise FieldError(f"{where} has shape {array.shape}, expected ({expected})", f"give {field}")
        return _cast(array, np.dtype(field.dtype), where).astype(field.stored_dtype, copy=False).tobytes()
    if array.shape != field.shape:
        sizes = ",".join(map(str, array.shape))
        remedy = f"give {field}" if field.shape else f"give a single {field}, or declare {name}={field.dtype}[{sizes}]"
        raise FieldError(f"{where} has shape {array.shape}, expected {field.shape}", remedy)
    return _cast(array, np.dtype(field.dtype), where)


def from_bytes(name: str, field: Field, item: memoryview, sample: int) -> Any:
    """Return a variable-size value as bytes, str, or an array (k, *shape) that owns its memory.

    Raises `DecodeError`, which names the field and the sample, for bytes that are not valid for the field.
    """
    if field.kind == "bytes":
        return bytes(item)
    try:
        if field.kind == "text":
            return str(item, "utf-8")
        return np.frombuffer(item, field.stored_dtype).astype(field.dtype).reshape(-1, *field.shape)
    except ValueError as error:
        remedy = "convert the dataset again, or go on without the sample in training with on_error='mask'"
        raise DecodeError(f"field {name!r} of sample {sample} is not {field} ({error})", remedy) from error


def _encode(value: Any, where: str) -> bytes:
    if not isinstance(value, str):
        raise FieldError(f"{where} is a {type(value).__name__}", "give a str")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise FieldError(f"{where} is not valid text ({error.reason})", "give a str that UTF-8 can encode") from error


_MASKED = frozenset({np.ma.MaskedArray, type(np.ma.masked)})


def as_array(value: Any) -> NDArray[Any]:
    """Return a value as an array, in which masked floats are NaN. Raises as numpy, and ValueError for others masked."""
    if hasattr(value, "__dlpack__") and not isinstance(value, np.ndarray) and (found := from_dlpack(value)) is not None:
        return found
    kinds = leaves(value)[1] if isinstance(value, list | tuple) else frozenset[type]()
    array = np.asanyarray(value) if _MASKED.isdisjoint(kinds) else _stack_masked(value)
    if np.ma.is_masked(array):
        if array.dtype.kind != "f":
            raise ValueError(f"elements of {array.dtype} are masked")
        array = np.ma.filled(array, np.nan)
    return np.asarray(array)


def from_dlpack(value: Any) -> NDArray[Any] | None:
    """Return the array of any library that has DLPack, from any device; None if only numpy's protocol is left.

    Raises `TypeError` if that is not there either.
    """
    value = value.detach() if hasattr(value, "detach") else value  # torch exports no tensor that requires a gradient
    try:
        return np.from_dlpack(value, device="cpu", copy=None)
    except (BufferError, RuntimeError, TypeError, ValueError, AttributeError) as error:
        if hasattr(value, "__array__"):
            return None  # an exporter older than DLPack 1.0, or an unsupported dtype
        raise TypeError(f"it has no array on the CPU: {error}; copy it to the CPU") from error


def _stack_masked(value: Any) -> NDArray[Any]:
    """Return nested lists as a masked array: numpy would drop the masks of masked arrays in a list."""
    arrays = [_stack_masked(item) if isinstance(item, list | tuple) else np.ma.asanyarray(item) for item in value]
    dtypes: list[Any] = [array.dtype for array in arrays if array is not np.ma.masked]  # which is a float64
    stacked: NDArray[Any] = np.ma.stack(arrays).astype(np.result_type(*dtypes or [np.float64]))
    return stacked


def leaves(items: Sequence[Any]) -> tuple[Sequence[Any], set[type]]:
    """Return the innermost items of nested lists, and their types."""
    for _ in range(64):  # numpy's limit of dimensions
        if not (kinds := set(map(type, items))) or not kinds <= {list, tuple}:
            break
        items = list(chain.from_iterable(items))
    return items, kinds


def _cast(array: NDArray[Any], dtype: np.dtype[Any], where: str) -> NDArray[Any]:
    """Return the array as `dtype`. Raises `FieldError` for a cast that loses information.

    Casts within a kind or to a wider kind are allowed, and those of integers to any dtype that holds every value
    exactly. Only floats are rounded, and only if the declared float is narrower.
    """
    if array.dtype == dtype or array.size == 0:
        return array.astype(dtype, copy=False)
    problem = f"{where} is {array.dtype}, expected {dtype}"
    if array.dtype.kind in "iu" and dtype.kind == "f":
        inexact = ~exact_in_float(array, dtype)
        if inexact.any():
            problem = f"{problem}, which does not hold {array[inexact].flat[0]} exactly"
            raise FieldError(problem, "declare a wider dtype, or round the values yourself")
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        low, high, info = int(array.min()), int(array.max()), np.iinfo(dtype)
        if low < info.min or high > info.max:
            raise FieldError(f"{problem}, which does not hold {low} to {high}", "declare a wider dtype")
    elif not np.can_cast(array.dtype, dtype, "same_kind"):
        raise FieldError(problem, "convert it yourself, or declare another dtype")
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype)
    except FloatingPointError as error:
        raise FieldError(f"{problem}, which does not hold its values", "declare a wider dtype") from error


def exact_in_float(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    """Return a mask of the elements of an integer array that the float `dtype` represents exactly."""
    bound = 1 << (np.finfo(dtype).nmant + 1)  # the float represents every integer up to here
    if -bound <= int(array.min(initial=0)) and int(array.max(initial=0)) <= bound:
        return np.ones(array.shape, np.bool_)
    with np.errstate(over="ignore", invalid="ignore"):
        floats = array.astype(dtype).astype(np.float64)
        # `<`, because the largest integer rounds up to 2^k
        in_range = np.isfinite(floats) & (floats < float(np.iinfo(array.dtype).max))
        exact: NDArray[np.bool_] = in_range & (floats.astype(array.dtype) == array)
    return exact


# the first bytes of common encodings
_MAGIC = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
    (b"ID3", "mp3"),
    (b"II*\0", "tiff"),
)
_RIFF = {b"WEBP": "webp", b"WAVE": "wav"}
AUDIO = frozenset({"wav", "flac", "ogg", "mp3"})


def sniff(data: bytes) -> str:
    """Return the encoding of data, such as "jpeg", from the first bytes; "" if it is unknown."""
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12], "")
    return next((encoding for magic, encoding in _MAGIC if data.startswith(magic)), "")


def row_bytes(fields: Mapping[str, Field], columns: Mapping[str, Column | Sequence[bytes]]) -> NDArray[np.int64]:
    """Return the decoded size of each sample of the columns in bytes: int64 (samples,)."""
    count = len(next(iter(columns.values())))
    sizes = np.full(count, sum(field.item_bytes for field in fields.values() if field.fixed), np.int64)
    for name, field in fields.items():
        if not field.fixed:
            sizes += np.fromiter((len(item) for item in columns[name]), np.int64, count)
    return sizes
