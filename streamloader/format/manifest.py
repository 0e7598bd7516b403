"""The description of a dataset as frozen values (fields, layouts, pinned order) and as JSON.

The manifest is the group attribute `streamloader` of the root `zarr.json`. `formats/streamloader/v1/SPEC.md` defines
each key. Parsing checks untrusted JSON and bounds every number, so later code can rely on them.
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
TABLES = "_streamloader/chunks"
APPEND = "append"  # in `requires` of a dataset that was appended to
DELETE = "delete"  # in `requires` of a version without samples that are stored

Kind = Literal["tensor", "bytes", "text", "ragged"]
CODECS = tuple(codec for codec in CODEC_CHOICES if codec != "auto")
INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTS, "float16", "float32", "float64")
MAX_CHUNK_BYTES = 2**31 - 64  # the bound of blosc is 2^31 - 17; item lengths and table entries are u32
RESIDENT_TOTAL = 256 * 10**6  # decoded bytes of all resident fields, which every reader holds in memory
MAX_AXES = 30  # of a sample: numpy 1 allows 32, and a batch adds one
NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_OF = r"(?P<kind>bytes|text|ragged)(?::(?P<of>[a-z0-9+.-]+))?"
_SPEC = re.compile(rf"(?:{_OF}|(?P<dtype>[a-z0-9]+))(?:\[(?P<shape>[0-9, ]*)\])?\Z")
_ENCODING = re.compile(r"[a-z0-9+.-]*\Z")


@dataclass(frozen=True)
class Field:
    """The type of one field of a sample.

    A "tensor" has a `dtype` and a fixed `shape` per sample. A "ragged" field has a `dtype`, a variable first dimension
    and a fixed inner `shape`. "bytes" and "text" have an optional `encoding` (jpeg, png, flac, ...). Raises
    `FieldError` for invalid combinations.
    """

    kind: Kind
    dtype: str = ""
    shape: tuple[int, ...] = ()
    encoding: str = ""

    def __post_init__(self) -> None:
        numbers, encoded = self.kind in ("tensor", "ragged"), self.kind in ("bytes", "text")
        encoding_ok = bool(_ENCODING.match(self.encoding)) and (encoded or not self.encoding)
        for valid, problem, remedy in (
            (numbers or encoded, f"field kind {self.kind!r}", "choose tensor, bytes, text or ragged"),
            (not numbers or self.dtype in DTYPES, f"dtype {self.dtype!r}", f"choose one of {', '.join(DTYPES)}"),
            (all(n >= 1 for n in self.shape), f"shape {self.shape} has an empty axis", "give every axis at least 1"),
            (len(self.shape) <= MAX_AXES, f"a shape of {len(self.shape)} axes", f"the format allows {MAX_AXES}"),
            (numbers or not (self.dtype or self.shape), f"a {self.kind} field with dtype or shape", "leave them out"),
            (encoding_ok, f"encoding {self.encoding!r} of a {self.kind} field", "name it like bytes:jpeg"),
        ):
            if not valid:
                raise FieldError(problem, remedy)

    @classmethod
    def parse(cls, spec: str | Field) -> Field:
        """Return the field of a specification: `int64`, `float32[64]`, `bytes:jpeg`, `video`, `ragged:int32[2]` etc.

        Raises `FieldError` for an invalid specification.
        """
        if isinstance(spec, Field):
            return spec
        match = _SPEC.match("bytes:video" if spec == "video" else spec)
        if match is None:
            examples = "int64, float32[3,224,224], bytes:jpeg, text or ragged:int32"
            raise FieldError(f"{spec!r} is not a field type", f"write it like {examples}")
        shape = tuple(int(n) for n in (match["shape"] or "").replace(" ", "").split(",") if n)
        if match["kind"] == "ragged":
            return cls("ragged", match["of"] or "", shape)
        if match["kind"]:
            return cls("bytes" if match["kind"] == "bytes" else "text", shape=shape, encoding=match["of"] or "")
        return cls("tensor", match["dtype"], shape)

    def __str__(self) -> str:
        shape = f"[{','.join(map(str, self.shape))}]" if self.shape else ""
        if self.kind == "tensor":
            return f"{self.dtype}{shape}"
        of = self.dtype if self.kind == "ragged" else self.encoding
        return f"{self.kind}{':' + of if of else ''}{shape}"

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The stored dtype of tensors and ragged rows: `dtype`, little-endian."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def fixed(self) -> bool:
        """Whether every sample has the same number of bytes."""
        return self.kind == "tensor"

    @property
    def is_video(self) -> bool:
        """Whether samples are videos, which are indexed when they are written: see `format/video.py`."""
        return self.kind == "bytes" and self.encoding == "video"

    @property
    def item_bytes(self) -> int:
        """The bytes of one sample of a tensor field, or of one row of a ragged field; 1 for bytes and text."""
        if self.kind in ("bytes", "text"):
            return 1
        return np.dtype(self.dtype).itemsize * prod(self.shape)


@dataclass(frozen=True)
class FieldLayout:
    """The storage layout of one field. `chunk` and `shard` in samples; `nbytes` decoded and `stored` encoded, in bytes.

    `codec` is "none", "lz4" (blosc) or "zstd". Readers hold a `resident` field in memory, and it has its own chunk and
    shard sizes; those of other fields are aligned: chunk divides block divides shard. `skips` lists, in ascending
    order, (shard, chunk, bytes): the number of stale bytes of earlier versions before that chunk of the shard.
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
        """The number of inner chunks in the index of every shard, even if the last shard has fewer samples."""
        return self.shard // self.chunk

    @property
    def can_have_lengths(self) -> bool:
        """Whether the field may have a table of lengths: its samples vary, and a page is no larger than a chunk."""
        return not self.field.fixed and 4 * self.shard <= MAX_CHUNK_BYTES

    def shard_key(self, name: str, shard: int) -> str:
        """Return the path of a shard object, relative to the dataset (Zarr's default chunk key encoding)."""
        return "/".join([name, "c", str(shard), *("0" for _ in (self.field.shape if self.field.fixed else ()))])


@dataclass(frozen=True)
class OrderPin:
    """The order parameters of the manifest: `block` and `window` in samples (rule 1 of the order contract)."""

    block: int
    lanes: int
    window: int


@dataclass(frozen=True)
class Deleted:
    """The samples that a version leaves out: how many, and the `generation` and the SHA-256 of the list of them."""

    generation: int
    count: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The description of one dataset.

    `num_samples` are stored, of which `deleted` are left out. `tables` has the SHA-256 of each field's chunk table, and
    `lengths` that of each table of lengths, by field name. Each append and each deletion adds 1 to `generation`.
    """

    num_samples: int
    samples_per_shard: int
    fields: Mapping[str, FieldLayout]
    order: OrderPin
    tables: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    generation: int = 1
    lengths: Mapping[str, str] = field(default_factory=dict)
    deleted: Deleted | None = None

    @property
    def num_remaining(self) -> int:
        """The number of samples of this version: those that are stored and not deleted."""
        return self.num_samples - (self.deleted.count if self.deleted else 0)

    @property
    def digest(self) -> str:
        """The SHA-256, in hexadecimal, of the canonical JSON of the dataset's identity.

        That is version, num_samples, order, fields, the SHA-256 of each table, the generation if it is not 1, and the
        deleted samples if there are any.
        """
        # RFC 8785: there are no floats, and keys are ASCII, so sorting by code point is correct
        data = json.dumps(self._identity(), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(data.encode()).hexdigest()

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The class names recorded by the conversion, by field: name i belongs to value i."""
        recorded = class_names(self.provenance)
        return {name: tuple(map(str, names)) for name, names in recorded.items() if name in self.fields}

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value of the group attribute."""
        return {
            **self._identity(),
            "format": FORMAT,
            "requires": [APPEND] * (self.generation > 1) + [DELETE] * (self.deleted is not None),
            "samples_per_shard": self.samples_per_shard,
            "digest": self.digest,
            "provenance": dict(self.provenance),
            **({"lengths": dict(self.lengths)} if self.lengths else {}),
        }

    def _identity(self) -> dict[str, Any]:
        """Return the part of the manifest that the digest covers."""
        return {
            "version": VERSION,
            "num_samples": self.num_samples,
            "order": {"version": 1, **vars(self.order)},
            "fields": {name: layout_json(layout) for name, layout in self.fields.items()},
            "tables": dict(self.tables),
            **({"generation": self.generation} if self.generation > 1 else {}),
            **({"deleted": vars(self.deleted)} if self.deleted else {}),
        }


def tables_path(generation: int = 1) -> str:
    """Return the path of the group of all tables of a generation."""
    return TABLES if generation == 1 else f"{TABLES}.{generation}"


def manifest_path(generation: int) -> str:
    """Return the path of the manifest of a generation that was appended to."""
    return f"{tables_path(generation)}/manifest.json"


def deleted_path(generation: int) -> str:
    """Return the path of the list of deleted samples that a generation wrote."""
    return f"_streamloader/deleted.{generation}"


def class_names(notes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the class names by field, from a source's notes or a manifest's provenance."""
    classes = notes.get("classes")
    items = classes.items() if isinstance(classes, Mapping) else ()
    return {name: list(names) for name, names in items if isinstance(names, Sequence) and not isinstance(names, str)}


def check_name(name: str) -> None:
    """Raise `FieldError` unless `name` is a valid field name."""
    if not NAME.match(name):
        raise FieldError(f"field name {name!r} is invalid", "start with a-z and continue with a-z, 0-9 and _")


def natural(value: Any, least: int = 0) -> int:
    """Return `value`. Raises `ValueError` unless it is an integer of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} where a whole number of at least {least} is required")
    return value


def layout_json(layout: FieldLayout) -> dict[str, Any]:
    """Return the JSON value of a field's layout in the manifest."""
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
    """Return the layout that `layout_json` wrote.

    Raises `KeyError`, `TypeError`, `ValueError` or `FieldError` for other input.
    """
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


KNOWN_REQUIREMENTS = frozenset({APPEND, DELETE})
MAX_SAMPLES = 1 << 62  # keeps the positions of an epoch, with padding, below 2^63
MAX_DELETED = 1 << 28  # readers hold their numbers
MAX_CHUNKS = 1 << 20  # per shard: its index then has 16 MiB
MAX_LANES = 1 << 16  # readers loop over lanes
MAX_WINDOW = 1 << 31
MAX_SKIPS = 1 << 16  # per field: each append adds at most one
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


def parse_json(data: bytes) -> Any:
    """Return the value of a JSON document. Raises `ValueError`, even for a duplicate key, or `RecursionError`."""
    return json.loads(data, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):  # JSON parsers disagree on which value to use
        raise ValueError(f"a key appears twice in {[key for key, _ in pairs]!r:.200}")
    return document


def check_version(attributes: Mapping[str, Any], url: str) -> None:
    """Check that this version of streamloader can read the dataset at `url`.

    Raises `VersionError` for a later format version or an unknown requirement, `FormatError` for invalid values.
    """
    version, requires = attributes.get("version"), attributes.get("requires", [])
    names = isinstance(requires, list) and all(isinstance(name, str) for name in requires)
    if type(version) is not int or version < 1 or not names:
        problem = f"{url} has format version {version!r}, requires {requires!r}"
        raise FormatError(problem, "its manifest is damaged: convert it again")
    if version > VERSION:
        problem = f"{url} has format version {version}, this streamloader reads up to {VERSION}"
        raise VersionError(problem, "upgrade streamloader")
    if unknown := sorted(set(requires) - KNOWN_REQUIREMENTS):
        problem = f"{url} requires {', '.join(unknown)}, which this streamloader does not know"
        raise VersionError(problem, "upgrade streamloader")


def read_manifest(attributes: Mapping[str, Any], url: str) -> Manifest:
    """Return the manifest in an attribute `streamloader`. Raises `VersionError` or `FormatError`, which name `url`."""
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
            lengths=dict(attributes.get("lengths", {})),
            deleted=_deleted_from_json(attributes["deleted"]) if "deleted" in attributes else None,
        )
        requires, deletes = attributes.get("requires", []), manifest.deleted is not None
        if (APPEND in requires, DELETE in requires) != (manifest.generation > 1, deletes):
            problem = f"generation {manifest.generation}{', with deleted samples,' * deletes} requires {requires}"
            raise ValueError(problem)
        digest = attributes["digest"]
        for invalid, problem in _checks(manifest):
            if invalid:
                raise ValueError(problem)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = f"the manifest of {url} is damaged ({type(error).__name__}: {error})"
        raise FormatError(problem, "convert it again") from error
    if digest != manifest.digest:
        problem = f"the manifest of {url} states digest {digest}, its content gives {manifest.digest}"
        raise FormatError(problem, "it was edited: convert it again")
    return manifest


def _deleted_from_json(raw: Mapping[str, Any]) -> Deleted:
    return Deleted(natural(raw["generation"], 2), natural(raw["count"], 1), raw["sha256"])


def _checks(manifest: Manifest) -> Iterator[tuple[bool, str]]:
    """Yield for each check whether it fails, and its message.

    The checks reject manifests that streamloader never writes, before anything is allocated by their numbers.
    """
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
            yield layout.shard != shard, f"shard {layout.shard} of {name} differs from the dataset's {shard}"
            yield order.block % layout.chunk > 0, f"chunk {layout.chunk} of {name} does not divide block {order.block}"
        yield from _skip_checks(name, layout, manifest)
    for name, digest in manifest.lengths.items():
        yield name not in fields or not fields[name].can_have_lengths, f"{name!r} cannot have a table of lengths"
        yield not _SHA256.match(digest), f"hash of lengths {digest!r} of {name}"
    if deleted := manifest.deleted:
        yield deleted.generation > manifest.generation, f"samples deleted in generation {deleted.generation}"
        yield deleted.count > min(samples - 1, MAX_DELETED), f"{deleted.count} of {samples} samples are deleted"
        yield not _SHA256.match(deleted.sha256), f"hash of deleted samples {deleted.sha256!r}"
    resident = sum(layout.nbytes for layout in fields.values() if layout.resident)
    yield resident > RESIDENT_TOTAL, f"resident fields of {resident} bytes, the limit is {RESIDENT_TOTAL}"
    yield order.lanes > MAX_LANES, f"order of {order.lanes} lanes, the limit is {MAX_LANES}"
    window = order.window % order.block == 0 and 2 * order.block <= order.window < MAX_WINDOW
    yield not window, f"order window {order.window} is not a multiple of block {order.block} in [2 blocks, 2^31)"


def _skip_checks(name: str, layout: FieldLayout, manifest: Manifest) -> Iterator[tuple[bool, str]]:
    chunks = [(shard, chunk) for shard, chunk, _ in layout.skips]
    total, generation = sum(size for _, _, size in layout.skips), manifest.generation
    too_many = len(chunks) > (MAX_SKIPS if generation > 1 else 0)
    yield too_many, f"{len(chunks)} skips of {name} in generation {generation}"
    yield chunks != sorted(set(chunks)), f"the skips of {name} do not ascend"
    yield total > layout.stored or total >= MAX_SAMPLES, f"{name} skips {total} of {layout.stored} bytes"
    for shard, chunk in chunks:
        outside = chunk >= layout.chunks_per_shard
        outside |= shard * layout.shard + chunk * layout.chunk >= manifest.num_samples
        yield outside, f"{name} skips bytes before chunk {chunk} of shard {shard}, which does not exist"
