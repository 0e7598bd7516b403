"""`on_batch=` callbacks that log how long training waits: TensorBoard, and Weights & Biases."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from streamloader.options import whole
from streamloader.stats import BatchReport, quotient
from streamloader.storage.process import Owner


class SummaryWriter(Protocol):
    """A `SummaryWriter` of torch or tensorboardX."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> object:
        """Write a value of a step."""
        ...


class Run(Protocol):
    """What `wandb.init` returns."""

    def log(self, data: dict[str, Any], *, commit: bool) -> object:
        """Add values to a row of the history, which ends with `commit`."""
        ...


class _Log:
    """Sums up `every` reports, and writes the values of these batches by the name.

    `wait_seconds` is the mean of a batch, `wait_fraction` the share of the time that training waited, and
    `samples_per_second` the rate. DataLoader workers get a copy of it, which writes nothing: a writer of the process
    that made it does not work there.
    """

    def __init__(self, writer: Any, every: int) -> None:
        self._writer, self._every = writer, whole("every", every)
        self._owner = Owner("loggers")
        self._warned, self._batches = False, 0
        self._samples = self._wait_seconds = self._seconds = 0.0

    def __call__(self, report: BatchReport) -> None:
        if self._writer is None or not self._owner.here:
            self._warn()
            return
        self._batches += 1
        self._samples += report.samples
        self._wait_seconds += report.wait_seconds
        self._seconds += report.seconds
        if self._batches < self._every:
            return
        values = {
            "wait_seconds": self._wait_seconds / self._batches,
            "wait_fraction": min(1.0, quotient(self._wait_seconds, self._seconds)),
            "samples_per_second": quotient(self._samples, self._seconds),
            "epoch": report.epoch,
        }
        self._batches, self._samples, self._wait_seconds, self._seconds = 0, 0, 0.0, 0.0
        self._write(values, report.step)

    def _write(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            text = "%s logs nothing in DataLoader workers and other copies; give num_workers= to the dataset"
            logging.getLogger("streamloader").warning(text, type(self).__name__)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for workers, without the writer."""
        return self.__dict__ | {"_writer": None}


class TensorBoard(_Log):
    """Writes `data/wait_seconds`, `data/wait_fraction`, `data/samples_per_second` and `data/epoch` to TensorBoard.

    `writer`: a `SummaryWriter`. `every`: the batches that each value covers. The step is that of the last of them.
    Each rank needs a writer with a folder of its own; or let rank 0 log alone.
    """

    def __init__(self, writer: SummaryWriter, *, every: int = 10) -> None:
        super().__init__(writer, every)

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"data/{name}", value, step)


class WandB(_Log):
    """Adds `data/wait_seconds`, `data/wait_fraction`, `data/samples_per_second`, `data/epoch` and `data/step` to a run.

    `run`: what `wandb.init` returned. `every`: the batches that each value covers. The values become part of a row of
    the training: of its next `run.log`, or of its last one if it gives them a `step=`. A row of their own would advance
    the step of the run, and Weights & Biases drops what is logged for an earlier step.
    """

    def __init__(self, run: Run, *, every: int = 10) -> None:
        super().__init__(run, every)

    def _write(self, values: dict[str, float], step: int) -> None:
        self._writer.log({f"data/{name}": value for name, value in {**values, "step": step}.items()}, commit=False)
