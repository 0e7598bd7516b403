"""What `StreamingDataset` and `Mixture` share: passes, epochs and states of an `IterableDataset`."""

from __future__ import annotations

import multiprocessing
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import IterableDataset

from streamloader.engine.passes import Course
from streamloader.errors import StateError, UsageError
from streamloader.format.threads import wait_for
from streamloader.plan.cursor import ORDER_NAMES, Standing, get
from streamloader.plan.world import Part, World
from streamloader.stats import BatchReport, Stats
from streamloader.torch_choices import check_epoch, check_share, check_steps
from streamloader.torch_epochs import Place, SharedEpochs
from streamloader.torch_pass import SAMPLES_AT_ONCE, Follow, Pass, Position, warn_of_costs, warn_of_lanes
from streamloader.torch_session import ProcessSession
from streamloader.torch_steps import choose_gaps, only, read_steps
from streamloader.torch_tensors import Shape
from streamloader.torch_world import check_loader, in_worker, loader_asking_for_length, resolve_world, worker


@dataclass(frozen=True)
class Manner:
    """How batches are handed out: of how many samples (None: singly), in which shape, without which steps.

    `steps`: those of one iteration, which may be a part of an epoch or several; None for an epoch.
    """

    batch_size: int | None
    shape: Shape
    skips: dict[int, tuple[int, ...]] = field(default_factory=dict)
    on_batch: Callable[[BatchReport], None] | None = None
    steps: int | None = None


def check_guarded() -> None:
    """Raise `UsageError` in a process that imports the script of its parent, and so runs it once more."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "processes of transform_workers= or DataLoader import this script, which iterates a dataset when imported",
            "put the code that trains below `if __name__ == '__main__':`",
        )


class Steps(Iterator[dict[str, Any]]):
    """Yields `steps` batches from a pass and, where that ends, from those that `begin` returns.

    `keep` gets the pass when the last batch is handed out: the next iteration goes on with it.
    """

    def __init__(self, first: Pass, steps: int, begin: Callable[[], Pass], keep: Callable[[Pass], None]) -> None:
        self._pass = first
        self._left = steps
        self._begin = begin
        self._keep = keep
        self._turn = threading.RLock()

    def __next__(self) -> dict[str, Any]:
        """Return the next batch. Raises the error that belongs there. Several threads may share this, as a `Pass`."""
        wait_for(lambda seconds: self._turn.acquire(timeout=seconds))
        try:
            return self._take()
        finally:
            self._turn.release()

    def _take(self) -> dict[str, Any]:
        if not self._left:
            raise StopIteration
        try:
            batch = next(self._pass, None)
            if batch is None:
                self._pass = self._begin()
                batch = next(self._pass, None)
        except Exception:
            self._left = 0
            raise
        self._left = self._left - 1 if batch is not None else 0
        if batch is None:
            raise StopIteration
        if not self._left:
            self._keep(self._pass)
        return batch


class Streamed(IterableDataset[dict[str, Any]]):
    """Passes over data that an engine streams; a subclass says which data, and in which order."""

    def __init__(self, start: Standing, manner: Manner, session: ProcessSession, world: World | None) -> None:
        super().__init__()
        if manner.steps is not None:
            check_steps(manner.steps, manner.batch_size, start.remainder)
        self._manner = manner
        self._session = session
        self._world = world
        self._first = self._start = self._now = start
        self._loaded = False
        self._epochs = SharedEpochs()
        self._pass: weakref.ref[Pass] | None = None
        self._kept: Pass | None = None  # between two iterations of `steps_per_epoch`
        self._steps = 0  # handed out since the run began
        self._begun = (start, 0)  # place and steps at which the present iteration began

    @property
    def epoch(self) -> int:
        """The epoch that the next pass delivers; during one its own, until its last batch was handed out.

        With `steps_per_epoch` it counts iterations; the state has the epoch of the data.
        """
        return self._epochs.next_epoch() if self._manner.steps is None else self._steps // self._manner.steps

    def __len__(self) -> int:
        """This rank's batches in the whole of the next epoch (samples with `batch_size=None`).

        To a DataLoader with workers, which makes them act as ranks, that is what all of its workers yield.
        """
        world, loader = resolve_world(self._world), loader_asking_for_length()
        workers = 1 if loader is None else max(1, loader.num_workers)
        if self._manner.steps is not None:
            return self._manner.steps
        whole = replace(self._from(self.epoch, world, workers), position=0, extra=0, workers=workers)
        shares = [self._share(whole, world.consumer(number, workers)) for number in range(workers)]
        counts = [choose_gaps(self._manner.skips, whole, share).steps(share, whole.epoch, 0) for share in shares]
        if loader is None or loader.batch_size is None:
            return sum(counts)
        # each worker fills batches of its own: of these, and not of samples, the DataLoader divides out the number
        size = loader.batch_size if workers > 1 else 1
        return sum(count // size * size if loader.drop_last else -(-count // size) * size for count in counts)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Raise `UsageError`: samples come by iteration only."""
        raise UsageError(
            f"a {type(self).__name__} has no random access, so [{index!r:.40}] cannot be",
            "read single samples with sl.open(url, split=...)[i], and batches with `for batch in dataset`",
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin a pass: at the start of the epoch, or where a loaded state stands. Ends the pass before it.

        With `steps_per_epoch`: go on where the last iteration stopped.
        """
        check_loader(self._manner.batch_size, resolve_world(self._world).size)
        check_guarded()
        if self._manner.steps is None:
            return self._begin_pass()
        self._refuse_workers(worker()[1], in_worker())
        self._begun = self._now, self._steps
        kept = self._kept if self._kept is not None and self._kept is self._running() else None
        left = self._manner.steps - self._steps % self._manner.steps
        return Steps(kept or self._begin_pass(), left, self._begin_pass, self._keep)

    def _begin_pass(self) -> Pass:
        rank, (number, count) = resolve_world(self._world), worker()
        self._end_pass()
        if self._manner.steps is not None:
            self._start = self._now
        start = self._begin(rank, count)
        lanes = self._start.lanes
        start, repeated = start.with_workers(count, rank.size, self._manner.batch_size or 1)
        begin = Position.of_worker(start, rank, number, lambda world: self._share(start, world))
        check_share(begin.share)
        begin = replace(begin, gaps=choose_gaps(self._manner.skips, start, begin.share))
        warn_of_costs(begin.share, count, repeated, fresh=start.position == 0, shuffle=bool(start.lanes))
        if start.lanes != lanes and (rank.rank, number) == (0, 0):
            warn_of_lanes(rank.size, lanes, start.lanes)
        self._epochs.begin(number, count, start.epoch)
        self._start = self._now = start
        follow = Follow(self._deliver, self._complete, self._manner.on_batch)
        if self._manner.steps is not None:  # this dataset may keep the pass, which then must not keep the dataset
            follow = replace(follow, deliver=_weakly(self._deliver), complete=_weakly(self._complete))
        return self._run(begin, follow)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass deliver this epoch, from its beginning unless it is the present one already.

        Raises `StateError` where a state was just loaded and says another epoch: frameworks that number their
        epochs anew would lose the place. With `steps_per_epoch` only the present number of iterations is accepted.
        """
        check_epoch(epoch)
        present = self.epoch
        if self._manner.steps is not None:
            if epoch != present:
                raise UsageError(
                    f"set_epoch({epoch}) with steps_per_epoch={self._manner.steps} before iteration {present}",
                    f"call set_epoch({present}), or leave it out: each iteration goes on where the last one stopped",
                )
            return
        if self._loaded and epoch != present:
            raise StateError(
                f"set_epoch({epoch}) right after a state of epoch {present} was loaded",
                "go on with the loaded epoch, or do not load the state",
            )
        if epoch != present:
            self._choose(self._start.beginning(epoch))
            if self._running() is None:
                self._now = self._start

    def state_dict(self, batches: int | None = None, *, workers: int = 1) -> dict[str, Any]:
        """Return where training stands, as JSON-able values that are the same on every rank.

        Without arguments: after the batches handed out. `batches=k`: after k batches of the present pass were
        trained, for frameworks that fetch ahead; with DataLoader workers also say how many `workers`.
        Raises `StateError` in a parent whose DataLoader workers did the reading: it cannot know what they did.
        """
        world = resolve_world(self._world)
        if self._manner.steps is not None:
            self._refuse_workers(workers, self._read_by_workers())
            now, steps = (self._now, self._steps) if batches is None else self._after(batches, world)
            return {**self._settled(now, world, 1).to_dict(), "steps": steps}
        if batches is not None:
            # workers pass on without the parent: it knows where their first pass began, not which one they are at
            epoch = self._epochs.begun if self._read_by_workers() else self._start.epoch
            start = self._from(epoch, world, workers)
            share = self._share(start, World(0, world.size * workers))
            start = start.with_workers(workers, world.size, share.batch)[0]
            return start.advance(batches, share, choose_gaps(self._manner.skips, start, share)).to_dict()  # type: ignore[no-any-return]
        if self._read_by_workers():
            raise StateError(
                "this copy of the dataset was handed to DataLoader workers, which read since",
                "save state_dict(batches=<trained>, workers=<num_workers>), or use torchdata's StatefulDataLoader",
            )
        return self._settled(self._now, world, worker()[1]).to_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state: dict[str, Any], *, force: bool = False) -> None:
        """Let the next pass go on where the state stands, at any world size.

        Raises `StateError` where it belongs to another dataset, split, order or seed; `force` accepts a copy of
        the dataset with another digest.
        """
        found = self._read(state, force=force)
        steps = get(state, "steps", int) if "steps" in state else 0
        self._end_pass()
        self._choose(found)
        self._now = self._start
        self._loaded = True
        self._steps = max(0, steps)
        self._begun = self._now, self._steps

    def replay(self, epoch: int, steps: Iterable[int]) -> Iterator[dict[str, Any]]:
        """Begin to deliver some steps of an epoch again, ascending, with the crops they had; `samples` counts them.

        A pass under way ends; where training stands does not change. Raises `UsageError` for a step that is not there.
        """
        self._end_pass()
        world = resolve_world(self._world)
        start = self._from(epoch, world)
        share = self._share(start, world)
        start = replace(start, position=start.position % share.global_batch, extra=0, workers=1, ranks=0, batch=0)
        gaps = only(read_steps("steps", {epoch: steps})[epoch], epoch, start.position, share)
        return self._run(Position(world, share, start, 0, gaps), None)

    def stats(self) -> Stats:
        """Return what this process's loader did so far, with a verdict on what limits it."""
        return self._session.here().counters.snapshot()

    def close(self) -> None:
        """End the present pass and its threads."""
        self._end_pass()
        self._session.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for workers: the rank is resolved here, since a spawned worker cannot ask torch.distributed."""
        world = resolve_world(self._world)
        check_loader(self._manner.batch_size, world.size)  # a spawned worker does not see who splits its batches
        return self.__dict__ | {"_pass": None, "_kept": None, "_world": world}

    def _settled(self, start: Any, world: World, workers: int) -> Any:
        """The same place, with what depends on the size of the world."""
        raise NotImplementedError

    def _share(self, start: Any, world: World) -> Part:
        """This rank's part of the epoch of `start`."""
        raise NotImplementedError

    def _course(self, begin: Position, steps_at_once: int) -> Course:
        """What a pass from there on plans."""
        raise NotImplementedError

    def _read(self, state: dict[str, Any], *, force: bool) -> Standing:
        """The place that a state says. Raises `StateError` where it is not of this data and order."""
        raise NotImplementedError

    def _choose(self, start: Standing) -> None:
        self._start = start
        self._epochs.choose(start.epoch)
        if not in_worker():  # a worker that is given a state, by StatefulDataLoader, has a place of its own
            values = (start.epoch, start.position, start.extra, start.workers, start.ranks, start.batch, start.pin)
            self._epochs.tell(Place(*values, *start.order))

    def _begin(self, world: World, workers: int) -> Any:
        news = self._epochs.news() if in_worker() else None
        if news is not None:  # a worker that lives on learns what its parent chose meanwhile
            place: dict[str, Any] = news._asdict()
            if place.pop("pin") not in (0, self._start.pin):
                raise StateError("the state has other sources or weights", "make a new DataLoader, with new workers")
            order = [place.pop(name) for name in ORDER_NAMES]
            self._start = replace(self._start, **place).with_order(*order)
        return self._from(self._epochs.next_epoch(), world, workers)

    def _from(self, epoch: int, world: World, workers: int = 1) -> Any:
        """Where a pass of this epoch begins: where it stands if a state said so."""
        start = self._start if epoch == self._start.epoch else self._start.beginning(epoch)
        return self._settled(start, world, workers)

    def _read_by_workers(self) -> bool:
        return self._epochs.read_elsewhere and self._running() is None and not in_worker()

    def _deliver(self, cursor: Standing) -> None:
        self._loaded = False
        self._steps += 1
        self._now = cursor

    def _complete(self, epoch: int) -> None:
        self._epochs.complete(worker()[0], epoch)
        self._start = replace(self._start, skipped=self._now.skipped)
        self._now = self._start.next_epoch() if self._start.epoch == epoch else self._start  # set_epoch chose meanwhile
        self._pass = None

    def _running(self) -> Pass | None:
        return self._pass() if self._pass is not None else None

    def _end_pass(self) -> None:
        if (run := self._running()) is not None:
            run.end()
        self._pass = self._kept = None

    def _keep(self, run: Pass) -> None:
        self._kept = run

    def _refuse_workers(self, workers: int, elsewhere: bool) -> None:
        if workers > 1 or elsewhere:
            raise UsageError(
                f"steps_per_epoch={self._manner.steps} with DataLoader workers, which do not know where the last ones "
                "stopped",
                "use num_workers=0; transform_workers= runs slow transforms",
            )

    def _after(self, batches: int, world: World) -> tuple[Any, int]:
        """The place, and the steps of the run, after so many batches of the present iteration."""
        now, steps = self._begun[0], self._begun[1] + batches
        while batches:
            now = self._settled(now, world, 1)
            share = self._share(now, World(0, world.size))
            now = now.with_workers(1, world.size, share.batch)[0]
            gaps = choose_gaps(self._manner.skips, now, share)
            count = min(batches, max(1, gaps.steps(share, now.epoch, now.position)))
            now = now.advance(count, share, gaps)
            batches -= count
        return now, steps

    def _run(self, begin: Position, follow: Follow | None) -> Pass:
        course = self._course(begin, SAMPLES_AT_ONCE if self._manner.shape.samples else 1)
        run = Pass(self._session.here().start(course), begin, follow, self._manner.shape)
        self._pass = weakref.ref(run)
        return run


def _weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that calls the method as long as its object is alive."""
    found = weakref.WeakMethod(method)

    def call(value: Any) -> None:
        if (alive := found()) is not None:
            alive(value)

    return call
