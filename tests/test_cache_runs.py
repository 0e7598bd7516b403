"""Runs with a cache: what a node reads again, and that nothing but the number of requests depends on the cache."""

from collections import defaultdict

import numpy as np
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.schedule import Share, World


def visits(order: EpochOrder, epoch: int, lanes: list[int]) -> dict[int, list[float]]:
    """When some lanes read each block, or a part of it, by the block's first sample: in epochs."""
    of_epoch = EpochOrder(order.num_samples, order.params, order.seed, epoch)
    found: dict[int, list[float]] = defaultdict(list)
    length = max(1, order.num_samples // order.lanes)
    for ordinal in range(order.num_blocks):
        first, stop = of_epoch.first_arrivals(np.array([ordinal, ordinal + 1])).tolist()
        number = int(of_epoch.block_numbers(np.array([ordinal]))[0])
        for lane in lanes:
            begin, count = of_epoch.lane_bounds(lane)
            if first < begin + count and begin < stop:
                found[number * order.params.block].append(epoch + max(0, first - begin) / length)
    return found


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_the_order_tells_when_a_node_reads_a_block_next(data):
    block = data.draw(st.integers(1, 6))
    params = OrderParams(block, data.draw(st.sampled_from((1, 2, 4, 8))), 2 * block)
    count, seed = data.draw(st.integers(8 * block, 120)), data.draw(st.integers(0, 9))
    epoch = data.draw(st.integers(0, 3))
    size = data.draw(st.sampled_from([ranks for ranks in (1, 2, 4, 8) if params.lanes % ranks == 0]))
    node = tuple(sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1))))
    order = EpochOrder(count, params, seed, epoch)
    lanes = [lane for lane in range(params.lanes) if lane % size in node]
    now, after = visits(order, epoch, lanes), visits(order, epoch + 1, lanes)
    reads: dict[int, list[float]] = defaultdict(list)
    for rank in node:
        for plan in Share(order, 4, World(rank, size, node), "drop").plans(0):
            for ref in plan.needs:
                reads[ref.block].append(ref.now)
                later = [each for each in now[ref.block] if each > ref.now] + after.get(ref.block, [])
                assert ref.node_use == min(later, default=np.inf)
    assert all(set(times) <= set(now[first]) for first, times in reads.items())
