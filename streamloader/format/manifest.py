"""What a dataset is, as frozen values: fields, their layout, the pinned order; and their JSON form.

The manifest is the group attribute `streamloader` of the root `zarr.json`; `formats/streamloader/v1/SPEC.md`
says what each key means.

Parsing checks and bounds untrusted JSON, so that no later code has to.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np

from streamloader.errors import FieldError, FormatError, VersionError
from streamloader.options import CODECS as CODEC_CHOICES

FORMAT = "streamloader"
VERSION = 1
APPEND = "append"  # the requirement of a dataset that was appended to

Kind = Literal["tensor", "bytes", "text", "ragged"]
CODECS = tuple(codec for codec in CODEC_CHOICES if codec != "auto")
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTS, "float16", "float32", "float64")
MAX_CHUNK_BYTES = 2**31 - 64  # blosc's own bound is 2^31 - 17; lengths of items and table entries are u32
RESIDENT_TOTAL = 256 * 10**6  # bytes, decoded: what every reader may hold for the small fields
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
        numbers, encoded = self.kind in ("tensor", "ragged"), self.kind in ("bytes", "text")
        named = bool(_ENCODING.match(self.encoding)) and (encoded or not self.encoding)
        for fine, problem, remedy in (
            (numbers or encoded, f"field kind {self.kind!r}", "choose tensor, bytes, text or ragged"),
            (not numbers or self.dtype in DTYPES, f"dtype {self.dtype!r}", f"choose one of {', '.join(DTYPES)}"),
            (all(n >= 1 for n in self.shape), f"shape {self.shape} has an empty axis", "give every axis at least 1"),
            (len(self.shape) <= MAX_AXES, f"a shape of {len(self.shape)} axes", f"the format holds up to {MAX_AXES}"),
            (numbers or not (self.dtype or self.shape), f"a {self.kind} field with dtype or shape", "leave them out"),
            (named, f"encoding {self.encoding!r} of a {self.kind} field", "name it like bytes:jpeg"),
        ):
            if not fine:
                raise FieldError(problem, remedy)

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
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype of tensors and ragged rows as they are stored: little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

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
        return hashlib.sha256(canonical_json(self._identity())).hexdigest()

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """Class names by field, as the conversion recorded them: name i is that of the value i."""
        found = class_names(self.provenance)
        return {name: tuple(map(str, names)) for name, names in found.items() if name in self.fields}

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as it stands in the group attribute."""
        return {
            **self._identity(),
            "format": FORMAT,
            "requires": [APPEND] if self.generation > 1 else [],
            "samples_per_shard": self.samples_per_shard,
            "digest": self.digest,
            "provenance": dict(self.provenance),
        }

    def _identity(self) -> dict[str, Any]:
        """Return what the digest covers."""
        return {
            "version": VERSION,
            "num_samples": self.num_samples,
            "order": {"version": 1, **vars(self.order)},
            "fields": {name: layout_json(layout) for name, layout in self.fields.items()},
            "tables": dict(self.tables),
            **({"generation": self.generation} if self.generation > 1 else {}),
        }


def class_names(notes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the class names by field, from a source's notes or a manifest's provenance."""
    found = notes.get("classes")
    listed = found.items() if isinstance(found, Mapping) else ()
    return {name: list(names) for name, names in listed if isinstance(names, Sequence) and not isinstance(names, str)}


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
        raise ValueError(f"{value!r} where a whole number of at least {least} is required")
    return value


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
    field = Field(raw["kind"], raw.get("dtype", ""), shape, raw.get("encoding", ""))
    sizes = {"chunk": natural(raw["chunk"], 1), "shard": natural(raw["shard"], 1)}
    sizes |= {"nbytes": natural(raw["nbytes"]), "stored": natural(raw["stored"])}
    skips = tuple((natural(shard), natural(chunk), natural(size, 1)) for shard, chunk, size in raw.get("skips", ()))
    layout = FieldLayout(field, codec=raw["codec"], resident=raw["resident"], skips=skips, **sizes)
    if layout.shard % layout.chunk:
        raise ValueError(f"chunk {layout.chunk} does not divide shard {layout.shard}")
    if layout.codec not in CODECS or type(layout.resident) is not bool:
        raise ValueError(f"codec {layout.codec!r}, resident {layout.resident!r}")
    return layout


KNOWN_REQUIREMENTS = frozenset({APPEND})
MAX_SAMPLES = 1 << 62  # positions of an epoch, padding included, stay below 2^63
MAX_CHUNKS = 1 << 20  # of a shard: its index has 16 MiB then
MAX_LANES = 1 << 16  # readers loop over the lanes
MAX_WINDOW = 1 << 31
MAX_SKIPS = 1 << 16  # of a field: each append adds one at most
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


def parse_json(data: bytes) -> Any:
    """Return a JSON document. Raises ValueError, also for a duplicate key, or RecursionError."""
    return json.loads(data, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):  # readers would differ in which of the values they take
        raise ValueError(f"a key appears twice in {keys!r:.200}")
    return dict(pairs)


def check_version(attributes: Mapping[str, Any], url: str) -> None:
    """Raise `VersionError` for a later version, or for a requirement that this version does not know."""
    version, requires = attributes.get("version"), attributes.get("requires", [])
    listed = isinstance(requires, list) and all(isinstance(one, str) for one in requires)
    if type(version) is not int or version < 1 or not listed:
        problem = f"{url} has format version {version!r}, requires {requires!r}"
        raise FormatError(problem, "its manifest is damaged: convert it again")
    if version > VERSION:
        problem = f"{url} has format version {version}, this streamloader reads up to {VERSION}"
        raise VersionError(problem, "upgrade streamloader")
    if unknown := sorted(set(requires) - KNOWN_REQUIREMENTS):
        problem = f"{url} requires {', '.join(unknown)}, which this streamloader does not know"
        raise VersionError(problem, "upgrade streamloader")


def manifest_from_json(attributes: Mapping[str, Any], url: str) -> Manifest:
    """Return the manifest of one dataset. Raises `VersionError` or `FormatError`, which name `url`."""
    check_version(attributes, url)
    try:
        order = attributes["order"]
        if order["version"] != 1:
            raise ValueError(f"order version {order['version']!r}")
        manifest = Manifest(
            num_samples=natural(attributes["num_samples"]),
            samples_per_shard=natural(attributes["samples_per_shard"], 1),
            fields={name: layout_from_json(raw) for name, raw in attributes["fields"].items()},
            order=OrderPin(natural(order["block"], 1), natural(order["lanes"], 1), natural(order["window"], 1)),
            tables=dict(attributes["tables"]),
            provenance=dict(attributes.get("provenance", {})),
            generation=natural(attributes.get("generation", 1), 1),
        )
        if (APPEND in attributes.get("requires", [])) != (manifest.generation > 1):
            raise ValueError(f"generation {manifest.generation} requires {attributes.get('requires', [])}")
        stated = attributes["digest"]
        problem = next((problem for wrong, problem in _problems(manifest) if wrong), None)
        if problem is not None:
            raise ValueError(problem)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = f"the manifest of {url} is damaged ({type(error).__name__}: {error})"
        raise FormatError(problem, "convert it again") from error
    if stated != manifest.digest:
        problem = f"the manifest of {url} states digest {stated}, its content gives {manifest.digest}"
        raise FormatError(problem, "it was edited: convert it again")
    return manifest


def _problems(manifest: Manifest) -> Iterator[tuple[bool, str]]:
    """Yield what streamloader never writes, and whether it is so: nothing later allocates or computes by it."""
    fields, order, samples = manifest.fields, manifest.order, manifest.num_samples
    yield not fields, "no field"
    yield set(manifest.tables) != set(fields), f"fields {sorted(fields)} have tables {sorted(manifest.tables)}"
    yield samples >= MAX_SAMPLES, f"{samples} samples"
    for name, layout in fields.items():
        check_name(name)
        fixed, size = layout.field.fixed, layout.field.item_bytes if layout.field.fixed else 4
        large = layout.chunk * size > MAX_CHUNK_BYTES or layout.chunks_per_shard > MAX_CHUNKS
        yield not _SHA256.match(manifest.tables[name]), f"table hash {manifest.tables[name]!r} of {name}"
        yield large, f"chunk {layout.chunk} and shard {layout.shard} of {name} are too large"
        yield fixed and layout.nbytes != samples * size, f"{samples} samples of {name} have {layout.nbytes} bytes"
        yield layout.resident and not fixed, f"{layout.field} field {name} is resident"
        if not layout.resident:
            shard = manifest.samples_per_shard
            yield layout.shard != shard, f"shard {layout.shard} of {name} where the dataset has {shard}"
            yield order.block % layout.chunk > 0, f"block {order.block} cuts chunks of {layout.chunk} of {name}"
        yield from _skip_problems(name, layout, manifest)
    resident = sum(layout.nbytes for layout in fields.values() if layout.resident)
    yield resident > RESIDENT_TOTAL, f"resident fields of {resident} bytes, at most {RESIDENT_TOTAL} are held"
    yield order.lanes > MAX_LANES, f"order of {order.lanes} lanes, at most {MAX_LANES}"
    window = order.window % order.block == 0 and 2 * order.block <= order.window < MAX_WINDOW
    yield not window, f"order window {order.window} is not a multiple of block {order.block} in [2 blocks, 2^31)"


def _skip_problems(name: str, layout: FieldLayout, manifest: Manifest) -> Iterator[tuple[bool, str]]:
    places = [(shard, chunk) for shard, chunk, _ in layout.skips]
    total, generation = sum(size for _, _, size in layout.skips), manifest.generation
    many = len(places) > (MAX_SKIPS if generation > 1 else 0)
    yield many, f"{len(places)} skips of {name} in generation {generation}"
    yield places != sorted(set(places)), f"the skips of {name} do not ascend"
    yield total > layout.stored or total >= MAX_SAMPLES, f"{name} skips {total} of {layout.stored} bytes"
    for shard, chunk in places:
        outside = chunk >= layout.chunks_per_shard
        outside |= shard * layout.shard + chunk * layout.chunk >= manifest.num_samples
        yield outside, f"{name} skips bytes before chunk {chunk} of shard {shard}, which does not exist"
