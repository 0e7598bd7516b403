"""Streams training data from chunked, sharded Zarr v3 datasets on object storage into PyTorch.

    import streamloader as sl

    sl.convert("photos/", "s3://bucket/photos", split={"train": 0.9, "val": 0.1})
    for batch in sl.StreamingDataset("s3://bucket/photos", split="train", batch_size=256, decode="auto"):
        ...

Names are imported on first use: importing this package starts no thread, event loop or client, and only
`StreamingDataset`, `Mixture` and `to_device` import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from streamloader import errors

if TYPE_CHECKING:
    from streamloader import metrics as metrics
    from streamloader.conversion.api import convert as convert
    from streamloader.format.dataset import Dataset as Dataset
    from streamloader.format.dataset import open as open  # noqa: A004 - `sl.open` reads as the builtin does
    from streamloader.format.manifest import Field as Field
    from streamloader.format.writer import Writer as Writer
    from streamloader.loader.arguments import Source as Source
    from streamloader.loader.dataset import NumpyDataset as NumpyDataset
    from streamloader.loader.jax import jax_batches as jax_batches
    from streamloader.loader.tensorflow import tf_dataset as tf_dataset
    from streamloader.maintenance.append import append as append
    from streamloader.maintenance.columns import add_columns as add_columns
    from streamloader.maintenance.delete import delete as delete
    from streamloader.maintenance.export import export as export
    from streamloader.maintenance.verify import verify as verify
    from streamloader.maintenance.versions import diff as diff
    from streamloader.maintenance.versions import log as log
    from streamloader.metrics.losses import LossLog as LossLog
    from streamloader.options import Cache as Cache
    from streamloader.options import Channels as Channels
    from streamloader.options import Clips as Clips
    from streamloader.options import Decode as Decode
    from streamloader.options import Join as Join
    from streamloader.options import Layout as Layout
    from streamloader.options import Pack as Pack
    from streamloader.options import Pad as Pad
    from streamloader.options import Patch as Patch
    from streamloader.options import RetryPolicy as RetryPolicy
    from streamloader.options import Shuffle as Shuffle
    from streamloader.options import Window as Window
    from streamloader.pytorch.dataset import Mixture as Mixture
    from streamloader.pytorch.dataset import StreamingDataset as StreamingDataset
    from streamloader.pytorch.device import to_device as to_device
    from streamloader.stats import Stats as Stats

__version__ = "0.2.0"

# The names of each module. No submodule may have one of them: importing it would replace the name here.
_PUBLIC = {
    "conversion.api": "convert",
    "format.dataset": "Dataset open",
    "format.manifest": "Field",
    "format.writer": "Writer",
    "maintenance.append": "append",
    "maintenance.columns": "add_columns",
    "maintenance.delete": "delete",
    "maintenance.export": "export",
    "maintenance.verify": "verify",
    "maintenance.versions": "diff log",
    "metrics.losses": "LossLog",
    "options": "Cache Channels Clips Decode Join Layout Pack Pad Patch RetryPolicy Shuffle Window",
    "loader.arguments": "Source",
    "loader.dataset": "NumpyDataset",
    "loader.jax": "jax_batches",
    "loader.tensorflow": "tf_dataset",
    "pytorch.dataset": "Mixture StreamingDataset",
    "pytorch.device": "to_device",
    "stats": "Stats",
}
__all__ = ["__version__", "errors", *" ".join(_PUBLIC.values()).split()]  # noqa: PLE0604 - strings


def load_ipython_extension(ipython: Any) -> None:
    """Let a notebook show batches, which are plain dicts, as HTML: `%load_ext streamloader`."""
    from streamloader.show.render import batch_html

    ipython.display_formatter.formatters["text/html"].for_type(dict, batch_html)


if not TYPE_CHECKING:  # which would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name == "metrics":  # a module of its own, whose names are not among these
            return import_module("streamloader.metrics")
        for module, names in _PUBLIC.items():
            if name in names.split():
                return getattr(import_module(f"streamloader.{module}"), name)
        raise AttributeError(f"module 'streamloader' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "metrics"})
