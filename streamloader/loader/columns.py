"""The columns of a batch, as far as the fields and the options of a loader tell them before it reads any data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.collate import LENGTHS, MASK
from streamloader.engine.packing import row_items
from streamloader.errors import UsageError
from streamloader.format.manifest import Field
from streamloader.loader.base import Loader
from streamloader.loader.batches import OFFSETS
from streamloader.options import Collate, Pack, Pad

if TYPE_CHECKING:
    from streamloader.images.decode import ImageDecoder

# Its dtype, "bytes" and "text" for lists of these, and its shape, with None for an axis whose length varies.
Column = tuple[str, tuple[int | None, ...]]


def check_exported(loader: Loader, name: str) -> None:
    """Raise `UsageError` unless a loader yields batches on the host, which the function `name` gives to a framework."""
    if not isinstance(loader, Loader):
        raise UsageError(f"{name}() of a {type(loader).__name__}", "give a NumpyDataset or a StreamingDataset itself")
    given = loader._options
    if given.batch_size is None:
        raise UsageError(f"{name}() with batch_size=None, which yields single samples", "give the batch_size of a rank")
    by_torch = {"device=": given.device, "cast=": given.cast, "normalize= by channel": loader._channels or None}
    for option, value in by_torch.items():
        if value is not None:
            raise UsageError(
                f"{name}() of a dataset with {option}", "leave it out: torch copies, casts or computes by it"
            )


def host_array(name: str, value: Any) -> NDArray[Any]:
    """Return an array or a tensor of a batch as an array, which shares its memory."""
    if getattr(value, "is_nested", False):
        raise UsageError(f"{name!r} is a nested tensor, which only torch has", "give collate='pad', or leave it out")
    return np.asarray(value)


def batch_columns(loader: Loader) -> dict[str, Column | None]:
    """Return the columns of the loader's batches by name, None for those that only the data tell.

    These are nested tensors, lists of arrays, documents that are packed batch by batch, and boxes and key points that
    move with their images. Raises `UsageError` for a function that makes the columns.
    """
    given, config = loader._options, loader._config
    if config.transform is not None or config.collate is not None:
        what = "transform=" if config.transform is not None else "collate="
        raise UsageError(f"{what} makes columns that are not known before it is called", "give element_spec=")
    rows = given.batch_size if given.max_tokens is None and given.remainder != "uneven" else None
    arrays, found = loader._datasets[0].arrays, dict[str, Column | None]()
    for name, field in loader.fields.items():
        if name in config.packs:
            found |= _packed_columns(loader, name, config.packs[name], rows)
        elif (decoder := config.decoders.get(name)) is not None:
            found |= _image_columns(decoder, config.rules.get(name), rows)
        elif name in config.moved:
            found |= {name: None, f"{name}_valid": None}
        elif arrays is not None and arrays.columns[name].rows is None:
            column = arrays.columns[name]
            found |= {output.name: (column.dtype, (rows, *output.shape)) for output in column.outputs}
        else:
            found |= _value_columns(name, field, config.rules.get(name), rows)
    if given.with_index:
        numbers = loader._format.numbers(np.empty(0, np.int64))
        found |= dict.fromkeys(numbers, ("int64", (rows,)))
    flags = {"valid": loader._format.with_valid, "error": given.on_error == "mask"}
    flags |= {"replaced": given.on_error == "replace"}
    return found | {name: ("bool", (rows,)) for name, has in flags.items() if has}


def _value_columns(name: str, field: Field, rule: Collate | None, rows: int | None) -> dict[str, Column | None]:
    if field.kind in ("bytes", "text"):
        return {name: (field.kind, (rows,))}
    if field.kind == "tensor":
        return {name: (field.dtype, (rows, *field.shape))}
    if isinstance(rule, Pad):
        return _padded_columns(name, (field.dtype, field.shape), rule, rows)
    if rule is not None:
        return {name: None}
    edges = None if rows is None else rows + 1
    return {name: (field.dtype, (None, *field.shape)), name + OFFSETS: ("int64", (edges,))}


def _padded_columns(name: str, inner: Column, pad: Pad, rows: int | None) -> dict[str, Column | None]:
    """Return the columns of padded values, which have one size if there is one edge to pad to."""
    dtype, shape = inner
    size = pad.to[0] if isinstance(pad.to, tuple) and len(pad.to) == 1 else None
    sizes = (size,) * pad.axes
    found: dict[str, Column | None] = {name: (dtype, (rows, *sizes, *shape))}
    found[name + LENGTHS] = ("int64", (rows,) if pad.axes == 1 else (rows, pad.axes))
    return found | ({name + MASK: ("bool", (rows, *sizes))} if pad.mask else {})


def _image_columns(decoder: ImageDecoder, rule: Collate | None, rows: int | None) -> dict[str, Column | None]:
    name, options = decoder.name, decoder.options
    channels = () if decoder.mask else (options.channels,)
    found: dict[str, Column | None] = dict.fromkeys(decoder.columns)
    if options.views is not None:
        found = {column: (decoder.dtype, (rows, *shape)) for column, shape in decoder.view_shapes.items()}
    elif isinstance(rule, Pad):
        found = _padded_columns(name, (decoder.dtype, channels), rule, rows)
    elif rule is None:
        size = None if decoder.by_samples else decoder.crops[0][0]
        frames = () if (clips := getattr(decoder, "expected", None)) is None else (clips.frames,)
        found = {name: (decoder.dtype, (rows, *frames, *(size or (None, None)), *channels))}
        if frames:
            found |= {f"{name}_start": ("int64", (rows,)), f"{name}_times": ("float64", (rows, *frames))}
    if options.channels_first:
        found = {column: _channels_first(each) if column in decoder.columns else each for column, each in found.items()}
    return found | ({f"{name}_crop": ("int64", (rows, 5))} if options.with_crop else {})


def _channels_first(column: Column | None) -> Column | None:
    if column is None:
        return None
    dtype, (*others, height, width, channels) = column
    return dtype, (*others, channels, height, width)


def _packed_columns(loader: Loader, name: str, pack: Pack, rows: int | None) -> dict[str, Column | None]:
    if pack.fit is None:
        return {name: None}
    found: dict[str, Any] = {name: (loader.fields[name].dtype, (rows, pack.length))}
    if name != next(iter(loader._config.packs)):  # the others are packed alike
        return found
    _, segments, numbers = row_items(loader._datasets)
    beside: dict[str, Column] = {
        "documents": (numbers, (rows, pack.length)),
        "positions": ("int32", (rows, pack.length)),
        "cu_seqlens": ("int32", (None if rows is None else rows * segments + 1,)),
    }
    return found | {f"{name}_{column}": beside[column] for column in pack.columns}
