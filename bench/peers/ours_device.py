"""Trains a model with batches from the loader, and from batches that are on the device already: what loading costs.

`spec.extra`: `runs`, each a part to measure ("train", "copies" or "nvjpeg") with its model and feed; `device`; `small`:
tiny models; `ahead`; `row`, the length of packed rows; `urls` and `sources` of the workloads; `write`, the source and
url of each dataset to write first; `traces`, a folder for the traces of the runs that are `traced`. A run that fails
prints its error, and the others go on.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Source, Spec, UnsupportedError, emit, main
from ours import write
from ours_models import Step, is_torchvision_installed, normalised, trainer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import streamloader as sl

SIDE = 224
CROP = sl.Decode(size=(SIDE, SIDE), crop="random")
WARM_STEPS = 5
TRACED_STEPS = 10
COPIES = 20
NVJPEG_BATCHES = 8

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Usage:
    """What a loop took: wall time, time in `next()`, CPU time of the process, of other threads, and in `next()`."""

    steps: int
    seconds: float
    next_seconds: float
    cpu_seconds: float
    other_threads_seconds: float
    next_cpu_seconds: float
    peak_bytes: int
    outside_bytes: int


def read(spec: Spec) -> None:
    """Measure the runs and print a line for each."""
    device = torch.device(spec.extra["device"])
    torch.backends.cudnn.benchmark = True
    if spec.extra["small"]:
        torch.set_num_threads(1)  # small operators take longer with more
    for dataset in spec.extra["write"]:
        write(replace(spec, **dataset))
    for run in spec.extra["runs"]:
        try:
            emit({**run, **PARTS[run["kind"]](spec, device, run), "device": about(device)})
        except UnsupportedError as why:
            emit({**run, "unsupported": str(why)})
        except Exception as error:  # noqa: BLE001 - the other runs go on
            traceback.print_exc()
            emit({**run, "failed": f"{type(error).__name__}: {error}"})


def about(device: torch.device) -> dict[str, Any]:
    """Return what the device is."""
    if device.type != "cuda":
        return {"name": device.type}
    found = torch.cuda.get_device_properties(device)
    return {"name": found.name, "memory_bytes": found.total_memory, "cuda": torch.version.cuda}


def train(spec: Spec, device: torch.device, run: dict[str, Any]) -> dict[str, Any]:
    """Train with batches on the device, then with those of the feed."""
    step = trainer(run["model"], device, spec.extra["small"])
    resident = on_the_device(spec, device, run["model"])
    shapes = [tuple(column.shape) for column in resident]
    size = sum(column.nbytes for column in resident)
    bound, _ = loop(repeat(resident), step, device, spec.seconds / 2)
    traces: dict[str, str] = {}
    if run["traced"]:
        traces["bound_trace"] = traced(spec, repeat(resident), step, f"{run['model']}-{run['feed']}-bound")
    del resident
    with ExitStack() as stack:
        feed = FEEDS[run["feed"]](spec, device, stack)
        fed, stats = loop(feed.batches, step, device, spec.seconds, feed.stats)
        if run["traced"]:
            traces["trace"] = traced(spec, feed.batches, step, f"{run['model']}-{run['feed']}")
    units = int(np.prod(shapes[0])) if run["model"] == "transformer" else shapes[0][0]
    return {
        "unit": "tokens" if run["model"] == "transformer" else "images",
        "small": spec.extra["small"] or (run["model"] != "transformer" and not is_torchvision_installed()),
        "rate": round(units * fed.steps / fed.seconds, 1),
        "bound_rate": round(units * bound.steps / bound.seconds, 1),
        "batch": shapes[0],
        "batch_bytes": size,
        "ahead": spec.extra["ahead"],
        "bound": asdict(bound),
        "fed": asdict(fed),
        **stats,
        **traces,
    }


def loop(
    batches: Iterator[Batch],
    step: Step,
    device: torch.device,
    seconds: float,
    stats: Callable[[], sl.Stats] | None = None,
) -> tuple[Usage, dict[str, Any]]:
    """Take steps for so many seconds, after half as many that do not count; return what they took."""
    steps_until(batches, step, time.perf_counter() + seconds / 2)
    wait_for(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, cpu, thread, begin = stats() if stats else None, process_seconds(), time.thread_time(), time.perf_counter()
    steps, waited, waited_cpu = steps_until(batches, step, begin + seconds)
    wait_for(device)
    took, cpu, thread = time.perf_counter() - begin, process_seconds() - cpu, time.thread_time() - thread
    usage = Usage(
        steps=steps,
        seconds=round(took, 4),
        next_seconds=round(waited, 4),
        cpu_seconds=round(cpu, 4),
        other_threads_seconds=round(cpu - thread, 4),
        next_cpu_seconds=round(waited_cpu, 4),
        peak_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        outside_bytes=outside_of_the_allocator(device),
    )
    return usage, {"stats": asdict(stats().since(before))} if stats and before else {}


def steps_until(batches: Iterator[Batch], step: Step, stop: float) -> tuple[int, float, float]:
    """Take steps until the time `stop`, `WARM_STEPS` at least; return them, and the time and CPU time in `next()`."""
    steps, waited, waited_cpu = 0, 0.0, 0.0
    while steps < WARM_STEPS or time.perf_counter() < stop:
        begin, cpu = time.perf_counter(), time.thread_time()
        with record_function("next"):
            batch = next(batches)
        waited, waited_cpu = waited + time.perf_counter() - begin, waited_cpu + time.thread_time() - cpu
        with record_function("step"):
            step(batch)
        steps += 1
    return steps, waited, waited_cpu


def wait_for(device: torch.device) -> None:
    """Wait until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def process_seconds() -> float:
    """Return the CPU seconds of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def outside_of_the_allocator(device: torch.device) -> int:
    """Return the bytes of the device that are in use and not of torch's allocator: CUDA, libraries, other processes."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def traced(spec: Spec, batches: Iterator[Batch], step: Step, name: str) -> str:
    """Write a trace of some steps and return its file."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    options: dict[str, Any] = {}
    if torch.cuda.is_available():  # on which stream something waited is an event of its own
        options["experimental_config"] = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    with profile(activities=activities, **options) as found:
        for _ in range(TRACED_STEPS):
            with record_function("next"):
                batch = next(batches)
            with record_function("step"):
                step(batch)
    folder = Path(spec.extra["traces"])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json.gz"
    found.export_chrome_trace(str(file))
    return str(file)


# --- what batches come from


@dataclass
class Feed:
    """Endless batches, and what the loader counted."""

    batches: Iterator[Batch]
    stats: Callable[[], sl.Stats] | None = None


def on_the_device(spec: Spec, device: torch.device, model: str) -> Batch:
    """Return a batch as the loader delivers them."""
    if model == "transformer":
        rows = (spec.batch, spec.extra["row"])
        tokens = torch.randint(0, 50_000, rows, dtype=torch.int32, device=device)
        return tokens, torch.arange(rows[1], dtype=torch.int32, device=device).expand(rows).contiguous()
    images = torch.randn((spec.batch, SIDE, SIDE, 3), device=device).to(torch.bfloat16).permute(0, 3, 1, 2)
    return images, torch.arange(spec.batch, device=device)


def images_of(batch: dict[str, Any]) -> Batch:
    """Return images (batch, 3, height, width), adjacent by pixel, and labels."""
    name = "image" if "image" in batch else "jpeg"
    images = batch[name]
    return (images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)), batch["label"]


def tokens_of(batch: dict[str, Any]) -> Batch:
    """Return rows of tokens and the positions in their documents."""
    return batch["tokens"], batch["tokens_positions"]


def opened(spec: Spec, workload: str, stack: ExitStack, **options: Any) -> sl.StreamingDataset:
    """Return the dataset of a workload; whole batches only."""
    dataset = sl.StreamingDataset(
        spec.extra["urls"][workload],
        batch_size=spec.batch,
        remainder="drop",
        storage_options=spec.s3fs_options,
        **options,
    )
    return stack.enter_context(closing(dataset))


def endless(passes: Iterable[Any], convert: Callable[[Any], Batch]) -> Iterator[Batch]:
    """Yield the batches of one epoch after another."""
    while True:
        yield from map(convert, passes)


def fed_by(workload: str, nvjpeg: bool = False) -> Callable[[Spec, torch.device, ExitStack], Feed]:
    """Return the feed of a dataset that copies its batches to the device, where images are normalised.

    `nvjpeg`: JPEGs are decoded there too.
    """

    def feed(spec: Spec, device: torch.device, stack: ExitStack) -> Feed:
        options: dict[str, Any] = {"cast": "bfloat16", "normalize": {"image": "imagenet"}}
        if workload == "tokens":
            options = {"pack": packs(spec)}
        elif workload == "jpeg":
            where = {"device": str(device)} if nvjpeg else {}
            options = {"cast": "bfloat16", "decode": replace(CROP, normalize="imagenet", **where)}
        found = opened(spec, workload, stack, device=str(device), ahead=spec.extra["ahead"], **options)
        return Feed(endless(found, tokens_of if workload == "tokens" else images_of), found.stats)

    return feed


def packs(spec: Spec) -> dict[str, sl.Pack]:
    """Return how documents are packed: rows are the samples, so that every batch has the same shape."""
    return {"tokens": sl.Pack(spec.extra["row"], fit="best")}


def moved_by_hand(workload: str) -> Callable[[Spec, torch.device, ExitStack], Feed]:
    """Return the feed of a dataset whose batches are moved by `.to(device)`, and normalised there."""

    def feed(spec: Spec, device: torch.device, stack: ExitStack) -> Feed:
        if workload == "tokens":
            found = opened(spec, workload, stack, pack=packs(spec))
        else:
            found = opened(spec, workload, stack, decode=CROP if workload == "jpeg" else None)

        def move(batch: dict[str, Any]) -> Batch:
            if workload == "tokens":
                tokens, positions = tokens_of(batch)
                return tokens.to(device), positions.to(device)
            images, labels = images_of(batch)
            return normalised(images.permute(0, 2, 3, 1).to(device)), labels.to(device)

        return Feed(endless(found, move), found.stats)

    return feed


def data_loader(spec: Spec, device: torch.device, _: ExitStack) -> Feed:
    """Return the feed of torch's DataLoader over the raw arrays of local files, by `to_device`."""
    workers = 0 if spec.extra["small"] else max(1, len(os.sched_getaffinity(0)) // 2)
    loader = torch.utils.data.DataLoader(
        Samples(spec.extra["sources"]["images"]),
        spec.batch,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=workers > 0,
    )

    def convert(batch: dict[str, Tensor]) -> Batch:
        return normalised(batch["image"]), batch["label"]

    return Feed(endless(sl.to_device(loader, device, spec.extra["ahead"]), convert))


class Samples(torch.utils.data.Dataset[Any]):
    """Raw images and labels, mapped by the process that reads them."""

    def __init__(self, folder: str) -> None:
        self._folder, self._length = folder, len(Source(folder))
        self._source: Source | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one sample."""
        if self._source is None:
            self._source = Source(self._folder)
        return self._source.sample(index)


FEEDS = {
    "raw": fed_by("images"),
    "jpeg": fed_by("jpeg"),
    "nvjpeg": fed_by("jpeg", nvjpeg=True),
    "tokens": fed_by("tokens"),
    "raw .to(device)": moved_by_hand("images"),
    "jpeg .to(device)": moved_by_hand("jpeg"),
    "tokens .to(device)": moved_by_hand("tokens"),
    "raw to_device(DataLoader)": data_loader,
}


# --- without a model


def copies(spec: Spec, device: torch.device, _: dict[str, Any]) -> dict[str, Any]:
    """Return how fast a batch of raw images is copied to the device, in GB/s."""
    ordinary = torch.zeros(spec.batch * SIDE * SIDE * 3, dtype=torch.uint8)
    sources = {"ordinary": ordinary}
    if device.type == "cuda":
        sources["page_locked"] = ordinary.pin_memory()
    rates = {}
    for name, source in sources.items():
        source.to(device, copy=True)
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(COPIES):
            source.to(device, non_blocking=True, copy=True)
        wait_for(device)
        rates[name] = round(COPIES * source.nbytes / (time.perf_counter() - begin) / 1e9, 2)
    return {"gigabytes_per_second": rates}


def nvjpeg(spec: Spec, device: torch.device, _: dict[str, Any]) -> dict[str, Any]:
    """Return how many JPEGs a second nvJPEG decodes, whole, by the batch call of each package; in turns."""
    if device.type != "cuda":
        raise UnsupportedError("nvJPEG needs CUDA")
    calls = {}
    for package in ("torchcodec.decoders", "torchvision.io"):
        with suppress(ImportError, OSError, RuntimeError, AttributeError):  # not installed, or built for another torch
            calls[package.split(".")[0]] = importlib.import_module(package).decode_jpeg
    if not calls:
        raise UnsupportedError("neither TorchCodec 0.16 nor torchvision is installed")
    source = Source(spec.extra["sources"]["jpeg"])
    files = [torch.frombuffer(bytearray(source.sample(i)["jpeg"]), dtype=torch.uint8) for i in range(spec.batch)]
    seconds = dict.fromkeys(calls, 0.0)
    for turn in range(1 + NVJPEG_BATCHES):  # the first does not count
        for package, call in calls.items():
            begin = time.perf_counter()
            call(files, device=device)
            wait_for(device)
            seconds[package] += (time.perf_counter() - begin) if turn else 0
    count = NVJPEG_BATCHES * len(files)
    return {"rates": {package: round(count / took, 1) for package, took in seconds.items()}, "batch": len(files)}


PARTS = {"train": train, "copies": copies, "nvjpeg": nvjpeg}


if __name__ == "__main__":
    print(sys.version, file=sys.stderr)
    main(write=write, read=read)
