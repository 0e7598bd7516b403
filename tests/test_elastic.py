"""A run as a machine: any steps, at any world size, batch and number of workers, saved and loaded at any moment."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from streamloader.plan.cursor import Cursor
from streamloader.plan.ledger import step_samples
from streamloader.plan.order import EpochOrder, OrderParams
from streamloader.plan.schedule import schedule
from streamloader.plan.world import Share, World

SIZES = st.integers(1, 9)
BATCHES = st.sampled_from((1, 2, 3, 5, 8, 20))


class Run(RuleBasedStateMachine):
    """What all ranks deliver, by the planner alone, beside the order that it has to be."""

    @initialize(
        num_samples=st.integers(1, 60) | st.integers(1, 600),
        block=st.sampled_from((1, 2, 3, 8)),
        lanes=st.sampled_from((1, 2, 3, 4, 8)),
        windows=st.integers(2, 4),
        seed=st.integers(0, 2**64 - 1),
        shuffle=st.booleans(),
        remainder=st.sampled_from(("pad", "uneven")),
    )
    def begin(self, num_samples, block, lanes, windows, seed, shuffle, remainder) -> None:  # type: ignore[no-untyped-def]
        self.num_samples = num_samples
        params = OrderParams(block, lanes, windows * block)
        self.cursor = Cursor("digest", params, None, shuffle, remainder, seed)
        self.delivered: list[int] = []
        self.epoch = 0

    @property
    def order(self) -> EpochOrder:
        one = self.cursor
        return EpochOrder(self.num_samples, one.params, one.seed, one.epoch, one.shuffle)

    def share(self, world: World, batch: int) -> Share:
        return Share(self.num_samples, self.order.lanes, batch, world, self.cursor.remainder)

    def go_on(self, consumers: list[Share], workers: int) -> None:
        """Another number of workers, or another size of their round: what the open round delivered comes again."""
        before = self.cursor
        self.cursor, repeated = self.cursor.with_workers(workers, consumers[0].global_batch)
        assert repeated in (0, before.extra)
        if not self.cursor.extra:
            self.delivered = self.delivered[: self.cursor.position]

    @rule(size=SIZES, batch=BATCHES, steps=st.integers(1, 12))
    def deliver(self, size: int, batch: int, steps: int) -> None:
        """Every rank takes so many steps."""
        shares = [self.share(World(rank, size), batch) for rank in range(size)]
        self.go_on(shares, 1)
        order, position = self.order, self.cursor.position
        taken = [list(islice(schedule(order, share, position), steps)) for share in shares]
        done = min(steps, shares[0].global_steps(position))
        for step in range(done):
            for share, plans in zip(shares, taken, strict=True):
                if step < len(plans):  # "uneven": a rank may have no row in the last step
                    plan = plans[step]
                    self.delivered += plan.samples[plan.valid].tolist()
                    told = step_samples(order, share, position + step * share.global_batch)
                    assert told.tolist() == plan.samples.tolist()
        self.cursor = self.cursor.advance(done, shares[0])

    @rule(size=st.integers(1, 3), batch=BATCHES, workers=st.integers(2, 4), batches=st.integers(1, 12))
    def deliver_by_workers(self, size: int, batch: int, workers: int, batches: int) -> None:
        """The workers of every rank take turns, perhaps not all of them in the last round."""
        world = [World(rank, size) for rank in range(size)]
        shares = [[self.share(rank.consumer(worker, workers), batch) for rank in world] for worker in range(workers)]
        self.go_on(shares[0], workers)
        for _ in range(batches):
            for share in shares[self.cursor.extra]:
                plan = next(schedule(self.order, share, self.cursor.position), None)
                if plan is not None:
                    self.delivered += plan.samples[plan.valid].tolist()
            self.cursor = self.cursor.advance(1, shares[0][0])
            if self.cursor.epoch > self.epoch:
                break

    @rule()
    def save_and_load(self) -> None:
        self.cursor = Cursor.from_dict(json.loads(json.dumps(self.cursor.to_dict())))

    @invariant()
    def what_was_delivered_is_the_beginning_of_the_order(self) -> None:
        if not hasattr(self, "cursor"):
            return
        if self.cursor.epoch > self.epoch:
            assert sorted(self.delivered) == list(range(self.num_samples))
            self.delivered, self.epoch = [], self.cursor.epoch
        elif not self.cursor.extra:
            expected = self.order.samples_at(0, self.cursor.position)
            assert sorted(self.delivered) == np.sort(expected).tolist()


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
