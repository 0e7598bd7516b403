"""What a machine's cores do without a loader: plain GETs of a dataset's objects, and decoding of JPEGs in memory.

`spec.extra`: `bound`, "gets" or "decode"; `folder`: the dataset as the server sees it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import obstore
from common import Source, Spec, emit, main
from crops import jpeg_transform
from obstore.store import S3Store
from ours import write

RANGE = 4 << 20
THREADS = 32
JPEGS = 512


def read(spec: Spec) -> None:
    """Measure what `bound` names."""
    if spec.extra["bound"] == "gets":
        emit(gets(spec))
        return
    import simplejpeg

    for name, decode in (("whole", simplejpeg.decode_jpeg), ("crop", jpeg_transform("uint8"))):
        with multiprocessing.Pool(len(os.sched_getaffinity(0))) as pool:
            job = partial(decoded, spec.source, spec.seconds, decode)
            rates = pool.map(job, range(len(os.sched_getaffinity(0))), chunksize=1)
        emit({"decode": name, "samples": sum(rates), "seconds": spec.seconds})


def gets(spec: Spec) -> dict[str, Any]:
    """Return what threads got in ranges of 4 MiB: the stored bytes, and the samples and raw bytes in them."""
    options: Any = {"allow_http": True}
    keys = {"access_key_id": spec.key, "secret_access_key": spec.secret, "region": "us-east-1"}
    store = S3Store(spec.bucket, prefix=spec.prefix, endpoint=spec.endpoint, client_options=options, **keys)
    folder = Path(spec.extra["folder"])
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    ranges = [(key, at, min(at + RANGE, size)) for key, size in sizes.items() for at in range(0, size, RANGE)]
    total, begin = 0, time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        while (seconds := time.perf_counter() - begin) < spec.seconds:
            total += sum(pool.map(lambda one: len(obstore.get_range(store, one[0], start=one[1], end=one[2])), ranges))
    epochs, raw = total / sum(sizes.values()), Source(spec.source)
    counted = {"samples": round(epochs * len(raw)), "bytes": round(epochs * raw.meta["bytes"])}
    return {**counted, "stored_bytes": total, "seconds": round(seconds, 4)}


def decoded(source: str, seconds: float, decode: Callable[[bytes], Any], _: int) -> int:
    """Return how many JPEGs this process decodes in so many seconds."""
    raw = Source(source)
    jpegs = [raw.sample(number)["jpeg"] for number in range(min(JPEGS, len(raw)))]
    count, stop = 0, time.perf_counter() + seconds
    for jpeg in cycle(jpegs):
        decode(jpeg)
        count += 1
        if time.perf_counter() > stop:
            return count
    return count


if __name__ == "__main__":
    main(write=write, read=read)
