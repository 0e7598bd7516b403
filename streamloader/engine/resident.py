"""Resident fields: small, fixed-shape, held whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.format.reader import FieldReader, Run
from streamloader.format.threads import run_all
from streamloader.stats import Counters
from streamloader.storage.policy import RetryPolicy, call_with_retry
from streamloader.storage.protocol import RangeReader

THREADS = 8


def load_whole(field: FieldReader, reader: RangeReader, counters: Counters) -> NDArray[Any]:
    """Return every sample of a fixed-shape field, shape (num_samples, *shape). Raises storage and format errors."""
    out = np.empty((field.num_samples, *field.layout.field.shape), field.layout.field.dtype)

    def request(run: Run) -> memoryview:
        counters.add(requests=1)
        body = field.fetch(reader, run)
        counters.add(bytes_fetched=len(body))
        return body

    def again(*_: object) -> None:
        counters.add(retries=1)

    def load(run: Run) -> None:
        rows = out[run.first_sample : run.first_sample + run.num_samples]
        patient = partial(call_with_retry, partial(request, run), RetryPolicy(), on_retry=again)
        field.load(run, patient, rows, on_damage=again)

    run_all(load, field.runs(0, field.num_samples), THREADS)
    return out
