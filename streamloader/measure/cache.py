"""Forecasts how much of each epoch a cache on local disk has: the best choice is simulated over the order of epochs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from streamloader.engine.dataset import Dataset
from streamloader.order.schedule import Share, World
from streamloader.storage.cache import disk_bytes

EPOCHS = 4  # that are simulated
MOST_BLOCKS = 8192  # of a larger dataset so many are simulated: the error is about one percent
READ_BLOCKS = 512  # whose sizes are read from the chunk tables
TRAILER = 256  # bytes of a file in the cache besides those of its range, about


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


def simulate(epochs: Sequence[Visits], sizes: NDArray[np.int64], limit: float) -> list[float]:
    """Return the share of the visits of each epoch but the last whose blocks are in a cache of `limit` bytes.

    It keeps the blocks whose next use is soonest, and those that it had longest of others (L. A. Belady, A study of
    replacement algorithms for a virtual-storage computer, IBM Systems Journal 5, 1966); a block whose next use is later
    than theirs is not kept.
    """
    size_of, used = sizes.tolist(), 0
    kept: dict[int, tuple[float, int]] = {}  # by block: when it is used next, and the number of its visit
    heap: list[tuple[float, int, int]] = []  # (-next use, number of the visit, block), some of them past
    number, shares = 0, list[float]()
    for visits, following in pairwise(epochs):
        hits = 0
        uses = list(next_uses(visits, following))
        for (block, _), use in zip(visits, reversed(uses), strict=True):
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
        shares.append(hits / max(1, len(visits)))
    return shares


def forecast_cache(
    share: Share, dataset: Dataset, names: Sequence[str], *, limit: int, ranks_here: int, resident: int
) -> CacheForecast:
    """Forecast the cache of the first of machines with `ranks_here` ranks each, which all read `names` in blocks.

    `resident`: the bytes of the fields and tables that loaders hold in memory, which the cache keeps too. Of a dataset
    with more than `MOST_BLOCKS` blocks, a random part is simulated with a limit of the same share of its bytes.
    """
    size = share.world.size
    share = replace(share, world=World(0, size, tuple(range(min(ranks_here, size)))))
    block = share.fetch_params.block
    count = -(-dataset.num_samples // block)
    sizes, requests = _sizes(dataset, names, block, count)
    epochs = [visits_of(share, share.epoch + number) for number in range(EPOCHS + 1)]
    again = {each for each, _ in epochs[0]} & {each for each, _ in epochs[1]}
    room, rng = max(0, limit - resident), np.random.default_rng(0)
    if count > MOST_BLOCKS:
        chosen = set(rng.choice(count, MOST_BLOCKS, replace=False).tolist())
        room = round(room * sum(sizes[each] for each in chosen) / sizes.sum())
        epochs = [[visit for visit in visits if visit[0] in chosen] for visits in epochs]
    hits = simulate(epochs, sizes, room)[1:]
    nodes = -(-size // ranks_here)
    return CacheForecast(
        limit=limit,
        needed=int(sizes.sum()) + resident,
        nodes=nodes,
        hits=tuple(hits),
        requests=tuple(round((1 - each) * requests * share.read_factor) for each in hits),
        again=len(again) / max(1, len({each for each, _ in epochs[0]})),
    )


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
