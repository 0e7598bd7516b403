"""A second reader of the format, from `formats/streamloader/v1/SPEC.md` alone: slow, strict, and on its own.

It shares no code with the package: standard library, numpy, and numcodecs for zstd and blosc. It reads a folder
whole, checks everything that can be checked, and raises `Refused` for whatever does not hold.
"""

import hashlib
import json
import re
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs import blosc, zstd

MISSING = 2**64 - 1
DTYPES = {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in ("int", "uint", "float") for bits in (32, 64)
}
IDENTITY = ("kind", "dtype", "shape", "encoding", "chunk", "shard", "codec", "resident", "nbytes", "stored", "skips")


class Refused(Exception):
    """The folder is not what the specification says."""


def crc_table() -> list[int]:
    """Return the 256 steps of CRC-32C: polynomial 0x1EDC6F41, reflected 0x82F63B78."""
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


CRC_TABLE = crc_table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of RFC 3720, one byte at a time."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ CRC_TABLE[(value ^ byte) & 0xFF]
    return value ^ 0xFFFFFFFF


def check(condition: object, message: str) -> None:
    """Raise `Refused` unless the condition holds."""
    if not condition:
        raise Refused(message)


def unsealed(data: bytes) -> bytes:
    """Return bytes without the little-endian crc32c at their end, which must be theirs."""
    check(len(data) >= 4, "too short for a checksum")
    check(crc32c(data[:-4]) == int.from_bytes(data[-4:], "little"), "checksum does not match")
    return data[:-4]


def read_object(path: Path) -> bytes:
    """Return a file, or refuse a missing one."""
    check(path.is_file(), f"{path} is missing")
    return path.read_bytes()


def no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object whose keys are all different."""
    check(len({key for key, _ in pairs}) == len(pairs), "a key stands twice")
    return dict(pairs)


def read_json(path: Path) -> Any:
    """Return a JSON document."""
    try:
        return json.loads(read_object(path), object_pairs_hook=no_twice)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path}: {error}") from error


def digest_of(ours: dict[str, Any]) -> str:
    """Return the digest of a manifest from its keys."""
    fields = {name: {key: one[key] for key in IDENTITY if key in one} for name, one in ours["fields"].items()}
    keys = ("version", "generation", "deleted", "num_samples", "order", "tables")
    identity = {key: ours[key] for key in keys if key in ours} | {"fields": fields}
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read(folder: Path, split: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest and every column of a dataset, or of a split of it."""
    root = read_json(folder / "zarr.json")
    check((root["zarr_format"], root["node_type"]) == (3, "group"), "not a group of Zarr 3")
    check("streamloader" in root["attributes"], "not ours")
    ours = root["attributes"]["streamloader"]
    nodes = root["consolidated_metadata"]["metadata"]
    for path, node in nodes.items():
        alone = read_json(folder / path / "zarr.json")
        alone.pop("consolidated_metadata", None)
        check(alone == node, f"{path}/zarr.json is not what the root says")
    check(ours["format"] == "streamloader" and ours["version"] == 1, "not version 1")
    generation = ours.get("generation", 1)
    requires = ["append"] * (generation > 1) + ["delete"] * ("deleted" in ours)
    check(ours["requires"] == requires, "requires")
    check(generation > 1 or ("generation" not in ours), "a generation that is the first")
    if "splits" in ours:
        check(split in ours["splits"], f"no split {split}")
        manifest, columns = read(folder / str(split))
        count = manifest["num_samples"] - manifest.get("deleted", {"count": 0})["count"]
        said = {"num_samples": count, "digest": manifest["digest"]}
        check(said == ours["splits"][split], "the root says otherwise of its split")
        return manifest, columns
    check(split is None, "there are no splits")
    check(digest_of(ours) == ours["digest"], "digest")
    check(set(ours["fields"]) == set(ours["tables"]), "fields and tables")
    columns = {name: read_field(folder, ours, nodes, name) for name in ours["fields"]}
    for name in ours.get("lengths", {}):
        check_lengths(folder, ours, nodes, name, columns[name])
    if "deleted" in ours:
        left = remaining(folder, ours)
        columns = {name: c[left] if isinstance(c, np.ndarray) else [c[i] for i in left] for name, c in columns.items()}
    return ours, columns


def remaining(folder: Path, ours: dict[str, Any]) -> list[int]:
    """Return the numbers of the stored samples that are not deleted."""
    deleted, count = ours["deleted"], ours["num_samples"]
    check(2 <= deleted["generation"] <= ours["generation"], "the generation of a deletion")
    data = unsealed(read_object(folder / f"_streamloader/deleted.{deleted['generation']}"))
    plain = bytes(zstd.decompress(data))
    check(len(plain) == 8 * deleted["count"], "number of deleted samples")
    check(hashlib.sha256(plain).hexdigest() == deleted["sha256"], "hash of the deleted samples")
    numbers = np.frombuffer(plain, "<u8").tolist()
    check(numbers == sorted(set(numbers)) and 0 < len(numbers) < count and numbers[-1] < count, "deleted samples")
    return sorted(set(range(count)) - set(numbers))


def check_lengths(folder: Path, ours: dict[str, Any], nodes: dict[str, Any], name: str, column: Any) -> None:
    """Check the table of lengths of a field against its samples."""
    path, shard, count = f"_streamloader/lengths/{name}", ours["fields"][name]["shard"], len(column)
    check((nodes[path]["shape"], nodes[path]["data_type"]) == ([count], "uint32"), f"shape of {path}")
    paths = [folder / path / f"c/{i}" for i in range(-(-count // shard))]
    pages = b"".join(bytes(zstd.decompress(unsealed(read_object(page)))) for page in paths)
    sizes = [len(one.encode() if isinstance(one, str) else bytes(one)) for one in column]
    found = np.frombuffer(pages, "<u4")[:count].tolist() if len(pages) == 4 * len(paths) * shard else None
    check(found == sizes, f"{path} differs from the samples")
    parts = [pages[4 * first : 4 * min(first + shard, count)] for first in range(0, count, shard)]
    found = b"".join(hashlib.sha256(part).digest() for part in parts)
    check(hashlib.sha256(found).hexdigest() == ours["lengths"][name], f"hash of {path}")


def read_field(folder: Path, ours: dict[str, Any], nodes: dict[str, Any], name: str) -> Any:
    """Return one column: an array, or a list of bytes, str or arrays."""
    field, count = ours["fields"][name], ours["num_samples"]
    check(re.fullmatch(r"[a-z][a-z0-9_]*", name), f"name {name!r}")
    chunk, shard = field["chunk"], field["shard"]
    check(shard % chunk == 0, f"chunk {chunk} does not divide shard {shard}")
    check(field["resident"] or shard == ours["samples_per_shard"], f"shard {shard}")
    num_shards = -(-count // shard)
    decode = chunk_decoder(nodes[name], field, count)
    table = read_table(folder, nodes, ours, name, num_shards)
    items: list[Any] = []
    stored = 0
    for number in range(num_shards):
        inner = field["shape"] if field["kind"] == "tensor" else []
        data = read_object(folder / name / "c" / "/".join([str(number), *("0" for _ in inner)]))
        stored += len(data)
        here = min(shard, count - number * shard)
        skips = skips_of(field, number, count)
        for body, samples in chunks_of(data, table[number], chunk, here, skips):
            items += decode(body)[:samples]
    check(len(items) == count and stored == field["stored"], f"{name}: {len(items)} samples in {stored} bytes")
    return column_of(field, items)


def skips_of(field: dict[str, Any], number: int, count: int) -> dict[int, int]:
    """Return by chunk how many bytes of earlier versions stand before it in a shard."""
    skips = field.get("skips", [])
    check("skips" not in field or skips, "a list of skips without any")
    check(all(one[:2] < other[:2] for one, other in pairwise(skips)), "skips do not ascend")
    for shard, chunk, size in skips:
        check(size >= 1 and 0 <= chunk < field["shard"] // field["chunk"], f"a skip of {size} bytes at {chunk}")
        check(shard >= 0 and shard * field["shard"] + chunk * field["chunk"] < count, "a skip behind the last sample")
    return {chunk: size for shard, chunk, size in skips if shard == number}


def chunks_of(data: bytes, entries: Any, chunk: int, here: int, skips: dict[int, int]) -> list[tuple[bytes, int]]:
    """Return the verified bodies of a shard's chunks with the samples that each holds."""
    count = len(entries)
    index = np.frombuffer(unsealed(data[-16 * count - 4 :]), "<u8").reshape(count, 2).tolist()
    used = -(-here // chunk)
    at, out = 0, []
    for i, (offset, size) in enumerate(index):
        if i >= used:
            check((offset, size) == (MISSING, MISSING) and not entries[i].any(), f"chunk {i} holds no sample")
            continue
        at += skips.get(i, 0)
        check(offset == at, f"chunk {i} stands at {offset}, not at {at}")
        stored = data[at : at + size]
        check(size == entries[i][0] == len(stored), f"chunk {i} has {size} bytes, table {entries[i][0]}")
        check(int.from_bytes(stored[-4:], "little") == entries[i][1], f"the table's checksum of chunk {i}")
        out.append((unsealed(stored), min(chunk, here - i * chunk)))
        at += size
    check(at + 16 * count + 4 == len(data), "bytes between the chunks and the index")
    return out


def read_table(folder: Path, nodes: dict[str, Any], ours: dict[str, Any], name: str, num_shards: int) -> Any:
    """Return a field's chunk table, u4 (shards, chunks, 2)."""
    generation = ours.get("generation", 1)
    path = f"_streamloader/chunks{'' if generation == 1 else f'.{generation}'}/{name}"
    node, field = nodes[path], ours["fields"][name]
    chunks = field["shard"] // field["chunk"]
    check(node["shape"] == [num_shards, chunks, 2] and node["data_type"] == "uint32", f"shape of {path}")
    rows, *rest = node["chunk_grid"]["configuration"]["chunk_shape"]
    wanted = max(1, min(max(1, (1 << 20) // (8 * chunks)), num_shards))
    check((rows, rest) == (wanted, [chunks, 2]), f"pages of {path}")
    pages = [
        np.frombuffer(unsealed(read_object(folder / path / f"c/{i}/0/0")), "<u4").reshape(rows, chunks, 2)
        for i in range(-(-num_shards // rows))
    ]
    table = np.concatenate(pages)[:num_shards] if pages else np.zeros((0, chunks, 2), "<u4")
    check(hashlib.sha256(table.tobytes()).hexdigest() == ours["tables"][name], f"hash of {path}")
    return table


def chunk_decoder(node: dict[str, Any], field: dict[str, Any], count: int) -> Any:
    """Return the function from a chunk's body to its items, from the array's document; both must agree."""
    kind, fixed = field["kind"], field["kind"] == "tensor"
    inner = field["shape"] if fixed else []
    check(node["shape"] == [count, *inner], "shape of the array")
    check(node["chunk_grid"]["configuration"]["chunk_shape"] == [field["shard"], *inner], "shard of the array")
    check(node["chunk_key_encoding"] == {"name": "default", "configuration": {"separator": "/"}}, "keys of the array")
    (sharding,) = node["codecs"]
    inside = sharding["configuration"]
    check(sharding["name"] == "sharding_indexed" and inside["index_location"] == "end", "sharding")
    check(inside["chunk_shape"] == [field["chunk"], *inner], "chunk of the array")
    first, *middle, last = [codec["name"] for codec in inside["codecs"]]
    check(last == "crc32c" and middle == {"none": [], "lz4": ["blosc"], "zstd": ["zstd"]}[field["codec"]], "codecs")
    types = {"tensor": {field.get("dtype")}, "text": {"string"}}.get(kind, {"variable_length_bytes", "bytes"})
    check(node["data_type"] in types, f"data type {node['data_type']} of {kind}")
    check(first == {"tensor": "bytes", "text": "vlen-utf8"}.get(kind, "vlen-bytes"), f"codec {first} of {kind}")
    unpack = {"none": bytes, "lz4": blosc.decompress, "zstd": zstd.decompress}[field["codec"]]
    return lambda body: (rows_of if fixed else items_of)(bytes(unpack(body)), field)


def rows_of(payload: bytes, field: dict[str, Any]) -> list[bytes]:
    """Return the samples of a fixed-shape chunk as bytes."""
    size = DTYPES[field["dtype"]] * prod(field["shape"])
    check(len(payload) == size * field["chunk"], f"a chunk of {len(payload)} bytes")
    return [payload[i * size : (i + 1) * size] for i in range(field["chunk"])]


def items_of(payload: bytes, field: dict[str, Any]) -> list[bytes]:
    """Return the samples of a variable-size chunk: u32 count, then u32 length and bytes for each."""
    check(int.from_bytes(payload[:4], "little") == field["chunk"], "number of items")
    at, out = 4, []
    for _ in range(field["chunk"]):
        size = int.from_bytes(payload[at : at + 4], "little")
        check(at + 4 + size <= len(payload), "an item ends behind its chunk")
        out.append(payload[at + 4 : at + 4 + size])
        at += 4 + size
    check(at == len(payload), "bytes behind the last item")
    return out


def column_of(field: dict[str, Any], items: list[bytes]) -> Any:
    """Return the samples as values."""
    check(sum(map(len, items)) == field["nbytes"], f"nbytes {field['nbytes']}")
    if field["kind"] == "bytes":
        return items
    if field["kind"] == "text":
        return [item.decode("utf-8") for item in items]
    dtype = np.dtype(field["dtype"]).newbyteorder("<")
    if field["kind"] == "tensor":
        return np.frombuffer(b"".join(items), dtype).reshape(len(items), *field["shape"])
    return [np.frombuffer(item, dtype).reshape(-1, *field["shape"]) for item in items]
