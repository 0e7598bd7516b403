"""The stores of formats/zarr/stores, the values that xarray decodes from them, and samples cut from these by hand."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import streamloader as sl

STORES = Path(__file__).parent.parent / "formats" / "zarr" / "stores"
PLAIN = (
    *("xarray2.zarr", "xarray3.zarr", "xarray2_unconsolidated.zarr", "python3.zarr", "python2_codecs.zarr"),
    *("zarr2.zarr", "v2_in_v3.zarr-v3", "tensorstore2.zarr", "tensorstore3.zarr", "zarrs3.zarr", "gdal2.zarr"),
)
REFERENCES = ("kerchunk.json", "kerchunk.parquet", "virtualizarr.json")
GRIDS = (*PLAIN, *REFERENCES, "icechunk")
TIMES = 23


def url_of(name: str) -> str:
    """The URL by which streamloader opens a store."""
    return f"icechunk://::{STORES / name}" if name == "icechunk" else str(STORES / name)


@cache
def expected() -> dict[str, np.ndarray]:
    """What xarray decodes, as `make.py` recorded it."""
    with np.load(STORES / "expected.npz") as stored:
        return dict(stored)


def values_of(store: str, name: str) -> np.ndarray:
    """An array of a store as streamloader unpacks it: float32 where xarray chooses float64 for 16 bits.

    In metadata of version 2, xarray takes every fill value of Zarr for netCDF's, streamloader 0 only for packed values.
    """
    values = expected()[name]
    return values.astype(np.float32) if name == "t2m" else values


def anchors(extent: int, stride: int, selected: range = range(TIMES)) -> list[int]:
    """The first elements of all windows, by a loop: they begin at the start of each part, and stay in it.

    The gap in `time` before element 15 ends a part, except for windows of a single element.
    """
    found = []
    if extent == 1:
        return list(selected)[::stride]
    for part in (range(selected.start, min(15, selected.stop)), range(max(15, selected.start), selected.stop)):
        found += [first for first in range(part.start, part.stop, stride) if first + extent <= part.stop]
    return found


def samples_of(batches: list[dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """The valid samples of batches, as dicts of numpy arrays."""
    return [
        {name: column[row].numpy() for name, column in batch.items()}
        for batch in batches
        for row in range(len(batch["index"]))
        if bool(batch["valid"][row])
    ]


def all_ranks(url: str, world: int, state: Any = None, steps: int | None = None, **options: Any) -> Any:
    """The batches of each step over all ranks of a world, and the state after `steps` steps."""
    datasets = [sl.StreamingDataset(url, world=(rank, world), with_index=True, **options) for rank in range(world)]
    if state is not None:
        for dataset in datasets:
            dataset.load_state_dict(state)
    iterators = [iter(dataset) for dataset in datasets]
    taken: list[list[dict[str, torch.Tensor]]] = []
    while steps is None or len(taken) < steps:
        step = [next(iterator, None) for iterator in iterators]
        if step[0] is None:
            break
        taken.append(step)
    after = datasets[0].state_dict()
    for dataset in datasets:
        dataset.close()
    return taken, after
