"""Splits: exact counts, every row once, and nothing but seed and row number decides."""

from fractions import Fraction

import numpy as np
import pytest
from click.testing import CliRunner
from conversions import SMALL
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import streamloader as sl
from streamloader.cli.main import cli
from streamloader.conversion.row_order import assign, parse_splits, row_keys, split_sizes
from streamloader.errors import SourceError, UsageError

fractions = st.lists(st.integers(1, 1000), min_size=1, max_size=5).map(
    lambda parts: {f"s{i}": Fraction(part, sum(parts)) for i, part in enumerate(parts)}
)


@given(fractions, st.integers(5000, 6000))
def test_splits_hold_every_row_once_in_ascending_order_and_have_exact_sizes(splits, rows):
    assigned = assign(rows, splits)
    found = [assigned[name] for name in splits]
    assert sorted(np.concatenate(found).tolist()) == list(range(rows))
    assert all((np.diff(part) > 0).all() for part in found)
    sizes = split_sizes(rows, splits)
    assert {name: len(assigned[name]) for name in splits} == sizes
    assert all(abs(sizes[name] - rows * share) < 1 for name, share in splits.items())


def test_largest_remainders_are_rounded_up():
    assert split_sizes(10, parse_splits("a=0.55,b=0.26,c=0.19")) == {"a": 5, "b": 3, "c": 2}
    assert split_sizes(3, parse_splits("a=0.5,b=0.5")) == {"a": 2, "b": 1}


def test_a_split_is_no_tail_cut_but_takes_from_everywhere():
    rows = assign(100_000, parse_splits("train=0.9,val=0.1"))["val"]
    per_tenth = np.histogram(rows, bins=10, range=(0, 100_000))[0]
    assert per_tenth.min() > 900  # 1000 expected, its standard deviation is 30
    assert per_tenth.max() < 1100


def test_the_assignment_is_pinned_and_depends_on_the_seed():
    pinned = [0, 1, 2, 5, 8, 9, 10, 15, 17, 19]  # by a transcription with Python integers
    assert assign(20, parse_splits("a=0.5,b=0.5"))["b"].tolist() == pinned
    assert assign(20, parse_splits("a=0.5,b=0.5"), seed=1)["b"].tolist() != pinned


def test_row_keys_do_not_depend_on_where_the_range_begins_and_never_tie():
    keys = row_keys(0, 100_000, 0)
    assert (row_keys(50_000, 100_000, 0) == keys[50_000:]).all()
    assert len(np.unique(keys)) == len(keys)


def test_splits_parse_from_text_and_mapping_alike():
    assert parse_splits("train=0.9, val=0.1") == parse_splits({"train": 0.9, "val": 0.1})
    assert parse_splits("a=1/3,b=2/3") == {"a": Fraction(1, 3), "b": Fraction(2, 3)}
    assert parse_splits(None) == {}
    assert sum(split_sizes(1000, parse_splits("a=0.333,b=0.333,c=0.334")).values()) == 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train=0.9,val=0.2", "sum to 1.1"),
        ("train=0.9,train=0.1", "is a duplicate"),
        ("train=1,val=0", "more than 0"),
        *((text, "is not a valid name") for text in ("Train=1", "../x=1", "")),
        *((text, "not a fraction") for text in ("train", "train=nine", "train=1/0")),
    ],
)
def test_invalid_splits_are_errors(text, message):
    with pytest.raises(UsageError, match=message):
        parse_splits(text)


def test_a_split_without_samples_is_an_error_unless_the_source_is_empty():
    with pytest.raises(UsageError, match=r"val=0\.01 of 10 samples is empty"):
        assign(10, parse_splits("train=0.99,val=0.01"))
    empty = assign(0, parse_splits("train=0.99,val=0.01"))
    assert {name: len(rows) for name, rows in empty.items()} == {"train": 0, "val": 0}


# --- splits that a source has by itself


def png(path, value=0):
    """An image whose first pixel tells which it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (value, 0, 0)).save(path)
    return path.read_bytes()


@pytest.fixture
def inet(tmp_path):
    """Splits with class folders: `bee` is in one of them only, and an image is deeper than the others."""
    root = tmp_path / "inet"
    for split, name, count in (("train", "ant", 3), ("train", "bee", 2), ("train", "cat", 4), ("val", "ant", 1)):
        for i in range(count):
            png(root / split / name / f"{i}.png", i)
    png(root / "val" / "cat" / "deep" / "0.png")
    return root


def test_folders_with_names_of_splits_become_splits_whose_labels_agree(inet, tmp_path):
    report = sl.convert(inet, tmp_path / "out", workers=0, layout=SMALL)
    assert report.preview.splits == {"train": 9, "val": 2}
    assert report.preview.classes == {"label": ["ant", "bee", "cat"]}
    train, val = (sl.open(tmp_path / "out", split=name) for name in ("train", "val"))
    assert train.read("label", 0, 9).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert val.read("label", 0, 2).tolist() == [0, 2]
    assert val[1]["image"] == (inet / "val" / "cat" / "deep" / "0.png").read_bytes()
    for one in (train, val):
        assert one.manifest.provenance["classes"] == {"label": ["ant", "bee", "cat"]}
    assert sl.verify(tmp_path / "out", against=inet).ok
    (inet / "val" / "cat" / "deep" / "0.png").write_bytes((inet / "train" / "ant" / "2.png").read_bytes())
    assert not sl.verify(tmp_path / "out", against=inet).ok
    sl.convert(inet / "train", tmp_path / "one", workers=0)
    with pytest.raises(UsageError, match="splits train, val of its own; append each"):
        sl.append(tmp_path / "one", inet)


def test_splits_of_a_source_are_shuffled_apart_and_resumed(inet, tmp_path):
    sl.convert(inet, tmp_path / "out", workers=0, shuffle=3)
    assert sorted(sl.open(tmp_path / "out", split="train").read("label", 0, 9)) == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert sorted(sl.open(tmp_path / "out", split="val").read("label", 0, 2)) == [0, 2]
    assert sl.convert(inet, tmp_path / "out", workers=0, shuffle=3, resume=True).shards_kept == 2
    with pytest.raises(UsageError, match=r"has the splits train, val of its own, and split='a=1/2,b=1/2' is given"):
        sl.convert(inet, tmp_path / "other", workers=0, split="a=0.5,b=0.5")


@pytest.mark.parametrize("names", [("train", "cat"), ("train", "val")])
def test_folders_are_classes_where_their_names_or_what_they_hold_say_so(names, tmp_path):
    deep = "deep/" if "cat" in names else ""
    for name in names:
        png(tmp_path / "in" / name / f"{deep}x.png")
    report = sl.convert(tmp_path / "in", tmp_path / "out", workers=0)
    assert report.preview.classes == {"label": sorted(names)}


def test_the_classes_are_printed_before_anything_is_written(inet, tmp_path):
    run = CliRunner().invoke(cli, ["convert", str(inet), str(tmp_path / "out"), "--dry-run"])
    assert "  label: 3 classes: ant, bee, cat\n" in run.stdout
    assert "(train 9, val 2)" in run.stdout
    for i in range(97):
        png(inet / "val" / f"x{i:02}" / "0.png")
    run = CliRunner().invoke(cli, ["convert", str(inet), str(tmp_path / "out"), "--dry-run"])
    (line,) = [line for line in run.stdout.splitlines() if "100 classes" in line]
    assert line.startswith("  label: 100 classes: ant, bee, cat, x00,") and line.endswith(", ..., x96")


@pytest.mark.parametrize("split", [False, True])
def test_an_image_in_no_class_folder_is_a_bad_sample(split, inet, tmp_path):
    root = inet if split else inet / "train"
    sl.convert(root, tmp_path / "whole", workers=0, layout=SMALL)
    Image.new("L", (4, 4)).save(root / "stray.jpg")
    message = r"stray\.jpg: it is in no class folder; put every image into .*on_error=.skip"
    with pytest.raises(SourceError, match=message):
        sl.convert(root, tmp_path / "out", workers=0)
    assert not (tmp_path / "out").exists()
    report = sl.convert(root, tmp_path / "out", workers=0, layout=SMALL, on_error="skip")
    (bad,) = [one for some in report.left_out.values() for one in some]
    assert bad.name == f"{root}/stray.jpg"
    for name in ("train", "val") if split else (None,):
        found, whole = (sl.open(tmp_path / place, split=name) for place in ("out", "whole"))
        assert found.read("image", 0, len(found)) == whole.read("image", 0, len(whole))
        assert str(found.fields["image"]) == "bytes:png", "the extension of what is left out does not count"
