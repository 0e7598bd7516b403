"""Resident fields: small, fixed-shape, held whole."""

from __future__ import annotations

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
    field: FieldReader, store: Store, counters: Counters, start: int = 0, stop: int | None = None
) -> NDArray[Any]:
    """Return the samples [start, stop) of a fixed-shape field, by default all, shape (samples, *shape).

    Raises storage and format errors.
    """
    stop = field.num_samples if stop is None else stop
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
        field.load(run, patient, out, start, on_damage=again)

    run_all(load, field.runs(start, stop), THREADS)
    return out
