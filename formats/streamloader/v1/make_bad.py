"""Writes `bad/`: broken and hostile datasets, made from golden ones, and what each must give (`expected.json`).

    python make_bad.py [FOLDER]

Nothing of the package is used. Where a dataset is to be hostile and not merely broken, every checksum, table and
digest is made to fit, as an attacker would.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crc32c
import numpy as np
from numcodecs import blosc, zstd

HERE = Path(__file__).parent
IDENTITY = ("kind", "dtype", "shape", "encoding", "chunk", "shard", "codec", "resident", "nbytes", "stored", "skips")
GONE = 2**64 - 1
blosc.use_threads = False  # threads write blocks in the order in which they finish


def sealed(data: bytes) -> bytes:
    """Return bytes with their crc32c behind them."""
    return data + crc32c.crc32c(data).to_bytes(4, "little")


class Files:
    """The objects of a dataset by path, to be changed."""

    def __init__(self, name: str = "free") -> None:
        folder = HERE / "golden" / name
        paths = [path for path in folder.rglob("*") if path.is_file()]
        self.objects = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        self.root: Any = json.loads(self.objects.pop("zarr.json"))
        # a reader of ours takes everything from the manifest: Zarr's own documents are left out, to be small
        self.objects = {path: data for path, data in self.objects.items() if not path.endswith("zarr.json")}
        if "splits" not in self.ours:
            del self.root["consolidated_metadata"]

    @property
    def ours(self) -> Any:
        """The manifest."""
        return self.root["attributes"]["streamloader"]

    def restate(self) -> None:
        """State the digest that fits."""
        ours = self.ours
        fields = {name: {key: one[key] for key in IDENTITY if key in one} for name, one in ours["fields"].items()}
        keys = ("version", "generation", "num_samples", "order", "tables")
        identity = {key: ours[key] for key in keys if key in ours} | {"fields": fields}
        text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        ours["digest"] = hashlib.sha256(text.encode()).hexdigest()

    def shard(self, name: str, number: int) -> str:
        """Return the path of a shard."""
        field = self.ours["fields"][name]
        inner = field["shape"] if field["kind"] == "tensor" else []
        return "/".join([name, "c", str(number), *("0" for _ in inner)])

    def page(self, name: str) -> str:
        """Return the path of a field's chunk table: one page."""
        generation = self.ours.get("generation", 1)
        return f"_streamloader/chunks{'' if generation == 1 else f'.{generation}'}/{name}/c/0/0/0"

    def table(self, name: str) -> Any:
        """Return a field's chunk table: one page."""
        field = self.ours["fields"][name]
        data = self.objects[self.page(name)][:-4]
        return np.frombuffer(data, "<u4").reshape(-1, field["shard"] // field["chunk"], 2).copy()

    def put_table(self, name: str, table: Any) -> None:
        """Store a chunk table, with its hash in the manifest and the digest that fits."""
        self.objects[self.page(name)] = sealed(table.astype("<u4").tobytes())
        self.ours["tables"][name] = hashlib.sha256(table.astype("<u4").tobytes()).hexdigest()
        self.restate()

    def bodies(self, name: str, number: int) -> list[bytes]:
        """Return the stored chunks of a shard, without their checksums."""
        at, out = 0, []
        for size, _ in self.table(name)[number].tolist():
            out += [self.objects[self.shard(name, number)][at : at + size - 4]] if size else []
            at += size
        return out

    def put_shard(self, name: str, number: int, bodies: list[bytes]) -> list[list[int]]:
        """Store a shard of these bodies; return its rows of the table."""
        field = self.ours["fields"][name]
        chunks = [sealed(body) for body in bodies]
        index, rows, at = b"", [], 0
        for i in range(field["shard"] // field["chunk"]):
            size = len(chunks[i]) if i < len(chunks) else 0
            index += struct.pack("<QQ", *((at, size) if size else (GONE, GONE)))
            rows.append([size, int.from_bytes(chunks[i][-4:], "little") if size else 0])
            at += size
        self.objects[self.shard(name, number)] = b"".join(chunks) + sealed(index)
        return rows

    def replace_chunk(self, name: str, number: int, chunk: int, body: bytes) -> None:
        """Put another chunk into a shard and let everything fit: only its content is wrong."""
        bodies = self.bodies(name, number)
        bodies[chunk] = body
        table = self.table(name)
        old = len(self.objects[self.shard(name, number)])
        table[number] = self.put_shard(name, number, bodies)
        self.ours["fields"][name]["stored"] += len(self.objects[self.shard(name, number)]) - old
        self.put_table(name, table)

    def flip(self, path: str, at: int) -> None:
        """Flip a bit of an object."""
        data = bytearray(self.objects[path])
        data[at] ^= 16
        self.objects[path] = bytes(data)

    def write(self, folder: Path) -> None:
        """Write the objects and the root."""
        for path, data in self.objects.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        if self.root is not None:
            raw = self.root if isinstance(self.root, bytes) else json.dumps(self.root, separators=(",", ":")).encode()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "zarr.json").write_bytes(raw)


CASES: dict[str, tuple[Callable[[], Files], dict[str, Any]]] = {}


def case(
    error: str, code: str, *says: str, **more: Any
) -> Callable[[Callable[[Files], None]], Callable[[Files], None]]:
    """Register a bad dataset: the error it must give, and words of its message. `base` is the golden dataset."""
    base = more.pop("base", "free")

    def register(change: Callable[[Files], None]) -> Callable[[Files], None]:
        def make() -> Files:
            files = Files(base)
            if more.get("when", "open") == "open":  # what does not open needs no other object
                files.objects.clear()
                files.root.pop("consolidated_metadata", None)
            change(files)
            return files

        told = more if base == "free" else more | {"base": base}
        CASES[change.__name__] = make, {"error": error, "code": code, "says": list(says), "when": "open"} | told
        return change

    return register


def manifest_case(
    name: str, says: str, change: Callable[[Any], Any], error: str = "FormatError", code: str = "SL300"
) -> None:
    """Register a manifest that is wrong although its digest fits."""

    def apply(files: Files) -> None:
        change(files.ours)
        files.restate()

    apply.__name__ = name
    case(error, code, *([says] if says else []))(apply)


def field(manifest: Any, name: str, **keys: Any) -> None:
    """Change keys of a field of a manifest."""
    manifest["fields"][name].update(keys)


def rename(manifest: Any, old: str, new: str) -> None:
    """Give a field another name."""
    for part in ("fields", "tables"):
        manifest[part][new] = manifest[part].pop(old)


def many(manifest: Any, count: int) -> None:
    """Claim so many samples, in sizes that fit."""
    manifest["num_samples"] = count
    for one in manifest["fields"].values():
        if one["kind"] == "tensor":
            one["nbytes"] = count * {"int16": 6, "uint32": 4}[one["dtype"]]


# --- the root document -------------------------------------------------------------------------------------------


@case("VersionError", "SL303", "format version 2", "up to 1", "upgrade")
def too_new(files: Files) -> None:
    files.ours["version"] = 2


@case("VersionError", "SL303", "requires encryption, filters", "upgrade")
def unknown_requires(files: Files) -> None:
    files.ours["requires"] = ["filters", "encryption"]


@case("IncompleteError", "SL302", "unfinished", "1 of 3 shards", "run the same convert command again")
def unfinished_conversion(files: Files) -> None:
    files.root = None
    job = {"by": "convert", "fields": ["x"], "shards": 3, "splits": []}
    files.objects = {"_streamloader/job.json": json.dumps(job).encode(), "_streamloader/receipts/0.json": b"{}"}


@case("IncompleteError", "SL302", "not closed", "overwrite=True")
def unfinished_writer(files: Files) -> None:
    files.root = None
    job = {"by": "writer", "fields": ["x"], "shards": None, "splits": []}
    files.objects = {"_streamloader/job.json": json.dumps(job).encode()}


@case("FormatError", "SL300", "job.json", "damaged")
def unfinished_hostile_job(files: Files) -> None:
    files.root = None
    files.objects = {"_streamloader/job.json": b'{"by": "convert", "shards": "many", "splits": 7}'}


@case("NotADatasetError", "SL301", "no dataset")
def nothing_here(files: Files) -> None:
    files.root = None
    files.objects = {"notes.txt": b"not a dataset\n"}


@case("NotADatasetError", "SL301", "not a streamloader dataset")
def plain_zarr(files: Files) -> None:
    files.root["attributes"] = {}


@case("FormatError", "SL300", "zarr.json is damaged")
def not_json(files: Files) -> None:
    files.root = b"\x89PNG\r\n\x1a\n"


@case("FormatError", "SL300", "zarr.json is damaged")
def cut_json(files: Files) -> None:
    files.root = json.dumps(files.root).encode()[:200]


@case("FormatError", "SL300", "zarr.json is damaged")
def deep_json(files: Files) -> None:
    files.root = b"[" * 20_000 + b"]" * 20_000


@case("FormatError", "SL300", "zarr.json is damaged", "not an object")
def json_list(files: Files) -> None:
    files.root = b"[1, 2, 3]"


@case("FormatError", "SL300", "zarr.json is damaged", "num_samples", "twice")
def duplicate_keys(files: Files) -> None:
    files.root = json.dumps(files.root).replace('"num_samples": 20', '"num_samples": 19, "num_samples": 20').encode()


@case("FormatError", "SL300", "zarr.json is damaged")
def endless_integer(files: Files) -> None:
    files.root = json.dumps(files.root).replace('"num_samples": 20', f'"num_samples": {"9" * 5000}').encode()


@case("FormatError", "SL300", "digest")
def wrong_digest(files: Files) -> None:
    files.ours["digest"] = "0" * 64


@case("FormatError", "SL300", "digest", "edited")
def edited_manifest(files: Files) -> None:
    files.ours["fields"]["label"]["dtype"] = "int32"


@case("FormatError", "SL300", "splits", "damaged", base="splits", split="train")
def climbing_split(files: Files) -> None:
    files.ours["splits"]["../train"] = files.ours["splits"]["train"]


@case("FormatError", "SL300", "does not hold its split 'train'", base="splits", split="train")
def split_without_manifest(files: Files) -> None:
    """The consolidated metadata of the root is not there."""


@case("FormatError", "SL300", "digest", base="splits", split="val", when="read")
def split_of_another_dataset(files: Files) -> None:
    files.ours["splits"]["val"]["digest"] = "0" * 64
    files.objects.clear()


manifest_case("negative_num_samples", "-1", lambda m: m.update(num_samples=-1))
manifest_case("too_many_samples", "samples", lambda m: many(m, 2**63))
manifest_case("resident_field_of_exabytes", "resident", lambda m: many(m, 2**61))
manifest_case("resident_text", "resident", lambda m: field(m, "blob", resident=True))
manifest_case("float_num_samples", "20.0", lambda m: m.update(num_samples=20.0))
manifest_case("chunk_does_not_divide_shard", "chunk 5 does not divide shard 12", lambda m: field(m, "wave", chunk=5))
manifest_case("shard_is_not_the_datasets", "shard 24", lambda m: field(m, "wave", shard=24))
manifest_case("huge_chunk", "too large", lambda m: field(m, "label", chunk=2**40, shard=2**40))
manifest_case("shard_of_many_chunks", "too large", lambda m: field(m, "label", chunk=1, shard=2**40))
manifest_case("climbing_field_name", "../x", lambda m: rename(m, "wave", "../x"))
manifest_case("absolute_field_name", "/etc/passwd", lambda m: rename(m, "wave", "/etc/passwd"))
manifest_case("hidden_field_name", "_streamloader", lambda m: rename(m, "wave", "_streamloader"))
manifest_case("no_fields", "no field", lambda m: m.update(fields={}, tables={}))
manifest_case("empty_axis", "0 where a whole number of at least 1", lambda m: field(m, "wave", shape=[0]))
manifest_case("gigantic_shape", "wave", lambda m: field(m, "wave", shape=[2**31, 2**31, 2**31]))
manifest_case("many_axes", "axes", lambda m: field(m, "wave", shape=[3] + [1] * 70))
manifest_case("object_dtype", "object", lambda m: field(m, "wave", dtype="object"))
manifest_case("unknown_kind", "pickle", lambda m: field(m, "wave", kind="pickle"))
manifest_case("unknown_codec", "gzip", lambda m: field(m, "wave", codec="gzip"))
manifest_case("table_is_no_hash", "table", lambda m: m["tables"].update(wave="../../x"))
manifest_case("field_without_table", "tables", lambda m: m["tables"].pop("wave"))
manifest_case("order_of_many_lanes", "lanes", lambda m: m["order"].update(lanes=2**60))
manifest_case("order_of_a_huge_window", "window", lambda m: m["order"].update(window=6 * 2**40))
manifest_case("order_of_a_cut_block", "window", lambda m: m["order"].update(window=13))
manifest_case("order_that_cuts_chunks", "block", lambda m: m["order"].update(block=4, window=8))
manifest_case("order_of_a_later_version", "order", lambda m: m["order"].update(version=2))


def skip(name: str, says: str, skips: Any, **keys: Any) -> None:
    """Register a manifest of an appended dataset whose field `wave` has other skips."""

    def apply(files: Files) -> None:
        field(files.ours, "wave", skips=skips)
        files.ours.update(keys)
        files.restate()

    apply.__name__ = name
    case("FormatError", "SL300", *([says] if says else []), base="appended")(apply)


skip("skip_behind_the_last_shard", "before chunk 0 of shard 3, which does not exist", [[0, 1, 28], [3, 0, 28]])
skip("skip_behind_the_last_chunk", "before chunk 2 of shard 0, which does not exist", [[0, 2, 28]])
skip("skips_of_one_chunk", "do not ascend", [[0, 1, 20], [0, 1, 8]])
skip("skips_that_descend", "do not ascend", [[1, 0, 28], [0, 1, 28]])
skip("skip_of_exabytes", "skips 9223372036854775808", [[0, 1, 2**63]])
skip("skip_of_less_than_nothing", "-28 where a whole number", [[0, 1, -28]])
skip("generation_that_is_not_required", "generation 3 requires []", [[0, 1, 28]], requires=[])
skip("generation_of_a_fraction", "2.5", [[0, 1, 28]], generation=2.5)


@case("FormatError", "SL300", "generation 1 requires ['append']", base="appended")
def required_append_that_never_was(files: Files) -> None:
    del files.ours["generation"]
    files.restate()


# --- objects that are missing or damaged --------------------------------------------------------------------------


@case("MissingObjectError", "SL304", "wave/c/1/0 is missing", when="read")
def missing_shard(files: Files) -> None:
    del files.objects["wave/c/1/0"]


@case("CorruptError", "SL305", "wave/c/1/0", "chunk", "samples", when="read")
def truncated_shard(files: Files) -> None:
    files.objects["wave/c/1/0"] = files.objects["wave/c/1/0"][:30]


@case("CorruptError", "SL305", "wave/c/1/0", "0 of", when="read")
def empty_shard(files: Files) -> None:
    files.objects["wave/c/1/0"] = b""


@case("CorruptError", "SL305", "chunk 1 of", "wave/c/0/0", "samples 3 to 5", "crc32c", when="read")
def flipped_chunk(files: Files) -> None:
    files.flip("wave/c/0/0", 25)


@case("CorruptError", "SL305", "chunk 1 of", "blob/c/1", "samples 18 to 19", when="read")
def flipped_compressed_chunk(files: Files) -> None:
    files.flip("blob/c/1", int(files.table("blob")[1, 0, 0]) + 40)


@case("CorruptError", "SL305", "chunk 2 of", "label/c/0", "samples 10 to 14", when="read")
def flipped_resident_chunk(files: Files) -> None:
    files.flip("label/c/0", int(files.table("label")[0, :2, 0].sum()) + 8)


@case("CorruptError", "SL305", "chunk 0 of", "wave/c/0/0", when="read")
def flipped_chunk_and_index(files: Files) -> None:
    files.flip("wave/c/0/0", 1)
    files.flip("wave/c/0/0", len(files.objects["wave/c/0/0"]) - 10)


@case("ModifiedError", "SL306", "chunk 0 of", "wave/c/0/0", "modified", when="read")
def rewritten_shard(files: Files) -> None:
    files.put_shard("wave", 0, [bytes(18), *files.bodies("wave", 0)[1:]])


@case("ModifiedError", "SL306", "blob/c/0", "modified", when="read")
def rewritten_shard_of_other_sizes(files: Files) -> None:
    files.put_shard("blob", 0, files.bodies("blob", 1)[::-1])


@case("ModifiedError", "SL306", "wave/c/1/0", "modified", when="read")
def shard_in_the_place_of_another(files: Files) -> None:
    files.objects["wave/c/1/0"] = files.objects["wave/c/0/0"]


@case("MissingObjectError", "SL304", "chunk table", "chunks/wave", when="read")
def missing_table(files: Files) -> None:
    del files.objects["_streamloader/chunks/wave/c/0/0/0"]


@case("CorruptError", "SL305", "chunk table", "chunks/wave", "has 31 bytes, expected 68", when="read")
def truncated_table(files: Files) -> None:
    files.objects["_streamloader/chunks/wave/c/0/0/0"] = files.objects["_streamloader/chunks/wave/c/0/0/0"][:31]


@case("CorruptError", "SL305", "chunk table", "chunks/wave", "checksum", when="read")
def flipped_table(files: Files) -> None:
    files.flip("_streamloader/chunks/wave/c/0/0/0", 4)


@case("ModifiedError", "SL306", "chunk table", "chunks/wave", when="read")
def rewritten_table(files: Files) -> None:
    table = files.table("wave")
    table[0] = files.put_shard("wave", 0, [bytes(len(body)) for body in files.bodies("wave", 0)])
    files.objects["_streamloader/chunks/wave/c/0/0/0"] = sealed(table.tobytes())


# --- hostile: everything fits but the content -----------------------------------------------------------------------


@case("MissingObjectError", "SL304", "chunk 3 of", "wave/c/0/0", "absent", when="read")
def absent_chunk(files: Files) -> None:
    table = files.table("wave")
    table[0, 3] = 0
    files.put_table("wave", table)


@case("FormatError", "SL300", "chunk table", "whole field has", when="read")
def table_of_huge_chunks(files: Files) -> None:
    table = files.table("wave")
    table[0, :, 0] = 2**32 - 1
    files.put_table("wave", table)


@case("ModifiedError", "SL306", "wave/c/0/0", "its index is intact", when="read")
def huge_chunks_and_a_huge_field(files: Files) -> None:
    files.ours["fields"]["wave"]["stored"] = 2**40
    table_of_huge_chunks(files)


@case("MissingObjectError", "SL304", "chunk table", "missing", when="read")
def samples_without_end(files: Files) -> None:
    files.objects.clear()
    for part in ("fields", "tables"):
        del files.ours[part]["label"], files.ours[part]["blob"]
    many(files.ours, 2**60)
    files.restate()


def packed(*items: bytes, count: int | None = None) -> bytes:
    """Return the variable-length layout."""
    parts = [len(item).to_bytes(4, "little") + item for item in items]
    return (len(items) if count is None else count).to_bytes(4, "little") + b"".join(parts)


def lz4(payload: bytes) -> bytes:
    """Return a blosc frame."""
    return bytes(blosc.compress(payload, b"lz4", 5, blosc.NOSHUFFLE))


@case("CorruptError", "SL305", "chunk 0 of", "blob/c/0", "samples 0 to 5", "6 items", when="read")
def wrong_item_count(files: Files) -> None:
    files.replace_chunk("blob", 0, 0, lz4(packed(*[b"x" * 9] * 6, count=2**32 - 1)))


@case("CorruptError", "SL305", "chunk 0 of", "blob/c/0", "item", when="read")
def item_beyond_its_chunk(files: Files) -> None:
    files.replace_chunk("blob", 0, 0, lz4(packed(*[b"x" * 9] * 5) + b"\xff\xff\xff\x7f" + b"y" * 60))


@case("CorruptError", "SL305", "chunk 0 of", "blob/c/0", when="read")
def bytes_behind_the_last_item(files: Files) -> None:
    files.replace_chunk("blob", 0, 0, lz4(packed(*[b"x" * 9] * 6) + b"more"))


@case("CorruptError", "SL305", "chunk 1 of", "wave/c/0/0", "14 bytes", "18", when="read")
def short_fixed_chunk(files: Files) -> None:
    files.replace_chunk("wave", 0, 1, bytes(14))


@case("CorruptError", "SL305", "chunk 1 of", "label/c/0", "zstd", "claims 67108864", "20", when="read")
def zstd_bomb(files: Files) -> None:
    files.replace_chunk("label", 0, 1, bytes(zstd.compress(bytes(1 << 26), 3)))


@case("CorruptError", "SL305", "chunk 1 of", "label/c/0", "zstd", when="read")
def zstd_bomb_that_lies(files: Files) -> None:
    """The frame's header states the right size, 20 bytes; its blocks hold 64 MiB."""
    frame = bytes(zstd.compress(bytes(1 << 26), 3))
    assert frame[4] >> 6 == 2, "a content size of four bytes"
    single = frame[4] >> 5 & 1
    at = 5 + (1 - single)
    files.replace_chunk("label", 0, 1, frame[:at] + (20).to_bytes(4, "little") + frame[at + 4 :])


@case("CorruptError", "SL305", "chunk 1 of", "label/c/0", "zstd", when="read")
def zstd_of_two_frames(files: Files) -> None:
    files.replace_chunk("label", 0, 1, bytes(zstd.compress(bytes(20), 3)) + bytes(zstd.compress(bytes(1 << 26), 3)))


@case("CorruptError", "SL305", "chunk 1 of", "label/c/0", "zstd", when="read")
def zstd_without_a_size(files: Files) -> None:
    # one raw block of 20 bytes in a frame with a window but no content size
    files.replace_chunk("label", 0, 1, b"\x28\xb5\x2f\xfd\x00\x00" + (20 << 3 | 1).to_bytes(3, "little") + bytes(20))


@case("CorruptError", "SL305", "chunk 0 of", "blob/c/0", "lz4", "claims", when="read")
def blosc_bomb(files: Files) -> None:
    """A frame of a few KB that claims 2 GB."""
    frame = bytearray(lz4(bytes(1 << 20)))
    frame[4:8] = (2**31 - 17).to_bytes(4, "little")
    files.replace_chunk("blob", 0, 0, bytes(frame))


@case("CorruptError", "SL305", "chunk 0 of", "blob/c/0", "lz4", when="read")
def blosc_frame_that_lies(files: Files) -> None:
    """The header states fewer bytes than there are, and blocks beyond the frame."""
    frame = bytearray(lz4(packed(*[b"x" * 90] * 6)))
    frame[12:16] = (2**31 - 1).to_bytes(4, "little")
    files.replace_chunk("blob", 0, 0, bytes(frame))


@case("DecodeError", "SL401", "caption", "sample 0", base="one", when="read")
def text_that_is_no_utf8(files: Files) -> None:
    replace_item(files, "caption", b"caf\xe9")


@case("DecodeError", "SL401", "boxes", "sample 0", base="one", when="read")
def ragged_rows_that_do_not_fit(files: Files) -> None:
    replace_item(files, "boxes", bytes(12))


def replace_item(files: Files, name: str, item: bytes) -> None:
    """Let the one sample of a field be this item."""
    one = files.ours["fields"][name]
    one["nbytes"] = len(item)
    body = packed(item)
    frame = {"none": lambda: body, "lz4": lambda: lz4(body), "zstd": lambda: bytes(zstd.compress(body, 3))}
    files.replace_chunk(name, 0, 0, frame[one["codec"]]())


@case("DecodeError", "SL401", "sample 0", "does not decode", base="one", when="decode")
def image_that_does_not_decode(files: Files) -> None:
    replace_item(files, "icon", b"\x89PNG\r\n\x1a\n, but not really")


@case("DecodeError", "SL401", "sample 0", "pixels", base="one", when="decode")
def image_bomb(files: Files) -> None:
    """A PNG that claims 50,000 x 50,000 pixels."""
    data = zlib.compress(bytes(1000), 9)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)), (b"IDAT", data), (b"IEND", b"")]
    parts = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    replace_item(files, "icon", b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@case("ModifiedError", "SL306", "chunk 1 of", "wave/c/0/0", "its index is intact", base="appended", when="read")
def skip_to_another_place(files: Files) -> None:
    field(files.ours, "wave", skips=[[0, 1, 20], [1, 0, 28]])
    files.restate()


@case("FormatError", "SL300", "chunk table", "whole field has", base="appended", when="read")
def skip_beyond_the_objects(files: Files) -> None:
    stored = files.ours["fields"]["wave"]["stored"]
    field(files.ours, "wave", skips=[[0, 1, stored - 50], [1, 0, 28]])
    files.restate()


# --- a shard's index is a second copy of the table: with the table intact it is not read ---------------------------


@case("", "", when="same")
def flipped_index(files: Files) -> None:
    files.flip("wave/c/0/0", len(files.objects["wave/c/0/0"]) - 10)


@case("", "", when="same")
def index_of_overlapping_chunks(files: Files) -> None:
    put_index(files, [(0, 22), (0, 22), (10, 22), (10, 22)])


@case("", "", when="same")
def index_of_huge_offsets(files: Files) -> None:
    put_index(files, [(2**63, 2**62), (2**64 - 2, 22), (44, 2**40), (66, 2**64 - 2)])


# --- the table of lengths is an addition: who reads the samples does not need it ------------------------------------


@case("", "", base="lengths", when="same")
def flipped_lengths(files: Files) -> None:
    files.flip("_streamloader/lengths/caption/c/0", 12)


@case("", "", base="lengths", when="same")
def lengths_of_other_samples(files: Files) -> None:
    """The page and the manifest agree, but the chunks have other lengths."""
    lengths = np.frombuffer(zstd.decompress(files.objects["_streamloader/lengths/caption/c/0"][:-4]), "<u4").copy()
    lengths[3] += 1
    files.objects["_streamloader/lengths/caption/c/0"] = sealed(zstd.compress(lengths, 3))
    rest = np.frombuffer(zstd.decompress(files.objects["_streamloader/lengths/caption/c/1"][:-4]), "<u4")
    pages = lengths, rest[: files.ours["num_samples"] - len(lengths)]
    found = b"".join(hashlib.sha256(page.tobytes()).digest() for page in pages)
    files.ours["lengths"]["caption"] = hashlib.sha256(found).hexdigest()


@case("FormatError", "SL300", "manifest", "table of lengths", base="lengths")
def lengths_of_a_tensor(files: Files) -> None:
    files.ours["lengths"]["wave"] = files.ours["lengths"]["caption"]


def put_index(files: Files, index: list[tuple[int, int]]) -> None:
    """Give a shard an index whose checksum fits."""
    size = 16 * len(index) + 4
    files.objects["wave/c/0/0"] = files.objects["wave/c/0/0"][:-size] + sealed(
        b"".join(struct.pack("<QQ", *entry) for entry in index)
    )


def make(folder: Path) -> None:
    """Write all bad datasets below `folder`."""
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir():
            shutil.rmtree(path)
    for name, (files, _) in CASES.items():
        files().write(folder / name)
    expected = {name: said for name, (_, said) in CASES.items()}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "bad")
