"""What every contestant shares: the specification, the raw data, the measuring, and the JPEG transform.

A contestant is a file of this folder that runs in a Python of its own:

    <python> bench/peers/peer_<name>.py write|read|order SPEC.json

The prefix keeps it from shadowing the package that it measures. It imports nothing but the standard library, numpy,
its peer (torch inside functions), this module, `measuring` and `crops`, and ends with

    if __name__ == "__main__":
        main(write=write, read=read)

`write(spec)` stores the raw data of `spec.source` at `spec.url` as the peer's documentation advises and returns the
samples written. `read(spec)` calls `measure_epochs` or `measure_loader` once. `order(spec)`, of loaders, calls
`emit_order` for one rank of `spec.world`, which torch.distributed knows. What a peer has no natural way for raises
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
tuned where that is documented too; "pillow", "uint8" and "fast" (default) choose the JPEG transform; "packed" delivers
tokens as rows of PACKED_ROW, each batch `spec.batch` rows, and is written at a url of its own. What is counted is
samples; for tokens it is tokens, so that lists and rows compare. A label is the number of its sample, and a document
begins with FIRST_TOKEN + its number, so that batches show in what order samples come.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

PACKED_ROW = 2049
SMALL_SHARD_BYTES = 16 << 20  # of the variant "small-shards", a quarter of what peers have by default
FIRST_TOKEN = 50257  # the vocabulary of GPT-2: no other token is as large


class UnsupportedError(Exception):
    """The peer has no natural way to do this workload; the message says why."""


@dataclass(frozen=True)
class Spec:
    """One measurement: at least `epochs` epochs, and those after the first take `seconds` together; all are whole.

    `ca`: a PEM file, or empty.

    `cache`: an empty folder for the peer's local cache, removed afterwards. `rank`, `world`, `port`: as of torchrun.
    `stop`: after so many batches; `state`: what such a run ended with, to go on from. `extra`: what one contestant
    alone knows.
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
    rank: int = 0
    world: int = 1
    port: int = 0
    stop: int | None = None
    state: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def is_local(self) -> bool:
        """Whether `url` is a folder of this machine."""
        return "://" not in self.url

    @property
    def bucket(self) -> str:
        """The bucket of `url`."""
        return self.url.split("/")[2]

    @property
    def prefix(self) -> str:
        """The key prefix of `url`, without slashes at its ends."""
        return "/".join(self.url.split("/")[3:]).strip("/")

    @property
    def s3fs_options(self) -> dict[str, Any]:
        """The server, as s3fs takes it; nothing for a folder."""
        if self.is_local:
            return {}
        client = {"region_name": "us-east-1", **({"verify": self.ca} if self.ca else {})}
        return {"key": self.key, "secret": self.secret, "endpoint_url": self.endpoint, "client_kwargs": client}

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
            **(self._ranks() if self.world > 1 else {}),
        }

    def _ranks(self) -> dict[str, str]:
        """Return the variables of torchrun, for ranks of one node."""
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.world, "MASTER_PORT": self.port}
        local = {"LOCAL_RANK": self.rank, "LOCAL_WORLD_SIZE": self.world}
        return {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in (numbers | local).items()}


def load_spec(path: str) -> Spec:
    """Read a specification; keys that this version does not know are left out."""
    known = {one.name for one in fields(Spec)}
    return Spec(**{name: value for name, value in json.loads(Path(path).read_text()).items() if name in known})


def main(
    write: Callable[[Spec], int], read: Callable[[Spec], None], order: Callable[[Spec], None] | None = None
) -> None:
    """Do what the command line says, and print the lines of the contract."""
    mode, spec = sys.argv[1], load_spec(sys.argv[2])
    os.environ.update(spec.environment())
    try:
        if mode == "write":
            begin = time.perf_counter()
            samples = write(spec)
            emit({"samples": samples, "seconds": round(time.perf_counter() - begin, 4)})
        elif mode == "order" and order is not None:
            if spec.world > 1:
                import torch.distributed

                torch.distributed.init_process_group("gloo")
            order(spec)
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
