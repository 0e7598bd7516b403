"""COCO and audio folders: formats/*/expected*.json, and every input that cannot be converted."""

import contextlib
import io
import json
import pickle
import resource
import sys
import wave

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import CASES, COCO, FORMATS, assert_error, bad_rows, files, image_bytes, kinds_of, opened, read, rows_of
from torchrun import run_python

from streamloader.conversion.api import convert
from streamloader.conversion.sources.fields import FieldSelection
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.media import audio_problem
from streamloader.errors import SourceError, UsageError

PNG = image_bytes()
CLIPS = sorted(path for path in (FORMATS / "audiofolder/input").rglob("[a-g].*") if path.suffix != ".txt")


def test_notes_have_class_names_and_the_number_of_unused_files():
    notes = opened(f"{FORMATS}/{COCO.format('instances')}").notes
    assert notes["classes"] == {"labels": ["person", "dog", "toothbrush"]}
    assert notes["category_ids"] == [1, 18, 90]
    assert notes["unknown_images"] == 1
    assert notes["annotations"] == "annotations/instances_train2017.json"
    assert notes["passed_over"] == 5  # the other split's images, and the other annotations
    people = opened(f"{FORMATS}/{COCO.format('person_keypoints')}").notes
    assert people["keypoints"] == {"person": ["nose", "left_eye", "right_eye"]}
    clips = CASES["audiofolder/input"].expected()
    notes = {"classes": {"label": clips["classes"]}, "passed_over": clips["passed_over"]}
    assert opened(FORMATS / "audiofolder/input").notes == notes


def test_the_files_are_those_that_it_is_made_of():
    paths = [info.path for info in opened(f"{FORMATS}/{COCO.format('captions')}").files]
    images = ["000000000007.png", "000000000139.jpg", "000000000285.jpg"]
    assert paths == ["annotations/captions_train2017.json", *(f"train2017/{name}" for name in images)]
    paths = [info.path for info in opened(FORMATS / "audiofolder/input").files]
    assert len(paths) == len(set(paths)) == 14


# COCO


def coco(root, document, name="annotations/instances_train.json"):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    text = document if isinstance(document, str) else json.dumps(document)
    (root / name).write_bytes(text.encode(errors="surrogateescape"))
    return root


def one_image(**changes):
    """A COCO document of one image and one annotation, changed."""
    image = {"id": 1, "file_name": "a.png", "width": 4, "height": 4, **changes.pop("image", {})}
    box = {"id": 5, "image_id": 1, "category_id": 3, "bbox": [0, 0, 1, 1], **changes.pop("annotation", {})}
    return {"images": [image], "annotations": [box], "categories": [{"id": 3, "name": "cat"}], **changes}


def test_coco_is_known_by_its_annotations_among_images(tmp_path):
    files({"train/a.png": PNG})(tmp_path)
    assert open_source(coco(tmp_path, one_image()), None, {}, FieldSelection())[0] == "coco"
    (tmp_path / "annotations" / "instances_train.json").rename(tmp_path / "train" / "_annotations.coco.json")
    (tmp_path / "annotations").rmdir()
    assert open_source(tmp_path, None, {}, FieldSelection())[0] == "coco"
    (tmp_path / "train" / "_annotations.coco.json").rename(tmp_path / "train" / "whatever.json")
    assert open_source(tmp_path, None, {}, FieldSelection())[0] == "imagefolder"
    assert opened(tmp_path, name="coco").num_samples == 1


def test_several_annotations_ask_for_a_choice():
    message = "holds 3 files of annotations: annotations/captions_.*choose one, like .*input::/annotations/captions_"
    assert_error(SourceError, message, FORMATS / "coco/input")
    with pytest.raises(SourceError, match=r"no file exists at .*input/annotations/other\.json"):
        opened(f"{FORMATS}/coco/input::/annotations/other.json")


SUB = ["train/sub/a.png", "train/other/a.png"]
PLACES = {
    "the split's folder": (["train/a.png", "val/a.png", "images/a.png"], "train/a.png"),
    "the split's folder somewhere": (["x/train/a.png", "x/val/a.png"], "x/train/a.png"),
    "beside the annotations": (["annotations/a.png", "val/a.png"], "annotations/a.png"),
    "the root": (["a.png", "images/a.png"], "a.png"),
    "images": (["images/a.png", "val/a.png"], "images/a.png"),
    "anywhere": (["deep/er/a.png"], "deep/er/a.png"),
    "not hidden": ([".thumbs/a.png", "deep/a.png"], "deep/a.png"),
    **{f"a path, {name}": (SUB, SUB[0], name) for name in ("sub/a.png", "./sub/a.png", "sub\\a.png")},
}


@pytest.mark.parametrize("case", PLACES)
def test_an_image_is_found_in_the_nearest_place(case, tmp_path):
    paths, wanted, *name = PLACES[case]
    for size, path in enumerate(paths, 3):
        files({path: image_bytes(size)})(tmp_path)
    source = opened(coco(tmp_path, one_image(image={"file_name": name[0] if name else "a.png"})))
    assert read(source)["image"] == [(tmp_path / wanted).read_bytes()]


def two(key, **both):
    document = one_image()
    document[key] = [document[key][0], {**document[key][0], **both}]
    return document


NO_COCO = {
    "no JSON": ('{"images": [', r"instances_train\.json is not valid JSON"),
    "too deep": ("[" * 200_000, "is not valid JSON"),
    "no UTF-8": ('{"images": "\udcff"}', "is not valid JSON"),
    "a list": ([], "is not a COCO file: it has no list 'images'"),
    "no annotations": ({"images": [{"id": 1}]}, "has no list 'annotations'"),
    "no images": (one_image(images=[]), "has no list 'images'"),
    "image is no object": (one_image(images=[7]), r"images\[0\] is a int"),
    "annotation is no object": (one_image(annotations=[None]), r"annotations\[0\] is a NoneType"),
    "image without id": (one_image(images=[{"file_name": "a.png"}]), r"images\[0\] has id None: expected a whole"),
    "image with a huge id": (one_image(image={"id": 2**70}), r"images\[0\] has id 1180591620717411303424"),
    "image with a true id": (one_image(image={"id": True}), r"images\[0\] has id True"),
    "two ids": (two("images", file_name="b.png"), r"images\[0\] and images\[1\] have one id, 1"),
    "two names": (two("images", id=2), r"images\[0\] and images\[1\] have one file_name, 'a.png'"),
    "two categories": (two("categories", name="dog"), r"categories\[0\] and categories\[1\] have one id, 3"),
    "no image is there": (one_image(image={"file_name": "b.png"}), r"none of the 1 images .* such as 'b\.png'"),
    "no climbing": (one_image(image={"file_name": "../train/a.png"}), "none of the 1 images"),
    "too many points": (one_image(annotation={"keypoints": [0] * 6000}), "has 2000 keypoints, up to 1000"),
}


@pytest.mark.parametrize("case", NO_COCO)
def test_a_file_that_is_not_coco_is_an_error(case, tmp_path):
    document, message = NO_COCO[case]
    files({"train/a.png": PNG})(tmp_path)
    assert_error(SourceError, message, coco(tmp_path, document))


BAD_IMAGES = {  # what is wrong with its entry, its annotation
    "missing": ({"file_name": "b.png"}, {}, "its file does not exist"),
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
    "infinite polygon": ({}, {"segmentation": [[float("inf")]]}, r"has segmentation \[\[inf\]\]: expected numbers"),
}


@pytest.mark.parametrize("case", BAD_IMAGES)
def test_a_bad_image_is_reported_and_left_out(case, tmp_path):
    entry, annotation, message = BAD_IMAGES[case]
    paths = ("train/a.png", "train/good.png", "x/two.png", "y/two.png")
    files({"train/text.png": b"text", **dict.fromkeys(paths, image_bytes())})(tmp_path)
    whole = {"area": 1.5, "iscrowd": 0, "segmentation": [[0, 0, 1, 1, 0, 1]], "keypoints": [0, 0, 1, 2, 2, 2]}
    good = {"id": 0, "file_name": "good.png", "width": 4, "height": 4}
    document = one_image(image=entry, annotation={**whole, **annotation})
    document["images"].append(good)
    document["annotations"].insert(0, {**whole, "id": 9, "image_id": 0, "category_id": 3, "bbox": [0, 0, 2, 2]})
    source = opened(coco(tmp_path, document))
    (left,), bad = bad_rows(source)
    assert left["image_id"] == 0
    assert left["boxes"] == [[0, 0, 2, 2]]
    assert [one.position for one in bad] == [1]
    assert_error(SourceError, message, source)
    report = convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", workers=0, on_error="skip")
    assert report.num_samples == report.num_left_out == 1


def test_only_selected_fields_are_read(tmp_path):
    """Without the field `image` the images need not even be there."""
    document = one_image(annotation={"segmentation": [[0.5]], "area": 2})
    source = opened(coco(tmp_path, document), "boxes=ragged:float64[4],labels", "coco")
    assert kinds_of(source) == {"boxes": "ragged:float64[4]", "labels": "ragged:int64"}
    assert rows_of(source) == [{"boxes": [[0, 0, 1, 1]], "labels": [0]}]


def test_text_that_utf8_cannot_write_is_escaped(tmp_path):
    files({"a.png": PNG})(tmp_path)
    document = one_image(annotation={"caption": "half \ud83d", "segmentation": None})
    document["categories"][0]["name"] = "\udcff"
    source = opened(coco(tmp_path, document))
    (found,) = rows_of(source)
    assert json.loads(found["captions"]) == ["half \ud83d"]
    assert found["segmentation"] == "[null]"
    assert source.notes["classes"] == {"labels": ["?"]}
    convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", workers=0)


def test_points_that_are_missing_are_not_labelled(tmp_path):
    files({"a.png": PNG})(tmp_path)
    document = one_image(annotation={"keypoints": [1, 2, 2]})
    first = document["annotations"][0]
    missing = {key: value for key, value in first.items() if key != "keypoints"}
    document["annotations"] += [{**first, "keypoints": []}, missing]
    (found,) = rows_of(opened(coco(tmp_path, document)))
    assert found["keypoints"] == [[[1, 2, 2]], [[0, 0, 0]], [[0, 0, 0]]]


def test_a_part_holds_the_annotations_of_its_rows_only(tmp_path):
    count = 300
    files({f"images/{number}.png": PNG for number in range(count)})(tmp_path)
    images = [{"id": number, "file_name": f"{number}.png"} for number in range(count)]
    boxes = [{"id": i, "image_id": i % count, "bbox": [i, 0, 1, 1], "segmentation": [[i] * 50]} for i in range(3000)]
    source = opened(coco(tmp_path, {"images": images, "annotations": boxes}))
    assert len(pickle.dumps(source.fragment(np.arange(3)))) < len(pickle.dumps(source.fragment(np.arange(count)))) / 30
    (found,) = rows_of(source, [7])
    assert [box[0] for box in found["boxes"]] == list(range(7, 3000, count))


OPENED = """
import resource, sys
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.fields import FieldSelection
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
open_source(sys.argv[1], "coco", {}, FieldSelection())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long
def test_annotations_are_parsed_in_a_few_times_their_size(tmp_path):
    files({"a.png": PNG})(tmp_path)
    box = {"id": "ID", "image_id": 1, "bbox": [0, 0, 1, 1], "segmentation": [[round(i * 0.37, 2) for i in range(60)]]}
    boxes = ",".join(json.dumps(box).replace('"ID"', str(i)) for i in range(60_000))
    text = f'{{"images": [{{"id": 1, "file_name": "a.png"}}], "annotations": [{boxes}]}}'
    assert len(text) > 20e6
    assert int(run_python("-c", OPENED, coco(tmp_path, text)).stdout) * 1024 < 6 * len(text) + 32e6


# audio


with io.BytesIO() as out, wave.open(out, "wb") as file:
    file.setparams((1, 2, 8000, 100, "NONE", ""))
    file.writeframes(np.arange(100, dtype="<i2").tobytes())
    WAV = out.getvalue()


@pytest.mark.parametrize("path", CLIPS, ids=lambda path: path.name)
def test_a_clip_of_every_kind_is_known_by_its_first_bytes(path):
    data = path.read_bytes()
    for front in (b"", b"ID3\x04\x00\x00\x00\x00\x01\x00" + bytes(128)):
        assert audio_problem(front + data) == ""
    assert "no known audio header" in audio_problem(data[1:])


@pytest.mark.parametrize("path", CLIPS, ids=lambda path: path.name)
@given(changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=6), cut=st.integers(0, 5000))
@settings(max_examples=100)
def test_no_bytes_break_the_test_of_a_clip(path, changes, cut):
    data = bytearray(path.read_bytes()[:cut])
    for at, value in changes:
        data[at : at + 1] = bytes([value])
    assert isinstance(audio_problem(bytes(data)), str)


def clip(name):
    return next(path for path in CLIPS if path.suffix.lower() == name).read_bytes()


@pytest.mark.parametrize("kind", [".flac", ".ogg", ".opus"])
def test_soundfile_decodes_where_it_is_installed(kind):
    pytest.importorskip("soundfile")
    assert audio_problem(clip(kind)) == ""
    assert audio_problem(clip(kind)[: len(clip(kind)) // 2])


class _Decoder:
    """The part of soundfile that is used: clips of 10 frames, of which `frames` can be read."""

    class LibsndfileError(RuntimeError):
        def __init__(self, code):
            super().__init__(f"error {code}")
            self.code = code

    def __init__(self, frames=10, error=0):
        self.frames, self._read, self._error = 10, frames, error

    def SoundFile(self, _file):
        if self._error:
            raise self.LibsndfileError(self._error)
        return contextlib.nullcontext(self)

    def blocks(self, _size, dtype):
        return iter([np.zeros(self._read, dtype)])


DECODERS = [
    (_Decoder(), ""),
    (_Decoder(frames=7), "it ends after 7 of 10 frames: it is truncated"),
    (_Decoder(error=1), ""),  # a kind that libsndfile does not know
    (_Decoder(error=2), "error 2"),
]


@pytest.mark.parametrize(("decoder", "problem"), DECODERS)
def test_a_decoder_finds_what_the_first_bytes_do_not_show(decoder, problem, monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", decoder)
    assert audio_problem(clip(".flac")) == problem


BAD_CLIPS = {
    "empty": (b"", "its 0 bytes have no known audio header"),
    "an image": (PNG, "have no known audio header"),
    "half a header": (b"RIFF\x00", "have no known audio header"),
}


@pytest.mark.parametrize("case", BAD_CLIPS)
def test_a_bad_clip_is_reported_and_left_out(case, tmp_path):
    data, message = BAD_CLIPS[case]
    files({"a/good.wav": WAV, "a/bad.mp3": data})(tmp_path)
    source = opened(tmp_path)
    good, bad = bad_rows(source)
    assert len(good) == 1
    assert [(one.position, one.data) for one in bad] == [(0, data)]
    assert_error(SourceError, f"a/bad.mp3: the clip cannot be decoded: .*{message}", source)


def test_clips_in_one_folder_have_their_path(tmp_path):
    files({"b.wav": WAV, "a b.WAV": WAV, "notes.md": b"no clip", "artwork/": b""})(tmp_path)
    source = opened(tmp_path)
    assert kinds_of(source) == {"audio": "bytes:wav", "path": "text"}
    assert [row["path"] for row in rows_of(source)] == ["a b.WAV", "b.wav"]
    assert source.notes == {"passed_over": 1}


def test_a_missing_or_unreadable_transcript_is_a_bad_sample(tmp_path):
    files({f"{name}.wav": WAV for name in "abcd"})(tmp_path)
    assert "text" not in opened(tmp_path).fields
    texts = {"a.txt": b"good\n", "b.TXT": b"\xff", "c.txt": b"x" * ((1 << 20) + 1), "other.txt": b"of no clip"}
    files(texts)(tmp_path)
    source = opened(tmp_path)
    good, bad = bad_rows(source)
    assert [row["text"] for row in good] == ["good\n"]
    assert {one.position: one.problem.split(",")[0] for one in bad} == {
        1: "the transcript cannot be decoded: it is not UTF-8: invalid start byte at byte 0",
        2: "the transcript has 1048577 bytes",
        3: "it has no transcript",
    }
    assert source.notes["passed_over"] == 1
    assert_error(SourceError, r"d\.wav: it has no transcript.*fields=.audio,path", source)
    assert len(rows_of(opened(tmp_path, "audio"))) == 4


NO_FOLDERS = {
    "no audio": ({"a/x.txt": b"no clip"}, "audiofolder", "class folder .*/a holds no clip"),
    "empty class": ({"a/x.wav": WAV, "b/": b""}, None, "class folder .*/b holds no clip"),
    "two formats": ({"a/x.wav": WAV, "a/x.png": PNG}, None, "formats imagefolder and audiofolder"),
}


@pytest.mark.parametrize("case", NO_FOLDERS)
def test_a_folder_that_does_not_hold_audio_is_an_error(case, tmp_path):
    contents, name, message = NO_FOLDERS[case]
    files(contents)(tmp_path)
    assert_error((SourceError, UsageError), message, tmp_path, name=name)


def test_a_file_too_large_for_a_sample_is_not_read(tmp_path):
    files({"a/good.wav": WAV})(tmp_path)
    with (tmp_path / "a" / "huge.wav").open("wb") as file:
        file.truncate(3 << 30)  # a hole: it takes no room on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    good, bad = bad_rows(opened(tmp_path))
    assert len(good) == 1
    assert "the clip has 3221225472 bytes, a sample holds up to" in bad[0].problem
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000
