"""The ceilings, on the project's own datasets.

`spec.extra["ceiling"]` is "fetch" (the same ranges, bytes dropped), "decode" (fetched, verified, decoded) or "image".
"""

from __future__ import annotations

from common import Source, Spec, emit, main
from measuring import Epochs, Memory, tree_usage, warm_memory
from ours import crop

from streamloader.measure import ceiling

IMAGE_SECONDS = 3.0


def write(spec: Spec) -> int:
    """Write nothing: a ceiling reads what the project wrote."""
    raise NotImplementedError(spec.url)


def read(spec: Spec) -> None:
    """Measure the ceiling once for each epoch."""
    source = Source(spec.source)
    warm_memory(spec.source)
    with Memory() as memory:
        for epoch in Epochs(spec):
            memory.begin_epoch()
            faults = tree_usage()[1]
            done = measure(spec)
            epoch.seconds = done.seconds
            emit(
                {
                    "epoch": epoch.number,
                    "samples": round(done.samples * source.units / len(source)),  # tokens, where they are counted
                    "seconds": round(done.seconds, 4),
                    "first_batch_seconds": 0.0,
                    "cpu_seconds": round(done.cpu_seconds, 3),
                    "faults": tree_usage()[1] - faults,
                    "peak_bytes": memory.peak(),
                    "bytes": done.bytes,
                    "requests": done.requests,
                }
            )


def measure(spec: Spec) -> ceiling.Ceiling:
    """Run one ceiling once."""
    options = spec.s3fs_options
    if spec.extra["ceiling"] == "image":
        return ceiling.image_ceiling(spec.url, options, "jpeg", crop(), IMAGE_SECONDS)
    return ceiling.read_ceiling(spec.url, options, unpack=spec.extra["ceiling"] == "decode")


if __name__ == "__main__":
    main(write=write, read=read)
