"""Resident fields: small, fixed-shape, held whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.errors import CorruptError
from streamloader.format.reader import FieldReader, Run
from streamloader.format.threads import run_all
from streamloader.stats import Counters
from streamloader.storage.policy import RetryPolicy, call_with_retry
from streamloader.storage.protocol import RangeReader

THREADS = 8


def load_whole(field: FieldReader, reader: RangeReader, counters: Counters) -> NDArray[Any]:
    """Return every sample of a fixed-shape field, shape (num_samples, *shape). Raises storage and format errors."""
    out = np.empty((field.num_samples, *field.layout.field.shape), field.layout.field.dtype)

    def fetch(run: Run) -> None:
        counters.add(requests=1)
        body = call_with_retry(
            partial(field.fetch, reader, run), RetryPolicy(), on_retry=lambda *_: counters.add(requests=1, retries=1)
        )
        counters.add(bytes_fetched=len(body))
        field.decode(run, body, out[run.first_sample : run.first_sample + run.num_samples])

    def load(run: Run) -> None:
        try:
            fetch(run)
        except CorruptError:  # mostly a damaged transfer: what is damaged at rest fails again
            counters.add(retries=1)
            fetch(run)

    run_all(load, field.runs(0, field.num_samples), THREADS)
    return out
