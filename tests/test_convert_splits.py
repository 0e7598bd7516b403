"""Splits: exact counts, every row once, and nothing but seed and row number decides."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_convert_job import SMALL

from streamloader import dataset
from streamloader.cli.main import cli
from streamloader.conversion.after.against import Against
from streamloader.conversion.after.append import append
from streamloader.conversion.after.verify import verify
from streamloader.conversion.job import convert
from streamloader.conversion.splits import assign, parse_splits, row_keys, split_sizes
from streamloader.errors import SourceError, UsageError

fractions = st.lists(st.integers(1, 1000), min_size=1, max_size=5).map(
    lambda parts: {f"s{i}": Fraction(part, sum(parts)) for i, part in enumerate(parts)}
)


@given(fractions, st.integers(5000, 6000))
def test_splits_hold_every_row_exactly_once_in_ascending_order(splits: dict[str, Fraction], rows: int) -> None:
    dealt = assign(rows, splits)
    found = [dealt.rows(name) for name in splits]
    assert sorted(np.concatenate(found).tolist()) == list(range(rows))
    assert all((np.diff(part) > 0).all() for part in found)


@given(fractions, st.integers(5000, 6000))
def test_split_sizes_are_exact_to_less_than_one_sample(splits: dict[str, Fraction], rows: int) -> None:
    sizes = split_sizes(rows, splits)
    assert sum(sizes.values()) == rows
    assert all(abs(sizes[name] - rows * share) < 1 for name, share in splits.items())
    dealt = assign(rows, splits)
    assert {name: len(dealt.rows(name)) for name in splits} == sizes


def test_largest_remainders_are_rounded_up() -> None:
    assert split_sizes(10, parse_splits("a=0.55,b=0.26,c=0.19")) == {"a": 5, "b": 3, "c": 2}
    assert split_sizes(3, parse_splits("a=0.5,b=0.5")) == {"a": 2, "b": 1}


def test_a_split_is_no_tail_cut_but_takes_from_everywhere() -> None:
    rows = assign(100_000, parse_splits("train=0.9,val=0.1")).rows("val")
    per_tenth = np.histogram(rows, bins=10, range=(0, 100_000))[0]
    assert per_tenth.min() > 900  # 1000 expected, its standard deviation is 30
    assert per_tenth.max() < 1100


def test_the_assignment_is_pinned_and_depends_on_the_seed() -> None:
    assert assign(20, parse_splits("a=0.5,b=0.5")).rows("b").tolist() == PINNED
    assert assign(20, parse_splits("a=0.5,b=0.5"), seed=1).rows("b").tolist() != PINNED


PINNED = [0, 1, 2, 5, 8, 9, 10, 15, 17, 19]  # by a transcription with Python integers


def test_row_keys_do_not_depend_on_where_the_range_begins_and_never_tie() -> None:
    keys = row_keys(0, 100_000, 0)
    assert (row_keys(50_000, 100_000, 0) == keys[50_000:]).all()
    assert len(np.unique(keys)) == len(keys)


def test_splits_parse_from_text_and_mapping_alike() -> None:
    assert parse_splits("train=0.9, val=0.1") == parse_splits({"train": 0.9, "val": 0.1})
    assert parse_splits("a=1/3,b=2/3") == {"a": Fraction(1, 3), "b": Fraction(2, 3)}
    assert parse_splits(None) == {}
    assert sum(split_sizes(1000, parse_splits("a=0.333,b=0.333,c=0.334")).values()) == 1000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train=0.9,val=0.2", "sum to 1.1"),
        ("train=0.9,train=0.1", "stands twice"),
        ("Train=1", "no name of a split"),
        ("../x=1", "no name of a split"),
        ("train", "no fraction"),
        ("train=nine", "no fraction"),
        ("train=1,val=0", "more than 0"),
        ("train=1/0", "no fraction"),
        ("", "no name of a split"),
    ],
)
def test_wrong_splits_are_told(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_splits(text)


def test_a_split_without_samples_is_refused_unless_the_source_is_empty() -> None:
    with pytest.raises(UsageError, match=r"val=0\.01 of 10 samples is empty"):
        assign(10, parse_splits("train=0.99,val=0.01"))
    assert assign(0, parse_splits("train=0.99,val=0.01")).sizes == {"train": 0, "val": 0}


# --- splits that a source has by itself


def png(path: Path, value: int = 0) -> bytes:
    """An image whose first pixel tells which it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (value, 0, 0)).save(path)
    return path.read_bytes()


@pytest.fixture
def inet(tmp_path: Path) -> Path:
    """Splits with class folders: `bee` is in one of them only, and an image is deeper than the others."""
    root = tmp_path / "inet"
    for split, name, count in (("train", "ant", 3), ("train", "bee", 2), ("train", "cat", 4), ("val", "ant", 1)):
        for i in range(count):
            png(root / split / name / f"{i}.png", i)
    png(root / "val" / "cat" / "deep" / "0.png")
    return root


def test_folders_with_names_of_splits_become_splits_whose_labels_agree(inet: Path, tmp_path: Path) -> None:
    report = convert(inet, tmp_path / "out", workers=0, layout=SMALL)
    assert report.preview.splits == {"train": 9, "val": 2}
    assert report.preview.classes == {"label": ["ant", "bee", "cat"]}
    train, val = (dataset.open(tmp_path / "out", split=name) for name in ("train", "val"))
    assert train.read("label", 0, 9).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert val.read("label", 0, 2).tolist() == [0, 2]
    assert val[1]["image"] == (inet / "val" / "cat" / "deep" / "0.png").read_bytes()
    for one in (train, val):
        assert one.manifest.provenance["classes"] == {"label": ["ant", "bee", "cat"]}
    assert verify(tmp_path / "out", against=Against(inet)).whole
    (inet / "val" / "cat" / "deep" / "0.png").write_bytes((inet / "train" / "ant" / "2.png").read_bytes())
    assert not verify(tmp_path / "out", against=Against(inet)).whole
    convert(inet / "train", tmp_path / "one", workers=0)
    with pytest.raises(UsageError, match="splits train, val of its own; append each"):
        append(tmp_path / "one", inet)


def test_splits_of_a_source_are_shuffled_apart_and_resumed(inet: Path, tmp_path: Path) -> None:
    convert(inet, tmp_path / "out", workers=0, shuffle=3)
    assert sorted(dataset.open(tmp_path / "out", split="train").read("label", 0, 9)) == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert sorted(dataset.open(tmp_path / "out", split="val").read("label", 0, 2)) == [0, 2]
    assert convert(inet, tmp_path / "out", workers=0, shuffle=3, resume=True).shards_kept == 2
    with pytest.raises(UsageError, match=r"has the splits train, val of its own, and split='a=1/2,b=1/2' is given"):
        convert(inet, tmp_path / "other", workers=0, split="a=0.5,b=0.5")


@pytest.mark.parametrize("names", [("train", "cat"), ("train", "val")])
def test_folders_are_classes_where_their_names_or_what_they_hold_say_so(names: tuple[str, str], tmp_path: Path) -> None:
    deep = "deep/" if "cat" in names else ""
    for name in names:
        png(tmp_path / "in" / name / f"{deep}x.png")
    report = convert(tmp_path / "in", tmp_path / "out", workers=0)
    assert report.preview.classes == {"label": sorted(names)}


def test_the_classes_are_told_before_anything_is_written(inet: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(cli, ["convert", str(inet), str(tmp_path / "out"), "--dry-run"])
    assert "  label: 3 classes: ant, bee, cat\n" in run.stdout
    assert "(train 9, val 2)" in run.stdout
    for i in range(97):
        png(inet / "val" / f"x{i:02}" / "0.png")
    run = CliRunner().invoke(cli, ["convert", str(inet), str(tmp_path / "out"), "--dry-run"])
    (line,) = [line for line in run.stdout.splitlines() if "100 classes" in line]
    assert line.startswith("  label: 100 classes: ant, bee, cat, x00,") and line.endswith(", ..., x96")


@pytest.mark.parametrize("split", [False, True])
def test_an_image_in_no_class_folder_is_a_bad_sample(split: bool, inet: Path, tmp_path: Path) -> None:
    root = inet if split else inet / "train"
    convert(root, tmp_path / "whole", workers=0, layout=SMALL)
    Image.new("L", (4, 4)).save(root / "stray.jpg")
    told = r"stray\.jpg: it is in no class folder; put every image into .*on_error=.skip"
    with pytest.raises(SourceError, match=told):
        convert(root, tmp_path / "out", workers=0)
    assert not (tmp_path / "out").exists()
    report = convert(root, tmp_path / "out", workers=0, layout=SMALL, on_error="skip")
    (bad,) = [one for some in report.left_out.values() for one in some]
    assert bad.name == f"{root}/stray.jpg"
    for name in ("train", "val") if split else (None,):
        found, whole = (dataset.open(tmp_path / place, split=name) for place in ("out", "whole"))
        assert found.read("image", 0, len(found)) == whole.read("image", 0, len(whole))
        assert str(found.fields["image"]) == "bytes:png", "the extension of what is left out does not count"
