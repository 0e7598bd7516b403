"""Forecasts what training on a dataset takes: memory, requests, cost, and how well batches mix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from streamloader.engine.dataset import Dataset
from streamloader.engine.engine import Engine
from streamloader.engine.stages import LoaderConfig
from streamloader.errors import UsageError
from streamloader.options import Shuffle
from streamloader.order.epoch_order import EpochOrder, lanes_for_world
from streamloader.order.schedule import Share, World
from streamloader.pytorch.arguments import Source, WhereChoice, choose_order, open_dataset, read_shuffle, read_where
from streamloader.storage import open_store

STEPS = 16  # that are looked at: their spread is a few percent
MAX_EXAMINED = 1 << 27  # arrivals, about: a second or two; of an order with long windows fewer steps are looked at


@dataclass(frozen=True)
class Mixing:
    """Of batches of `rows` rows: the mean number of distinct `blocks`, and with how many rows a row shares its own.

    For rows drawn evenly from n blocks `sharing` is (rows - 1) / n. `alike` is the probability that two samples drawn
    from the whole epoch share a block.
    """

    rows: int
    blocks: float
    sharing: float
    alike: float = 0.0

    def design_effect(self, correlation: float) -> float:
        """Return the variance of a batch's mean, around that of the epoch, over that of as many independent rows.

        `correlation` is that of two rows of one block: 1 where all are alike (a source in class order), 0 where the
        source was shuffled. With many blocks it is 1 + correlation * sharing: Kish, Survey Sampling (1965), for
        clusters; few blocks are a finite population, of which a batch that has them all in proportion is the mean.
        """
        if self.alike >= 1:  # one block, which is shuffled whole
            return 1.0
        spread = 1 + correlation * (self.sharing - self.rows * self.alike)
        return max(0.0, spread / (1 - correlation * self.alike))


def mixings(shares: Sequence[Share]) -> list[Mixing]:
    """Look at whole batches of ranks, or groups of them, evenly spread over the epoch; the only one where there is one.

    The ranks take the same steps: each step's order is computed once.
    """
    first, order, size = shares[0], shares[0].order, shares[0].num_samples
    steps = first.global_steps(0)
    work = min(2 * order.params.window, size) * order.lanes + first.global_batch
    count = max(2, min(STEPS, MAX_EXAMINED // max(1, work)))
    chosen = np.unique(np.linspace(0, max(0, steps - 2), count).astype(np.int64)).tolist() if steps else []
    found = np.zeros((len(shares), 3))
    for position in (step * first.global_batch for step in chosen):
        blocks = order.samples_at(position, min(size, position + first.global_batch)) // order.params.block
        for number, share in enumerate(shares):
            source = share.source(share.positions(position)) - position
            if not source.size or source.min() >= 0:
                rows = blocks[source]
            else:  # padded rows repeat those of the step before
                rows = share.samples(position) // order.params.block
            counts = np.unique(rows, return_counts=True)[1]
            found[number] += rows.size, counts.size, (counts * (counts - 1)).sum()
    full, last = divmod(size, order.params.block)
    alike = (full * order.params.block**2 + last**2) / max(1, size) ** 2
    pairs = zip(shares, found.tolist(), strict=True)
    return [
        Mixing(one.batch, blocks / max(1, len(chosen)), met / max(1, rows), alike) for one, (rows, blocks, met) in pairs
    ]


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
            problem = f"ranks_here={self.ranks_here}, dollars_for_a_get={self.dollars_for_a_get}"
            raise UsageError(problem, "give at least one rank, and no negative price")


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
    source = Source(url, options.split, storage_options=options.storage_options)
    dataset = open_dataset(source, condition, options.fields, ("valid",))
    count = dataset.num_samples
    config = read_shuffle(options.shuffle)
    params = pinned = choose_order(dataset.manifest, config, dataset.selection)
    if config.lanes is None:
        params = replace(pinned, lanes=lanes_for_world(count, pinned, world.size))
    order = EpochOrder(count, params, 0, 0, options.shuffle is not False)
    share = Share(order, options.batch_size, world, "pad", dataset.unit(params))
    engine = Engine([dataset], LoaderConfig(memory=options.memory, ranks_here=options.ranks_here))
    params, need = share.fetch_params, share.need()
    held, budget = engine.plan_memory(need)
    together = replace(share, batch=share.global_batch, world=World(0, 1))
    mixed = mixings((share, together))
    factor = share.read_factor if order.shuffle else _readers_of_a_unit(params.block, share)
    streamed = _runs(dataset, [name for name in dataset.names if name not in held], params.block)
    whole = _runs(replace(dataset, selection=None), held, max(1, dataset.manifest.num_samples))
    requests, size = (round(many * factor + once * world.size) for many, once in zip(streamed, whole, strict=True))
    return Forecast(
        url=open_store(url, options.storage_options).url,
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
        least_memory=engine.least_memory(need),
        held=tuple(held),
        requests=requests,
        bytes=size,
        dollars=requests * options.dollars_for_a_get,
        rank=mixed[0],
        together=mixed[1],
        pinned_lanes=pinned.lanes if order.shuffle else 1,
        shuffle=order.shuffle,
        memory_alone=engine.least_memory(replace(together, batch=share.batch).need()),
        drawn=_drawn(share, params.block),
    )


def _readers_of_a_unit(unit: int, share: Share) -> float:
    """How many ranks read the same `unit` samples where they take runs of a batch in turn."""
    if share.batch % unit == 0:
        return 1.0
    runs = unit / share.batch if unit % share.batch == 0 else 1 + (unit - 1) / share.batch
    return min(float(share.world.size), runs)


def _runs(dataset: Dataset, names: Sequence[str], block: int) -> tuple[float, float]:
    """Return (requests, bytes) of some fields for one pass in blocks."""
    starts = range(0, dataset.num_samples, block)
    chosen = np.unique(np.linspace(0, max(0, len(starts) - 1), MAX_BLOCKS).astype(np.int64)).tolist() if starts else []
    sizes = []
    for start in (starts[number] for number in chosen):
        stop = min(start + block, dataset.num_samples)
        sizes += [run.stop - run.start for name in names for run in dataset.runs(name, start, stop)]
    times = len(starts) / max(1, len(chosen))
    return len(sizes) * times, sum(sizes) * times


def _drawn(share: Share, block: int) -> tuple[tuple[int, ...], ...]:
    step = share.global_batch
    stop = min(share.num_samples, DRAWN_STEPS * step, DRAWN_ROWS)
    blocks = share.order.samples_at(0, stop) // block
    return tuple(tuple(blocks[begin : begin + step].tolist()) for begin in range(0, stop, step))
