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
    from streamloader.conversion.api import convert
    from streamloader.format.dataset import Dataset, open  # noqa: A004 - `sl.open` reads as the builtin does
    from streamloader.format.manifest import Field
    from streamloader.format.writer import Writer
    from streamloader.maintenance.append import append
    from streamloader.maintenance.export import export
    from streamloader.maintenance.verify import verify
    from streamloader.options import Decode, Layout, RetryPolicy, Shuffle
    from streamloader.pytorch.arguments import Source
    from streamloader.pytorch.dataset import Mixture, StreamingDataset
    from streamloader.stats import Stats

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
    "append",
    "convert",
    "errors",
    "export",
    "open",
    "verify",
]

# no module of this package has the name of a function here: importing a submodule sets an attribute of its name
_HOMES = {
    "conversion.api": "convert",
    "format.dataset": "Dataset open",
    "format.manifest": "Field",
    "format.writer": "Writer",
    "maintenance.append": "append",
    "maintenance.export": "export",
    "maintenance.verify": "verify",
    "options": "Decode Layout RetryPolicy Shuffle",
    "pytorch.arguments": "Source",
    "pytorch.dataset": "Mixture StreamingDataset",
    "stats": "Stats",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"streamloader.{module}"), name)
    raise AttributeError(f"module 'streamloader' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
