"""Tables of lengths that are added to datasets of earlier releases, with kills at any moment."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import naive_reader
import numpy as np
import pytest
from added import SMALL, base_columns, kill_at_each_change, new_columns, written
from conversions import Stop, contents, dying, meanwhile

import streamloader as sl
from streamloader import errors
from streamloader.cli.main import main
from streamloader.format.metadata import dataset_documents, to_bytes
from streamloader.format.publish import CLAIM
from streamloader.format.tables import LENGTHS
from streamloader.maintenance import lengths
from streamloader.maintenance.append import abandon
from streamloader.maintenance.lengths import add_lengths
from streamloader.storage import open_store

FIELDS = {"n": "int64", "t": "text", "tokens": "ragged:int32", "caption": "text"}
COUNT = 50
VARIABLE = ("caption", "t", "tokens")


def grow(data: Path, start: int, stop: int, **more: list) -> None:
    """Append the samples [start, stop)."""
    source = data.parent / f"from{start}"
    fields = {**FIELDS, **dict.fromkeys(more, "ragged:int16")}
    sl.append(data, written(source, fields, {**columns(start, stop), **more}), workers=0)


def columns(start: int, stop: int) -> dict[str, list]:
    values = {**base_columns(start, stop), **new_columns(stop, start)}
    return {name: values[name] for name in FIELDS}


def without_lengths(url: Path, split: str | None = None) -> Path:
    """Remove what earlier releases did not write."""
    dataset = url / split if split else url
    shutil.rmtree(dataset / LENGTHS)
    document = dataset_documents(replace(sl.open(url, split=split).manifest, lengths={}))[""]
    (dataset / "zarr.json").write_bytes(to_bytes(document))
    if split:
        root = json.loads((url / "zarr.json").read_bytes())
        nodes = root["consolidated_metadata"]["metadata"]
        nodes[split]["attributes"] = document["attributes"]
        for path in [path for path in nodes if path.startswith(f"{split}/{LENGTHS}")]:
            del nodes[path]
        (url / "zarr.json").write_bytes(to_bytes(root))
    return url


@pytest.fixture
def data(tmp_path):
    return without_lengths(written(tmp_path / "data", FIELDS, columns(0, COUNT)))


def test_added_lengths_are_those_of_the_samples(data, tmp_path):
    other = written(tmp_path / "other", FIELDS, columns(0, COUNT))
    before = sl.open(data)
    with pytest.raises(errors.FieldError, match="streamloader lengths URL"):
        before.lengths("t")
    with pytest.raises(errors.FieldError, match="streamloader lengths URL"):
        sl.NumpyDataset(data, batch_size=4, bucket_by="tokens")
    plain = [batch["n"].tolist() for batch in sl.NumpyDataset(data, batch_size=4)]
    report = add_lengths(data)
    assert (report.manifest.generation, report.fields, report.before, report.added) == (2, VARIABLE, COUNT, 0)
    ds = sl.open(data)
    for name in VARIABLE:
        assert ds.lengths(name).tolist() == sl.open(other).lengths(name).tolist()
    for page in (other / LENGTHS).glob("*/c/*"):
        assert page.read_bytes() == (data / page.relative_to(other)).read_bytes()
    assert sl.verify(data).ok and not (data / CLAIM).exists()
    assert before[7]["t"] == columns(7, 8)["t"][0]
    assert [batch["n"].tolist() for batch in sl.NumpyDataset(data, batch_size=4)] == plain, "the order stays"
    assert sl.log(data)[0].change == "tables of lengths added: caption, t, tokens"
    assert len(list(sl.NumpyDataset(data, batch_size=4, bucket_by="tokens"))) == 13
    naive_reader.read(data)
    again = contents(data)
    assert add_lengths(data).fields == () and contents(data) == again


def test_a_state_of_the_version_before_goes_on(data):
    loader = sl.NumpyDataset(data, batch_size=4)
    whole = [batch["n"].tolist() for batch in loader]
    loader = sl.NumpyDataset(data, batch_size=4)
    for _, _ in zip(range(3), loader, strict=False):
        pass
    state = loader.state_dict()
    add_lengths(data)
    after = sl.NumpyDataset(data, batch_size=4)
    after.load_state_dict(state)
    assert [batch["n"].tolist() for batch in after] == whole[3:]


def test_lengths_are_added_after_appends_deletions_and_new_fields(data, tmp_path):
    grow(data, COUNT, 70)
    sl.delete(data, where="n == 3")
    sl.add_columns(data, {"more=ragged:int16": [np.arange(n % 3, dtype="int16") for n in range(69)]}, workers=0)
    assert set(sl.open(data).manifest.lengths) == {"more"}
    add_lengths(data)
    ds = sl.open(data)
    assert set(ds.manifest.lengths) == {"more", *VARIABLE}
    wanted = [len(value) for n, value in enumerate(columns(0, 70)["tokens"]) if n != 3]
    assert ds.lengths("tokens").tolist() == wanted
    grow(data, 70, 75, more=[np.arange(2, dtype="int16")] * 5)
    assert len(sl.open(data).lengths("tokens")) == 74 and sl.verify(data).ok


@pytest.mark.quick(1)
@pytest.mark.parametrize("split", [None, "train"])
def test_an_addition_that_is_killed_at_any_change_goes_on_to_the_same_bytes(split, tmp_path, monkeypatch):
    source, fields = tmp_path / "source", {name: FIELDS[name] for name in ("n", "tokens")}
    written(source, fields, {name: columns(0, 24)[name] for name in fields})
    data = tmp_path / "data"
    sl.convert(source, data, layout=SMALL, split=split and "train=5/6,val=1/6", workers=0)
    without_lengths(data, split)
    assert not split or (sl.open(data, split="val").manifest.lengths and sl.verify(data).ok)
    assert kill_at_each_change(partial(add_lengths, split=split), data, split, monkeypatch) > 15


def test_a_resumed_addition_reads_no_shard_again_that_is_done(data, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(lengths, "SHARDS", 1)
        dying(patch, 9)
        add_lengths(data)
    done = sorted((data / "_streamloader/append/receipts").iterdir())
    shards = len(list((data / "t/c").iterdir()))
    assert 0 < len(done) < shards
    seen = []
    add_lengths(data, progress=lambda progress: seen.append((progress.phase, progress.kept)))
    assert max(kept for phase, kept in seen if phase == "write") == 16 * len(done)
    assert sl.verify(data).ok


def test_another_writer_is_an_error_on_both_sides(data):
    def interrupt(phase: str, act):
        add_lengths(data, progress=meanwhile(phase, act, 1))

    with pytest.raises(errors.DestinationError, match="another run ended"):
        interrupt("write", lambda: abandon(data))
    assert sl.open(data).manifest.generation == 1
    abandon(data)

    def append():
        with pytest.raises(errors.DestinationError, match="in progress"):
            grow(data, COUNT, 60)

    interrupt("write", append)
    assert set(sl.open(data).manifest.lengths) == set(VARIABLE)


def test_pages_of_an_earlier_version_stay_when_an_addition_is_ended(tmp_path, monkeypatch):
    data = written(tmp_path / "data", FIELDS, columns(0, COUNT))
    page = data / LENGTHS / "tokens/c/3"
    page.write_bytes(page.read_bytes()[:-1] + b"x")
    grow(data, COUNT, 70)
    assert set(sl.open(data).manifest.lengths) == {"t", "caption"}
    with monkeypatch.context() as patch, pytest.raises(Stop):
        dying(patch, 5)
        add_lengths(data)
    abandon(data)
    assert page.exists() and sl.open(data, version=1)[3]
    add_lengths(data)
    for version, count in ((1, COUNT), (3, 70)):
        lengths = sl.open(data, version=version).lengths("tokens")
        assert lengths.tolist() == [len(value) for value in columns(0, count)["tokens"]]


def test_a_damaged_chunk_is_an_error_and_nothing_is_published(data):
    shard = data / "tokens/c/0"
    body = bytearray(shard.read_bytes())
    body[30] ^= 1
    shard.write_bytes(body)
    with pytest.raises(errors.FormatError, match="tokens/c/0"):
        add_lengths(data)
    assert sl.open(data).manifest.generation == 1


def test_the_command_adds_the_lengths_of_all_splits(tmp_path, capsys):
    written(tmp_path / "source", FIELDS, columns(0, 60))
    data = tmp_path / "data"
    sl.convert(tmp_path / "source", data, layout=SMALL, split="train=5/6,val=1/6", workers=0)
    without_lengths(data, "train")
    for expected in ("added the lengths of caption, t, tokens to", "no table of lengths is missing"):
        with pytest.raises(SystemExit) as ended:
            main(["lengths", str(data)])
        assert not ended.value.code
        out = capsys.readouterr().out
        assert expected in out and "data/val is unchanged" in out
    assert sl.verify(data).ok and open_store(data)
