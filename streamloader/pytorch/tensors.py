"""Converts finished batches to dicts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from streamloader.engine.stages import Batch
from streamloader.engine.transform import Ragged, Tensors, check_shapes
from streamloader.errors import TransformError
from streamloader.order.schedule import BatchPlan

OFFSETS = "_offsets"


class BatchFormat(NamedTuple):
    """What iteration yields: single `samples` or batches, and the columns other than fields.

    `firsts`: the number of the first sample of each source of a mixture; the columns are then `source` and `index`, the
    number within the source. `indexes`: for each source of arrays, its function from sample numbers to the columns of
    `with_index`. `channels_first`: the image fields that become (channels, height, width), without a copy.
    """

    samples: bool
    with_index: bool
    with_valid: bool
    firsts: tuple[int, ...] = ()
    indexes: tuple[Callable[[NDArray[np.int64]], dict[str, NDArray[np.int64]]] | None, ...] = ()
    channels_first: frozenset[str] = frozenset()


def to_tensors(columns: Mapping[str, Any], plan: BatchPlan, form: BatchFormat) -> dict[str, Any]:
    """Return the columns of a batch as a dict.

    Arrays become tensors that share their memory, a ragged field `name` becomes the tensors `name` (concatenated
    values) and `name_offsets`, and lists stay lists. `index` is int64 and `valid` bool, both of shape (samples,).
    """
    out: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, Ragged):
            out[name] = _tensor(column.values)
            out[name + OFFSETS] = torch.from_numpy(column.offsets)
        else:
            out[name] = _tensor(column) if isinstance(column, np.ndarray) else column
            if name in form.channels_first and isinstance(column, np.ndarray):
                out[name] = out[name].permute(0, 3, 1, 2)
    if form.with_index:
        out |= numbers(plan.samples, form.firsts, form.indexes)
    if form.with_valid:
        out["valid"] = _copied(plan.valid)
    return out


def numbers(
    samples: NDArray[np.int64], firsts: tuple[int, ...], indexes: Sequence[Callable[..., Any] | None] = ()
) -> dict[str, torch.Tensor]:
    """Return `index` and, for a mixture, `source`, both int64 of shape (samples,); for patches, `index_y` and so on."""
    source = np.searchsorted(firsts, samples, side="right") - 1 if firsts else np.zeros(samples.shape, np.int64)
    local = samples - np.array(firsts)[source] if firsts else samples
    if not any(indexes):
        return {**({"source": torch.from_numpy(source)} if firsts else {}), "index": _copied(local)}
    columns: dict[str, NDArray[np.int64]] = {}
    for number, convert in enumerate(indexes):
        rows = source == number
        for name, values in ({"index": local[rows]} if convert is None else convert(local[rows])).items():
            columns.setdefault(name, np.zeros(samples.shape, np.int64))[rows] = values
    columns = {"source": source, **columns} if firsts else columns
    return {name: torch.from_numpy(values) for name, values in columns.items()}


def to_samples(batch: Batch, form: BatchFormat) -> Iterator[dict[str, Any]]:
    """Yield the samples of a batch: tensors without the batch axis, and elements of lists."""
    columns, plan = batch.columns, batch.plan
    if batch.singles is not None:
        others = to_tensors({}, plan, form)
        for i, single in enumerate(batch.singles):
            values = to_tensors(single, plan, BatchFormat(samples=True, with_index=False, with_valid=False))
            yield {name: column[0] for name, column in values.items()} | {name: of[i] for name, of in others.items()}
        return
    out = to_tensors(columns, plan, form)
    for name, column in columns.items():
        if isinstance(column, Ragged):
            edges = out.pop(name + OFFSETS).tolist()
            out[name] = [out[name][a:b] for a, b in pairwise(edges)]
        elif isinstance(column, list) and column and isinstance(column[0], np.ndarray):
            out[name] = [_tensor(image) for image in column]
            if name in form.channels_first:
                out[name] = [image.permute(2, 0, 1) for image in out[name]]
    for i in range(len(plan.samples)):
        yield {name: column[i] for name, column in out.items()}


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
    return torch.from_numpy(data).view(dtype).reshape(shape)


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


TENSORS = Tensors(stack_tensors, f"{__name__}:reduce_tensor", f"{__name__}:OwnGenerator")


def _copied(array: NDArray[Any]) -> torch.Tensor:
    """Return a copy of a small array as a tensor.

    numpy's copy and `torch.frombuffer` release the GIL, and then wait for it: 0.1 ms while other threads need it.
    """
    return torch.from_numpy(np.frombuffer(bytearray(array), array.dtype))


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    # A read-only array cannot be shared with torch, which would let the caller write to it.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
