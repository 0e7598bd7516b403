"""A run as a machine: any steps, at any world size, batch and number of workers, saved and loaded at any moment."""

import json
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
from amounts import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.order.schedule import Share, World
from streamloader.order.state import RunState, SourceIdentity

SIZES = st.integers(1, 9)
BATCHES = st.sampled_from((1, 2, 3, 5, 8, 20))


class Run(RuleBasedStateMachine):
    """What all ranks deliver, by the planner alone, beside the order that it has to be."""

    @initialize(
        num_samples=st.integers(1, 60) | st.integers(1, 400),
        block=st.sampled_from((1, 2, 3, 8)),
        lanes=st.sampled_from((1, 2, 3, 4, 8)),
        windows=st.integers(2, 4),
        seed=st.integers(0, 2**64 - 1),
        shuffle=st.booleans(),
        remainder=st.sampled_from(("pad", "uneven")),
    )
    def begin(self, num_samples, block, lanes, windows, seed, shuffle, remainder) -> None:  # type: ignore[no-untyped-def]
        self.num_samples = num_samples
        source = SourceIdentity("digest", None, None, num_samples, OrderParams(block, lanes, windows * block))
        self.first = RunState(sources=(source,), shuffle=shuffle, remainder=remainder, seed=seed, fresh=False)
        self.cursor = self.first
        self.delivered: list[int] = []
        self.epoch = 0

    @property
    def order(self) -> EpochOrder:
        one = self.cursor
        return EpochOrder(self.num_samples, one.sources[0].params, one.seed, one.epoch, one.shuffle)

    def share(self, world: World, batch: int) -> Share:
        return Share(self.order, batch, world, self.cursor.remainder)

    def go_on(self, consumers: list[Share], workers: int) -> None:
        """Another number of workers, or another size of their round: what the open round delivered comes again."""
        before = self.cursor
        ranks, batch = consumers[0].world.size // workers, consumers[0].batch
        self.cursor, repeated = self.cursor.with_workers(workers, ranks, batch)
        assert repeated in (0, before.extra)
        if not self.cursor.extra:
            self.delivered = self.delivered[: self.cursor.position]

    @rule(size=SIZES, batch=BATCHES, steps=st.integers(1, 12))
    def deliver(self, size: int, batch: int, steps: int) -> None:
        """Every rank takes so many steps."""
        shares = [self.share(World(rank, size), batch) for rank in range(size)]
        self.go_on(shares, 1)
        position = self.cursor.position
        taken = [list(islice(share.plans(position), steps)) for share in shares]
        done = min(steps, shares[0].global_steps(position))
        for step in range(done):
            for share, plans in zip(shares, taken, strict=True):
                if step < len(plans):  # "uneven": a rank may have no row in the last step
                    plan = plans[step]
                    self.delivered += plan.samples[plan.valid].tolist()
                    if step + 1 == done:
                        assert share.samples(position + step * share.global_batch).tolist() == plan.samples.tolist()
        self.cursor = self.cursor.advance(done, shares[0])

    @rule(size=st.integers(1, 3), batch=BATCHES, workers=st.integers(2, 4), batches=st.integers(1, 12))
    def deliver_by_workers(self, size: int, batch: int, workers: int, batches: int) -> None:
        """The workers of every rank take turns, perhaps not all of them in the last round."""
        world = [World(rank, size) for rank in range(size)]
        shares = [[self.share(rank.consumer(worker, workers), batch) for rank in world] for worker in range(workers)]
        self.go_on(shares[0], workers)
        for _ in range(batches):
            for share in shares[self.cursor.extra]:
                plan = next(share.plans(self.cursor.position), None)
                if plan is not None:
                    self.delivered += plan.samples[plan.valid].tolist()
            self.cursor = self.cursor.advance(1, shares[0][0])
            if self.cursor.epoch > self.epoch:
                break

    @rule()
    def save_and_load(self) -> None:
        self.cursor = self.first.resumed(json.loads(json.dumps(self.cursor.to_dict())))

    @invariant()
    def what_was_delivered_is_the_beginning_of_the_order(self) -> None:
        if not hasattr(self, "cursor"):
            return
        if self.cursor.epoch > self.epoch:
            assert sorted(self.delivered) == list(range(self.num_samples))
            self.delivered, self.epoch = [], self.cursor.epoch
        elif not self.cursor.extra:
            assert sorted(self.delivered) == np.sort(self.order.samples_at(0, self.cursor.position)).tolist()


TestRun = pytest.mark.hypothesis(Run.TestCase)
TestRun.settings = settings(max_examples=examples(30), stateful_step_count=16, deadline=None)


class MixedRun(RuleBasedStateMachine):
    """A mixture that goes on at any world size and batch, and with other weights and more sources, saved and loaded."""

    @initialize(
        counts=st.lists(st.integers(1, 90), min_size=3, max_size=3),
        block=st.sampled_from((1, 3, 8)),
        lanes=st.sampled_from((1, 2, 8)),
        seed=st.integers(0, 2**64 - 1),
        shuffle=st.booleans(),
        stop=st.sampled_from(("first", "last")),
        batches=st.sampled_from(("mixed", "homogeneous")),
    )
    def begin(self, counts, block, lanes, seed, shuffle, stop, batches) -> None:  # type: ignore[no-untyped-def]
        params = OrderParams(block, lanes, 2 * block)
        self.sources = [SourceIdentity(str(number), None, None, count, params) for number, count in enumerate(counts)]
        self.options = {"seed": seed, "shuffle": shuffle, "stop": stop, "batches": batches, "remainder": "pad"}
        self.options["unit"] = 2 if batches == "mixed" else None
        self.cursor = self.open(2, (2, 1)).settled(4)
        self.delivered: Counter[int] = Counter()

    def open(self, sources: int, weights: tuple[int, ...]) -> RunState:
        return RunState(sources=tuple(self.sources[:sources]), weights_by_step=((0, weights),), **self.options)

    @rule(size=st.integers(1, 5), batch=st.sampled_from((2, 4, 10)), steps=st.integers(1, 9))
    def deliver(self, size: int, batch: int, steps: int) -> None:
        """Every rank takes so many steps, at most to the end of the epoch."""
        self.cursor = self.cursor.settled(size * batch)
        shares = [self.cursor.share(batch, World(rank, size)) for rank in range(size)]
        position = self.cursor.position
        if not shares[0].global_steps(position):  # sources of fewer samples than a turn end several epochs at once
            self.cursor = self.cursor.next_epoch()
        for plans in zip(*(islice(share.plans(position), steps) for share in shares), strict=True):
            self.delivered.update(i for plan in plans for i in plan.samples[plan.valid].tolist())
            if self.cursor.batches == "homogeneous":
                firsts = list(shares[0].mix.firsts)
                rows = np.concatenate([plan.samples for plan in plans])
                assert len(set(np.searchsorted(firsts, rows, side="right"))) == 1
            self.cursor = self.cursor.advance(1, shares[0])

    @rule(weights=st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 5)), sources=st.integers(2, 3))
    def go_on_with_other_weights(self, weights: tuple[int, ...], sources: int) -> None:
        wanted = self.open(max(sources, len(self.cursor.sources)), weights[: max(sources, len(self.cursor.sources))])
        self.cursor = wanted.resumed(json.loads(json.dumps(self.cursor.to_dict())), 4)

    @rule(weights=st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 5)), ahead=st.integers(0, 60))
    def set_weights(self, weights: tuple[int, ...], ahead: int) -> None:
        """From a later position on, as `Mixture.set_weights` does."""
        before = self.cursor
        chosen = weights[: len(before.sources)]
        self.cursor = before.with_weights(before.run_position + ahead, chosen, before.epoch)
        assert self.cursor.run_position == before.run_position
        assert self.cursor.epoch == before.epoch
        last = [[state.phases[-1].weight(source) > 0 for source in range(3)] for state in (before, self.cursor)]
        if last[0] == last[1] and before.position < before.num_samples:
            assert self.cursor.anchor == before.anchor  # epochs are counted as before

    def load(self, state: dict[str, Any]) -> RunState:
        """The state in a run with the sources and weights that it has."""
        here = self.cursor
        run = RunState(sources=here.sources, weights_by_step=here.weights_by_step, **self.options)
        return run.resumed(json.loads(json.dumps(state)), 4)

    @rule()
    def save_and_load(self) -> None:
        """Nothing changes, whatever the global batch is at the time."""
        assert self.load(self.cursor.to_dict()) == self.cursor

    @rule()
    def name_the_sources_in_another_order(self) -> None:
        """Numbers of samples follow the order of sources, nothing else does."""
        weights = tuple((step, some[::-1]) for step, some in self.cursor.weights_by_step)
        turned = RunState(sources=self.cursor.sources[::-1], weights_by_step=weights, **self.options)
        assert self.load(turned.resumed(json.loads(json.dumps(self.cursor.to_dict())), 4).to_dict()) == self.cursor

    @invariant()
    def each_source_gave_the_beginning_of_its_epochs(self) -> None:
        if not hasattr(self, "cursor"):
            return
        mix = self.cursor.mix()
        at = mix.bounds(self.cursor.epoch)[0] + self.cursor.position
        expected: Counter[int] = Counter()
        for source, count in enumerate(mix.counts(at).tolist()):
            expected.update(mix.samples(source, np.arange(count)).tolist())
        assert self.delivered == expected


TestMixedRun = pytest.mark.hypothesis(MixedRun.TestCase)
TestMixedRun.settings = settings(max_examples=examples(40), stateful_step_count=16, deadline=None)
