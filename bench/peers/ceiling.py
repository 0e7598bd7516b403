"""The ceilings, on the project's own datasets.

`spec.extra["ceiling"]` is "fetch" (the same ranges, bytes dropped), "decode" (fetched, verified, decoded) or "image".
"""

from __future__ import annotations

from common import Source, Spec, emit, main
from measuring import Memory, warm_memory
from ours import crop

from streamloader.measure import ceiling


def write(spec: Spec) -> int:
    """Write nothing: a ceiling reads what the project wrote."""
    raise NotImplementedError(spec.url)


def read(spec: Spec) -> None:
    """Measure the ceiling once for each epoch."""
    source = Source(spec.source)
    warm_memory(spec.source)
    with Memory() as memory:
        for epoch in range(spec.epochs):
            memory.begin_epoch()
            done = measure(spec)
            emit(
                {
                    "epoch": epoch,
                    "samples": round(done.samples * source.units / len(source)),  # tokens, where they are counted
                    "seconds": round(done.seconds, 4),
                    "cut": bool(spec.seconds),
                    "first_batch_seconds": 0.0,
                    "first_batch_samples": 0,
                    "cpu_seconds": round(done.cpu_seconds, 3),
                    "peak_bytes": memory.peak(),
                    "bytes": done.bytes,
                    "requests": done.requests,
                }
            )


def measure(spec: Spec) -> ceiling.Ceiling:
    """Run one ceiling once."""
    options = spec.s3fs_options
    if spec.extra["ceiling"] == "image":
        return ceiling.image_ceiling(spec.url, options, "jpeg", crop(), spec.seconds or 3.0)
    effort = ceiling.Effort(seconds=spec.seconds)
    return ceiling.read_ceiling(spec.url, options, work=spec.extra["ceiling"], effort=effort)


if __name__ == "__main__":
    main(write=write, read=read)
