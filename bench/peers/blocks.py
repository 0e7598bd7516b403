"""What the two Zarr contestants share: datasets read in shuffled blocks by a plain torch `IterableDataset`.

Neither zarr-python nor TensorStore has a loader. This is what a careful user writes: blocks of neighbouring samples
(whole chunks) in a random order, many of them requested at once, a group of blocks mixed sample by sample, and the next
group requested while this one is consumed. A sample a request would be hundreds of times slower.

A tensor column is one array. A bytes, text or ragged column is two: its values end to end, and `<name>_offsets`, which
is read whole at the start, since neither library reads variable-length items from parts of a chunk. Packed tokens are
rows of one array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from common import Source, Spec
from crops import jpeg_transform
from measuring import measure_loader
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

# samples of a block, about 4 to 8 MB, and of a group, about 70 to 150 MB
BLOCK = {"images": 32, "vectors": 16384, "jpeg": 128, "tokens": 1024, "packed": 512, "mixed": 128}
GROUP = {"images": 1024, "vectors": 262144, "jpeg": 1024, "tokens": 8192, "packed": 8192, "mixed": 4096}
# values of a chunk where samples have different sizes: blocks end inside chunks, so chunks are smaller
VALUES_PER_CHUNK = {"jpeg": 1 << 19, "tokens": 1 << 17, "text": 1 << 16}


class Pending(Protocol):
    """A read that was started."""

    def result(self) -> Any:
        """Wait, and return what was read."""


class Arrays(Protocol):
    """The arrays of a dataset; opened again in each process."""

    def submit(self, name: str, start: int, stop: int) -> Pending:
        """Start to read rows of an array."""

    def rows(self, name: str) -> int:
        """The length of an array."""


@dataclass(frozen=True)
class ArrayPlan:
    """One array to write: its values, and the rows of a chunk."""

    name: str
    values: NDArray[Any]
    chunk: int


@dataclass(frozen=True)
class Ragged:
    """Samples of different lengths, end to end."""

    values: NDArray[Any]
    lengths: NDArray[np.int64]

    def split(self, order: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return the samples of `order`, as views."""
        ends = np.cumsum(self.lengths)
        return [self.values[ends[i] - self.lengths[i] : ends[i]] for i in order]


Column = NDArray[Any] | Ragged
Group = dict[str, Column]


def stored_as(spec: Spec) -> str:
    """Return the folder below `spec.url`: variants that differ in what is written have one each."""
    return spec.variant if spec.variant in ("packed", "sharded") else "arrays"


def layout(spec: Spec) -> str:
    """Return which blocks are meant: the workload, or "packed"."""
    return "packed" if spec.variant == "packed" else spec.workload


def arrays_to_write(spec: Spec) -> list[ArrayPlan]:
    """Return the arrays of a workload."""
    source, block = Source(spec.source), BLOCK[layout(spec)]
    if spec.variant == "packed":
        return [ArrayPlan("tokens", source.packed_rows(), block)]
    plans = []
    for name, kind in source.columns.items():
        if kind == "tensor":
            plans.append(ArrayPlan(name, source.array(name), block))
        else:
            offsets = np.asarray(source.offsets(name))
            plans.append(ArrayPlan(name, source.array(name), VALUES_PER_CHUNK[name]))
            plans.append(ArrayPlan(f"{name}_offsets", offsets, 1 << 20))
    return plans


class BlockDataset(IterableDataset[dict[str, Any]]):
    """Yields batches of torch tensors: blocks in a random order, mixed in groups; one more group is on its way.

    With DataLoader workers, each reads every so many-th group. `open_arrays` is called in the process that reads, since
    neither library survives a fork once it was used.
    """

    def __init__(self, spec: Spec, open_arrays: Callable[[Spec], Arrays]) -> None:
        self.spec = spec
        self.open_arrays = open_arrays
        self.columns = Source(spec.source).columns
        self.epoch = -1
        self.arrays: Arrays | None = None
        self.offsets: dict[str, NDArray[np.int64]] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        self.epoch += 1
        if self.arrays is None:
            self.open()
        rng = np.random.default_rng((self.spec.seed, self.epoch, first))
        for group, order in mixed(self.read_groups(self.groups()[first::step]), self.spec.batch, rng):
            yield as_batch(group, order, self.columns, self.spec.variant)

    def read_groups(self, groups: list[list[tuple[int, int]]]) -> Iterator[list[Group]]:
        """Read the groups one after another, the next one already on its way."""
        pending: list[dict[str, Any]] = []
        for blocks in [*groups, []]:
            following = [self.start(block) for block in blocks]
            if pending:
                yield [self.finish(block) for block in pending]
            pending = following

    def open(self) -> None:
        """Open the arrays, and read the offsets."""
        self.arrays = arrays = self.open_arrays(self.spec)
        if self.spec.variant != "packed":
            names = [f"{name}_offsets" for name, kind in self.columns.items() if kind != "tensor"]
            self.offsets = {name: arrays.submit(name, 0, arrays.rows(name)).result() for name in names}

    def groups(self) -> list[list[tuple[int, int]]]:
        """Return the groups of blocks of this epoch; the same in every worker."""
        assert self.arrays is not None
        name = next(iter(self.columns))
        offsets = self.offsets.get(f"{name}_offsets")
        samples = self.arrays.rows(name) if offsets is None else len(offsets) - 1
        size = BLOCK[layout(self.spec)]
        count = -(-samples // size)
        order = np.random.default_rng((self.spec.seed, self.epoch)).permutation(count)
        blocks = [(int(i) * size, min(int(i + 1) * size, samples)) for i in order]
        together = GROUP[layout(self.spec)] // size
        return [blocks[i : i + together] for i in range(0, count, together)]

    def start(self, block: tuple[int, int]) -> dict[str, Any]:
        """Start to read the columns of a block."""
        assert self.arrays is not None
        found: dict[str, Any] = {}
        for name in self.columns:
            offsets = self.offsets.get(f"{name}_offsets")
            if offsets is None:
                found[name] = self.arrays.submit(name, *block), None
            else:
                ends = offsets[block[0] : block[1] + 1]
                found[name] = self.arrays.submit(name, int(ends[0]), int(ends[-1])), np.diff(ends)
        return found

    def finish(self, pending: dict[str, Any]) -> Group:
        """Wait for the columns of a block."""
        return {
            name: read.result() if lengths is None else Ragged(read.result(), lengths)
            for name, (read, lengths) in pending.items()
        }


def mixed(
    groups: Iterable[list[Group]], size: int, rng: np.random.Generator
) -> Iterator[tuple[Group, NDArray[np.int64]]]:
    """Join the parts of each group and mix their samples; yield the group and the samples of each batch.

    What does not fill a batch joins the next group.
    """
    tail: list[Group] = []
    for parts in groups:
        group = {name: joined([part[name] for part in tail + parts]) for name in parts[0]}
        order = rng.permutation(length(group))
        whole = len(order) - len(order) % size
        for begin in range(0, whole, size):
            yield group, order[begin : begin + size]
        rest = order[whole:]
        tail = [{name: taken(column, rest) for name, column in group.items()}] if len(rest) else []
    if tail:
        yield tail[0], np.arange(length(tail[0]))


def as_batch(group: Group, order: NDArray[np.int64], kinds: dict[str, str], variant: str) -> dict[str, Any]:
    """Return the samples of `order` as tensors, lists of tensors, or lists of text; JPEGs decoded."""
    return {
        name: torch.from_numpy(column[order])
        if isinstance(column, np.ndarray)
        else items(kinds[name], column.split(order), variant)
        for name, column in group.items()
    }


def items(kind: str, values: list[NDArray[Any]], variant: str) -> Any:
    """Return the items of a column of different lengths as a batch has them."""
    if kind == "text":
        return [item.tobytes().decode() for item in values]
    if kind == "bytes":
        transform = jpeg_transform(variant)
        return torch.from_numpy(np.stack([transform(item.tobytes()) for item in values]))
    # one tensor cut in views: from a DataLoader worker it crosses as one piece of shared memory
    return list(torch.split(torch.from_numpy(np.concatenate(values)), [len(item) for item in values]))


def length(group: Group) -> int:
    """Return how many samples a group has."""
    column = next(iter(group.values()))
    return len(column if isinstance(column, np.ndarray) else column.lengths)


def joined(parts: list[Any]) -> Column:
    """Return columns end to end."""
    if len(parts) == 1:
        return parts[0]  # type: ignore[no-any-return]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return Ragged(np.concatenate([p.values for p in parts]), np.concatenate([p.lengths for p in parts]))


def taken(column: Column, order: NDArray[np.int64]) -> Column:
    """Return the samples of `order`, copied."""
    if isinstance(column, np.ndarray):
        return column[order]
    return Ragged(np.concatenate([column.values[:0], *column.split(order)]), column.lengths[order])


def read(spec: Spec, open_arrays: Callable[[Spec], Arrays]) -> None:
    """Measure the epochs."""

    def loader() -> Any:
        kept = spec.workers > 0
        data = BlockDataset(spec, open_arrays)
        return DataLoader(data, batch_size=None, num_workers=spec.workers, persistent_workers=kept)

    measure_loader(loader, spec)
