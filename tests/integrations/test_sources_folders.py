"""COCO and audio folders: what formats/*/expected*.json says, and every input that cannot be converted."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_convert_sources import FORMATS, opened, plain, png

from streamloader import dataset
from streamloader.conversion.job import convert
from streamloader.conversion.sources.base import BadSample, Source, refuse_all
from streamloader.conversion.sources.folders.audiofiles import audio_problem
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.wish import Wish, parse_wish
from streamloader.errors import FieldError, SourceError, UsageError
from streamloader.format.values import from_bytes

COCO = "coco/input::/annotations/{}_train2017.json"
EXPECTED = {
    COCO.format("instances"): "coco/expected.json",
    COCO.format("person_keypoints"): "coco/expected-person_keypoints.json",
    COCO.format("captions"): "coco/expected-captions.json",
    "audiofolder/input": "audiofolder/expected.json",
}
CLIPS = sorted(path for path in (FORMATS / "audiofolder/input").rglob("[a-g].*") if path.suffix != ".txt")


def expected(src: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FORMATS / EXPECTED[src]).read_text())
    return found


def rows_of(source: Source, rows: list[int], refuse: Any = refuse_all, part: Any = None) -> list[dict[str, Any]]:
    """Rows as expected.json has them."""
    columns = (part or source.part(np.array(rows, np.int64))).read(refuse)
    assert set(columns) == set(source.fields)
    assert len({len(column) for column in columns.values()}) == 1
    values = {
        name: [plain(one if field.fixed else from_bytes(name, field, memoryview(one), 0)) for one in columns[name]]
        for name, field in source.fields.items()
    }
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def every(source: Source) -> list[dict[str, Any]]:
    return rows_of(source, list(range(source.num_samples)))


@pytest.mark.parametrize("src", EXPECTED)
def test_source_reads_what_the_format_says(src: str) -> None:
    name, source = open_source(f"{FORMATS}/{src}", None, {}, Wish())
    assert name == src.split("/", maxsplit=1)[0]
    assert {field: str(kind) for field, kind in source.fields.items()} == expected(src)["fields"]
    assert every(source) == expected(src)["samples"]


@pytest.mark.parametrize("src", EXPECTED)
@given(data=st.data())
@settings(max_examples=10)
def test_any_rows_read_alone_or_after_pickling_are_the_same(src: str, data: st.DataObject) -> None:
    source = opened(f"{FORMATS}/{src}")
    chosen = sorted(data.draw(st.sets(st.integers(0, source.num_samples - 1))))
    wanted = [every(source)[row] for row in chosen]
    assert rows_of(source, chosen) == wanted
    part = pickle.loads(pickle.dumps(source.part(np.array(chosen, np.int64))))
    assert rows_of(source, chosen, part=part) == wanted


def test_a_source_is_the_same_below_every_url(store_url: tuple[str, dict[str, Any]]) -> None:
    from streamloader.storage import open_store

    url, options = store_url
    store = open_store(url, options)
    for path in [*FORMATS.glob("coco/input/**/*"), *FORMATS.glob("audiofolder/input/**/*")]:
        if path.is_file():
            store.put(path.relative_to(FORMATS).as_posix(), path.read_bytes())
    for src in EXPECTED:
        source = open_source(f"{url}/{src}", None, options, Wish())[1]
        assert every(source) == expected(src)["samples"]


@pytest.mark.parametrize("src", EXPECTED)
def test_a_converted_source_holds_what_it_says(src: str, tmp_path: Path) -> None:
    convert(f"{FORMATS}/{src}", tmp_path / "out", workers=0)
    ds = dataset.open(tmp_path / "out")
    assert {name: str(field) for name, field in ds.fields.items()} == expected(src)["fields"]
    found = [{name: plain(value) for name, value in ds[i].items()} for i in range(len(ds))]
    assert found == expected(src)["samples"]


def test_notes_tell_names_and_what_was_passed_over() -> None:
    notes = opened(f"{FORMATS}/{COCO.format('instances')}").notes
    assert notes["classes"] == {"labels": ["person", "dog", "toothbrush"]}
    assert notes["category_ids"] == [1, 18, 90]
    assert notes["unknown_images"] == 1
    assert notes["annotations"] == "annotations/instances_train2017.json"
    assert notes["passed_over"] == 5  # the other split's images, and the other annotations
    people = opened(f"{FORMATS}/{COCO.format('person_keypoints')}").notes
    assert people["keypoints"] == {"person": ["nose", "left_eye", "right_eye"]}
    clips = expected("audiofolder/input")
    assert opened(FORMATS / "audiofolder/input").notes == {
        "classes": {"label": clips["classes"]},
        "passed_over": clips["passed_over"],
    }


def test_the_files_are_those_that_it_is_made_of() -> None:
    paths = [info.path for info in opened(f"{FORMATS}/{COCO.format('captions')}").files]
    images = ["000000000007.png", "000000000139.jpg", "000000000285.jpg"]
    assert paths == ["annotations/captions_train2017.json", *(f"train2017/{name}" for name in images)]
    paths = [info.path for info in opened(FORMATS / "audiofolder/input").files]
    assert len(paths) == len(set(paths)) == 14


# COCO


def coco(root: Path, document: Any, name: str = "annotations/instances_train.json") -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(document if isinstance(document, str) else json.dumps(document))
    return root


def one_image(**changes: Any) -> dict[str, Any]:
    """A COCO document of one image and one annotation, changed."""
    image = {"id": 1, "file_name": "a.png", "width": 4, "height": 4, **changes.pop("image", {})}
    box = {"id": 5, "image_id": 1, "category_id": 3, "bbox": [0, 0, 1, 1], **changes.pop("annotation", {})}
    return {"images": [image], "annotations": [box], "categories": [{"id": 3, "name": "cat"}], **changes}


def test_coco_is_known_by_its_annotations_among_images(tmp_path: Path) -> None:
    png(tmp_path / "train" / "a.png")
    assert open_source(coco(tmp_path, one_image()), None, {}, Wish())[0] == "coco"
    (tmp_path / "annotations" / "instances_train.json").rename(tmp_path / "train" / "_annotations.coco.json")
    (tmp_path / "annotations").rmdir()
    assert open_source(tmp_path, None, {}, Wish())[0] == "coco"
    (tmp_path / "train" / "_annotations.coco.json").rename(tmp_path / "train" / "whatever.json")
    assert open_source(tmp_path, None, {}, Wish())[0] == "imagefolder"
    assert open_source(tmp_path, "coco", {}, Wish())[1].num_samples == 1


def test_several_annotations_ask_for_a_choice() -> None:
    told = "holds 3 files of annotations: annotations/captions_.*choose one, like .*input::/annotations/captions_"
    with pytest.raises(SourceError, match=told):
        opened(FORMATS / "coco/input")
    with pytest.raises(SourceError, match=r"no file is .*input/annotations/other\.json"):
        opened(f"{FORMATS}/coco/input::/annotations/other.json")


PLACES = {
    "the split's folder": (["train/a.png", "val/a.png", "images/a.png"], "train/a.png"),
    "the split's folder somewhere": (["x/train/a.png", "x/val/a.png"], "x/train/a.png"),
    "beside the annotations": (["annotations/a.png", "val/a.png"], "annotations/a.png"),
    "the root": (["a.png", "images/a.png"], "a.png"),
    "images": (["images/a.png", "val/a.png"], "images/a.png"),
    "anywhere": (["deep/er/a.png"], "deep/er/a.png"),
    "not hidden": ([".thumbs/a.png", "deep/a.png"], "deep/a.png"),
}


@pytest.mark.parametrize("case", PLACES)
def test_an_image_is_found_in_the_nearest_place(case: str, tmp_path: Path) -> None:
    paths, wanted = PLACES[case]
    for size, path in enumerate(paths, 3):
        png(tmp_path / path, size)
    source = opened(coco(tmp_path, one_image()))
    assert source.part(np.arange(1)).read(refuse_all)["image"] == [(tmp_path / wanted).read_bytes()]


@pytest.mark.parametrize("name", ["sub/a.png", "./sub/a.png", "sub\\a.png"])
def test_a_file_name_may_be_a_path(name: str, tmp_path: Path) -> None:
    for size, folder in enumerate(("train/sub", "train/other"), 3):
        png(tmp_path / folder / "a.png", size)
    source = opened(coco(tmp_path, one_image(image={"file_name": name})))
    assert source.part(np.arange(1)).read(refuse_all)["image"] == [(tmp_path / "train/sub/a.png").read_bytes()]


def two(key: str, **both: Any) -> dict[str, Any]:
    document = one_image()
    document[key] = [document[key][0], {**document[key][0], **both}]
    return document


NO_COCO: dict[str, tuple[Any, str]] = {
    "no JSON": ('{"images": [', r"instances_train\.json is no JSON that can be read"),
    "too deep": ("[" * 200_000, "is no JSON that can be read"),
    "no UTF-8": ('{"images": "\udcff"}', "is no JSON that can be read"),
    "a list": ([], "is no COCO file: it has no list 'images'"),
    "no annotations": ({"images": [{"id": 1}]}, "has no list 'annotations'"),
    "no images": (one_image(images=[]), "has no list 'images'"),
    "image is no object": (one_image(images=[7]), r"images\[0\] is a int"),
    "annotation is no object": (one_image(annotations=[None]), r"annotations\[0\] is a NoneType"),
    "image without id": (one_image(images=[{"file_name": "a.png"}]), r"images\[0\] has id None: expected a whole"),
    "image with a huge id": (one_image(image={"id": 2**70}), r"images\[0\] has id 1180591620717411303424"),
    "image with a text id": (one_image(image={"id": "1"}), r"images\[0\] has id '1'"),
    "image with a true id": (one_image(image={"id": True}), r"images\[0\] has id True"),
    "two ids": (two("images", file_name="b.png"), r"images\[0\] and images\[1\] have one id, 1"),
    "two names": (two("images", id=2), "the images 1 and 2 have one file_name, 'a.png'"),
    "two categories": (two("categories", name="dog"), r"categories\[0\] and categories\[1\] have one id, 3"),
    "no image is there": (one_image(image={"file_name": "b.png"}), r"none of the 1 images .* such as 'b\.png'"),
    "no climbing": (one_image(image={"file_name": "../train/a.png"}), "none of the 1 images"),
    "too many points": (one_image(annotation={"keypoints": [0] * 6000}), "has 2000 keypoints, up to 1000"),
}


@pytest.mark.parametrize("case", NO_COCO)
def test_a_file_that_is_no_coco_is_named(case: str, tmp_path: Path) -> None:
    document, told = NO_COCO[case]
    png(tmp_path / "train" / "a.png")
    text = document if isinstance(document, str) else json.dumps(document)
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_train.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SourceError, match=told):
        opened(tmp_path)


BAD_IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {  # what is wrong with its entry, its annotation
    "missing": ({"file_name": "b.png"}, {}, "its file is nowhere below"),
    "ambiguous": ({"file_name": "two.png"}, {}, "its file could be x/two.png or y/two.png"),
    "no image": ({"file_name": "text.png"}, {}, "the image cannot be decoded: its 4 bytes have no known image header"),
    "no name": ({"file_name": None}, {}, "its entry has no file_name"),
    "no width": ({"width": None}, {}, "its entry 1 has width None: expected a whole number"),
    "text as height": ({"height": "4"}, {}, "its entry 1 has height '4'"),
    "short box": ({}, {"bbox": [1, 2, 3]}, r"its annotation 5 has bbox \[1, 2, 3\]: expected 4 numbers"),
    "text in a box": ({}, {"bbox": [1, 2, 3, "4"]}, "expected a number that float32 holds"),
    "a box of NaN": ({}, {"bbox": [1, 2, 3, float("nan")]}, "expected a number that float32 holds"),
    "a huge box": ({}, {"bbox": [1, 2, 3, 1e300]}, "expected a number that float32 holds"),
    "unknown category": ({}, {"category_id": 4}, "its annotation 5 has category_id 4: no category has this id"),
    "a list as category": ({}, {"category_id": [3]}, "no category has this id"),
    "no area": ({}, {"area": None}, "its annotation 5 has area None"),
    "odd iscrowd": ({}, {"iscrowd": 2}, "its annotation 5 has iscrowd 2: expected 0 or 1"),
    "keypoints": ({}, {"keypoints": [1, 2]}, r"its annotation 5 has keypoints \[1, 2\]: expected 6 numbers"),
    "infinite polygon": (
        {},
        {"segmentation": [[float("inf")]]},
        "numbers that are not finite stand in its segmentation",
    ),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_a_bad_image_is_left_out_and_named(case: str, tmp_path: Path) -> None:
    entry, annotation, told = BAD_IMAGES[case]
    for path in ("train/a.png", "train/good.png", "x/two.png", "y/two.png"):
        png(tmp_path / path)
    (tmp_path / "train" / "text.png").write_text("text")
    whole = {"area": 1.5, "iscrowd": 0, "segmentation": [[0, 0, 1, 1, 0, 1]], "keypoints": [0, 0, 1, 2, 2, 2]}
    good = {"id": 0, "file_name": "good.png", "width": 4, "height": 4}
    document = one_image(image=entry, annotation={**whole, **annotation})
    document["images"].append(good)
    first = {**whole, "id": 9, "image_id": 0, "category_id": 3, "bbox": [0, 0, 2, 2]}
    document["annotations"].insert(0, first)
    source = opened(coco(tmp_path, document))
    bad: list[BadSample] = []
    (left,) = rows_of(source, [0, 1], bad.append)
    assert left["image_id"] == 0
    assert left["boxes"] == [[0, 0, 2, 2]]
    assert [one.position for one in bad] == [1]
    with pytest.raises(SourceError, match=told):
        every(source)
    report = convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", workers=0, on_error="skip")
    assert report.num_samples == report.num_left_out == 1


def test_only_what_is_wished_is_read(tmp_path: Path) -> None:
    """Without the field `image` the images need not even be there."""
    document = one_image(annotation={"segmentation": [[0.5]], "area": 2})
    source = open_source(coco(tmp_path, document), "coco", {}, parse_wish("boxes=ragged:float64[4],labels"))[1]
    assert {name: str(field) for name, field in source.fields.items()} == {
        "boxes": "ragged:float64[4]",
        "labels": "ragged:int64",
    }
    assert every(source) == [{"boxes": [[0, 0, 1, 1]], "labels": [0]}]
    png(tmp_path / "a.png")
    with pytest.raises(FieldError, match="has no field 'mask'; it has image, image_id, width, height, boxes, labels"):
        open_source(tmp_path, "coco", {}, parse_wish("boxes,mask"))


def test_text_that_utf8_cannot_write_is_escaped(tmp_path: Path) -> None:
    png(tmp_path / "a.png")
    document = one_image(annotation={"caption": "half \ud83d", "segmentation": None})
    document["categories"][0]["name"] = "\udcff"
    source = opened(coco(tmp_path, document))
    (found,) = every(source)
    assert json.loads(found["captions"]) == ["half \ud83d"]
    assert found["segmentation"] == "[null]"
    assert source.notes["classes"] == {"labels": ["?"]}
    convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", workers=0)


def test_points_that_are_missing_are_not_labelled(tmp_path: Path) -> None:
    png(tmp_path / "a.png")
    document = one_image(annotation={"keypoints": [1, 2, 2]})
    document["annotations"] += [{**document["annotations"][0], "keypoints": []}, {"image_id": 1, "id": 7}]
    document["annotations"][2] |= {"category_id": 3, "bbox": [0, 0, 1, 1]}
    (found,) = every(opened(coco(tmp_path, document)))
    assert found["keypoints"] == [[[1, 2, 2]], [[0, 0, 0]], [[0, 0, 0]]]


def test_a_part_holds_the_annotations_of_its_rows_only(tmp_path: Path) -> None:
    count = 300
    for number in range(count):
        png(tmp_path / "images" / f"{number}.png")
    images = [{"id": number, "file_name": f"{number}.png"} for number in range(count)]
    boxes = [{"id": i, "image_id": i % count, "bbox": [i, 0, 1, 1], "segmentation": [[i] * 50]} for i in range(3000)]
    source = opened(coco(tmp_path, {"images": images, "annotations": boxes}))
    assert len(pickle.dumps(source.part(np.arange(3)))) < len(pickle.dumps(source.part(np.arange(count)))) / 30
    (found,) = rows_of(source, [7])
    assert [box[0] for box in found["boxes"]] == list(range(7, 3000, count))


def test_annotations_are_parsed_in_a_few_times_their_size(tmp_path: Path) -> None:
    png(tmp_path / "a.png")
    polygon = [[round(i * 0.37, 2) for i in range(60)]]
    boxes = [{"id": i, "image_id": 1, "bbox": [0, 0, 1, 1], "segmentation": polygon} for i in range(60_000)]
    coco(tmp_path, {"images": [{"id": 1, "file_name": "a.png"}], "annotations": boxes})
    size = (tmp_path / "annotations/instances_train.json").stat().st_size
    assert size > 20e6
    code = (
        "import resource, sys\n"
        "from streamloader.conversion.sources.formats import open_source\n"
        "from streamloader.conversion.sources.wish import Wish\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "open_source(sys.argv[1], 'coco', {}, Wish())\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 6 * size + 32e6


# audio


def wav(path: Path, count: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.arange(count, dtype="<i2").tobytes())
    return path


@pytest.mark.parametrize("path", CLIPS, ids=lambda path: path.name)
def test_a_clip_that_is_cut_anywhere_is_told(path: Path) -> None:
    """The tiny clips of formats/ tell their length, each in its kind's own way."""
    data = path.read_bytes()
    assert audio_problem(data) == ""
    assert [cut for cut in range(len(data)) if not audio_problem(data[:cut])] == []


@pytest.mark.parametrize("path", CLIPS, ids=lambda path: path.name)
@given(changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=6), cut=st.integers(0, 5000))
@settings(max_examples=100)
def test_no_bytes_break_the_test_of_a_clip(path: Path, changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(path.read_bytes()[:cut])
    for at, value in changes:
        data[at : at + 1] = bytes([value])
    assert isinstance(audio_problem(bytes(data)), str)


WHOLE: dict[str, Callable[[bytes], bytes]] = {
    "an ID3 tag in front": lambda data: b"ID3\x04\x00\x00\x00\x00\x01\x00" + bytes(128) + data,
    "two of them": lambda data: 2 * (b"ID3\x04\x00\x00\x00\x00\x00\x05" + bytes(5)) + data,
}


@pytest.mark.parametrize("case", WHOLE)
def test_tags_do_not_matter(case: str) -> None:
    for path in CLIPS:
        assert audio_problem(WHOLE[case](path.read_bytes())) == ""


def clip(name: str) -> bytes:
    (found,) = [path for path in CLIPS if path.suffix.lower() == name]
    return found.read_bytes()


def test_a_clip_whose_length_was_not_known_is_taken() -> None:
    data = clip(".wav")
    streamed = data.replace(data[4:8], b"\xff" * 4, 1).replace(b"data" + data[40:44], b"data" + b"\xff" * 4)
    assert streamed != data
    assert audio_problem(streamed) == ""
    flac = bytearray(clip(".flac"))
    flac[8 + 13 : 8 + 18] = bytes([flac[8 + 13] & 0xF0, 0, 0, 0, 0])  # the number of samples
    assert audio_problem(bytes(flac)) == ""


def id3v1(data: bytes) -> bytes:
    return data + b"TAG" + bytes(125)


def test_a_tag_behind_flac_and_mp3_does_not_hide_a_cut() -> None:
    assert audio_problem(id3v1(clip(".mp3"))) == audio_problem(id3v1(clip(".flac"))) == ""
    assert "truncated" in audio_problem(clip(".mp3")[:-200] + b"TAG" + bytes(60))
    assert "truncated" in audio_problem(id3v1(clip(".flac")[:-1500]))


BAD_CLIPS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "its 0 bytes have no known audio header"),
    "text": (b"no audio at all", "have no known audio header"),
    "an image": (b"\x89PNG\r\n\x1a\n" + bytes(50), "have no known audio header"),
    "half a header": (b"RIFF\x00", "have no known audio header"),
    "cut wav": (clip(".wav")[:-9], "its outer chunk goes on to byte 844, it has 835: it is truncated"),
    "wav without data": (b"RIFF\x04\x00\x00\x00WAVE", "it has no chunk 'data'"),
    "cut aiff": (clip(".aiff")[:500], "it is truncated"),
    "cut flac": (clip(".flac")[:2000], "its last frame ends at sample 8192 of 9000: it is truncated"),
    "flac header only": (clip(".flac")[:42], "it is truncated|no frame follows"),
    "no STREAMINFO": (b"fLaC\x84\x00\x00\x00", "it does not begin with its STREAMINFO"),
    "cut ogg": (clip(".ogg")[:-1], "its last page goes on"),
    "ogg cut between pages": (clip(".ogg")[: clip(".ogg").rindex(b"OggS")], "does not end the stream: it is truncated"),
    "damaged ogg": (clip(".ogg").replace(b"OggS", b"OggX").replace(b"OggX", b"OggS", 1), "no page begins at byte"),
    "cut opus": (clip(".opus")[:-50], "it is truncated"),
    "cut mp3": (clip(".mp3")[:-1], "its audio goes on to byte 1656, it has 1655: it is truncated"),
    "cut m4a": (clip(".m4a")[:-5], "its box 'moov' goes on|it is truncated"),
    "unfinished m4a": (clip(".m4a")[: clip(".m4a").index(b"moov") - 4], "it has no box 'moov'"),
}


@pytest.mark.parametrize("case", BAD_CLIPS)
def test_a_bad_clip_is_left_out_and_named(case: str, tmp_path: Path) -> None:
    data, told = BAD_CLIPS[case]
    wav(tmp_path / "a" / "good.wav")
    (tmp_path / "a" / "bad.mp3").write_bytes(data)
    source = opened(tmp_path)
    bad: list[BadSample] = []
    assert len(rows_of(source, [0, 1], bad.append)) == 1
    assert [(one.position, one.data) for one in bad] == [(0, data)]
    with pytest.raises(SourceError, match=f"a/bad.mp3: the clip cannot be decoded: .*({told})"):
        every(source)


def test_clips_in_one_folder_have_their_path(tmp_path: Path) -> None:
    for name in ("b.wav", "a b.WAV"):
        wav(tmp_path / name, len(name))
    (tmp_path / "notes.md").write_text("no clip")
    (tmp_path / "artwork").mkdir()
    source = opened(tmp_path)
    assert {name: str(field) for name, field in source.fields.items()} == {"audio": "bytes:wav", "path": "text"}
    assert [row["path"] for row in every(source)] == ["a b.WAV", "b.wav"]
    assert source.notes == {"passed_over": 1}


def test_transcripts_are_all_there_or_told(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        wav(tmp_path / f"{name}.wav")
    assert "text" not in opened(tmp_path).fields
    (tmp_path / "a.txt").write_text("good\n")
    (tmp_path / "b.TXT").write_bytes(b"\xff")
    (tmp_path / "c.txt").write_bytes(b"x" * ((1 << 20) + 1))
    (tmp_path / "other.txt").write_text("of no clip")
    source = opened(tmp_path)
    bad: list[BadSample] = []
    assert [row["text"] for row in rows_of(source, [0, 1, 2, 3], bad.append)] == ["good\n"]
    assert {one.position: one.problem.split(",")[0] for one in bad} == {
        1: "it is no UTF-8 text: invalid start byte",
        2: "the transcript has 1048577 bytes",
        3: "it has no transcript",
    }
    assert source.notes["passed_over"] == 1
    with pytest.raises(SourceError, match=r"c\.txt: the transcript has 1048577 bytes.* --fields audio,path"):
        every(source)
    source = open_source(tmp_path, None, {}, parse_wish("audio"))[1]
    assert len(every(source)) == 4


def no_audio(root: Path) -> None:
    (root / "a").mkdir()
    (root / "a" / "x.txt").write_text("no clip")


def hollow(root: Path) -> None:
    wav(root / "a" / "x.wav")
    (root / "b").mkdir()


def with_images(root: Path) -> None:
    wav(root / "a" / "x.wav")
    png(root / "a" / "x.png")


NO_FOLDERS: dict[str, tuple[Callable[[Path], Any], str | None, str]] = {
    "no audio": (no_audio, "audiofolder", "class folder .*/a holds no clip"),
    "empty class": (hollow, None, "class folder .*/b holds no clip"),
    "two formats": (with_images, None, "fits the formats imagefolder and audiofolder"),
}


@pytest.mark.parametrize("case", NO_FOLDERS)
def test_a_folder_that_is_none_of_audio_is_told(case: str, tmp_path: Path) -> None:
    make, name, told = NO_FOLDERS[case]
    make(tmp_path)
    with pytest.raises((SourceError, UsageError), match=told):
        open_source(tmp_path, name, {}, Wish())


def test_what_no_sample_holds_is_not_even_read(tmp_path: Path) -> None:
    wav(tmp_path / "a" / "good.wav")
    with (tmp_path / "a" / "huge.wav").open("wb") as file:
        file.truncate(3 << 30)  # a hole: it takes no room on the disk
    source = opened(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bad: list[BadSample] = []
    assert len(rows_of(source, [0, 1], bad.append)) == 1
    assert "it has 3221225472 bytes, a sample holds up to" in bad[0].problem
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000
    shutil.rmtree(tmp_path / "a")
