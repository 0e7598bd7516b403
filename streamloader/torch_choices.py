"""What the arguments of `StreamingDataset` mean for a dataset: checked, and filled in from its manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from streamloader.decode.image import ENCODINGS, ImageDecoder
from streamloader.errors import BatchError, FieldError, UsageError
from streamloader.format.geometry import BLOCKS, nearest_power, next_power, order_pin
from streamloader.format.manifest import Field, Manifest, OrderPin
from streamloader.options import REMAINDERS, Decode, Shuffle, parse_size
from streamloader.plan.cursor import ORDER_NAMES
from streamloader.plan.order import OrderParams
from streamloader.plan.selection import Selection
from streamloader.plan.world import Part
from streamloader.torch_tensors import OFFSETS

DecodeChoice = None | bool | str | Decode | Mapping[str, "Decode | str | bool"]


def check_arguments(
    batch_size: int | None,
    remainder: str,
    transform: object,
    transform_workers: int,
    shuffle: object,
    *,
    on_batch: object,
) -> None:
    """Raise `UsageError` for what is wrong whatever the dataset is."""
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise BatchError(f"batch_size={batch_size!r}", "give a whole number of at least 1, or None for samples")
    if remainder not in REMAINDERS:
        raise UsageError(f"remainder={remainder!r}", f"choose one of {', '.join(REMAINDERS)}")
    if transform is not None and not callable(transform):
        raise UsageError(f"transform={transform!r} cannot be called", "give a function of a sample")
    if transform_workers < 0 or (transform_workers and transform is None):
        raise UsageError(
            f"transform_workers={transform_workers} with transform={transform}", "give both, or transform_workers=0"
        )
    if not isinstance(shuffle, bool | Shuffle):
        windowed = isinstance(shuffle, int) and shuffle > 1
        raise UsageError(
            f"shuffle={shuffle!r:.60} is neither a bool nor a Shuffle",
            f"give True, False, or {f'Shuffle(window={shuffle})' if windowed else 'Shuffle(window=, lanes=, block=)'}",
        )
    if on_batch is not None and not callable(on_batch):
        raise UsageError(f"on_batch={on_batch!r} cannot be called", "give a function of a BatchReport")


def check_steps(steps: int, batch_size: int | None, remainder: str) -> None:
    """Raise `UsageError` for a `steps_per_epoch` that is no number of steps, or where ranks would lose step."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps_per_epoch={steps!r}", "give a whole number of at least 1")
    if batch_size is None:
        raise UsageError(f"steps_per_epoch={steps} with batch_size=None", "give a batch_size: a step is a batch")
    if remainder == "uneven":
        raise UsageError(
            f"steps_per_epoch={steps} with remainder='uneven', where ranks have different numbers of steps",
            "choose 'pad' or 'drop'",
        )


def choose_memory(memory: int | str | None) -> int | None:
    """Return `memory` in bytes, also of text like "2GiB". Raises `UsageError`."""
    if memory is None:
        return None
    try:
        return parse_size(memory)
    except UsageError:
        raise UsageError(f"memory={memory!r}", "give bytes, at least 1, or text like '2GiB' or '500MB'") from None


def check_batch(batch_size: int, num_samples: int, url: str) -> None:
    """Raise `BatchError` for a batch that the dataset cannot fill; one sample is enough for an empty one."""
    if batch_size > max(1, num_samples):
        raise BatchError(
            f"batch_size={batch_size} is more than the {num_samples} samples of {url}",
            "give a batch_size that the dataset can fill",
        )


def check_epoch(epoch: int) -> None:
    """Raise `UsageError` for what is no number of an epoch."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < 2**63:
        raise UsageError(f"set_epoch({epoch!r})", "give a whole number of at least 0, below 2**63")


def choose_fields(
    manifest: Manifest, wanted: Sequence[str] | None, with_index: bool, with_valid: bool
) -> tuple[str, ...]:
    """Return the fields to fetch. Raises `FieldError` for an unknown one, or a name that a column of the batch has."""
    if isinstance(wanted, str):
        raise FieldError(f"fields={wanted!r}", f"give a list: fields=[{wanted!r}]")
    names = tuple(manifest.fields) if wanted is None else tuple(wanted)
    for name in names:
        if name not in manifest.fields:
            raise FieldError(f"there is no field {name!r}", f"choose from {', '.join(manifest.fields)}")
        if names.count(name) > 1:
            raise FieldError(f"fields names {name!r} {names.count(name)} times", "name each field once")
    ragged = [name for name in names if manifest.fields[name].field.kind == "ragged"]
    columns = {*(name + OFFSETS for name in ragged), *(("index",) * with_index), *(("valid",) * with_valid)}
    for name in names:
        if name in columns:
            raise FieldError(
                f"the dataset has a field {name!r}, and the batch a column of that name",
                "leave the field out with fields=, or choose with_index=False or another remainder",
            )
    return names


def choose_decoders(fields: Mapping[str, Field], choice: DecodeChoice) -> dict[str, ImageDecoder]:
    """Return the decoder of each image field. Raises `FieldError` where there is nothing to decode."""
    if choice is None or choice is False:
        return {}
    images = [name for name, field in fields.items() if field.kind == "bytes" and field.encoding in ENCODINGS]
    each = dict(choice) if isinstance(choice, Mapping) else dict.fromkeys(images, choice)
    for name in each:
        if name not in fields or fields[name].kind != "bytes":
            raise FieldError(
                f"decode names {name!r}, which is no bytes field that is fetched",
                f"choose from {', '.join(images) or 'none'}",
            )
    if not each and not isinstance(choice, Mapping):
        raise FieldError(
            f"decode={choice!r}, and no field holds encoded images",
            "leave decode out, or name the field in decode={...}",
        )
    chosen = {name: _decode_options(value) for name, value in each.items() if value is not False}
    return {name: ImageDecoder.choose(options, name) for name, options in chosen.items()}


def choose_layouts(decoders: Mapping[str, ImageDecoder], transformed: bool) -> frozenset[str]:
    """Return the image fields of which tensors have the channels first.

    Raises `UsageError` where that is asked for of images that a transform gets and returns as it likes.
    """
    if not transformed:
        return frozenset(name for name, decoder in decoders.items() if decoder.options.channels_first)
    for name, decoder in decoders.items():
        if decoder.options.layout == "CHW":
            raise UsageError(
                f"Decode(layout='CHW') of {name!r} with a transform, which gets height x width x channels",
                "leave layout out, and let the transform return image.transpose(2, 0, 1)",
            )
    return frozenset()


def _decode_options(value: Decode | str | bool) -> Decode:
    if isinstance(value, Decode):
        return value
    return Decode() if value is True else Decode(backend=value)  # type: ignore[arg-type]


def choose_order(manifest: Manifest, shuffle: bool | Shuffle, selection: Selection | None) -> OrderParams:
    """Return the manifest's order, with what `Shuffle` overrides. Raises `UsageError` for a block that cuts chunks.

    A selection is cut like a dataset of its size: a block of it takes about the bytes of a block of the dataset, or
    less where it is small, and its lanes and window follow from that.
    """
    wish = shuffle if isinstance(shuffle, Shuffle) else Shuffle()
    pinned = manifest.order if selection is None else _order_of(manifest, selection, wish.block)
    block = wish.block or pinned.block
    window = wish.window or max(pinned.window // block, 2 if wish.block is None else 4) * block
    check_block(manifest, block, selection)
    return OrderParams(block, wish.lanes or pinned.lanes, window)


def check_block(manifest: Manifest, block: int, selection: Selection | None) -> None:
    """Raise `UsageError` for a block that cuts chunks; samples of a selection begin anywhere in a chunk."""
    chunk = largest_chunk(manifest)
    if selection is None and block % chunk:
        raise UsageError(f"Shuffle(block={block}) cuts chunks of {chunk} samples", f"give a multiple of {chunk}")


def chosen_names(shuffle: bool | Shuffle) -> tuple[str, ...]:
    """Return which parameters of the order the caller gives: a state must have the same."""
    wish = shuffle if isinstance(shuffle, Shuffle) else Shuffle()
    return tuple(name for name in ORDER_NAMES if getattr(wish, name) is not None)


def largest_chunk(manifest: Manifest) -> int:
    """Return the samples of the largest chunk over the bulk fields; 1 where all fields are resident."""
    return max((layout.chunk for layout in manifest.fields.values() if not layout.resident), default=1)


def _order_of(manifest: Manifest, selection: Selection, block: int | None) -> OrderPin:
    """The order of the selected samples, in blocks of so many of them (None: as suits how dense they lie)."""
    count, chunk = len(selection), largest_chunk(manifest)
    if block is None:
        touched = selection.samples // chunk
        each = count / (1 + np.count_nonzero(touched[1:] != touched[:-1]))  # selected samples of a chunk
        usual = nearest_power(each * manifest.order.block / chunk)
        block = max(nearest_power(each), min(usual, next_power(count) // BLOCKS))
    decoded = sum(layout.nbytes for layout in manifest.fields.values()) * count // manifest.num_samples
    found = order_pin(count, block, decoded)
    return replace(found, lanes=min(found.lanes, manifest.order.lanes))


def check_share(share: Part) -> None:
    """Raise `BatchError` where the last, incomplete step is the only one, and is to be dropped."""
    if share.remainder == "drop" and share.num_samples and not share.global_steps(0):
        raise BatchError(
            f"{share.world.size} consumers with batch_size={share.batch} take {share.global_batch} samples at once, "
            f"the dataset has {share.num_samples}, and remainder='drop' leaves nothing",
            "give a smaller batch_size, or another remainder",
        )
