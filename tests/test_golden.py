"""Every golden dataset, by the package and by the naive reader, against values that neither of them made."""

import json
import subprocess
import sys
from functools import reduce

import datasets
import jsonschema
import naive_reader
import numpy as np
import pytest
from conversions import contents
from golden import EXPECTED, GOLDEN, V1, assert_same, expected_column, place
from sources import kinds_of

import streamloader as sl
from streamloader.format import manifest

NAMES = sorted(EXPECTED)
SCHEMA = jsonschema.Draft202012Validator(json.loads((V1 / "manifest.schema.json").read_text()))


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", NAMES)
def test_open_reads_every_golden_dataset(name):
    folder, split = place(name)
    ds = sl.open(folder.as_uri(), split=split)
    expected = EXPECTED[name]
    assert (len(ds), ds.digest) == (expected["num_samples"], expected["digest"])
    assert kinds_of(ds) == {field: one["spec"] for field, one in expected["fields"].items()}
    whole = ds[:]
    for field in expected["fields"]:
        wanted = expected_column(name, field)
        assert_same(whole[field], wanted)
        assert_same(ds.read(field, 0, len(ds)), wanted)
        for i in range(len(ds)):
            assert_same([ds[i][field]], [np.asarray(wanted[i]) if isinstance(wanted, np.ndarray) else wanted[i]])


@pytest.mark.parametrize("name", NAMES)
def test_the_naive_reader_reads_every_golden_dataset(name):
    folder, split = place(name)
    manifest, columns = naive_reader.read(folder, split)
    assert (manifest["num_samples"], manifest["digest"]) == (EXPECTED[name]["num_samples"], EXPECTED[name]["digest"])
    assert set(columns) == set(EXPECTED[name]["fields"])
    for field, column in columns.items():
        assert_same(column, expected_column(name, field))


@pytest.mark.quick(7)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_streaming_without_shuffle_gives_every_golden_dataset_in_order(name, batch_size):
    folder, split = place(name)
    count = EXPECTED[name]["num_samples"]
    loader = sl.StreamingDataset(
        folder.as_uri(), split=split, batch_size=min(batch_size, max(count, 1)), shuffle=False, remainder="uneven"
    )
    batches = list(loader)
    assert len(batches) == len(loader)
    for field, one in EXPECTED[name]["fields"].items():
        wanted = expected_column(name, field)
        assert_same(gathered(batches, field, one["spec"]) if batches else wanted[:0], wanted)


def gathered(batches, field, spec):
    """Return a column of all batches; ragged ones are cut by their offsets."""
    if spec.startswith("ragged"):
        lengths = [batch[f"{field}_offsets"].diff().tolist() for batch in batches]
        return [row.numpy() for batch, sizes in zip(batches, lengths, strict=True) for row in batch[field].split(sizes)]
    if spec.startswith(("bytes", "text")):
        return [item for batch in batches for item in batch[field]]
    return np.concatenate([batch[field].numpy() for batch in batches])


def test_the_images_decode():
    loader = sl.StreamingDataset(
        (GOLDEN / "variable").as_uri(), batch_size=1, fields=["photo", "icon"], shuffle=False, decode="pillow"
    )
    for i, sample in enumerate(loader):
        assert sample["photo"].shape == (1, 8, (16, 8)[i % 2], 3)
        grey = [[(i * 20 + 16 * x + 64 * y) % 256 for x in range(4)] for y in range(3)]
        assert sample["icon"].tolist() == [[[[g, g, g] for g in row] for row in grey]]


@pytest.mark.long
@pytest.mark.parametrize("name", ["golden", "bad"])
def test_the_script_makes_the_same_bytes_again(name, tmp_path):
    subprocess.run([sys.executable, V1 / f"make_{name}.py", tmp_path], check=True, timeout=300)
    made, kept = contents(tmp_path), contents(V1 / name)
    assert set(kept) == set(made) | {"README.md", ".gitattributes"}
    assert [path for path in made if made[path] != kept[path]] == []


def test_golden_data_stays_small():
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 300_000


def manifest_at(folder):
    return json.loads((folder / "zarr.json").read_text())["attributes"]["streamloader"]


@pytest.mark.parametrize("name", [*NAMES, "splits"])
def test_every_golden_manifest_fits_the_schema(name):
    SCHEMA.validate(manifest_at(GOLDEN / name))


@pytest.mark.quick(2)
@pytest.mark.parametrize("codec", ["auto", "none", "lz4", "zstd"])
def test_what_the_writer_makes_fits_the_schema_and_the_naive_reader(tmp_path, codec):
    layout = sl.Layout(codec=codec, chunk_size=1 << 12, block_size=1 << 13, shard_size=1 << 14)
    datasets.write(tmp_path, 53, layout=layout)
    SCHEMA.validate(manifest_at(tmp_path))
    manifest, columns = naive_reader.read(tmp_path)
    assert manifest["fields"]["x"]["codec"] == codec or codec == "auto"
    for field, column in columns.items():
        wanted = [datasets.value(field, i) for i in range(53)]
        assert_same(column, wanted if isinstance(column, list) else np.stack(wanted))


def change(path, value):
    """Return a function that sets a key of a manifest, or removes it where the value is `...`."""

    def apply(manifest):
        *parents, last = path.split(".")
        node = reduce(dict.__getitem__, parents, manifest)
        if value is ...:
            del node[last]
        else:
            node[last] = value

    return apply


WRONG = {
    **{f"{key} is missing": change(key, ...) for key in ("format", "version", "requires", "num_samples", "order")},
    **{f"{key} is missing": change(key, ...) for key in ("fields", "tables", "digest", "order.window")},
    **{f"label.{key} is missing": change(f"fields.label.{key}", ...) for key in ("kind", "dtype", "chunk", "codec")},
    "another format": change("format", "zarr"),
    "a later version": change("version", 2),
    "a requirement": change("requires", ["encryption"]),
    "negative num_samples": change("num_samples", -1),
    "num_samples as a float": change("num_samples", 2.5),
    "too many samples": change("num_samples", 1 << 63),
    "another order": change("order.version", 2),
    "no lanes": change("order.lanes", 0),
    "a huge window": change("order.window", 1 << 31),
    "no fields": change("fields", {}),
    "an unknown kind": change("fields.label.kind", "object"),
    "an unknown dtype": change("fields.label.dtype", "complex64"),
    "an empty axis": change("fields.label.shape", [0]),
    "too many axes": change("fields.label.shape", [1] * 31),
    "an unknown codec": change("fields.label.codec", "gzip"),
    "an empty chunk": change("fields.label.chunk", 0),
    "text that is resident": change("fields.caption.resident", True),
    "text with a dtype": change("fields.caption.dtype", "int8"),
    "a tensor with an encoding": change("fields.label.encoding", "png"),
    "a short digest": change("digest", "00"),
    "a table hash in capitals": change("tables.label", "A" * 64),
    "a name with a path": lambda manifest: manifest["fields"].update({"../x": manifest["fields"]["label"]}),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_wrong_manifest_does_not_fit_the_schema(what):
    manifest = manifest_at(GOLDEN / "mixed")
    WRONG[what](manifest)
    with pytest.raises(jsonschema.ValidationError):
        SCHEMA.validate(manifest)


def test_a_wrong_root_of_splits_does_not_fit_the_schema():
    root = manifest_at(GOLDEN / "splits")
    for wrong in ({}, {"../up": root["splits"]["val"]}, {"val": {"num_samples": 3}}):
        with pytest.raises(jsonschema.ValidationError):
            SCHEMA.validate(root | {"splits": wrong})


def test_the_example_of_the_specification_is_the_golden_shard():
    text = (V1 / "SPEC.md").read_text()
    assert bytes.fromhex(text.split("```\n")[1]) == (GOLDEN / "free" / "wave" / "c" / "1" / "0").read_bytes()


def test_the_schema_has_the_limits_of_the_reader():
    defs = SCHEMA.schema["$defs"]
    order = defs["dataset"]["properties"]["order"]["properties"]
    assert order["lanes"]["maximum"] == manifest.MAX_LANES
    assert order["window"]["exclusiveMaximum"] == manifest.MAX_WINDOW
    assert defs["count"]["exclusiveMaximum"] == manifest.MAX_SAMPLES
    field = defs["field"]["properties"]
    assert field["shape"]["maxItems"] == manifest.MAX_AXES
    assert (field["dtype"]["enum"], field["codec"]["enum"]) == (list(manifest.DTYPES), list(manifest.CODECS))
