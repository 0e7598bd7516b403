"""What a dataset is, as frozen values: fields, their layout, the pinned order; and their JSON form.

The manifest is the group attribute `streamloader` of the root `zarr.json`; `formats/streamloader/v1/SPEC.md`
says what each key means.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np

from streamloader.errors import FieldError

FORMAT = "streamloader"
VERSION = 1
APPEND = "append"  # the requirement of a dataset that was appended to

Kind = Literal["tensor", "bytes", "text", "ragged"]
CODECS = ("none", "lz4", "zstd")
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTS, "float16", "float32", "float64")
MAX_CHUNK_BYTES = 2**31 - 64  # blosc's own bound is 2^31 - 17; lengths of items and table entries are u32
MAX_AXES = 30  # of a sample: numpy before version 2 has 32, a batch adds one
NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_OF = r"(?P<kind>bytes|text|ragged)(?::(?P<of>[a-z0-9+.-]+))?"
_SPEC = re.compile(rf"(?:{_OF}|(?P<dtype>[a-z0-9]+))(?:\[(?P<shape>[0-9, ]*)\])?\Z")
_ENCODING = re.compile(r"[a-z0-9+.-]*\Z")


@dataclass(frozen=True)
class Field:
    """One field of a sample.

    `kind` "tensor" has a `dtype` and a fixed `shape` a sample; "ragged" a `dtype` and the fixed inner
    `shape` behind its variable first dimension; "bytes" an optional `encoding` (jpeg, png, flac, ...).
    """

    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    encoding: str = ""

    def __post_init__(self) -> None:
        if self.kind in ("tensor", "ragged"):
            if self.dtype not in DTYPES:
                raise FieldError(f"dtype {self.dtype!r} of a {self.kind} field", f"choose one of {', '.join(DTYPES)}")
            if any(n < 1 for n in self.shape):
                raise FieldError(f"shape {self.shape} has an empty axis", "give every axis at least 1")
            if len(self.shape) > MAX_AXES:
                raise FieldError(f"a shape of {len(self.shape)} axes", f"the format holds up to {MAX_AXES}")
        elif self.kind not in ("bytes", "text"):
            raise FieldError(f"field kind {self.kind!r}", "choose tensor, bytes, text or ragged")
        elif self.dtype or self.shape:
            raise FieldError(f"a {self.kind} field with dtype or shape", "only tensor and ragged fields have them")
        if not _ENCODING.match(self.encoding) or (self.encoding and self.kind not in ("bytes", "text")):
            raise FieldError(f"encoding {self.encoding!r} of a {self.kind} field", "name it like bytes:jpeg")

    @classmethod
    def parse(cls, spec: str | Field) -> Field:
        """Return the field that `int64`, `float32[64]`, `bytes`, `bytes:jpeg`, `text` or `ragged:int32[2]` names."""
        if isinstance(spec, Field):
            return spec
        found = _SPEC.match(spec)
        if found is None:
            examples = "int64, float32[3,224,224], bytes:jpeg, text or ragged:int32"
            raise FieldError(f"{spec!r} names no field", f"write it like {examples}")
        shape = tuple(int(n) for n in (found["shape"] or "").replace(" ", "").split(",") if n)
        if found["kind"] == "ragged":
            return cls("ragged", found["of"] or "", shape)
        if found["kind"]:
            return cls("bytes" if found["kind"] == "bytes" else "text", shape=shape, encoding=found["of"] or "")
        return cls("tensor", found["dtype"], shape)

    def __str__(self) -> str:
        shape = f"[{','.join(map(str, self.shape))}]" if self.shape else ""
        if self.kind == "tensor":
            return f"{self.dtype}{shape}"
        of = self.dtype if self.kind == "ragged" else self.encoding
        return f"{self.kind}{':' + of if of else ''}{shape}"

    @property
    def fixed(self) -> bool:
        """Whether every sample has the same number of bytes."""
        return self.kind == "tensor"

    @property
    def item_bytes(self) -> int:
        """Bytes of one sample of a tensor field, or of one row of a ragged one; 1 for bytes and text."""
        if self.kind in ("bytes", "text"):
            return 1
        return np.dtype(self.dtype).itemsize * prod(self.shape)


@dataclass(frozen=True)
class FieldLayout:
    """How one field is stored. `chunk` and `shard` in samples; `nbytes` decoded and `stored` encoded, in bytes.

    `codec` is "none", "lz4" (blosc) or "zstd". A `resident` field is held in memory by readers; its geometry
    is its own, where that of the others is aligned: chunk divides block divides shard. `skips` are (shard, chunk,
    bytes), ascending: so many bytes of earlier versions stand before that chunk of the shard.
    """

    field: Field
    chunk: int
    shard: int
    codec: str
    resident: bool
    nbytes: int = 0
    stored: int = 0
    skips: tuple[tuple[int, int, int], ...] = ()

    def num_shards(self, num_samples: int) -> int:
        """Return the number of shard objects."""
        return -(-num_samples // self.shard)

    @property
    def chunks_per_shard(self) -> int:
        """The inner chunks of every shard, also of the last, shorter one."""
        return self.shard // self.chunk

    def shard_key(self, name: str, shard: int) -> str:
        """Return the path of a shard object below the dataset (Zarr's default chunk key encoding)."""
        return "/".join([name, "c", str(shard), *("0" for _ in (self.field.shape if self.field.fixed else ()))])


@dataclass(frozen=True)
class OrderPin:
    """The order parameters that the manifest pins, in samples (rule 1 of the order contract)."""

    block: int
    lanes: int
    window: int


@dataclass(frozen=True)
class Manifest:
    """One dataset. `tables` has the SHA-256 of each field's chunk table, by field name; each append adds 1 to
    `generation`.
    """

    num_samples: int
    samples_per_shard: int
    fields: Mapping[str, FieldLayout]
    order: OrderPin
    tables: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    generation: int = 1

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON of version, num_samples, order, fields and each table's SHA-256; and of the
        generation, where that is not the first.
        """
        identity = {
            "version": VERSION,
            "num_samples": self.num_samples,
            "order": _order_json(self.order),
            "fields": {name: layout_json(layout) for name, layout in self.fields.items()},
            "tables": dict(self.tables),
            **self._generation_json(),
        }
        return hashlib.sha256(canonical_json(identity)).hexdigest()

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Class names by field, as the conversion recorded them: name i is that of the value i."""
        found = self.provenance.get("classes")
        listed = found.items() if isinstance(found, Mapping) else ()
        return {
            name: tuple(map(str, names))
            for name, names in listed
            if name in self.fields and isinstance(names, Sequence) and not isinstance(names, str)
        }

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as it stands in the group attribute."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "requires": [APPEND] if self.generation > 1 else [],
            **self._generation_json(),
            "num_samples": self.num_samples,
            "samples_per_shard": self.samples_per_shard,
            "order": _order_json(self.order),
            "fields": {name: layout_json(layout) for name, layout in self.fields.items()},
            "tables": dict(self.tables),
            "digest": self.digest,
            "provenance": dict(self.provenance),
        }

    def _generation_json(self) -> dict[str, int]:
        return {"generation": self.generation} if self.generation > 1 else {}


def canonical_json(value: Any) -> bytes:
    """Return RFC 8785 JSON of a value without floats: our keys are ASCII, so code point order is its order."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def check_name(name: str) -> None:
    """Raise `FieldError` unless `name` can name a field."""
    if not NAME.match(name):
        raise FieldError(f"field name {name!r}", "start with a-z and go on with a-z, 0-9 and _")


def natural(value: Any, least: int = 0) -> int:
    """Return `value`. Raises ValueError unless it is a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} where a whole number of at least {least} belongs")
    return value


def _order_json(order: OrderPin) -> dict[str, int]:
    return {"version": 1, "block": order.block, "lanes": order.lanes, "window": order.window}


def layout_json(layout: FieldLayout) -> dict[str, Any]:
    """Return a field's layout as it stands in the manifest."""
    out: dict[str, Any] = {"kind": layout.field.kind}
    if layout.field.dtype:
        out["dtype"] = layout.field.dtype
        out["shape"] = list(layout.field.shape)
    if layout.field.encoding:
        out["encoding"] = layout.field.encoding
    out |= {"chunk": layout.chunk, "shard": layout.shard, "codec": layout.codec, "resident": layout.resident}
    out |= {"nbytes": layout.nbytes, "stored": layout.stored}
    return out | ({"skips": [list(skip) for skip in layout.skips]} if layout.skips else {})


def layout_from_json(raw: Mapping[str, Any]) -> FieldLayout:
    """Return the layout that `layout_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
    shape = tuple(natural(n, 1) for n in raw.get("shape", ()))
    layout = FieldLayout(
        field=Field(raw["kind"], raw.get("dtype", ""), shape, raw.get("encoding", "")),
        chunk=natural(raw["chunk"], 1),
        shard=natural(raw["shard"], 1),
        codec=raw["codec"],
        resident=raw["resident"],
        nbytes=natural(raw["nbytes"]),
        stored=natural(raw["stored"]),
        skips=tuple(_skip(skip) for skip in raw.get("skips", ())),
    )
    if layout.shard % layout.chunk:
        raise ValueError(f"chunk {layout.chunk} does not divide shard {layout.shard}")
    if layout.codec not in CODECS or type(layout.resident) is not bool:
        raise ValueError(f"codec {layout.codec!r}, resident {layout.resident!r}")
    return layout


def _skip(raw: Any) -> tuple[int, int, int]:
    shard, chunk, size = raw
    return natural(shard), natural(chunk), natural(size, 1)
