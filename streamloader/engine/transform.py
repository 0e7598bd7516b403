"""The caller's transform, a sample at a time, in this process or in processes behind the one engine."""

from __future__ import annotations

import inspect
import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from streamloader.errors import EngineError, TransformError, UsageError

Transform = Callable[..., Any]
Sample = dict[str, Any]


@dataclass(frozen=True)
class RngKey:
    """What a sample's random numbers are keyed by, so that augmentation repeats exactly at any world size."""

    seed: int
    epoch: int
    position: int

    def rng(self) -> np.random.Generator:
        """Return the generator: Philox, keyed by (seed, epoch), its counter started at the position."""
        key = np.array([self.seed, self.epoch], np.uint64)  # numpy would make floats of a list with large numbers
        return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, self.position], np.uint64)))


def takes_rng(transform: Transform) -> bool:
    """Return whether the transform has a second positional argument, which then gets the generator."""
    try:
        parameters = inspect.signature(transform).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in kinds and (p.default is p.empty or p.name == "rng")]
    return len(required) >= 2


def apply(
    transform: Transform, with_rng: bool, samples: Sequence[Sample], keys: Sequence[RngKey], numbers: Sequence[int]
) -> list[Sample]:
    """Return the transformed samples. Raises `TransformError`, naming the sample, for whatever the transform raises."""
    out = []
    for sample, key, number in zip(samples, keys, numbers, strict=True):
        try:
            result = transform(sample, key.rng()) if with_rng else transform(sample)
        except Exception as error:
            raise TransformError(
                f"the transform raised {type(error).__name__} on sample {number}: {error}",
                "mend the transform, or skip such samples in it",
            ) from error
        if not isinstance(result, dict):
            raise TransformError(
                f"the transform returned {type(result).__name__} for sample {number}",
                "return a dict from field names to values",
            )
        out.append(result)
    return out


def collate(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return samples as batch columns: arrays and numbers stacked, others as lists. Raises `TransformError`."""
    names = list(samples[0]) if samples else []
    for sample in samples:
        if list(sample) != names:
            raise TransformError(
                f"the transform returned keys {sorted(sample)} after {sorted(names)}",
                "return the same keys for every sample",
            )
    return {name: _stack(name, [sample[name] for sample in samples]) for name in names}


def _stack(name: str, values: list[Any]) -> Any:
    if isinstance(values[0], (str, bytes, list, dict, tuple)) or values[0] is None:
        return values
    arrays = [np.asarray(value) for value in values]
    if arrays[0].dtype == object:
        return values
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        shown = ", ".join(map(str, sorted(shapes)[:3]))
        raise TransformError(
            f"the transform returned {name!r} in shapes {shown}", "return one shape, or a list to keep them apart"
        )
    return np.stack(arrays)


class TransformProcess:
    """One process that applies a transform; it ends by itself once its parent is gone, however that went."""

    def __init__(self, transform: Transform) -> None:
        context = multiprocessing.get_context("spawn")
        if multiprocessing.current_process().daemon:
            raise UsageError(
                "transform_workers in a DataLoader worker, which may not have children",
                "use num_workers=0 with transform_workers",
            )
        try:
            pickle.dumps(transform)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"transform_workers with a transform that other processes cannot load ({error})",
                "define it at the top level of a module, or use transform_workers=0",
            ) from error
        ours, theirs = context.Pipe()
        self._pipe = ours
        self._process = context.Process(
            target=_serve, args=(theirs, transform), name="streamloader-transform", daemon=True
        )
        self._process.start()
        theirs.close()

    def run(self, samples: Sequence[Sample], keys: Sequence[RngKey], numbers: Sequence[int]) -> list[Sample]:
        """Return the transformed samples. Raises `TransformError`, or `EngineError` where the process died."""
        try:
            self._pipe.send((samples, keys, numbers))
            result = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(1)
            raise EngineError(
                f"a transform process died (exit code {self._process.exitcode}) on one of {list(numbers)[:4]}...",
                "look for a crash or too little memory in the transform",
            ) from error
        if isinstance(result, TransformError):
            raise result
        return list(result)

    def close(self) -> None:
        """Hang up; the process ends after the job it is in."""
        self._pipe.close()


def _serve(pipe: Connection, transform: Transform) -> None:
    with_rng = takes_rng(transform)
    while True:
        try:
            samples, keys, numbers = pipe.recv()
        except (EOFError, OSError):
            return
        answer: Any
        try:
            answer = apply(transform, with_rng, samples, keys, numbers)
        except TransformError as error:
            answer = error
        try:
            pipe.send(answer)
        except OSError:
            return
