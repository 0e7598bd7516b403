"""What `StreamingDataset` and `Mixture` share: passes, epochs and states of an `IterableDataset`."""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import IterableDataset

from streamloader.engine.passes import Course
from streamloader.errors import StateError, UsageError
from streamloader.plan.cursor import Standing
from streamloader.plan.world import Part, World
from streamloader.stats import BatchReport, Stats
from streamloader.torch_choices import check_epoch, check_share
from streamloader.torch_epochs import Place, SharedEpochs
from streamloader.torch_pass import SAMPLES_AT_ONCE, Follow, Pass, Position, warn_of_costs
from streamloader.torch_session import ProcessSession
from streamloader.torch_steps import choose_gaps, only, read_steps
from streamloader.torch_tensors import Shape
from streamloader.torch_world import check_loader, in_worker, loader_asking_for_length, resolve_world, worker


@dataclass(frozen=True)
class Manner:
    """How batches are handed out: of how many samples (None: singly), in which shape, without which steps."""

    batch_size: int | None
    shape: Shape
    skips: dict[int, tuple[int, ...]] = field(default_factory=dict)
    on_batch: Callable[[BatchReport], None] | None = None


def check_guarded() -> None:
    """Raise `UsageError` in a process that imports the script of its parent, and so runs it once more."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "processes of transform_workers= or DataLoader import this script, which iterates a dataset when imported",
            "put the code that trains below `if __name__ == '__main__':`",
        )


class Streamed(IterableDataset[dict[str, Any]]):
    """Passes over data that an engine streams; a subclass says which data, and in which order."""

    def __init__(self, start: Standing, manner: Manner, session: ProcessSession, world: World | None) -> None:
        super().__init__()
        self._manner = manner
        self._session = session
        self._world = world
        self._start = self._now = start
        self._loaded = False
        self._epochs = SharedEpochs()
        self._pass: weakref.ref[Pass] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that the next pass delivers; during one its own, until its last batch was handed out."""
        return self._epochs.next_epoch()

    def __len__(self) -> int:
        """This rank's batches in the whole of the next epoch (samples with `batch_size=None`).

        To a DataLoader with workers, which makes them act as ranks, that is what all of its workers yield.
        """
        world, loader = resolve_world(self._world), loader_asking_for_length()
        workers = 1 if loader is None else max(1, loader.num_workers)
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
        """Begin a pass: at the start of the epoch, or where a loaded state stands. Ends the pass before it."""
        rank, (number, count) = resolve_world(self._world), worker()
        check_loader(self._manner.batch_size, rank.size)
        check_guarded()
        self._end_pass()
        start = self._begin(rank, count)
        start, repeated = start.with_workers(count, rank.size, self._manner.batch_size or 1)
        begin = Position.of_worker(start, rank, number, lambda world: self._share(start, world))
        check_share(begin.share)
        begin = replace(begin, gaps=choose_gaps(self._manner.skips, start, begin.share))
        warn_of_costs(begin.share, count, repeated, fresh=start.position == 0)
        self._epochs.begin(number, count, start.epoch)
        self._start = self._now = start
        return self._run(begin, Follow(self._deliver, self._complete, self._manner.on_batch))

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass deliver this epoch, from its beginning unless it is the present one already.

        Raises `StateError` where a state was just loaded and says another epoch: frameworks that number their
        epochs anew would lose the place.
        """
        check_epoch(epoch)
        present = self.epoch
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
        self._end_pass()
        self._choose(found)
        self._now = self._start
        self._loaded = True

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
        return self.__dict__ | {"_pass": None, "_world": world}

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
            self._epochs.tell(Place(*(getattr(start, name) for name in Place._fields)))

    def _begin(self, world: World, workers: int) -> Any:
        news = self._epochs.news() if in_worker() else None
        if news is not None:  # a worker that lives on learns what its parent chose meanwhile
            place: dict[str, Any] = news._asdict()
            if place.pop("pin") not in (0, self._start.pin):
                raise StateError("the state has other sources or weights", "make a new DataLoader, with new workers")
            self._start = replace(self._start, **place)
        return self._from(self._epochs.next_epoch(), world, workers)

    def _from(self, epoch: int, world: World, workers: int = 1) -> Any:
        """Where a pass of this epoch begins: where it stands if a state said so."""
        start = self._start if epoch == self._start.epoch else self._start.beginning(epoch)
        return self._settled(start, world, workers)

    def _read_by_workers(self) -> bool:
        return self._epochs.read_elsewhere and self._running() is None and not in_worker()

    def _deliver(self, cursor: Standing) -> None:
        self._loaded = False
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
        self._pass = None

    def _run(self, begin: Position, follow: Follow | None) -> Pass:
        course = self._course(begin, SAMPLES_AT_ONCE if self._manner.shape.samples else 1)
        run = Pass(self._session.here().start(course), begin, follow, self._manner.shape)
        self._pass = weakref.ref(run)
        return run
