"""How the columns of a loader are shown, in notebooks and by `streamloader view`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from streamloader.loader.arguments import leftmost
from streamloader.options import Sampling
from streamloader.show.cells import Looks
from streamloader.show.render import Shown, show_table
from streamloader.show.render import show_batch as render_batch

if TYPE_CHECKING:
    from streamloader.loader.base import Loader

BOXES = "boxes", "bbox"  # the names of a field of boxes, x, y, width and height, that needs no Decode(boxes=)


def looks_of(loader: Loader, tokens: Callable[[Sequence[int]], Sequence[str]] | None = None) -> Looks:
    """Return how the columns of a loader are shown. `tokens`: returns the texts of token numbers."""
    decoders = loader._config.decoders
    images: dict[str, Any] = {}
    for name, decoder in decoders.items():
        views = decoder.options.views or {}
        columns = [f"{name}_{view}" for view in views] or [name]
        images |= dict.fromkeys(columns, decoder.options.normalization)
    boxes = {
        name: (decoder.options.boxes, decoder.options.box_format == "xyxy")
        for name, decoder in decoders.items()
        if decoder.options.boxes
    }
    from streamloader.images.decode import ENCODINGS

    encoded = [name for name, field in loader.fields.items() if field.encoding in ENCODINGS]
    named = [name for name in BOXES if name in loader.fields]
    if not boxes and named and len(encoded) == 1:
        boxes = {encoded[0]: (named[0], False)}
    return Looks(loader.classes, images, boxes, tokens, loader.fields.keys(), dict(_axes(loader)))


def _axes(loader: Loader) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each column of arrays in place, and what its elements are along each axis but the last two.

    These are names of channels, times such as t-1, in elements before the present one, or the first one of windows
    without targets, and indices of other dimensions. Of a mixture, those of the first source.
    """
    arrays, source = loader._datasets[0].arrays, leftmost(loader._sources[0])
    stacked = Sampling(**{name: getattr(source, name) for name in vars(Sampling())}).columns
    for column in () if arrays is None else arrays.columns.values():
        for output in column.outputs:
            inputs = column.outputs[0].parts[0]
            present = inputs.offset + (inputs.length - 1) * inputs.step * (len(column.outputs) > 1)
            times = [  # in the direction of time, in which steps may be below 0
                (part.offset + i * part.step - present) * (1 if part.step > 0 else -1)
                for part in output.parts
                for i in range(part.length)
            ]
            sizes = {**column.lengths, **column.sizes}
            axes: list[Iterable[str]] = [
                (f"t{time:+}" if time else "t" for time in times)
                if dim == column.sample_axis
                else _indices(dim, sizes[dim])
                for dim in column.dims
            ]
            if column.channels:
                axes.insert(column.channel_axis, stacked[column.name].names)
            if not times and column.sample_axis in column.dims:
                del axes[column.sample_position]
            yield output.name, [list(axis) for axis in axes[:-2]]


def _indices(dim: str, size: int) -> Iterator[str]:
    return (f"{dim}[{index}]" for index in range(size))


def show_step(loader: Loader, at: tuple[int, int, int | None], most: int) -> Shown:
    """Return a step of a rank, at (epoch, step, rank), as it is trained, and its first `most` samples."""
    epoch, step, rank = at
    own = object.__new__(type(loader))
    own.__dict__.update(loader.__getstate__())  # a copy without threads, as a worker would get: the pass goes on
    try:
        batch = next(own.replay(epoch, [step], rank=rank))
    finally:
        own.close()
    of_rank = f", rank {loader._rank.rank if rank is None else rank} of {loader._rank.size}"
    return show_batch(own, batch, most, f"epoch {epoch}, step {step}{of_rank}")


def show_batch(loader: Loader, batch: Mapping[str, Any], most: int, title: str = "") -> Shown:
    """Return the first `most` samples of a batch of a loader."""
    return render_batch(batch, looks_of(loader), title, most)


def fields_table(loader: Loader) -> Shown:
    """Return the fields of a loader as a table."""
    rows = [
        (name, str(field), f"{len(loader.classes[name]):,} classes" if name in loader.classes else "")
        for name, field in loader.fields.items()
    ]
    return show_table(repr(loader).partition("(")[0] + f": {len(loader):,} batches", ("field", "type", ""), rows)
