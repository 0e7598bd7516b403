"""Forecasts the memory and requests of training on a dataset or a mixture, and how well its batches mix."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from streamloader.engine.dataset import Dataset, numbers_among_all, table_bytes
from streamloader.engine.engine import Engine
from streamloader.engine.stages import LoaderConfig
from streamloader.errors import FieldError, MixtureError, UsageError
from streamloader.format.geometry import next_power, previous_power
from streamloader.loader.arguments import ClipsChoice, ExcludeChoice, Source, WeightsChoice, WhereChoice
from streamloader.loader.dataset import NumpyDataset, NumpyMixture
from streamloader.measure.arrays import (
    SAMPLED_BLOCKS,
    WORTH_CONVERTING,
    ArrayReads,
    Rechunking,
    array_reads,
    rechunking,
)
from streamloader.measure.cache import CacheForecast, forecast_cache
from streamloader.options import Join, Pack, Sampling, Shuffle
from streamloader.order.epoch_order import MIN_BLOCKS_PER_LANE, EpochOrder, OrderParams
from streamloader.order.mixture import MixShare
from streamloader.order.schedule import EpochShare, Share, World
from streamloader.stats import Counters
from streamloader.storage import open_store

STEPS = 16  # steps that are sampled: the error of their mean is a few percent
PADDED_STEPS = 256  # steps whose padding is counted: a few with long samples have most of it
WELL_MIXED = 2.0  # the design effect from which on more lanes are worth their memory
MAX_LANES = 64  # that a plan names
MAX_EXAMINED = 1 << 27  # arrivals, which take one or two seconds: with long windows, fewer steps are sampled


@dataclass(frozen=True)
class Mixing:
    """How well batches of `rows` rows mix.

    `blocks`: the mean number of distinct blocks in a batch. `design_effect`: the variance of a batch's mean around the
    epoch's mean, relative to that of independent rows, if the rows of a block are equal, as in a source that is sorted
    by class.
    """

    rows: int
    blocks: float
    design_effect: float


@dataclass(frozen=True)
class Copies:
    """What the first epoch draws by weights: so many different `samples`, one of them `most` times.

    `shares`: the share of each class in its draws, by number or name, if weights are of classes.
    """

    samples: int
    most: int
    shares: Mapping[str, float]


@dataclass(frozen=True)
class PackedRows:
    """The rows of `length` elements that `documents` are packed into, of which `padding` is the share of padding.

    `dropped`: the documents that are left out, since they are longer than a row.
    """

    length: int
    documents: int
    dropped: int
    padding: float


@dataclass(frozen=True)
class MoreLanes:
    """The number of lanes with which batches mix better: the design effect of a rank's, and the memory it needs."""

    lanes: int
    design_effect: float
    memory: int


def design_effect(rows: int, sharing: float, alike: float, met: float) -> float:
    """Return the design effect of batches of `rows` rows from blocks of equal rows.

    `sharing`: the mean number of other rows of the batch from the block of a row; (rows - 1) / n for rows drawn
    uniformly from n blocks. `alike`: the probability that two samples drawn from the whole epoch are of one block.
    `met`: the probability that a row of these batches and a sample drawn from the whole epoch are. With many blocks,
    the result is 1 + sharing (Kish, Survey Sampling, 1965, for clusters). Few blocks are a finite population: the mean
    of a batch that has all of them in proportion equals that of the epoch.
    """
    if alike >= 1:  # one block, which is shuffled completely
        return 1.0
    return max(0.0, (1 + sharing - rows * (2 * met - alike)) / (1 - alike))


def mixings(shares: Sequence[Share]) -> list[Mixing]:
    """Return how well the batches of each share mix, from steps that are spread evenly over the epoch.

    The shares must have the same steps, so that the order of each step is computed once. The last step, which may not
    be full, is left out unless it is the only one.
    """
    first, order, size = shares[0], shares[0].order, shares[0].num_samples
    steps = first.global_steps(0)
    examined = min(2 * order.params.window, size) * order.lanes + first.global_batch
    count = max(2, min(STEPS, MAX_EXAMINED // max(1, examined)))
    chosen = _spread(count, steps - 1 if steps > 1 else steps)
    full, last = divmod(size, order.params.block)
    # rows, distinct blocks, ordered pairs of rows of one block, and probabilities to meet a sample of the epoch
    totals = np.zeros((len(shares), 4))
    for position in (first.after(0, step) for step in chosen):
        blocks = order.samples_at(position, min(size, position + first.global_batch)) // order.params.block
        for number, share in enumerate(shares):
            source = share.source(share.positions(position)) - position
            if not source.size or 0 <= source.min() <= source.max() < blocks.size:
                rows = blocks[source]
            else:  # padded rows repeat those of the previous step, and buckets exchange those of several
                rows = share.samples(position) // order.params.block
            distinct, counts = np.unique(rows, return_counts=True)
            samples = np.where(distinct == full, last, order.params.block)  # of each of these blocks
            totals[number] += rows.size, counts.size, (counts * (counts - 1)).sum(), counts @ samples / max(1, size)
    alike = (full * order.params.block**2 + last**2) / max(1, size) ** 2
    mixed = []
    for share, (taken, spread, pairs, met) in zip(shares, totals.tolist(), strict=True):
        batch = share.batch if share.budget is None else round(taken / max(1, len(chosen)))
        effect = design_effect(batch, pairs / max(1, taken), alike, met / max(1, taken))
        mixed.append(Mixing(batch, spread / max(1, len(chosen)), effect))
    return mixed


def _spread(count: int, size: int) -> list[int]:
    """Return up to `count` distinct integers that are spread evenly over [0, size), with both ends."""
    return [int(number) for number in np.unique(np.linspace(0, size - 1, min(count, size)).astype(np.int64))]


MAX_BLOCKS = 1024  # blocks that are sampled, evenly spread, for the requests of a larger dataset
DRAWN_STEPS = 64
DRAWN_ROWS = 1 << 16


@dataclass(frozen=True)
class ForecastOptions:
    """Options of `forecast`. Raises `UsageError` for invalid numbers.

    `batch_size`: the samples of a rank's batch. `memory`: bytes, as in `StreamingDataset`. `ranks_here`: the number of
    ranks that share the memory of a machine. `join`, `on`: the right side of a `Join` of each URL, and its key.
    `cache`: the limit of a cache on each machine, in bytes.
    """

    world_size: int = 1
    batch_size: int = 256
    fields: tuple[str, ...] | None = None
    split: str | None = None
    where: WhereChoice = None
    exclude: ExcludeChoice = None
    weights: WeightsChoice = None
    replacement: bool = True
    shuffle: bool | Shuffle = True
    memory: int | None = None
    ranks_here: int = 1
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    bucket_by: str | None = None
    bucket_steps: int = 100
    max_tokens: int | None = None
    pack: Mapping[str, Pack | int] | None = None
    clips: ClipsChoice = None
    join: str | None = None
    on: str | tuple[str, str] | None = None
    cache: int | None = None

    def __post_init__(self) -> None:
        if self.ranks_here < 1:
            raise UsageError(f"ranks_here={self.ranks_here}", "give at least one rank")
        if self.on is not None and self.join is None:
            raise UsageError(f"on={self.on!r} without join=", "give the URL of the dataset to join, or leave on= out")

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `StreamingDataset` and `Mixture` for the first rank."""
        names = "batch_size", "fields", "shuffle", "memory", "pack", "bucket_by", "bucket_steps", "max_tokens", "clips"
        return {name: getattr(self, name) for name in names} | {"world": (0, self.world_size)}

    def source(self, url: str) -> Source:
        """Return the source at a URL."""
        chosen = {name: getattr(self, name) for name in ("exclude", "weights", "replacement")} | vars(self.sampling)
        joined = url if self.join is None else Join(url, self.join, on=self.on)
        return Source(joined, self.split, self.where, self.storage_options, **chosen)


@dataclass(frozen=True, kw_only=True)
class EpochForecast:
    """The forecast of an epoch over all ranks.

    `held`: the fields that every rank holds in memory. `max_tokens`: the budget of a batch; `batch_size` is the most
    samples that it has. `kept`: the share of the blocks that every rank keeps in memory
    for later epochs, from 0 to 1. `requests`, `bytes`: those of all ranks in the first epoch. `memory`: the bytes that
    the loader of a rank may use. `least_memory`: the least that it needs.
    """

    num_samples: int
    world_size: int
    batch_size: int
    max_tokens: int | None
    steps: int
    memory: int
    least_memory: int
    held: tuple[str, ...]
    kept: float
    requests: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Forecast(EpochForecast):
    """The forecast of an epoch on the dataset at `url`.

    `block`, `lanes`, `window`: the order of a new run on these ranks. `pinned_lanes`: the lanes of the dataset.
    `rank`, `together`: how the batch of a rank and the global batch mix; `better`: lanes with which they mix better.
    `copies`: what is drawn by weights. `padding`: the share of padding in the batches of a rank, in buckets and
    without; None if there are no buckets. `packed`: how documents are packed, for a dataset whose samples are packed
    rows.
    `drawn`: the block of each row of the first global batches. `arrays`: what is read of each array, for a dataset that
    is read as arrays, `unused` the elements of each axis that no sample reads, and `rechunking` the conversion after
    which less is read or batches mix better. `memory_alone`: the least memory that a single rank needs to resume such a
    run. `cache`: what a cache on each machine has in later epochs.
    """

    url: str
    block: int
    lanes: int
    window: int
    blocks: int
    read_factor: float
    rank: Mixing
    together: Mixing
    better: MoreLanes | None
    pinned_lanes: int
    shuffle: bool
    memory_alone: int
    arrays: tuple[ArrayReads, ...]
    unused: Mapping[str, int]
    rechunking: Rechunking | None
    copies: Copies | None
    cache: CacheForecast | None
    padding: tuple[float, float] | None
    packed: PackedRows | None
    drawn: tuple[tuple[int, ...], ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, without `drawn`."""
        values = super().to_dict()
        del values["drawn"]
        return values


def forecast(url: str, options: ForecastOptions) -> Forecast:
    """Forecast an epoch without reading samples. A condition of `where` reads the small fields that it names.

    Raises the errors of opening a dataset; `FieldError`, `WorldError`, `BatchError`, `SelectionError` or `UsageError`
    for invalid options; and `MemoryBudgetError` if the window does not fit in the memory.
    """
    loader = NumpyDataset(**vars(options.source(url)), **options.arguments())
    (dataset,), share = loader._datasets, loader._first_share()
    assert isinstance(share, Share)
    order, params = share.order, share.order.params
    together = replace(share, batch=share.global_batch, world=World(0, 1))
    if share.budget is not None:
        together = replace(together, budget=(share.budget[0] * share.world.size, *share.budget[1:]))
    rank_mixing, together_mixing = mixings((share, together))
    engine = _engine(loader, options)
    share = engine.widened(share)
    assert isinstance(share, Share)
    factor = (
        share.read_factor if order.shuffle else _ranks_per_unit(share.unit if dataset.arrays else params.block, share)
    )
    epoch, (reads,) = _epoch(loader, engine, share, [factor], options)
    epoch |= {"block": params.block, "lanes": order.lanes, "window": params.window, "shuffle": order.shuffle}
    return Forecast(
        **epoch,
        url=open_store(url, options.storage_options).url,
        blocks=-(-dataset.num_samples // params.block),
        read_factor=factor,
        rank=rank_mixing,
        together=together_mixing,
        better=_better(engine, share, rank_mixing.design_effect) if order.shuffle else None,
        pinned_lanes=max(loader._first.lanes, default=1),
        memory_alone=loader._engine().least_memory(replace(together, batch=share.batch)),
        arrays=tuple(reads.arrays),
        unused={} if dataset.arrays is None else dataset.arrays.unused,
        rechunking=rechunking(reads.arrays, options.sampling, mix=rank_mixing.design_effect > WORTH_CONVERTING),
        copies=_copies(dataset, options.weights),
        cache=_cache(engine, share, options),
        padding=_padding(loader._datasets, loader._first_share()),
        packed=_packed(dataset),
        drawn=_first_blocks(share, params.block),
    )


def _cache(engine: Engine, share: EpochShare, options: ForecastOptions) -> CacheForecast | None:
    """Return what a cache has in later epochs, None without one."""
    if options.cache is None:
        return None
    held, _ = engine.plan_memory(share, engine.steps_at_once(share))
    stored = sum(dataset.layouts[name].stored for dataset in engine.datasets for name in held)
    resident = stored + table_bytes(engine.datasets)
    given = {"limit": options.cache, "ranks_here": options.ranks_here, "resident": resident}
    return forecast_cache(share, engine.datasets, held, **given)


def _padding(datasets: Sequence[Dataset], share: EpochShare) -> tuple[float, float] | None:
    """Return the share of padding in batches that are padded to their longest sample, in buckets and without."""
    tables = [dataset.lengths for dataset in datasets if dataset.lengths is not None]
    if not tables or not share.global_steps(0):
        return None
    assert share.bucket is not None
    assert isinstance(share, Share | MixShare)
    fetches = share.mix.fetches if isinstance(share, MixShare) else [share.fetch_params]
    examined = sum(2 * params.window * params.lanes for params in fetches) + share.bucket[0] * share.bucket[1]
    lengths, among_all = np.concatenate(tables), numbers_among_all(datasets)
    found, count = [], max(2, min(PADDED_STEPS, MAX_EXAMINED // examined))
    for each in (share, replace(share, bucket=None, budget=None)):
        steps = _spread(count, each.global_steps(0))
        rows = [lengths[among_all(each.samples(each.after(0, step)))] for step in steps]
        padded = sum(row.size * int(row.max()) for row in rows)
        found.append(1 - sum(int(row.sum()) for row in rows) / max(1, padded))
    return found[0], found[1]


def _packed(dataset: Dataset) -> PackedRows | None:
    """Return how the documents of a dataset are packed, None if they are not."""
    if (packed := dataset.packed) is None:
        return None
    return PackedRows(
        packed.length, dataset.num_documents, packed.dropped, 1 - packed.real / (len(packed) * packed.length)
    )


def _copies(dataset: Dataset, weights: WeightsChoice) -> Copies | None:
    """Return how often the first epoch has its samples and classes, if weights are given."""
    if weights is None or dataset.selection is None:
        return None
    from streamloader.loader.weights import class_shares

    samples = dataset.selection[:]
    distinct, times = np.unique(samples, return_counts=True)
    return Copies(distinct.size, int(times.max()), class_shares(weights, dataset, samples))


def _better(engine: Engine, share: Share, effect: float) -> MoreLanes | None:
    """Return the lanes with which a design effect above `WELL_MIXED` is about that, or as many as blocks allow."""
    params, most = share.order.params, share.order.num_blocks // MIN_BLOCKS_PER_LANE
    lanes = min(
        MAX_LANES, next_power(int(params.lanes * (effect - 1) / (WELL_MIXED - 1))), previous_power(max(1, most))
    )
    if effect <= WELL_MIXED or lanes <= params.lanes:
        return None
    share = replace(share, order=replace(share.order, params=replace(params, lanes=lanes)))
    return MoreLanes(lanes, mixings((share,))[0].design_effect, engine.least_memory(share))


def _ranks_per_unit(unit: int, share: Share) -> float:
    """Return the mean number of ranks that read a unit of `unit` samples, given that ranks take batches in turn."""
    if share.batch % unit == 0:
        return 1.0
    runs = unit / share.batch if unit % share.batch == 0 else 1 + (unit - 1) / share.batch
    return min(float(share.world.size), runs)


@dataclass(frozen=True)
class SourceForecast:
    """What an epoch of a mixture takes of one source, which has `num_samples`.

    `share`: its share of the samples. `field_shares`: that of the elements of each variable-length field whose lengths
    are known. `passes`: how many times the epoch takes all its samples. `requests`, `bytes`: about those of all ranks.
    """

    url: str
    weight: float
    num_samples: int
    share: float
    field_shares: Mapping[str, float]
    passes: float
    requests: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class MixtureForecast(EpochForecast):
    """The forecast of the first epoch of a mixture.

    `schedule`: the share of each source in the samples, by the number of steps, or of what else is `schedule_by`, after
    which they are no more those of `sources`. `rereads`: why several ranks read a block, so that `requests` and `bytes`
    are the least; "" if one rank reads it. `padding`, `cache`: as in `Forecast`.
    """

    sources: tuple[SourceForecast, ...]
    schedule: tuple[tuple[int, tuple[float, ...]], ...]
    schedule_by: str
    rereads: str
    padding: tuple[float, float] | None
    cache: CacheForecast | None


def forecast_mixture(
    weights: Sequence[tuple[str, float]],
    options: ForecastOptions,
    *,
    weigh: str | None = None,
    schedule: Mapping[int, Sequence[float]] | None = None,
    schedule_by: str = "steps",
    **arguments: Any,
) -> MixtureForecast:
    """Forecast the first epoch of a mixture of URLs with `weights`. The other arguments are those of `Mixture`.

    `schedule`: weights of all URLs in their order. `options` are those of every source. Raises the errors of
    `forecast`, and `MixtureError`.
    """
    sources = {options.source(url): weight for url, weight in weights}
    later = {}
    for begin, each in sorted((schedule or {}).items()):
        if len(each) != len(sources):
            problem = f"a schedule of {len(each)} weights from {begin} {schedule_by} on, for {len(sources)} URLs"
            raise MixtureError(problem, "give a weight for each URL")
        later[begin] = dict(zip(sources, each, strict=True))
    arguments |= {"weigh": weigh, "schedule": later, "schedule_by": schedule_by}
    mixture = NumpyMixture(sources, **arguments, **options.arguments())
    share = mixture._first_share()
    assert isinstance(share, MixShare)
    counts = share.mix.counts(share.num_samples).tolist()
    passes = [count / dataset.num_samples for count, dataset in zip(counts, mixture._datasets, strict=True)]
    passes_read = list(map(_passes_read, share.mix.orders, share.mix.fetches, counts))
    engine = _engine(mixture, options)
    epoch, reads = _epoch(mixture, engine, share, passes_read, options)
    shares, field_shares = mixture.shares(), _field_shares(mixture, weigh)
    parts = []
    for number, (source, weight) in enumerate(sources.items()):
        dataset, of_fields = mixture._datasets[number], {name: each[source] for name, each in field_shares.items()}
        values = dataset.num_samples, shares[source], of_fields, passes[number]
        parts.append(SourceForecast(dataset.store.url, weight, *values, reads[number].requests, reads[number].bytes))
    shuffled = options.shuffle is not False
    in_order = "" if shuffled or share.divides else "without shuffle, ranks take parts of the same blocks"
    rereads = in_order or share.describe_rereads(shuffle=shuffled)
    padding = _padding(mixture._datasets, share)
    scheduled = tuple((begin, tuple(mixture.shares(step=begin).values())) for begin in later)
    shown: dict[str, Any] = {"schedule": scheduled, "schedule_by": schedule_by, "rereads": rereads, "padding": padding}
    shown["cache"] = _cache(engine, share, options)
    return MixtureForecast(**epoch, sources=tuple(parts), **shown)


def _passes_read(order: EpochOrder, fetch: OrderParams, samples: int) -> float:
    """Return how many times the first `samples` of a source read it: the last blocks are those of its window."""
    passes, rest = divmod(samples, order.num_samples)
    return passes + min(1.0, min(rest * fetch.block, rest + fetch.lanes * fetch.window) / order.num_samples)


def _field_shares(mixture: NumpyMixture, weigh: str | None) -> dict[str, dict[Source, float]]:
    """Return the share of each source in the elements of every variable-length field whose lengths are known."""
    names = {name for name, field in mixture.fields.items() if not field.fixed} | ({weigh} if weigh else set())
    shares = {}
    for name in sorted(names):
        with suppress(FieldError):  # of a selection without a table of lengths
            shares[name] = mixture.shares(name)
    return shares


class Reads(NamedTuple):
    """What an epoch reads of a dataset: requests and stored bytes, and what it reads of each array."""

    requests: int
    bytes: int
    arrays: list[ArrayReads]


def _engine(loader: NumpyDataset | NumpyMixture, options: ForecastOptions) -> Engine:
    chosen = {name: getattr(loader._config, name) for name in ("packs", "decoders")}
    config = LoaderConfig(memory=options.memory, ranks_here=options.ranks_here, **chosen)
    return Engine(loader._datasets, config, Counters())


def _epoch(
    loader: NumpyDataset | NumpyMixture,
    engine: Engine,
    share: EpochShare,
    passes: Sequence[float],
    options: ForecastOptions,
) -> tuple[dict[str, Any], list[Reads]]:
    """Return the values of an `EpochForecast`, and what it reads of each dataset, of which it has `passes`."""
    resident, budget = engine.plan_memory(share, engine.steps_at_once(share))
    reads = []
    for dataset, source, times in zip(loader._datasets, loader._first.sources, passes, strict=True):
        streamed = [name for name in dataset.names if name not in resident]
        unshuffled = share.unit if isinstance(share, Share) else dataset.unit(source.params)
        block = source.params.block if options.shuffle is not False or not dataset.arrays else unshuffled
        count, size = _estimate_reads(dataset, streamed, block)
        whole, arrays = replace(dataset, selection=None), array_reads(dataset, block)
        resident_count, resident_size = _estimate_reads(whole, resident, max(1, dataset.manifest.num_remaining))
        if arrays:  # requests for whole objects do not state their size
            each_block = sum(each.read for each in arrays)
            if budget.keeps:  # by each rank
                arrays = [each.sharing(1 / options.world_size) for each in arrays]
            size = sum(each.stored for each in arrays)
            count *= sum(each.read for each in arrays) / max(1, each_block)
        count = count * times + resident_count * options.world_size
        size = size * times + resident_size * options.world_size
        reads.append(Reads(round(count), round(size), arrays))
    blocks = sum(-(-dataset.num_samples // share.block) for dataset in loader._datasets)
    values: dict[str, Any] = {
        "num_samples": share.num_samples,
        **{name: getattr(options, name) for name in ("world_size", "batch_size", "max_tokens")},
        "steps": share.global_steps(0),
        "memory": budget.bytes,
        "least_memory": engine.least_memory(share),
        "held": tuple(resident),
        "kept": 1.0 if budget.keeps else min(1.0, budget.kept_slots / max(1, blocks)),
        "requests": sum(each.requests for each in reads),
        "bytes": sum(each.bytes for each in reads),
    }
    return values, reads


def _estimate_reads(dataset: Dataset, names: Sequence[str], block: int) -> tuple[float, float]:
    """Return the (requests, bytes) of these fields for one pass in blocks, from up to `MAX_BLOCKS` of them."""
    starts = range(0, dataset.num_samples, block)
    chosen = _spread(MAX_BLOCKS if dataset.arrays is None else SAMPLED_BLOCKS, len(starts))
    sizes = []
    for start in (starts[number] for number in chosen):
        stop = min(start + block, dataset.num_samples)
        sizes += [run.stop - run.start for name in names for run in dataset.runs(name, start, stop)]
    scale = len(starts) / max(1, len(chosen))
    return len(sizes) * scale, sum(sizes) * scale


def _first_blocks(share: Share, block: int) -> tuple[tuple[int, ...], ...]:
    """Return the block of each row of the first global batches."""
    step = share.global_batch
    stop = min(share.num_samples, DRAWN_STEPS * step, DRAWN_ROWS)
    blocks = share.order.samples_at(0, stop) // block
    return tuple(tuple(blocks[begin : begin + step].tolist()) for begin in range(0, stop, step))
