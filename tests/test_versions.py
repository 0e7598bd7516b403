"""The log of a dataset's versions, and the difference of two."""

import json
from datetime import UTC, datetime

import numpy as np
import pytest
from commands import run
from hypothesis import given
from hypothesis import strategies as st

import streamloader as sl
from streamloader.errors import UsageError
from streamloader.format import publish
from streamloader.format.manifest import Field, FieldLayout, Manifest, OrderPin, manifest_path
from streamloader.maintenance.versions import compare

TYPES = [Field("tensor", "int64"), Field("tensor", "float32", (3,)), Field("text"), Field("bytes", encoding="png")]
LAYOUTS = st.builds(
    lambda field, stored: FieldLayout(field, 1, 1, "none", False, 0, stored), st.sampled_from(TYPES), st.integers(0, 99)
)
MANIFESTS = st.builds(
    lambda samples, fields, classes: Manifest(samples, 1, fields, OrderPin(1, 1, 2), provenance={"classes": classes}),
    st.integers(0, 50),
    st.dictionaries(st.sampled_from("abcd"), LAYOUTS, min_size=1),
    st.dictionaries(st.sampled_from("abcd"), st.lists(st.sampled_from("xyz"), unique=True)),
)


@given(MANIFESTS, MANIFESTS)
def test_a_difference_leads_from_the_one_version_to_the_other_and_its_reverse_back(before, after):
    there, back = compare(before, after), compare(after, before)
    old, new = ({name: layout.field for name, layout in each.fields.items()} for each in (before, after))
    assert before.num_samples + there.samples_added - there.samples_deleted == after.num_samples
    kept = {name: field for name, field in old.items() if name not in there.fields_removed}
    changed = {name: later for name, (_, later) in there.fields_changed.items()}
    assert {**kept, **changed, **there.fields_added} == new
    assert (there.fields_added, there.bytes) == (back.fields_removed, -back.bytes)
    assert {name: pair[::-1] for name, pair in there.fields_changed.items()} == back.fields_changed
    for name, names in there.classes_added.items():
        assert set(names) == set(after.classes[name]) - set(before.classes.get(name, ()))
    assert (str(compare(before, before)), compare(before, before).bytes) == ("no change", 0)
    json.dumps(there.to_dict())


@pytest.fixture
def grown(tmp_path):
    """A dataset of three versions, with 5, 8 and 9 samples."""
    for part, stop in enumerate((5, 3, 1)):
        (tmp_path / f"{part}").mkdir()
        np.save(tmp_path / f"{part}" / "n.npy", np.arange(stop))
    sl.convert(tmp_path / "0", tmp_path / "data", workers=0)
    for part in (1, 2):
        sl.append(tmp_path / "data", tmp_path / f"{part}", workers=0)
    return tmp_path / "data"


def test_the_log_lists_every_version_the_newest_first(grown):
    versions = sl.log(grown)
    assert [(one.number, one.num_samples) for one in versions] == [(3, 9), (2, 8), (1, 5)]
    assert [one.change for one in versions] == ["appended 1 sample", "appended 3 samples", "created"]
    assert [one.manifest.digest for one in versions] == [sl.open(grown, version=number).digest for number in (3, 2, 1)]
    assert versions[0].diff == sl.diff(grown, 2, 3)
    assert sl.diff(grown, 3, 1).samples_deleted == 4
    for wrong in (0, 4):
        with pytest.raises(UsageError, match=f"no version {wrong}"):
            sl.diff(grown, 1, wrong)


@pytest.mark.quick(2)
def test_every_store_tells_when_a_version_was_published(store_url, tmp_path):
    url, options = store_url
    np.save(tmp_path / "n.npy", np.arange(3))
    begin = datetime.now(UTC).replace(microsecond=0)  # S3 has whole seconds
    sl.convert(tmp_path / "n.npy", url, workers=0, storage_options=options)
    sl.append(url, tmp_path / "n.npy", workers=0, storage_options=options)
    last, first = sl.log(url, storage_options=options)
    assert begin <= first.published <= last.published <= datetime.now(UTC)


def test_a_version_whose_manifest_was_not_kept_has_a_row_that_says_so(grown, capsys):
    (grown / manifest_path(2)).unlink()
    third, second, first = sl.log(grown)
    assert (second.num_samples, second.fields, second.stored) == (None, {}, None)
    assert "not kept" in second.change and "version 2 was not kept" in third.change
    assert first.change == "created"
    with pytest.raises(UsageError, match="not kept"):
        sl.diff(grown, 2, 3)
    assert run(capsys, "log", grown)[0] == 0


def test_the_log_of_a_split_is_that_of_the_split(grown, tmp_path):
    sl.convert(tmp_path / "0", tmp_path / "parts", split="a=0.6,b=0.4", workers=0)
    sl.append(tmp_path / "parts", tmp_path / "1", split="b", workers=0)
    assert [one.num_samples for one in sl.log(tmp_path / "parts", split="a")] == [3]
    assert [one.num_samples for one in sl.log(tmp_path / "parts", split="b")] == [5, 2]


def test_the_commands_print_what_the_functions_return(grown, capsys):
    status, out, _ = run(capsys, "log", grown)
    assert status == 0
    assert all(text in out for text in ("appended 3 samples", "created", "version", "n"))
    assert json.loads(run(capsys, "log", grown, "--json")[1]) == [one.to_dict() for one in sl.log(grown)]
    assert "version 1 to 3: appended 4 samples; +" in run(capsys, "diff", grown, 1, 3)[1]
    assert json.loads(run(capsys, "diff", grown, 1, 3, "--json")[1]) == sl.diff(grown, 1, 3).to_dict()


@pytest.mark.quick(3)
@pytest.mark.parametrize("split", [None, "b"])
@pytest.mark.parametrize(
    ("text", "changed"), [(b"provenance", b"provenancf"), (b'"digest"', b'"digesu"'), (b"attributes", b"\xffttributes")]
)
def test_a_damaged_response_while_a_version_is_published_is_read_again(
    grown, tmp_path, monkeypatch, split, text, changed
):
    read, damaged, url = publish.get_document, list[bytes](), grown
    if split:
        url = tmp_path / "parts"
        sl.convert(tmp_path / "0", url, split="a=0.6,b=0.4", workers=0)

    def get_document(store, path):
        found = read(store, path)
        if path == "zarr.json" and not damaged:
            damaged.append(found.replace(text, changed))
            assert damaged[0] != found
            return damaged[0]
        return found

    monkeypatch.setattr(publish, "get_document", get_document)
    versions = [one.num_samples for one in sl.log(url, split=split)]
    sl.append(url, tmp_path / "2", split=split, workers=0)
    assert damaged
    added = len(list((tmp_path / "2").iterdir()))
    assert [one.num_samples for one in sl.log(url, split=split)] == [versions[0] + added, *versions]
    for one in sl.log(url, split=split):
        assert sl.open(url, split=split, version=one.number).manifest.provenance
