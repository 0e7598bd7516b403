"""What the engine executes: the batches of one rank, each with the blocks it needs and those it is done with.

Pure and vectorised: Python work is O(blocks) + O(batches). A schedule is planned in spans of steps. Each re-examines
a window of arrivals before and after it, so spans start short (the first batch is early) and grow to about two
windows (then half of the arithmetic is overlap).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from streamloader.errors import UsageError
from streamloader.plan.booking import BatchPlan, Placed, batches, book, book_nothing
from streamloader.plan.order import EpochOrder, OrderParams
from streamloader.plan.touch import Ints, Key, Parts, Span, lane_samples, touch_lanes, touch_nothing, touch_units
from streamloader.plan.world import Share

__all__ = ["FIRST_STEPS", "MAX_ROWS", "schedule", "slots_needed", "span_rows"]

MAX_ROWS = 2**22  # rows of a span, for which memory is needed: see `engine.passes.Need`
PART_ROWS = 2**15  # rows of it whose positions are computed together
_MIN_ROWS = 2**12  # rows of a lane below which a longer span costs little
FIRST_STEPS = 64  # steps of the first span at most: what the first batch waits for


def schedule(
    order: EpochOrder,
    share: Share,
    position: int,
    unit: int | None = None,
    steps_at_once: int = 1,
    *,
    first_ticket: int = 0,
    stop: int | None = None,
    held: bool = False,
) -> Iterator[BatchPlan]:
    """The batches of `share`'s rank from the global position `position` to the end of the epoch.

    Or to `stop`, where a later step would start.

    `unit` is the number of samples fetched at once without shuffle (the chunk; the block where it is None). Each plan
    holds the rows of `steps_at_once` steps, the last perhaps of fewer: for steps of a single sample. Tickets are
    numbered from `first_ticket` on, so that schedules can follow one another. `held`: every field is held whole, so
    plans name samples and no blocks.

    Raises UsageError where order and share do not belong together, or the position is outside the epoch.
    """
    if (share.num_samples, share.lanes) != (order.num_samples, order.lanes):
        raise UsageError(
            f"a share of {share.num_samples} samples over {share.lanes} lanes does not fit an order of "
            f"{order.num_samples} over {order.lanes}",
            "make the share with order.num_samples and order.lanes",
        )
    if not 0 <= position <= order.num_samples:
        raise UsageError(f"position {position} is not in [0, {order.num_samples}]", "start inside the epoch")
    if stop is not None and ((stop - position) % share.global_batch or not position <= stop <= order.num_samples):
        raise UsageError(
            f"no step starts at position {stop} of {order.num_samples}, {share.global_batch} at once from {position}",
            "stop where a later step starts",
        )
    if steps_at_once < 1 or (unit is not None and unit < 1):
        raise UsageError(f"unit={unit} samples and {steps_at_once} steps at once cannot be", "give 1 or more")
    steps = share.num_steps(position) if stop is None else (stop - position) // share.global_batch
    spans = _spans(order, share, position, steps, steps_at_once)
    unit = unit or order.params.block
    if held:
        return _plan_samples(order, share, spans, steps_at_once)
    return _plan(order, share, spans, unit=unit, steps_at_once=steps_at_once, tickets=first_ticket)


def _plan_samples(order: EpochOrder, share: Share, spans: Iterator[Span], steps_at_once: int) -> Iterator[BatchPlan]:
    for span in spans:
        positions = partial(_positions, share, span, steps_at_once)
        sources = partial(_sources, share, positions)
        steps = range(span.first_step, span.first_step + span.steps, steps_at_once)
        for at, samples in zip(
            positions(), lane_samples(order, sources, span) if order.shuffle else sources(), strict=True
        ):
            placed = Placed(order.epoch, share.num_samples, [at])
            yield from batches(touch_nothing(samples), book_nothing(), share.batch * steps_at_once, placed, steps)
            steps = steps[-(-at.size // (share.batch * steps_at_once)) :]


def _plan(
    order: EpochOrder, share: Share, spans: Iterator[Span], *, unit: int, steps_at_once: int, tickets: int
) -> Iterator[BatchPlan]:
    live: dict[Key, int] = {}  # the tickets of blocks that later spans use
    for span in spans:
        positions = partial(_positions, share, span, steps_at_once)
        sources = partial(_sources, share, positions)
        if order.shuffle:
            touched = touch_lanes(order, sources, span, live)
        else:
            onward = span.end + share.world.rank * share.batch  # where this rank's rows go on
            touched = touch_units(order.num_samples, unit, np.concatenate([*sources()]), onward, last=span.last)
        booking = book(touched, live, tickets)
        steps = range(span.first_step, span.first_step + span.steps, steps_at_once)
        placed = Placed(order.epoch, share.num_samples, positions())
        yield from batches(touched, booking, share.batch * steps_at_once, placed, steps)
        tickets += booking.opened.size
        live = booking.kept(touched)


def _positions(share: Share, span: Span, steps_at_once: int) -> Iterator[Ints]:
    """Yield the positions of a span's rows, those of some plans at a time: temporary arrays then fit into a cache."""
    some = max(1, PART_ROWS // (share.batch * steps_at_once)) * steps_at_once
    for done in range(0, span.steps, some):
        yield share.positions_of_steps(span.begin + done * share.global_batch, min(some, span.steps - done))


def _sources(share: Share, positions: Parts) -> Iterator[Ints]:
    return map(share.source, positions())


def _spans(order: EpochOrder, share: Share, position: int, steps: int, steps_at_once: int) -> Iterator[Span]:
    """Cuts the steps into spans. The last two steps are in one, since padding repeats rows of the one before."""
    rows = _rows_of_a_lane(order.params, share)
    longest = rows * share.lanes // share.global_batch if order.shuffle else rows // share.batch
    most = max(1, longest // steps_at_once) * steps_at_once
    size = min(most, max(1, FIRST_STEPS // steps_at_once) * steps_at_once)
    done = 0
    while done < steps:
        count = steps - done if steps - done <= size + 1 else size
        begin = position + done * share.global_batch
        end = min(begin + count * share.global_batch, order.num_samples)
        yield Span(done, count, begin, end, last=done + count == steps)
        done += count
        size = min(most, 2 * size)


def _rows_of_a_lane(params: OrderParams, share: Share) -> int:
    return min(max(2 * params.window, _MIN_ROWS), MAX_ROWS // share.lanes_read)


def span_rows(params: OrderParams, share: Share) -> int:
    """Return how many rows of this rank are planned together at most."""
    return min(_rows_of_a_lane(params, share) * share.lanes_read, share.num_samples // share.world.size + share.batch)


def slots_needed(params: OrderParams, share: Share, steps_at_once: int = 1) -> int:
    """How many blocks a schedule holds at once at most, from `needs` until `done`; the same on every rank.

    A lane holds a block from its smallest key to its largest. The keys of the arrivals [s, s + B) lie in
    [s, s + B + W), so at key T only blocks with T - B - W < s < T are held: at most W / B + 1, and one more in the
    lane of the short block. A batch holds what any of its keys [T0, T1] holds: W / B + 2 + (T1 - T0) / B, and
    T1 - T0 is about the batch's rows in that lane: chance stretches it, but by little against a block, and against
    the lanes without the short block; one slot more is for a single lane. (Replays of thousands of schedules
    came up to the count without it, never above.)
    Padding makes the last step the last G positions in another order. Where N < G or R does not divide L, the last
    step may touch other lanes, one block for each row at most. Without shuffle, give OrderParams(unit, 1, 2 * unit).
    """
    lanes, per_lane = share.lanes_read, params.window // params.block + 2
    batch = steps_at_once * share.batch
    rows = -(-lanes * share.world.size * batch // share.lanes)  # of a plan, over all ranks, in the lanes that one reads
    slots = lanes * per_lane + -(-rows // params.block) + 1
    if not share.divides or share.num_samples < share.global_batch:
        slots = max(slots, min(batch, share.lanes * per_lane))
    return min(slots, max(1, -(-share.num_samples // params.block) + share.lanes - 1))
