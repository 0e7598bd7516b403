"""`sl.jax_batches`: batches as JAX arrays, on one device or on those of all processes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import UsageError, WorldError
from streamloader.loader.base import Loader
from streamloader.loader.columns import batch_columns, check_exported, host_array
from streamloader.order.schedule import World
from streamloader.storage.optional import need

_WIDE = {"int64": np.int32, "uint64": np.uint32}


def jax_batches(dataset: Loader, *, sharding: Any = None) -> Iterator[dict[str, Any]]:
    """Begin a pass over a `NumpyDataset` or a `StreamingDataset`, and yield its batches with JAX arrays.

    Lists of bytes and text stay on the host. Without x64, JAX's integers and floats have 32 bits: a larger integer is
    an error, and floats are rounded.

    `sharding`: a `jax.sharding.Sharding` of the global batch, whose rows are those of all ranks in order. Each process
    gives the rows of its rank to its own devices, and yields global arrays of shape (world size * batch_size, ...).
    Every process must have `world=(jax.process_index(), jax.process_count())`, or the rank of the rows that its devices
    hold; otherwise raises `WorldError`. Without it, arrays have this process's rows, on JAX's default device.

    JAX copies to a device while the program goes on, so nothing is read ahead for that: the dataset's `state_dict()`
    counts the batches that were returned. Raises `UsageError` if a column cannot be a global array, since its first
    axis does not count samples, its size may differ between ranks, or the sharding does not divide it. The columns of
    a `transform` or a function `collate` are known with the first batch, when the processes compare their shapes and
    dtypes once; each later batch must have the same.
    """
    check_exported(dataset, "jax_batches")
    jax, given = need("jax"), dataset._options
    if sharding is None:
        return map(partial(_placed, jax), dataset)
    if not isinstance(sharding, jax.sharding.Sharding):
        remedy = "give NamedSharding(mesh, PartitionSpec('data')), or leave it out for the default device"
        raise UsageError(f"sharding= is a {type(sharding).__name__}", remedy)
    if given.remainder == "uneven" or given.max_tokens is not None:
        option = "max_tokens=" if given.max_tokens is not None else "remainder='uneven'"
        raise UsageError(f"sharding= with {option}, by which batches have different numbers of rows", "leave one out")
    made = dataset._config.transform is not None or dataset._config.collate is not None
    if not made:
        _check_columns(sharding, dataset)
    first = dict[str, Any]() if made and dataset._rank.size > 1 else None
    return map(partial(_global, jax, sharding, dataset, first), dataset)


def _placed(jax: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with arrays on the default device."""
    arrays: dict[str, Any] = jax.device_put(_arrays(jax, batch))
    return batch | arrays


def _global(jax: Any, sharding: Any, dataset: Loader, first: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with global arrays, to which this process gives its rows.

    `first`: the columns of the first batch, which those of all batches of all processes must equal, or None.
    """
    arrays, world, rows = _arrays(jax, batch), dataset._rank, dataset._options.batch_size
    if first is not None:
        _check_alike(first, arrays)
    for name, array in arrays.items():
        if array.shape[:1] != (rows,):
            raise _uncounted(name)
        shape = (world.size * len(array), *array.shape[1:])
        _check_divided(sharding, name, shape)
        _check_rows(sharding, shape, world, len(array))
        arrays[name] = jax.make_array_from_process_local_data(sharding, array, shape)
    return batch | arrays


def _check_alike(first: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    """Raise `UsageError` unless all processes have the same columns in the first batch, and these in every other."""
    found = {name: (array.dtype.name, array.shape) for name, array in sorted(arrays.items())}
    problem = ""
    if not first:
        sums = np.array([zlib.crc32(repr(found).encode())], np.uint32)
        if np.unique(need("jax.experimental.multihost_utils", "jax").process_allgather(sums)).size > 1:
            problem = f"the columns of global arrays differ between processes: this one has {found}"
        first.update(found)
    elif found != first:
        problem = f"the columns of global arrays differ between batches: {first} and {found}"
    if problem:
        raise UsageError(problem, "make one shape and dtype in every batch, such as collate=Pad(to=(longest,)) does")


def _arrays(jax: Any, batch: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the arrays and tensors of a batch as arrays, which share their memory."""
    arrays = {name: host_array(name, value) for name, value in batch.items() if hasattr(value, "__dlpack__")}
    for name, array in arrays.items():
        narrow = _WIDE.get(array.dtype.name)
        if narrow is None or jax.config.jax_enable_x64 or not array.size:
            continue
        limits = np.iinfo(narrow)
        found = int(array.min()), int(array.max())
        if found[0] < limits.min or found[1] > limits.max:
            problem = f"{name!r} has integers from {found[0]} to {found[1]}, and JAX's integers have 32 bits"
            raise UsageError(problem, "call jax.config.update('jax_enable_x64', True), or leave it out with fields=")
    return arrays


def _check_columns(sharding: Any, dataset: Loader) -> None:
    """Raise `UsageError` for a column that cannot be a global array, before data is read."""
    size, rows = dataset._rank.size, dataset._options.batch_size
    for name, column in batch_columns(dataset).items():
        dtype, (first, *others) = column or ("", (None,))
        if dtype in ("bytes", "text"):
            continue
        if rows is None or first != rows:
            raise _uncounted(name)
        if size > 1 and None in others:
            problem = f"{name!r} may have another size on each of {size} ranks, so it cannot be a global array"
            raise UsageError(problem, "give one size: collate=Pad(to=(longest,)), or Decode(size=) of images")
        # what is not known yet is divided in any case here
        divided = (len(sharding.device_set) if other is None else other for other in others)
        _check_divided(sharding, name, (size * rows, *divided))


def _uncounted(name: str) -> UsageError:
    problem = f"the first axis of {name!r} does not count samples, so it cannot be a global array"
    return UsageError(problem, "leave it out, or give collate=Pad(to=(longest,)) or pack= of rows of one length")


def _check_divided(sharding: Any, name: str, shape: tuple[int, ...]) -> None:
    """Raise `UsageError` unless a sharding divides a global array of this shape."""
    if len(getattr(sharding, "spec", ())) <= len(shape):
        with suppress(ValueError):
            sharding.shard_shape(shape)
            return
    problem = f"the sharding {sharding} does not divide {name!r} of the global shape {shape}"
    raise UsageError(problem, "give a batch_size that its devices divide, and a PartitionSpec of the first axis alone")


def _check_rows(sharding: Any, shape: tuple[int, ...], world: World, count: int) -> None:
    """Raise `WorldError` unless the devices of this process hold the rows of its rank."""
    held = [rows[0].indices(shape[0]) for rows in sharding.addressable_devices_indices_map(shape).values()]
    first, stop = min(begin for begin, *_ in held), max(end for _, end, _ in held)
    if (first, stop) != (world.rank * count, (world.rank + 1) * count):
        problem = f"the devices of this process hold rows {first} to {stop} of the global batch of {shape[0]}"
        problem += f", and rank {world.rank} of {world.size} has {count} from {world.rank * count} on"
        remedy = "give the dataset world=(jax.process_index(), jax.process_count()), and a mesh in jax.devices()' order"
        raise WorldError(problem, remedy)
