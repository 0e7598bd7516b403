"""Makes the `zarr.json` documents of a dataset from its manifest. Pure: the same manifest gives the same bytes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from streamloader.format.codecs import BLOSC_LEVEL, ZSTD_LEVEL, typesize
from streamloader.format.manifest import FORMAT, VERSION, Field, FieldLayout, Manifest, tables_path
from streamloader.format.tables import LENGTHS, rows_per_page, table_path

Document = dict[str, Any]


def dataset_documents(manifest: Manifest) -> dict[str, Document]:
    """Return the documents of a dataset by node path; "" is the root, which consolidates all others."""
    nodes: dict[str, Document] = {}
    for name, layout in manifest.fields.items():
        nodes[name] = field_document(name, layout, manifest.num_samples)
        nodes[table_path(name, manifest.generation)] = table_document(layout, manifest.num_samples)
    for name in manifest.lengths:
        nodes[LENGTHS] = group_document({})
        nodes[f"{LENGTHS}/{name}"] = lengths_document(manifest.fields[name], manifest.num_samples)
    nodes["_streamloader"] = group_document({})
    nodes[tables_path(manifest.generation)] = group_document({})
    return {"": group_document({FORMAT: manifest.to_json()}, nodes), **nodes}


def split_documents(manifests: Mapping[str, Manifest]) -> Document:
    """Return the root document that lists the splits. Each split is a dataset in the child group of that name."""
    nodes: dict[str, Document] = {}
    for split, manifest in manifests.items():
        for path, document in dataset_documents(manifest).items():
            node = {key: value for key, value in document.items() if key != "consolidated_metadata"}
            nodes[f"{split}/{path}" if path else split] = node
    splits = {name: {"num_samples": split.num_remaining, "digest": split.digest} for name, split in manifests.items()}
    attributes = {"format": FORMAT, "version": VERSION, "requires": [], "splits": splits}
    return group_document({FORMAT: attributes}, nodes)


def to_bytes(document: Document) -> bytes:
    """Return the stored form of a document. Keys are sorted, so the same dataset gives the same bytes."""
    return json.dumps(document, sort_keys=True, indent=1, allow_nan=False).encode()


def group_document(attributes: Mapping[str, Any], nodes: Mapping[str, Document] | None = None) -> Document:
    """Return the document of a group, with `nodes` as inline consolidated metadata if given."""
    document: Document = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    if nodes is not None:
        consolidated = {"kind": "inline", "must_understand": False, "metadata": dict(sorted(nodes.items()))}
        document["consolidated_metadata"] = consolidated
    return document


def field_document(name: str, layout: FieldLayout, num_samples: int) -> Document:
    """Return the document of a field's array: `sharding_indexed` along the sample axis, with the index at the end."""
    field = layout.field
    inner = list(field.shape) if field.fixed else []
    data_type, fill, codec = _stored_type(field)
    sharding = {
        "chunk_shape": [layout.chunk, *inner],
        "codecs": [codec, *_compressor(layout), {"name": "crc32c"}],
        "index_codecs": [_bytes_codec(8), {"name": "crc32c"}],
        "index_location": "end",
    }
    document = _array_document([num_samples, *inner], [layout.shard, *inner], data_type, fill)
    document["codecs"] = [{"name": "sharding_indexed", "configuration": sharding}]
    document["dimension_names"] = ["sample", *(f"{name}_{axis}" for axis in range(len(inner)))]
    if not field.fixed:
        attribute: Document = {"kind": field.kind}
        if field.encoding:
            attribute["encoding"] = field.encoding
        if field.kind == "ragged":
            attribute |= {"dtype": field.dtype, "shape": list(field.shape)}
        document["attributes"] = {FORMAT: attribute}
    return document


def table_document(layout: FieldLayout, num_samples: int) -> Document:
    """Return the document of a field's chunk table: u4 (shards, chunks, 2), chunked into pages along the shard axis."""
    shape = [layout.num_shards(num_samples), layout.chunks_per_shard, 2]
    document = _array_document(shape, [rows_per_page(layout, num_samples), *shape[1:]], "uint32", 0)
    document["codecs"] = [_bytes_codec(4), {"name": "crc32c"}]
    document["dimension_names"] = ["shard", "chunk", "entry"]
    return document


def lengths_document(layout: FieldLayout, num_samples: int) -> Document:
    """Return the document of a field's table of lengths: u4 (samples), with a page for each shard."""
    document = _array_document([num_samples], [layout.shard], "uint32", 0)
    document["codecs"] = [_bytes_codec(4), *_compressor(replace(layout, codec="zstd")), {"name": "crc32c"}]
    document["dimension_names"] = ["sample"]
    return document


def plain_document(
    shape: tuple[int, ...], dtype: np.dtype[Any], dims: tuple[str, ...], attributes: Mapping[str, Any]
) -> Document:
    """Return the document of an array in one chunk, which ends with a checksum."""
    document = _array_document(list(shape), list(shape), dtype.name, np.zeros((), dtype).item())
    codecs = [_bytes_codec(dtype.itemsize), {"name": "crc32c"}]
    return {**document, "codecs": codecs, "dimension_names": list(dims), "attributes": dict(attributes)}


def _array_document(shape: list[int], chunk: list[int], data_type: str, fill: Any) -> Document:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "attributes": {},
        "shape": shape,
        "data_type": data_type,
        "fill_value": fill,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "storage_transformers": [],
    }


def _stored_type(field: Field) -> tuple[str, Any, Document]:
    """Return the data type, the fill value and the first codec of a field's array."""
    if field.kind == "text":
        return "string", "", {"name": "vlen-utf8", "configuration": {}}
    if not field.fixed:
        return "variable_length_bytes", "", {"name": "vlen-bytes", "configuration": {}}
    zero = np.zeros((), field.dtype)
    return field.dtype, zero.item(), _bytes_codec(zero.itemsize)


def _bytes_codec(itemsize: int) -> Document:
    if itemsize == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


def _compressor(layout: FieldLayout) -> list[Document]:
    if layout.codec == "none":
        return []
    if layout.codec == "zstd":
        return [{"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}}]
    size = typesize(layout.field)
    shuffle = "shuffle" if size > 1 else "noshuffle"
    blosc = {"cname": "lz4", "clevel": BLOSC_LEVEL, "shuffle": shuffle, "typesize": size, "blocksize": 0}
    return [{"name": "blosc", "configuration": blosc}]
