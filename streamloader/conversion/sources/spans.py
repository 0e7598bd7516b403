"""Records that lie one after another in a file: each by its bytes, many in few requests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from streamloader.conversion.sources import base
from streamloader.conversion.sources.streams import Content, Span, read_spans


def read_each(content: Content, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Iterator[memoryview]:
    """Yield bytes [start, stop) of what a file holds for each of these; they ascend.

    Raises `SourceError` for a damaged file, `SourceChangedError` for one that now ends sooner.
    """
    runs = base.cut_runs(starts, stops, base.GAP_BYTES, base.REQUEST_BYTES)
    spans = [Span(content, int(starts[i]), int(stops[j - 1])) for i, j in runs]
    for (i, j), wanted, data in zip(runs, spans, read_spans(spans), strict=True):
        view = memoryview(data)
        for start, stop in zip(starts[i:j].tolist(), stops[i:j].tolist(), strict=True):
            yield view[start - wanted.start : stop - wanted.start]
