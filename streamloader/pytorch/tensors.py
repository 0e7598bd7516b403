"""Tensors: of finished batches, and those that a transform returns or draws at random.

The engine loads what it needs of this module by name, see `engine/transform.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from streamloader.engine.collate import check_shapes
from streamloader.engine.transform import Ragged
from streamloader.errors import TransformError


def to_tensors(columns: dict[Any, Any]) -> dict[Any, Any]:
    """Replace the arrays among the columns by tensors, which share their memory, and return the columns.

    Ragged columns become nested tensors of the jagged layout.
    """
    for name, column in columns.items():
        if isinstance(column, Ragged):
            values, offsets = map(torch.from_numpy, column)
            columns[name] = nested_type()(values, offsets)
        if isinstance(column, np.ndarray):
            # a read-only array cannot be shared with torch, which would let the caller write to it
            columns[name] = torch.from_numpy(column if column.flags.writeable else column.copy())
    return columns


def check_device(device: str) -> None:
    """Raise `UsageError` unless images can be decoded on the device."""
    from streamloader.pytorch import images

    images.check_device(device)


def device_decoder(device: str) -> tuple[Callable[..., torch.Tensor], Callable[[], object]]:
    """Return what decodes images on a device, and what waits for that; see `pytorch/images.py`."""
    from streamloader.pytorch import images

    return images.device_decoder(device)


@cache
def nested_type() -> Callable[..., torch.Tensor]:
    """Return what makes a nested tensor: the type itself, in a quarter of the time of `nested_tensor_from_jagged`."""
    nested = import_module("torch.nested._internal.nested_tensor")
    return getattr(nested, "NestedTensor", torch.nested.nested_tensor_from_jagged)


def split_tensor(values: NDArray[Any], offsets: NDArray[np.int64]) -> list[torch.Tensor]:
    """Return the rows of a ragged column as tensors, which share its memory."""
    # "unsafe" makes tensors of their own, as from arrays: autograd forbids to change several views of one in place
    whole = torch.from_numpy(values if values.flags.writeable else values.copy())
    return list(torch.unsafe_split_with_sizes(whole, (offsets[1:] - offsets[:-1]).tolist()))


def stack_tensors(name: str, values: Sequence[Any], samples: Sequence[int]) -> Any:
    """Stack the tensors that a transform returned for a field; return None if not all values are tensors.

    Detaches them: gradients do not reach the transform. Keeps dtypes that numpy does not have, such as bfloat16. Raises
    `TransformError` for meta and sparse tensors, and if shapes differ.
    """
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    for value, sample in zip(values, samples, strict=True):
        if value.is_meta or value.layout != torch.strided:
            kind = "meta" if value.is_meta else str(value.layout).removeprefix("torch.")
            remedy = "create it on the CPU" if value.is_meta else "return tensor.to_dense(), or a list of tensors"
            raise TransformError(f"the transform returned {name!r} of sample {sample} as a {kind} tensor", remedy)
    check_shapes(name, values)
    tensors = [value.detach() for value in values]
    try:
        return np.stack([tensor.numpy() for tensor in tensors])  # faster than torch.stack, which starts threads
    except (TypeError, RuntimeError):  # a dtype, a device or a view that numpy does not support
        return torch.stack(tensors)


def reduce_tensor(value: Any) -> Any:
    """Reduce a dense CPU tensor for `pickle`, by value and detached; leave other values to `pickle`."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return NotImplemented
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    return _rebuilt, (dense.reshape(-1).view(torch.uint8).numpy(), dense.dtype, tuple(dense.shape))


def _rebuilt(data: NDArray[np.uint8], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with these bytes, or stacked tensors with the bytes of the rows."""
    return torch.from_numpy(data).view(dtype).reshape(data.shape[:-1] + shape)


class OwnGenerator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which CPU operations of this thread draw from a generator of its own, and not from torch's."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator()

    def seed(self, number: int) -> None:
        """Seed the generator."""
        self._generator.manual_seed(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation, with this generator if it draws random numbers."""
        kwargs = kwargs or {}
        overload = _with_generator(func)
        if overload is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        device = args[0].device if args and isinstance(args[0], torch.Tensor) else kwargs.get("device") or "cpu"
        if torch.device(device).type != "cpu":
            return func(*args, **kwargs)
        return overload(*args, **{**kwargs, "generator": self._generator})


@cache
def _with_generator(func: Any) -> Any:
    """Return an operation that draws random numbers, or its overload with the same arguments and a generator.

    None for other operations, and if there is none.
    """
    expected = {argument.name: str(argument.type) for argument in func._schema.arguments}
    if "generator" in expected:
        return func
    for name in func.overloadpacket.overloads() if torch.Tag.nondeterministic_seeded in func.tags else ():
        overload = getattr(func.overloadpacket, name)
        arguments = {argument.name: str(argument.type) for argument in overload._schema.arguments}
        if arguments.pop("generator", None) and arguments == expected:
            return overload
    return None
