"""The run whose steps are shown: a loader with the arguments of training, and where its steps are."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from streamloader.errors import FieldError, StateError, StreamloaderError, UsageError
from streamloader.loader.arguments import Source
from streamloader.loader.base import Loader
from streamloader.loader.dataset import NumpyDataset, NumpyMixture
from streamloader.loader.describe import read_description
from streamloader.options import Decode, Pack, Sampling, whole
from streamloader.storage import open_store, split_url
from streamloader.storage.url import redact

FROM_STATE = "split", "version", "seed", "shuffle", "remainder"  # of a state of one dataset, which fix its order
_REMEDY = "give a file that json.dump(dataset.state_dict(), file) or json.dump(dataset.describe(), file) wrote"
MOST_EPOCHS = 1000  # of different lengths, whose steps are counted one by one
DEFAULT_BATCH = 32  # of a dataset that is opened without a run


@dataclass(frozen=True)
class RunOptions:
    """What `streamloader view` is told about a run.

    `url`: the dataset, None for those of the description. `description`: what `describe` of the run returned. `state`:
    a saved state. `given`: arguments of the dataset that are known otherwise, which take the place of those of the
    description. `world_size`: of the run. `transform`: of each sample, `module:function`.
    """

    url: str | None
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    description: Mapping[str, Any] | None = None
    state: Mapping[str, Any] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    transform: str | None = None
    sampling: Sampling = field(default_factory=Sampling)


Opened = TypeVar("Opened", bound=Loader)


class Place(NamedTuple):
    """A step of a rank: `step` counts from the beginning of its epoch, and `total` from that of epoch 0, if known."""

    epoch: int
    step: int
    rank: int
    total: int | None


def read_json(path: str, storage_options: Mapping[str, Any]) -> Any:
    """Return the JSON object at a path or a URL. Raises `StateError` for another document, and `StorageError`."""
    folder, name = split_url(path)
    try:
        value = json.loads(open_store(folder, storage_options).get(name))
    except (ValueError, RecursionError) as error:
        raise StateError(f"{redact(path)} is not JSON: {error}", _REMEDY) from error
    if not isinstance(value, dict):
        raise StateError(f"{redact(path)} has {str(value)!r:.60}", _REMEDY)
    return value


def load_function(name: str) -> Callable[..., Any]:
    """Return the function `module:function`, whose module may be in the current folder. Raises `UsageError`."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--transform {name}: {error}", "write it as module:function, of a module here") from error
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise UsageError(f"--transform {name} is not a function", "write it as module:function")
    return found  # type: ignore[no-any-return]


def _with_crops(decode: Any, *, wanted: bool) -> Any:
    """Return `decode=` without a device, with a column that says how images were cropped, where it can have one."""
    if isinstance(decode, Mapping):
        return {name: _with_crops(each, wanted=wanted) for name, each in decode.items()}
    if not isinstance(decode, Decode):
        return decode
    cropped = wanted and decode.size is not None and decode.views is None
    return replace(decode, with_crop=cropped or decode.with_crop, device=None)


def numbered(make: Callable[..., Opened]) -> Opened:
    """Return a loader whose batches have the numbers of samples, unless a field has that name."""
    try:
        return make(with_index=True)
    except FieldError:
        return make(with_index=False)


class Run:
    """A run over a dataset or a mixture, whose steps are read again. Thread-safe."""

    def __init__(self, options: RunOptions) -> None:
        self._lock = threading.Lock()
        description = options.description or {}
        self.has_batch_size = bool(description) or "batch_size" in options.given
        try:
            self.size = options.world_size or whole("world_size", description.get("world_size", 1))
            self.left_out: Mapping[str, str] = dict(description.get("left_out", {}))
            self.loader = self._open(options)
            if options.state is not None:
                self.loader.load_state_dict(dict(options.state))
        except StreamloaderError:
            raise
        except (AttributeError, TypeError, ValueError) as error:  # arguments that are missing or of other types
            raise StateError(f"the description of the run cannot be used: {error}", _REMEDY) from error

    def _open(self, options: RunOptions) -> Loader:
        sources, arguments = self._arguments(options)
        shares: Any = arguments.pop("shares", None)
        # a transform would get a column more
        arguments["decode"] = _with_crops(arguments.get("decode"), wanted=options.transform is None)
        shared = {**arguments, "world": (0, self.size), "num_workers": 0}
        if options.transform is not None:
            shared["transform"] = load_function(options.transform)
            self.left_out = {name: text for name, text in self.left_out.items() if name != "transform"}
        opened = [Source(**{**source, "storage_options": options.storage_options}) for source in sources]
        if shares is None:
            (source,) = opened
            return numbered(partial(NumpyDataset, **vars(source), **shared))
        weights = {step: dict(zip(opened, each, strict=True)) for step, each in shares}
        return numbered(partial(NumpyMixture, weights.pop(0), schedule=weights or None, **shared))

    def _arguments(self, options: RunOptions) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the arguments of each source and those of the loader: described, of the state, and given."""
        state, given = options.state or {}, dict(options.given)
        names = "split", "where", "version"
        of_source = {name: given.pop(name) for name in names if given.get(name) is not None} | vars(options.sampling)
        if options.description is not None:
            sources, arguments = read_description(options.description)
            if options.url is not None and len(sources) > 1:
                problem = f"{redact(options.url)} and a run over {len(sources)} datasets"
                raise UsageError(problem, "leave the URL out: the description names them")
            if options.url is not None:
                sources[0]["url"] = options.url
            changed = {name: value for name, value in of_source.items() if value != getattr(Sampling(), name, None)}
            if arguments.get("batch_size", 1) is None:  # whose steps are those of batches of one sample
                arguments["batch_size"] = 1
            return [source | changed for source in sources], arguments | given
        if "sources" in state:
            problem = "the state is of a mixture, and does not name its datasets"
            raise StateError(problem, "give --run with the file of its describe(), or of sl.LossLog")
        of_state = {name: state[name] for name in FROM_STATE if state.get(name) is not None}
        source = {"url": options.url} | {name: of_state.pop(name) for name in names if name in of_state} | of_source
        return [source], {"batch_size": DEFAULT_BATCH, **of_state, **given}

    @property
    def begin(self) -> tuple[int, int]:
        """The epoch and the step of it at which the loaded state goes on; (0, 0) without a state."""
        start = self.loader._start_of(self.loader._start.epoch)
        share = self._share(start.epoch)
        return start.epoch, share.steps_between(share.first_start(start.position), start.position)

    def close(self) -> None:
        """End the threads of the loader."""
        self.loader.close()

    @property
    def described(self) -> str:
        """What steps are of, as text."""
        batch, shuffled = self.loader._options.batch_size, self.loader._options.shuffle is not False
        order = f"shuffled with seed {self.loader._options.seed}" if shuffled else "in stored order"
        unit = " documents" * self.of_documents
        return f"{self.size:,} rank{'s' if self.size > 1 else ''}, batches of {batch}{unit}, {order}"

    @property
    def of_documents(self) -> bool:
        """Whether batches are of documents that are packed without `fit`: so many documents in fewer or more rows."""
        packs = (self.loader._options.pack or {}).values()
        return any(not isinstance(pack, Pack) or pack.fit is None for pack in packs)

    @property
    def _even(self) -> bool:
        """Whether all epochs have as many steps: not those of a mixture, nor of `max_tokens=`."""
        return not isinstance(self.loader, NumpyMixture) and self.loader._options.max_tokens is None

    def steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch, from 0."""
        share = self._share(epoch)
        return int(share.global_steps(share.first_start(self.loader._start_of(epoch).position)))

    def _share(self, epoch: int) -> Any:
        return self.loader._share(self.loader._start_of(epoch), self.loader._rank)

    def place(self, step: int, epoch: int | None, rank: int) -> Place:
        """Return where a step is: of an epoch, or, without one, counted from the beginning of epoch 0.

        Raises `UsageError` for one that the epoch does not have.
        """
        if epoch is None:
            epoch = 0
            while step >= (count := self.steps(epoch)):
                if not count or epoch > MOST_EPOCHS:
                    raise UsageError(f"step {step} from the beginning of epoch 0", "give the epoch, and its step")
                skipped = step // count if self._even else 1
                epoch, step = epoch + skipped, step - skipped * count
        count = self.steps(epoch)
        if not count:
            raise UsageError(f"epoch {epoch} has no steps", "open a dataset, a split or a selection that has samples")
        if not 0 <= step < count:
            raise UsageError(f"step {step} of epoch {epoch}, which has {count} steps", f"give 0 to {count - 1}")
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} of {self.size}", f"give 0 to {self.size - 1}, or --world-size")
        if self._even:
            return Place(epoch, step, rank, step + epoch * self.steps(0))
        known = epoch <= MOST_EPOCHS
        return Place(epoch, step, rank, step + sum(map(self.steps, range(epoch))) if known else None)

    def batch(self, place: Place) -> dict[str, Any]:
        """Return the batch of a step as training got it."""
        with self._lock:
            return next(self.loader.replay(place.epoch, [place.step], rank=place.rank))

    def spread(self, count: int) -> list[dict[str, Any]]:
        """Return up to so many batches of rank 0 that are spread evenly over epoch 0."""
        steps = np.unique(np.linspace(0, max(0, self.steps(0) - 1), count).astype(np.int64)).tolist()
        with self._lock:
            return list(self.loader.replay(0, steps, rank=0)) if self.steps(0) else []

    def orders(self, epoch: int) -> list[dict[str, int]]:
        """Return the order of each source, with the number of its "samples" and "blocks"."""
        sources = self.loader._start_of(epoch).sources
        counts = (
            {"samples": each.num_samples, "blocks": -(-each.num_samples // each.params.block)} for each in sources
        )
        return [vars(each.params) | count for each, count in zip(sources, counts, strict=True)]

    def blocks(self, epoch: int, steps: Iterable[int]) -> dict[int, tuple[int, list[int]]]:
        """Return the number of samples of some global steps, and their blocks, of all ranks.

        Blocks count through all sources, and those of a selection are of the selected samples.
        """
        block, count, blocks = (
            np.array([each[name] for each in self.orders(epoch)]) for name in ("block", "samples", "blocks")
        )
        first, before = np.cumsum(count) - count, np.cumsum(blocks) - blocks
        found = {}
        for step in steps:
            samples = self.loader._positions(epoch, step, None, 1) % count.sum()  # those that weights draw count on
            source = np.searchsorted(first, samples, side="right") - 1
            of = before[source] + (samples - first[source]) // block[source]
            found[step] = len(samples), np.unique(of).tolist()
        return found
