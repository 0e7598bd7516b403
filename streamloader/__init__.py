"""Streams training data from chunked, sharded Zarr v3 datasets on object storage into PyTorch.

    import streamloader as sl

    sl.convert("photos/", "s3://bucket/photos", split={"train": 0.9, "val": 0.1})
    for batch in sl.StreamingDataset("s3://bucket/photos", split="train", batch_size=256, decode="auto"):
        ...

Names are loaded when they are first used: importing this package starts no thread, no event loop and no
client, and imports torch only with `StreamingDataset`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streamloader import errors

if TYPE_CHECKING:
    from streamloader.conversion.job import convert
    from streamloader.dataset import Dataset, open  # noqa: A004 - `sl.open` reads as the builtin does
    from streamloader.format.manifest import Field
    from streamloader.format.writer import Writer
    from streamloader.options import Decode, Layout, RetryPolicy, Shuffle
    from streamloader.stats import Stats
    from streamloader.torch_dataset import StreamingDataset
    from streamloader.torch_mixture import Mixture
    from streamloader.torch_sources import Source

__version__ = "0.1.0"

__all__ = [
    "Dataset",
    "Decode",
    "Field",
    "Layout",
    "Mixture",
    "RetryPolicy",
    "Shuffle",
    "Source",
    "Stats",
    "StreamingDataset",
    "Writer",
    "__version__",
    "convert",
    "errors",
    "open",
]

# the package of `convert` is called otherwise: importing a submodule sets an attribute of its name here
_HOMES = {
    "Dataset": "streamloader.dataset",
    "Decode": "streamloader.options",
    "Field": "streamloader.format.manifest",
    "Layout": "streamloader.options",
    "Mixture": "streamloader.torch_mixture",
    "RetryPolicy": "streamloader.options",
    "Shuffle": "streamloader.options",
    "Source": "streamloader.torch_sources",
    "Stats": "streamloader.stats",
    "StreamingDataset": "streamloader.torch_dataset",
    "Writer": "streamloader.format.writer",
    "convert": "streamloader.conversion.job",
    "open": "streamloader.dataset",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'streamloader' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
