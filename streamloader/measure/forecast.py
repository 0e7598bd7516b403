"""What training on a dataset will take, told before it starts: memory, requests, cost, and how well batches mix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from streamloader.engine.passes import Need
from streamloader.engine.session import Opened, Session, Wish
from streamloader.errors import UsageError
from streamloader.format.reader import FieldReader, field_reader, open_manifest
from streamloader.options import Shuffle
from streamloader.plan.mixing import Mixing, mixings
from streamloader.plan.order import EpochOrder, OrderParams, lanes_for_world
from streamloader.plan.selection import Selection
from streamloader.plan.world import Share, World
from streamloader.storage import open_store
from streamloader.torch_choices import choose_fields, choose_order, chosen_names
from streamloader.torch_selection import WhereChoice, choose_selection, read_where

# S3 standard storage, us-east-1, November 2026: 0.40 USD for a million GETs; traffic within the region is free.
DOLLARS_FOR_A_GET = 0.4e-6
# Of a larger dataset so many blocks are looked at, evenly spread, and stand for the others.
MAX_BLOCKS = 1024
DRAWN_STEPS = 64
DRAWN_ROWS = 1 << 16


@dataclass(frozen=True)
class ForecastOptions:
    """What is planned; `batch_size` is that of a rank, `ranks_here` how many ranks share a machine's memory."""

    world_size: int = 1
    batch_size: int = 256
    fields: tuple[str, ...] | None = None
    split: str | None = None
    where: WhereChoice = None
    shuffle: bool | Shuffle = True
    memory: int | None = None
    ranks_here: int = 1
    dollars_for_a_get: float = DOLLARS_FOR_A_GET
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ranks_here < 1 or self.dollars_for_a_get < 0:
            raise UsageError(
                f"ranks_here={self.ranks_here}, dollars_for_a_get={self.dollars_for_a_get}",
                "give at least one rank, and no negative price",
            )


@dataclass(frozen=True)
class Forecast:
    """What `options` take on the dataset at `url`; bytes and requests are those of one epoch over all ranks.

    `memory` and `least_memory`: what the loader of a rank takes at most and at least. `held`: fields that every rank
    keeps whole. `rank` and `together`: how the batch of a rank and the global one mix. `drawn`: for the first steps,
    the block of each row of the global batch. `lanes` are those of a run that begins on these ranks, `pinned_lanes` the
    dataset's; `memory_alone` is the least that a single rank takes which goes on with such a run.
    """

    url: str
    num_samples: int
    world_size: int
    batch_size: int
    block: int
    lanes: int
    window: int
    blocks: int
    steps: int
    read_factor: float
    memory: int
    least_memory: int
    held: tuple[str, ...]
    requests: int
    bytes: int
    dollars: float
    rank: Mixing
    together: Mixing
    pinned_lanes: int
    shuffle: bool
    memory_alone: int
    drawn: tuple[tuple[int, ...], ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able values, without what is drawn."""
        found = asdict(self)
        del found["drawn"]
        for name, one in (("rank", self.rank), ("together", self.together)):
            found[name]["design_effect"] = one.design_effect(1.0)
        return found


def forecast(url: str, options: ForecastOptions) -> Forecast:
    """Plan an epoch without reading a sample; but a condition of `where` reads the small fields that it names.

    Raises as opening does; `FieldError`, `WorldError`, `BatchError`, `SelectionError` or `UsageError` for options that
    cannot be, and `MemoryBudgetError` where the window does not fit.
    """
    world, condition = World(0, options.world_size), read_where(options.where)  # before anything is read
    store = open_store(url, options.storage_options)
    manifest, place = open_manifest(store, options.split)
    names = choose_fields(manifest, options.fields, with_index=False, with_valid=True)
    selection = choose_selection(condition, manifest, place)
    count = manifest.num_samples if selection is None else len(selection)
    params = pinned = choose_order(manifest, options.shuffle, selection)
    if "lanes" not in chosen_names(options.shuffle):
        params = replace(pinned, lanes=lanes_for_world(count, pinned, world.size))
    order = EpochOrder(count, params, 0, 0, options.shuffle is not False)
    share = Share(order.num_samples, order.lanes, options.batch_size, world, "pad")
    readers = {name: field_reader(place, manifest, name) for name in names}
    opened = Opened(place, readers, manifest.num_samples, selection)
    session = Session([opened], Wish(memory=options.memory, ranks_here=options.ranks_here))
    if not order.shuffle:
        unit = opened.unit(params)
        params = OrderParams(unit, 1, 2 * unit)
    need = Need.of(params, share)
    held, budget = session.plan_memory(need)
    together = replace(share, batch=share.global_batch, world=World(0, 1))
    mixed = mixings(order, (share, together))
    factor = share.read_factor if order.shuffle else _readers_of_a_unit(params.block, share)
    streamed = _runs([reader for name, reader in readers.items() if name not in held], params.block, count, selection)
    whole = _runs([readers[name] for name in held], max(1, manifest.num_samples), manifest.num_samples)
    requests, size = (round(many * factor + once * world.size) for many, once in zip(streamed, whole, strict=True))
    return Forecast(
        url=store.url,
        num_samples=count,
        world_size=options.world_size,
        batch_size=options.batch_size,
        block=params.block,
        lanes=order.lanes,
        window=params.window,
        blocks=-(-count // params.block),
        steps=share.global_steps(0),
        read_factor=factor,
        memory=budget.bytes,
        least_memory=session.least_memory(need),
        held=tuple(held),
        requests=requests,
        bytes=size,
        dollars=requests * options.dollars_for_a_get,
        rank=mixed[0],
        together=mixed[1],
        pinned_lanes=pinned.lanes if order.shuffle else 1,
        shuffle=order.shuffle,
        memory_alone=session.least_memory(Need.of(params, replace(together, batch=share.batch))),
        drawn=_drawn(order, share, params.block),
    )


def _readers_of_a_unit(unit: int, share: Share) -> float:
    """How many ranks read the same `unit` samples where they take runs of a batch in turn."""
    if share.batch % unit == 0:
        return 1.0
    runs = unit / share.batch if unit % share.batch == 0 else 1 + (unit - 1) / share.batch
    return min(float(share.world.size), runs)


def _runs(
    readers: Sequence[FieldReader], block: int, count: int, selection: Selection | None = None
) -> tuple[float, float]:
    """Return (requests, bytes) of one pass in blocks over `count` samples, perhaps of a selection."""
    starts = range(0, count, block)
    chosen = np.unique(np.linspace(0, max(0, len(starts) - 1), MAX_BLOCKS).astype(np.int64)).tolist() if starts else []
    sizes = []
    for start in (starts[number] for number in chosen):
        stop = min(start + block, count)
        for reader in readers:
            runs = reader.runs(start, stop) if selection is None else reader.runs_of(selection.samples[start:stop])
            sizes += [run.stop - run.start for run in runs]
    times = len(starts) / max(1, len(chosen))
    return len(sizes) * times, sum(sizes) * times


def _drawn(order: EpochOrder, share: Share, block: int) -> tuple[tuple[int, ...], ...]:
    step = share.global_batch
    stop = min(order.num_samples, DRAWN_STEPS * step, DRAWN_ROWS)
    blocks = order.samples_at(0, stop) // block
    return tuple(tuple(blocks[begin : begin + step].tolist()) for begin in range(0, stop, step))
