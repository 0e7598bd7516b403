"""Receipts: what is left of a finished shard until its dataset is finished."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamloader.format.opening import RECEIPTS, get_document
from streamloader.format.threads import run_all
from streamloader.storage.protocol import Store

THREADS = 16


@dataclass(frozen=True)
class StoredObject:
    """An object as it was written: size in bytes, etag (empty where unknown), crc32c of the whole."""

    size: int
    etag: str
    crc32c: int


@dataclass(frozen=True, eq=False)
class FieldReceipt:
    """A bulk field's part of one shard: decoded and encoded bytes, and the shard's rows of the chunk table."""

    nbytes: int
    stored: int
    entries: NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Receipt:
    """One finished shard of all fields: its objects by path, and what the tables need of its bulk fields.

    `job` is the id of the conversion that it belongs to; empty where nobody asks.
    """

    shard: int
    num_samples: int
    objects: Mapping[str, StoredObject]
    fields: Mapping[str, FieldReceipt]
    job: str = ""

    def to_json(self) -> bytes:
        """Return the receipt as it is stored."""
        objects = {path: [one.size, one.etag, one.crc32c] for path, one in self.objects.items()}
        fields = {
            name: {
                "nbytes": one.nbytes,
                "stored": one.stored,
                "entries": base64.b64encode(one.entries.astype("<u4").tobytes()).decode(),
            }
            for name, one in self.fields.items()
        }
        document = {"shard": self.shard, "num_samples": self.num_samples, "objects": objects, "fields": fields}
        document |= {"job": self.job} if self.job else {}
        return json.dumps(document, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Receipt:
        """Return the receipt that `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        raw = json.loads(data)
        fields = {
            name: FieldReceipt(int(one["nbytes"]), int(one["stored"]), _entries(one["entries"]))
            for name, one in raw["fields"].items()
        }
        objects = {
            path: StoredObject(int(size), str(etag), int(crc)) for path, (size, etag, crc) in raw["objects"].items()
        }
        return cls(int(raw["shard"]), int(raw["num_samples"]), objects, fields, str(raw.get("job", "")))


def receipt_path(shard: int) -> str:
    """Return the path of a shard's receipt."""
    return f"{RECEIPTS}/{shard}.json"


def read_receipts(store: Store, folder: str = RECEIPTS, job: str = "") -> dict[int, Receipt]:
    """Return the receipts of all finished shards by shard number, without those that do not parse.

    With `job` only receipts of that job count. A shard without a receipt that counts is then done again, as if it had
    never been written. Raises `FormatError` for one that is larger than any document.
    """
    paths = [info.path for info in store.list(folder) if info.path.endswith(".json")]
    found = run_all(lambda path: _parse(get_document(store, path)), paths, THREADS)
    return {receipt.shard: receipt for receipt in found if receipt is not None and job in ("", receipt.job)}


def check_receipts(store: Store, receipts: Mapping[int, Receipt]) -> list[int]:
    """Return the shards of which an object is missing or differs in size or etag, by one listing."""
    listed = {info.path: info for info in store.list()}
    wrong = []
    for shard, receipt in sorted(receipts.items()):
        for path, stored in receipt.objects.items():
            info = listed.get(path)
            differs = info is None or info.size != stored.size
            if differs or (info is not None and info.etag and stored.etag and info.etag != stored.etag):
                wrong.append(shard)
                break
    return wrong


def _parse(data: bytes) -> Receipt | None:
    try:
        return Receipt.from_json(data)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def _entries(text: Any) -> NDArray[np.uint32]:
    return np.frombuffer(base64.b64decode(text), "<u4").astype(np.uint32).reshape(-1, 2)
