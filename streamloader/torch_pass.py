"""One pass of one consumer over an epoch: from the pipeline's batches to what the caller gets."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from streamloader.engine.batch import Batch
from streamloader.engine.pipeline import Pipeline
from streamloader.errors import EngineError
from streamloader.format.threads import wait_for
from streamloader.plan.gaps import NO_GAPS, Gaps
from streamloader.plan.world import Part, World
from streamloader.stats import BatchReport
from streamloader.torch_tensors import Shape, to_samples, to_tensors
from streamloader.torch_world import worker

# A pass that yields samples still runs in batches, so that the engine's work stays per batch.
SAMPLES_AT_ONCE = 64


@dataclass(frozen=True)
class Position:
    """Where a consumer begins: its own world (rule 10), its share, and the cursor of the pass."""

    world: World
    share: Part
    start: Any  # a Standing: a Cursor, or a MixCursor
    ahead: int
    gaps: Gaps = NO_GAPS

    @classmethod
    def of_worker(cls, start: Any, rank: World, number: int, share: Callable[[World], Part]) -> Position:
        """Return where DataLoader worker `number` of `start.workers` begins.

        DataLoader asks worker 0 first. If `extra` workers of the round have delivered already, worker 0 takes the
        part of the next one in line, and those that have delivered are a round ahead.
        """
        part = (number + start.extra) % start.workers
        world = rank.consumer(part, start.workers)
        return cls(world, share(world), start, 1 if part < start.extra else 0)

    def position(self, steps: int) -> int:
        """The global position of this consumer's next step after `steps` of them."""
        begin = self.start.position + self.ahead * self.share.global_batch
        return self.gaps.walk(self.start.epoch, begin, steps, self.share.global_batch)

    def ends_after(self, steps: int) -> bool:
        """Whether no rank has a step after so many of this consumer."""
        return not self.share.global_steps(self.position(steps))

    def cursor(self, steps: int) -> Any:
        """The cursor after `steps` steps of this consumer; it means the same to the worker of this number."""
        place = self.position(steps)
        if self.ahead and self.share.global_steps(place):
            place -= self.ahead * self.share.global_batch
        found = self.start.moved(place, self.share, self.gaps)
        if self.start.workers == 1:
            return found
        ranks = self.share.world.size // self.start.workers
        return replace(found, inside=True, ranks=ranks, batch=self.share.batch)


@dataclass(frozen=True)
class Follow:
    """Who is told: `deliver` of the cursor after each batch handed out, `complete` of the epoch that is over.

    `report` hears of each batch before it is handed out: where it raises, the batch is still to come.
    """

    deliver: Callable[[Any], None]
    complete: Callable[[int], None]
    report: Callable[[BatchReport], None] | None = None


class Pass(Iterator[dict[str, Any]]):
    """Yields batches, or samples, and reports what was handed out. Dropping it ends its threads."""

    def __init__(
        self,
        pipeline: Pipeline,
        begin: Position,
        follow: Follow | None,
        shape: Shape,
    ) -> None:
        self._begin = begin
        self._epoch = begin.start.epoch
        self._follow = follow
        self._shape = shape
        self._steps = 0
        self._steps_before = self._epoch * begin.share.num_steps(0)
        self._waiting: deque[dict[str, Any]] = deque()
        self._pipeline: Pipeline | None = pipeline  # None once ended: who keeps this pass keeps no memory with it
        self._told = time.perf_counter()
        self._turn = threading.RLock()

    def __next__(self) -> dict[str, Any]:
        """Return the next batch or sample. Raises the error that belongs there.

        Several threads may share a pass: each item goes to one of them.
        """
        wait_for(lambda seconds: self._turn.acquire(timeout=seconds))
        try:
            return self._take()
        finally:
            self._turn.release()

    def _take(self) -> dict[str, Any]:
        pipeline = self._pipeline
        if pipeline is None:
            raise EngineError(
                "this pass was ended by a later iter(), load_state_dict() or close()", "iterate one pass at a time"
            )
        if not self._waiting:
            asked = time.perf_counter()
            batch = next(pipeline, None)
            if batch is None:
                if pipeline.completed:  # and not after an error
                    self._complete_once()
                raise StopIteration
            self._waiting.extend(self._converted(batch))
            self._report(len(batch.plan.samples), asked)
        # Whoever knows the number of batches does not ask for one more: the pass is over with its last one.
        if len(self._waiting) == 1 and self._begin.ends_after(self._steps + 1):
            next(pipeline, None)
        self._steps += 1
        if self._follow is not None:
            self._follow.deliver(self._begin.cursor(self._steps))
        if pipeline.completed:
            self._complete_once()
        return self._waiting.popleft()

    def end(self) -> None:
        """End the threads of this pass; asking it for more is an error from now on."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()

    def _converted(self, batch: Batch) -> list[dict[str, Any]]:
        try:
            return list(to_samples(batch, self._shape)) if self._shape.samples else [to_tensors(batch, self._shape)]
        except BaseException:
            self.end()  # this batch is lost: a later one must not come in its place
            raise

    def _report(self, samples: int, asked: float) -> None:
        if self._follow is None or self._follow.report is None:
            return
        now, before = time.perf_counter(), self._told
        self._told = now
        share = self._begin.share
        self._follow.report(
            BatchReport(
                epoch=self._epoch,
                step=self._steps_before + self._begin.position(self._steps) // share.global_batch,
                samples=samples,
                wait_seconds=now - asked,
                seconds=now - before,
                worker=worker()[0],
            )
        )

    def _complete_once(self) -> None:
        if self._follow is not None:
            self._follow.complete(self._epoch)
        self._follow = None


def warn_of_lanes(size: int, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """Say that a run on more ranks than lanes takes more lanes, and what pins them."""
    pinned, taken = (", ".join(map(str, sorted(set(lanes)))) for lanes in (before, after))
    warnings.warn(
        f"{size} ranks are more than the dataset's {pinned} lanes: this run takes {taken}, so that fewer ranks read "
        "the same block, and its states keep that at any number of ranks; "
        f"set shuffle=Shuffle(lanes={max(after)}) to begin other runs in this order",
        stacklevel=3,
    )


def warn_of_costs(share: Part, workers: int, repeated: int, *, fresh: bool, shuffle: bool) -> None:
    """Say once what this world costs: more ranks than lanes, lanes that are read twice, workers, repeated batches."""
    if repeated:
        warnings.warn(
            f"the state stands within a round of DataLoader workers, and their number, the world or the batch changed: "
            f"{repeated} batches of each rank come again",
            stacklevel=3,
        )
    if workers > 1:
        warnings.warn(
            f"{workers} DataLoader workers on each rank: an epoch has the same samples, but the composition of its "
            "batches depends on num_workers; num_workers=0 is as fast, transform_workers= runs slow transforms",
            stacklevel=3,
        )
    if costs := share.costs(fresh=fresh, shuffle=shuffle):
        warnings.warn(costs, stacklevel=3)
