"""What every contestant shares: the specification, the raw data, the measuring, and the JPEG transform.

A contestant is a file of this folder that runs in a Python of its own:

    <python> bench/peers/peer_<name>.py write|read SPEC.json

The prefix keeps it from shadowing the package that it measures. It imports nothing but the standard library, numpy,
its peer (torch inside functions) and this module, and ends with

    if __name__ == "__main__":
        main(write=write, read=read)

`write(spec)` stores the raw data of `spec.source` at `spec.url` as the peer's documentation advises and returns the
samples written. `read(spec)` calls `measure_epochs` once. What a peer has no natural way for raises
`UnsupportedError(why)`. Standard output has JSON lines only: print anything else to standard error.

The raw data of a workload is a folder with `meta.json` and one column after another:

| workload | columns |
|---|---|
| images | image uint8[224,224,3], label int64 |
| vectors | vector float32[64], label int64 |
| jpeg | jpeg bytes, label int64 |
| tokens | tokens ragged int32 |
| mixed | image uint8[96,96,3], label int64, vector float32[16], text str |

A batch is whatever the peer makes of these: a dict or tuple whose columns are tensors (jpeg: float32, see
`jpeg_transform`), or lists for text and for tokens as lists. Variants: "" is the peer as its documentation shows it,
tuned where that is documented too; "pillow" and "fast" (default) choose the JPEG transform; "packed" delivers tokens
as rows of PACKED_ROW, each batch `spec.batch` rows, and is written at a url of its own. What is
counted is samples; for tokens it is tokens, so that lists and rows compare.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PACKED_ROW = 2049
CROP = 224
CROP_SCALE = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)
# the usual ones of ImageNet
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SAMPLING_SECONDS = 0.5
WARM_BYTES = 2_500_000_000  # about what the project takes for the largest window; peers take less


class UnsupportedError(Exception):
    """The peer has no natural way to do this workload; the message says why."""


@dataclass(frozen=True)
class Spec:
    """One measurement. `seconds`: an epoch is cut so long after its first batch, 0 never; `ca`: a PEM file, or empty.

    `cache`: an empty folder for the peer's local cache, removed afterwards. `extra`: what one contestant alone knows.
    """

    workload: str
    source: str
    url: str
    endpoint: str = ""
    key: str = ""
    secret: str = ""
    ca: str = ""
    workers: int = 0
    batch: int = 256
    epochs: int = 2
    seconds: float = 0.0
    cache: str = ""
    variant: str = ""
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def bucket(self) -> str:
        """The bucket of `url`."""
        return self.url.split("/")[2]

    @property
    def prefix(self) -> str:
        """The key prefix of `url`, without slashes at its ends."""
        return "/".join(self.url.split("/")[3:]).strip("/")

    def environment(self) -> dict[str, str]:
        """Return the variables by which S3 clients find the server; `main` sets them."""
        certificate = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE") if self.ca else ()
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            **dict.fromkeys(("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "S3_ENDPOINT_URL"), self.endpoint),
            **dict.fromkeys(certificate, self.ca),
        }


def load_spec(path: str) -> Spec:
    """Read a specification; keys that this version does not know are left out."""
    known = {one.name for one in fields(Spec)}
    return Spec(**{name: value for name, value in json.loads(Path(path).read_text()).items() if name in known})


def main(write: Callable[[Spec], int], read: Callable[[Spec], None]) -> None:
    """Do what the command line says, and print the lines of the contract."""
    mode, spec = sys.argv[1], load_spec(sys.argv[2])
    os.environ.update(spec.environment())
    try:
        if mode == "write":
            begin = time.perf_counter()
            samples = write(spec)
            emit({"samples": samples, "seconds": round(time.perf_counter() - begin, 4)})
        else:
            read(spec)
    except UnsupportedError as why:
        emit({"unsupported": str(why)})


def emit(line: dict[str, Any]) -> None:
    """Print one JSON line."""
    print(json.dumps(line), flush=True)


class Source:
    """The raw data of a workload, mapped, never loaded: a few columns of the same length."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.meta: dict[str, Any] = json.loads((self.folder / "meta.json").read_text())
        self.columns: dict[str, str] = self.meta["columns"]  # name -> "tensor", "bytes", "text" or "ragged"
        self._values = {name: self._open(name, kind) for name, kind in self.columns.items()}

    def __len__(self) -> int:
        return int(self.meta["samples"])

    @cached_property
    def units(self) -> int:
        """What an epoch counts: samples, or tokens."""
        return int(self.offsets("tokens")[-1]) if "tokens" in self.columns else len(self)

    def array(self, name: str) -> NDArray[Any]:
        """Return the mapped array of a tensor column; of any other, its values end to end (bytes as uint8)."""
        return self._values[name]

    def offsets(self, name: str) -> NDArray[np.int64]:
        """Return where each sample of a bytes, text or ragged column begins in `array(name)`, and the end."""
        result: NDArray[np.int64] = np.load(self.folder / f"{name}_offsets.npy", mmap_mode="r")
        return result

    def sample(self, index: int) -> dict[str, Any]:
        """Return one sample: arrays, numpy scalars, bytes and str."""
        return {name: self._one(name, kind, index) for name, kind in self.columns.items()}

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield every sample in order."""
        return (self.sample(index) for index in range(len(self)))

    def packed_rows(self) -> NDArray[np.int32]:
        """Return the documents end to end, cut into rows of PACKED_ROW; what is left over is dropped."""
        tokens = self.array("tokens")
        rows = len(tokens) // PACKED_ROW
        return tokens[: rows * PACKED_ROW].reshape(rows, PACKED_ROW)

    def _open(self, name: str, kind: str) -> NDArray[Any]:
        if kind in ("bytes", "text"):
            return np.memmap(self.folder / f"{name}.bin", np.uint8, "r")
        values: NDArray[Any] = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        return values

    def _one(self, name: str, kind: str, index: int) -> Any:
        values = self._values[name]
        if kind == "tensor":
            return values[index]
        start, stop = self._bounds[name][index : index + 2]
        part = values[start:stop]
        if kind == "ragged":
            return np.asarray(part)
        return part.tobytes() if kind == "bytes" else part.tobytes().decode()

    @cached_property
    def _bounds(self) -> dict[str, NDArray[np.int64]]:
        return {name: self.offsets(name) for name, kind in self.columns.items() if kind != "tensor"}


def pack_documents(documents: Iterable[NDArray[Any]], length: int = PACKED_ROW) -> Iterator[NDArray[Any]]:
    """Yield rows of `length` cut from the documents end to end; the last, short one is dropped."""
    waiting: list[NDArray[Any]] = []
    size = 0
    for document in documents:
        waiting.append(document)
        size += len(document)
        if size >= length:
            joined = np.concatenate(waiting)
            rows = size // length
            yield from joined[: rows * length].reshape(rows, length)
            waiting, size = [joined[rows * length :]], size % length


def warm_memory() -> None:
    """Touch memory and give it back: what is taken next is then memory that the machine has handed out just now.

    A virtual machine may provide memory that it has not used for seconds at 0.2 GB/s, twenty times slower than memory
    in use: a first epoch in it measures the hypervisor. It has to be done here and now: memory that another process
    held ready was cold again, or not what this process got.
    """
    with mmap.mmap(-1, WARM_BYTES) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)  # as numpy asks for its arrays: what is given back must fit them
        np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1


def measure_epochs(
    make_epoch_iterator: Callable[[int], Iterable[Any]], spec: Spec, count_of: Callable[[Any], int]
) -> None:
    """Consume `spec.epochs` epochs and print one line for each.

    Import the peer before, and construct its dataset in `make_epoch_iterator(0)`: the time from its call to the first
    batch is `first_batch_seconds`. `make_epoch_iterator(epoch)` returns what is iterated once; `count_of(batch)` the
    samples of a batch (tokens for the tokens workload), without rows that only fill it up.
    """
    warm_memory()
    with Memory() as memory:
        for epoch in range(spec.epochs):
            memory.begin_epoch()
            cpu, begin = tree_cpu_seconds(), time.perf_counter()
            samples, first_samples, first, cut = 0, 0, 0.0, False
            for batch in make_epoch_iterator(epoch):
                touch(batch)
                samples += count_of(batch)
                elapsed = time.perf_counter() - begin
                if not first:
                    first, first_samples = elapsed, samples
                if spec.seconds and elapsed - first >= spec.seconds:
                    cut = True
                    break
            seconds = time.perf_counter() - begin
            emit(
                {
                    "epoch": epoch,
                    "samples": samples,
                    "seconds": round(seconds, 4),
                    "cut": cut,
                    "first_batch_seconds": round(first, 4),
                    "first_batch_samples": first_samples,
                    "cpu_seconds": round(tree_cpu_seconds() - cpu, 3),
                    "peak_bytes": memory.peak(),
                }
            )


def touch(batch: Any) -> None:
    """Read one element of each column. Raises `TypeError` for a column that is no tensor, list, bytes or text."""
    for column in batch.values() if isinstance(batch, dict) else batch:
        ends = (column[0], column[-1]) if isinstance(column, (list, tuple)) and column else (column,)
        for item in ends:
            if hasattr(item, "data_ptr"):
                item.flatten()[-1:].tolist()
            elif not isinstance(item, (str, bytes, list, tuple)):
                raise TypeError(f"a batch holds {type(item).__name__}: deliver torch tensors")


def processes() -> list[int]:
    """Return this process and all below it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(entry.name))
        if stat:
            parents[int(entry.name)] = int(stat[1])
    found = [os.getpid()]
    for parent in found:  # grows while it is walked
        found.extend(pid for pid, above in parents.items() if above == parent)
    return found


def tree_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all below it, the dead ones too once their parents reaped them."""
    ticks = sum(sum(map(int, stat[11:15])) for stat in map(_stat, processes()) if stat)
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the third on; none where the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


class Memory:
    """The peak memory of this process and those below it, for each epoch.

    Alone, the kernel's own peak of the resident set; with others, their proportional set sizes (a shared page counts
    once), looked at twice a second. Mapped files count.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._sampled = 0

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def begin_epoch(self) -> None:
        """Forget the peak."""
        self._sampled = 0
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Return the bytes of the peak since the epoch began."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return max(self._sampled, int(status["VmHWM"].split()[0]) * 1024)

    def look(self) -> None:
        """Take what all processes hold now into account."""
        tree = processes()
        if len(tree) > 1:
            self._sampled = max(self._sampled, sum(map(_proportional_set, tree)))

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLING_SECONDS):
            self.look()


def _proportional_set(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def jpeg_transform(variant: str = "fast") -> Callable[[bytes], NDArray[np.float32]]:
    """Return what every contestant does to a JPEG: decode, random resized crop, normalise; float32 (224, 224, 3).

    "fast" (and ""): simplejpeg at the DCT scale that the crop allows, then OpenCV; what a tuned program does.
    "pillow": as the peers' pages show it. The function can be pickled, and each process draws crops of its own.
    """
    return _fast_crop if variant != "pillow" else _pillow_crop


def random_crop(height: int, width: int) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of a random resized crop, drawn as torchvision does."""
    for _ in range(10):
        area = height * width * random.uniform(*CROP_SCALE)
        ratio = math.exp(random.uniform(math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side


def _fast_crop(data: bytes) -> NDArray[np.float32]:
    import cv2
    import simplejpeg

    cv2.setNumThreads(0)  # as advised for loaders: the workers are the parallelism
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    top, left, h, w = random_crop(height, width)
    scale = min(1.0, max(CROP / h, CROP / w))
    # scales between a half and the whole take longer than the whole
    least = (math.ceil(height * scale), math.ceil(width * scale)) if scale <= 0.5 else (height, width)
    image = simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1], min_factor=1)
    down, right = image.shape[0] / height, image.shape[1] / width
    y, x = int(top * down), int(left * right)
    part = image[y : max(y + 1, round((top + h) * down)), x : max(x + 1, round((left + w) * right))]
    small = cv2.resize(part, (CROP, CROP), interpolation=cv2.INTER_LINEAR)
    result: Any = cv2.LUT(small, _TABLE)
    return np.asarray(result, np.float32)


def _pillow_crop(data: bytes) -> NDArray[np.float32]:
    import io

    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        top, left, h, w = random_crop(image.height, image.width)
        crop = image.convert("RGB").crop((left, top, left + w, top + h))
    pixels = np.asarray(crop.resize((CROP, CROP), Image.Resampling.BILINEAR), np.float32)
    return np.asarray((pixels / 255 - np.array(MEAN, np.float32)) / np.array(STD, np.float32), np.float32)


def _normalising_table() -> NDArray[np.float32]:
    """Return (1, 256, 3): the normalised value of each byte in each channel."""
    values = np.arange(256, dtype=np.float32)[None, :, None] / 255
    return np.asarray((values - np.array(MEAN)) / np.array(STD), np.float32)


_TABLE = _normalising_table()
