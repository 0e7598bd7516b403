"""`LossLog`: the loss of each sample as JSON lines, which `streamloader view --losses` ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from streamloader.errors import UsageError
from streamloader.show.cells import to_numpy
from streamloader.storage.json_lines import JsonLines
from streamloader.storage.process import Finalizer

BATCHES = 100  # of an object, if the log is a folder or a URL


class LossLog:
    """Writes the loss of each sample of the batches that a dataset returns, one line of JSON for each batch.

    `dataset`: a `StreamingDataset`, `NumpyDataset` or mixture. Give it `with_index=True`, so that samples have their
    numbers. `log`: a file, to which all ranks may append; or a URL, or a folder whose path ends with "/", where 100
    batches of a rank become an object. `storage_options`: of the log's store. Create it after you load a state: the
    first line of a rank has what `describe()` and `state_dict()` of the dataset return, as has a line after
    `set_weights()`.

        log = sl.LossLog(dataset, "losses.jsonl")
        for batch in dataset:
            losses = cross_entropy(model(batch["image"]), batch["label"], reduction="none")
            log(batch, losses)

    The first failure to write is a `RuntimeWarning`. What is left is written by `close()`, or at the end of the process
    unless it is killed.
    """

    def __init__(
        self, dataset: Any, log: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._dataset = dataset
        self._run, state = dataset.describe(), dataset.state_dict()
        # of a mixture: its weights, and the positions from which they hold; None of a dataset
        self._phases = state.get("phases")
        self._lines: list[dict[str, Any]] = [{"run": self._run, "state": state}]
        self._log = JsonLines(os.fspath(log), storage_options, "losses are missing in LossLog")
        self._batches = 1 if self._log.is_file else BATCHES
        # of an exception in training
        self._end = Finalizer(self, partial(_write, at_once=True), self._log, self._lines)

    def __call__(self, batch: Mapping[str, Any], losses: Any) -> None:
        """Log the losses of the batch that the dataset returned last: a tensor or an array of shape (samples,).

        Losses of padded rows, False in `valid`, are left out. Raises `UsageError` for another shape, and `StateError`
        if the dataset has returned no batch, or DataLoader workers read it.
        """
        values = np.asarray(to_numpy(losses))
        count = next((len(batch[name]) for name in ("valid", "index") if name in batch), values.size)
        rows = np.flatnonzero(to_numpy(batch["valid"])) if "valid" in batch else np.arange(count)
        if values.shape != (count,):
            problem = f"losses of shape {values.shape} for a batch of {count} samples"
            raise UsageError(problem, "give one for each sample: reduction='none', then the mean over other axes")
        line = self._dataset.last_step() | {"row": rows.tolist()}
        line |= {name: to_numpy(batch[name])[rows].tolist() for name in ("index", "source") if name in batch}
        loss = [float(f"{value:.6g}") if np.isfinite(value) else None for value in values[rows].tolist()]
        state = {} if self._phases is None else self._dataset.state_dict()
        if state.get("phases") != self._phases:  # set_weights(), without which the steps after it had other samples
            self._phases = state["phases"]
            self._lines.append({"run": self._run, "state": state})
        self._lines.append({**line, "loss": loss})
        if len(self._lines) >= self._batches:
            _write(self._log, self._lines)

    def close(self) -> None:
        """Write what is left, and wait until it is written."""
        _write(self._log, self._lines)
        self._log.close()

    def __enter__(self) -> LossLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(log: JsonLines, lines: list[dict[str, Any]], *, at_once: bool = False) -> None:
    """Write the lines, and remove them from the list; nothing if there is only that of the run."""
    last = lines[-1] if lines else {}
    if "epoch" in last:
        name = f"{last['epoch']:06}-{last['step']:08}-{last['rank']:05}.jsonl"
        log.write(name, lines, at_once=at_once)
        lines.clear()
