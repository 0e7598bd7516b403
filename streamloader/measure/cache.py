"""Forecasts how much of each epoch a cache on local disk has: the best choice is simulated over the order of epochs."""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.dataset import Dataset
from streamloader.measure.arrays import stored_share
from streamloader.order.epoch_order import EpochOrder
from streamloader.order.mixture import MixShare
from streamloader.order.schedule import EpochShare, Share, World
from streamloader.storage.cache import disk_bytes
from streamloader.zarr.columns import RegionReader

EPOCHS = 4  # that are simulated
MOST_BLOCKS = 8192  # of a larger dataset so many are simulated: the error is about one percent
READ_BLOCKS = 512  # whose sizes are read from the chunk tables
TRAILER = 128  # bytes of a file in the cache besides those of its range, about


@dataclass(frozen=True)
class CacheForecast:
    """What a cache of up to `limit` bytes does on each of `nodes` machines. `needed`: the bytes with which it has all.

    `hits`: the share of the reads of blocks in each later epoch that it has, from 0 to 1. `requests`: those of all
    machines then. `again`: the share of the blocks that a machine reads in an epoch and in the next one.
    """

    limit: int
    needed: int
    nodes: int
    hits: tuple[float, ...]
    requests: tuple[int, ...]
    again: float


Visits = list[tuple[int, float]]  # (block, time in epochs), in order
Reads = list[tuple[int, float]]  # (number of a block or range, when it is read next), in order


def visits_of(share: Share, epoch: int) -> Visits:
    """Return the blocks that the ranks of a node read in an epoch, or parts of them, with the times."""
    world, order = share.world, replace(share.order, epoch=epoch)
    if order.shuffle:
        blocks, times = order.visits(world.lanes(order.lanes, world.node))
    else:
        blocks = np.arange(-(-share.num_samples // share.unit))
        ranks = blocks * share.unit // share.batch % world.size
        blocks = blocks[np.isin(ranks, world.node)]
        times = blocks * share.unit / max(1, share.num_samples)
    return list(zip(blocks.tolist(), (epoch + times).tolist(), strict=True))


def next_uses(visits: Visits, following: Visits) -> Iterator[float]:
    """Yield when each block of an epoch is read next, as far as the order of the next epoch tells, in reverse order."""
    later: dict[int, float] = {}
    for block, time in reversed(following):
        later[block] = time
    for block, time in reversed(visits):
        yield later.get(block, inf)
        later[block] = time


def _reads(visits: Visits, following: Visits) -> Reads:
    uses = reversed(list(next_uses(visits, following)))
    return [(block, use) for (block, _), use in zip(visits, uses, strict=True)]


def reads_of(share: EpochShare, epoch: int) -> list[tuple[int, int, float]]:
    """Return (block, epoch of its source, when it is read next) of what the ranks of a node read in an epoch.

    The blocks of a mixture are numbered over all sources.
    """
    if isinstance(share, MixShare):
        return _reads_of_mixture(share, epoch)
    assert isinstance(share, Share)
    reads = _reads(visits_of(share, epoch), visits_of(share, epoch + 1))
    return [(block, epoch, inf if share.order.stride else use) for block, use in reads]  # weights draw other samples


def _reads_of_mixture(share: MixShare, epoch: int) -> list[tuple[int, int, float]]:
    """Return the reads of a mixture: those of the epochs of its sources that lie in one of its own.

    The time of a source is about that of its position in the epoch of the mixture.
    """
    mix, phase, found, before = share.mix, share.mix.phases[-1], list[tuple[float, int, int, float]](), 0
    begin, end = mix.bounds(epoch)
    firsts, lasts = mix.counts(begin).tolist(), mix.counts(end).tolist()
    size = share.world.size if share.divides else 1
    for source, (order, unit, first, last) in enumerate(zip(mix.orders, mix.units, firsts, lasts, strict=True)):
        count, weight = order.num_samples, phase.weight(source)
        known, turns = weight and not order.stride, sum(phase.weights) / max(1, weight)
        fetch = mix.fetches[source]
        window = fetch.lanes * fetch.window  # samples: their rows are shuffled with later ones

        def visits(number: int, order: EpochOrder = order, unit: int = unit) -> Visits:
            ranks = tuple((rank - number * order.num_samples) % size for rank in share.world.node)
            return visits_of(Share(order, share.batch, World(ranks[0], size, ranks), "pad", unit), number)

        for number in range(first // count, -(-last // count)) if last > first else ():
            now = visits(number)
            for (_, time), (block, use) in zip(now, _reads(now, visits(number + 1)), strict=True):
                if first - window <= time * count < last + 2 * window:
                    at = min(max(0.0, (time * count - first) / (last - first)), 1.0)
                    found.append((at, before + block, number, begin + (use * count - first) * turns if known else inf))
        before += -(-count // fetch.block)
    return [(block, number, use) for _, block, number, use in sorted(found)]


def simulate(epochs: Sequence[Visits], sizes: NDArray[np.int64], limit: float) -> list[float]:
    """Return the share of the visits of each epoch but the last whose blocks are in a cache of `limit` bytes."""
    return replay([_reads(visits, following) for visits, following in pairwise(epochs)], sizes.tolist(), limit)


def replay(epochs: Iterable[Reads], size_of: Sequence[int], limit: float) -> list[float]:
    """Return the share of the reads of each epoch that a cache of `limit` bytes has.

    It keeps what is read soonest, and what it had longest of others (L. A. Belady, A study of replacement algorithms
    for a virtual-storage computer, IBM Systems Journal 5, 1966); what is read later than that is not kept.
    """
    used, kept = 0, dict[int, tuple[float, int]]()  # when each is read next, and the number of its latest read
    heap: list[tuple[float, int, int]] = []  # (-next use, number of the read, block), some of them past
    number, shares = 0, list[float]()
    for reads in epochs:
        hits = 0
        for block, use in reads:
            number += 1
            if block in kept:
                hits += 1
            else:
                while used + size_of[block] > limit and heap and -heap[0][0] >= use:
                    before, at, other = heappop(heap)
                    if kept.get(other) == (-before, at):
                        used -= size_of[other]
                        del kept[other]
                if used + size_of[block] > limit:
                    continue
                used += size_of[block]
            kept[block] = use, number
            heappush(heap, (-use, number, block))
        heap = [(-use, at, block) for block, (use, at) in kept.items()]
        heapify(heap)
        shares.append(hits / max(1, len(reads)))
    return shares


# (epoch, block) -> what is read of a block: the key of each range, or of all of them, its bytes, and its requests
Ranges = Callable[[int, int], Sequence[tuple[Hashable, int, float]]]


def forecast_cache(
    share: EpochShare, datasets: Sequence[Dataset], held: Sequence[str], *, limit: int, ranks_here: int, resident: int
) -> CacheForecast:
    """Forecast the cache of the first of machines with `ranks_here` ranks each.

    `held`: the fields that loaders hold in memory, of `resident` bytes with the tables, which the cache keeps too. Of
    more than `MOST_BLOCKS` blocks, a part is simulated with a limit of the same share of the bytes.
    """
    assert isinstance(share, Share | MixShare)
    size = share.world.size
    share = replace(share, world=World(0, size, tuple(range(min(ranks_here, size)))))
    fetches = share.mix.fetches if isinstance(share, MixShare) else [share.fetch_params]
    counts = [-(-dataset.num_samples // fetch.block) for dataset, fetch in zip(datasets, fetches, strict=True)]
    part, firsts = min(1.0, MOST_BLOCKS / max(1, sum(counts))), list(accumulate(counts, initial=0))
    stored = [
        _ranges_of(dataset, [name for name in dataset.names if name not in held], fetch.block, part)
        for dataset, fetch in zip(datasets, fetches, strict=True)
    ]
    needed, chosen = sum(total for _, total, _ in stored), sum(size for _, _, size in stored)
    blocks = [reads_of(share, share.epoch + number) for number in range(EPOCHS)]
    numbers, sizes, epochs, requests = dict[Hashable, int](), list[int](), list[Reads](), list[float]()
    for reads in blocks:
        epochs.append([])
        requests.append(0.0)
        for block, epoch, use in reads:
            source = bisect_right(firsts, block) - 1
            for key, nbytes, sent in stored[source][0](epoch, block - firsts[source]):
                number = numbers.setdefault((source, key), len(numbers))
                sizes += [nbytes] * (number == len(sizes))
                epochs[-1].append((number, use))
                requests[-1] += sent / part
    hits = replay(epochs, sizes, max(0, limit - resident) * chosen / max(1, needed))
    first, second = ({block for block, *_ in reads} for reads in blocks[:2])
    nodes = -(-size // ranks_here)
    return CacheForecast(
        limit=limit,
        needed=needed + resident,
        nodes=nodes,
        hits=tuple(hits[1:]),
        requests=tuple(round((1 - hit) * sent * nodes) for hit, sent in zip(hits[1:], requests[1:], strict=True)),
        again=len(first & second) / max(1, len(first)),
    )


def _ranges_of(dataset: Dataset, names: Sequence[str], block: int, part: float) -> tuple[Ranges, int, int]:
    """Return what is read of each block, none of those that are left out of a part; and the bytes of all, and of these.

    The blocks of arrays share chunks, and with weights each epoch has other ranges: those of the first blocks are read.
    """
    count = -(-dataset.num_samples // block)
    chosen = round(count * part)
    if dataset.arrays is None and dataset.weights_digest is None:
        sizes, requests = _sizes(dataset, names, block, count)
        those = np.random.default_rng(0).permutation(count)[:chosen]
        known = {number: ((number, int(sizes[number]), requests / count),) for number in those.tolist()}
        return lambda _, number: known.get(number, ()), int(sizes.sum()), int(sizes[those].sum())

    @lru_cache(EPOCHS * MOST_BLOCKS)
    def ranges(epoch: int, number: int) -> Sequence[tuple[Hashable, int, float]]:
        if number >= chosen:
            return ()
        first, stop = number * block, min((number + 1) * block, dataset.num_samples)
        first, stop = (epoch * dataset.num_samples * bool(dataset.weights_digest) + at for at in (first, stop))
        runs = [(name, run) for name in names for run in dataset.runs(name, first, stop) if run.stop]
        return [((run.path, run.start, run.stop), bytes_of(name, run), 1.0) for name, run in runs]

    bytes_of = partial(_stored_bytes, dataset, {})
    found = {key: size for number in range(chosen) for key, size, _ in ranges(0, number)}
    return ranges, sum(found.values()) * count // max(1, chosen), sum(found.values())


def _stored_bytes(dataset: Dataset, shares: dict[Any, float], name: str, run: Any) -> int:
    """Return the bytes of a request on disk, about those of a chunk for one that does not tell where it ends."""
    reader, size = dataset.readers[name], run.stop - run.start
    if isinstance(reader, RegionReader) and not reader.arrays[run.member].array.sharding:
        array = reader.arrays[run.member]
        if (name, run.member) not in shares:
            shares[name, run.member] = stored_share(dataset, array)
        size = round(array.array.chunk_bytes * len(run.chunks) * shares[name, run.member])
    return disk_bytes(size + TRAILER)


def _sizes(dataset: Dataset, names: Sequence[str], block: int, count: int) -> tuple[NDArray[np.int64], float]:
    """Return the bytes of each block in the cache, and the requests of all; some are read, others are like these."""
    few = count > MOST_BLOCKS
    numbers = np.linspace(0, count - 1, READ_BLOCKS).astype(np.int64).tolist() if few else range(count)
    found, requests = np.zeros(len(numbers), np.int64), 0
    for at, number in enumerate(numbers):
        start, stop = number * block, min((number + 1) * block, dataset.num_samples)
        runs = [run for name in names for run in dataset.runs(name, start, stop)]
        requests += len(runs)
        found[at] = sum(disk_bytes(run.stop - run.start + TRAILER) for run in runs)
    sizes = found[np.random.default_rng(0).integers(0, len(found), count)] if few else found
    return sizes, requests * count / max(1, len(numbers))
