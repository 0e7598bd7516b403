"""What a trace of torch.profiler says about a training loop: copies beside kernels, waits for the device; a picture.

Times are microseconds. The steps of the loop are marked "step" and "next" by `record_function`; the first of them are
left out, since profiling itself begins there.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Event = Mapping[str, Any]
Interval = tuple[float, float]

WARM_STEPS = 4
DRAWN_STEPS = 3
# what waits in the calling thread until a stream, or the whole device, has done its work
BLOCKING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cuStreamSynchronize", "cuCtxSynchronize")


def read(file: Path) -> list[Event]:
    """Return the events of a trace that have a duration."""
    with gzip.open(file, "rt") as text:
        return [event for event in json.load(text)["traceEvents"] if event.get("ph") == "X"]


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Return what the steps after the first ones took, and whether they waited for the device.

    `overlap`: the share of the time of copies to the device during which kernels ran on another stream; None without
    copies. `idle`: the share of the time between the first and the last kernel in which none ran. `blocking`: calls
    that waited for the stream of the kernels or the whole device, by name, and `elsewhere` those for other streams.
    `event_waits`: calls within `next()` that waited for an event, as the loader does while `ahead` copies run.
    """
    begin, end = window(events)
    inside = [event for event in events if begin <= event["ts"] < end]
    kernels = of(inside, "kernel")
    found: dict[str, Any] = {"steps": len(marks(inside, "step")), "seconds": round((end - begin) / 1e6, 6)}
    found |= {**waits(inside, main_stream(kernels)), "event_waits": event_waits(inside)}
    copies = [event for event in of(inside, "gpu_memcpy") if "HtoD" in event["name"]]
    busy = merged(map(interval, kernels))
    if busy:
        span = busy[-1][1] - busy[0][0]
        found |= {"streams": len({event["tid"] for event in kernels}), "kernels": len(kernels)}
        found["idle"] = round(1 - length(busy) / span, 4)
    if copies:
        total = sum(event["dur"] for event in copies)
        beside = sum(
            length(clipped(merged(interval(kernel) for kernel in kernels if kernel["tid"] != tid), interval(copy)))
            for tid in {event["tid"] for event in copies}
            for copy in copies
            if copy["tid"] == tid
        )
        found |= {"copies": len(copies), "copied_bytes": sum(copy.get("args", {}).get("bytes", 0) for copy in copies)}
        found |= {"overlap": round(beside / total, 4), "copy_seconds": round(total / 1e6, 6)}
    return found


def window(events: Sequence[Event]) -> Interval:
    """Return where the steps that count begin and end, on the CPU."""
    steps, asked = marks(events, "step"), marks(events, "next")
    if len(steps) <= WARM_STEPS:
        raise ValueError(f"the trace has {len(steps)} steps; {WARM_STEPS + 1} are needed")
    return asked[WARM_STEPS]["ts"], steps[-1]["ts"] + steps[-1]["dur"]


def waits(events: Iterable[Event], stream: Any) -> dict[str, Any]:
    """Count the calls that wait; those for a stream other than `stream` apart, where the trace names it."""
    events = list(events)
    streams = {
        event["args"]["correlation"]: event["args"].get("stream")
        for event in of(events, "cuda_sync")
        if event["name"] == "Stream Sync"
    }
    blocking: dict[str, int] = {}
    elsewhere: dict[str, int] = {}
    for event in events:
        if event["name"] in BLOCKING and event.get("cat") in ("cuda_runtime", "cuda_driver"):
            waited_for = streams.get(event.get("args", {}).get("correlation"), stream)
            kind = blocking if waited_for == stream else elsewhere
            kind[event["name"]] = kind.get(event["name"], 0) + 1
    return {"blocking": blocking, "elsewhere": elsewhere}


def event_waits(events: Sequence[Event]) -> int:
    """Count the calls that wait for an event within `next()`."""
    asked = [(mark["tid"], *interval(mark)) for mark in marks(events, "next")]
    waits = [event for event in of(events, "cuda_runtime") if event["name"] == "cudaEventSynchronize"]
    return sum(any(tid == one["tid"] and begin <= one["ts"] < end for tid, begin, end in asked) for one in waits)


def main_stream(kernels: Iterable[Event]) -> Any:
    """Return the stream on which kernels ran longest: that of the model."""
    times: dict[Any, float] = {}
    for event in kernels:
        times[event["tid"]] = times.get(event["tid"], 0.0) + event["dur"]
    return max(times, key=lambda tid: times[tid], default=None)


def of(events: Iterable[Event], category: str) -> list[Event]:
    """Return the events of a category, in their order."""
    return sorted((event for event in events if event.get("cat") == category), key=lambda event: event["ts"])


def marks(events: Iterable[Event], name: str) -> list[Event]:
    """Return what `record_function(name)` marked, on the CPU."""
    return [event for event in of(events, "user_annotation") if event["name"] == name]


def interval(event: Event) -> Interval:
    """Return when it begins and ends."""
    return event["ts"], event["ts"] + event["dur"]


def merged(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """Return the union in order; what is not more than `gap` apart becomes one."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def clipped(intervals: Iterable[Interval], bounds: Interval) -> list[Interval]:
    """Return the parts within the bounds."""
    found = [(max(begin, bounds[0]), min(end, bounds[1])) for begin, end in intervals]
    return [(begin, end) for begin, end in found if begin < end]


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the durations."""
    return sum(end - begin for begin, end in intervals)


def timeline(events: Sequence[Event]) -> dict[str, list[Interval]]:
    """Return what is drawn: by row, when something ran during the last steps, in milliseconds from their start.

    On a GPU these are the steps as its streams see them, later than the calls of the CPU; without one, the operators
    of each thread.
    """
    stream = main_stream(of(events, "kernel"))
    on_device = [event for event in of(events, "gpu_user_annotation") if event["tid"] == stream]
    steps = [event for event in on_device if event["name"] == "step"] or marks(events, "step")
    drawn = steps[-DRAWN_STEPS - 1 : -1] if len(steps) > DRAWN_STEPS else steps
    bounds = drawn[0]["ts"], drawn[-1]["ts"] + drawn[-1]["dur"]
    rows: dict[str, list[Interval]] = {"next()": [interval(mark) for mark in marks(events, "next")]}
    for category, word in (("kernel", "kernels"), ("gpu_memcpy", "copies"), ("gpu_memset", "fills")):
        for event in of(events, category):
            rows.setdefault(f"stream {event['tid']}, {word}", []).append(interval(event))
    if not of(events, "kernel"):
        for event in of(events, "cpu_op"):
            rows.setdefault(f"thread {event['tid']}, operators", []).append(interval(event))
    gap = (bounds[1] - bounds[0]) / 2000  # less than a pixel
    return {
        name: [((begin - bounds[0]) / 1e3, (end - bounds[0]) / 1e3) for begin, end in parts]
        for name, found in rows.items()
        if (parts := merged(clipped(found, bounds), gap))
    }
