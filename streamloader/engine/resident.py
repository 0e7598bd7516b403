"""Resident fields: small, fixed-shape, held whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.format.reader import FieldReader, Run
from streamloader.format.threads import run_all
from streamloader.stats import Counters
from streamloader.storage.protocol import Store

THREADS = 8


def load_whole(
    field: FieldReader,
    store: Store,
    counters: Counters,
    span: tuple[int, int] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> NDArray[Any]:
    """Return the samples `span`, [start, stop), of a fixed-shape field, by default all, shape (samples, *shape).

    Waits before retries by `sleep`. Raises storage and format errors, and what `sleep` raises.
    """
    start, stop = span or (0, field.num_samples)
    out = np.empty((stop - start, *field.layout.field.shape), field.layout.field.dtype)

    reader = store.reader()

    def request(run: Run) -> memoryview:
        counters.add(requests=1)
        body = field.fetch(reader, run)
        counters.add(bytes_fetched=len(body))
        return body

    def again(*_: object) -> None:
        counters.add(retries=1)

    def load(run: Run) -> None:
        patient = partial(store.retries.call, partial(request, run), on_retry=again)
        with store.retries.waits_by(sleep):
            field.load(run, patient, out, start, on_damage=again)

    with store.retries.waits_by(sleep):
        runs = field.runs(start, stop)
    run_all(load, runs, THREADS)
    return out
