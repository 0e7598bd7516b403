"""Options of a conversion: fields, functions, re-encoded images, order, bad samples."""

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from amounts import examples
from commands import run
from conversions import SMALL, Exported, contents, interrupted, module_at, write_photos
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps
from sources import kinds_of

import streamloader as sl
from streamloader.conversion import job, shard_task
from streamloader.conversion.api import convert
from streamloader.conversion.row_order import SampleRows
from streamloader.conversion.sources.fields import parse_selection
from streamloader.conversion.sources.objects import Encoded, keep_encoded
from streamloader.conversion.transforms import parse_map, parse_recode
from streamloader.errors import DecodeError, DestinationError, FieldError, SourceError, StreamloaderError, UsageError
from streamloader.format import dataset
from streamloader.format.manifest import Field
from streamloader.format.writer import Writer
from streamloader.maintenance.verify import verify
from streamloader.options import Decode
from streamloader.pytorch.dataset import StreamingDataset
from streamloader.storage import open_store

ROWS = 500


@pytest.fixture
def arrays(tmp_path):
    """A folder of arrays, 500 rows each."""
    folder = tmp_path / "arrays"
    folder.mkdir()
    rng = np.random.default_rng(1)
    np.save(folder / "n.npy", np.arange(ROWS))
    np.save(folder / "x.npy", rng.random((ROWS, 40)))
    return folder


@pytest.fixture
def photos(tmp_path):
    """40 images in two classes, of which two cannot be decoded."""
    return write_photos(tmp_path / "photos", {"ant": 20, "bee": 20}, lambda i: (30 + i, 40), "{:02}.png")


def spoil(photos, *names):
    for name in names:
        (photos / name).write_bytes(b"no image")


def made(src, tmp_path, **options):
    convert(src, tmp_path / "out", workers=0, **options)
    return dataset.open(tmp_path / "out")


# --- fields


def test_fields_are_chosen_and_typed(arrays, tmp_path):
    ds = made(arrays, tmp_path, fields="x=ragged:float32,n=int16")
    assert kinds_of(ds) == {"n": "int16", "x": "ragged:float32"}
    assert np.array_equal(ds[7]["x"], np.load(arrays / "x.npy")[7].astype(np.float32))
    assert ds.read("n", 0, ROWS).tolist() == list(range(ROWS))


def test_fields_are_parsed_in_every_form():
    wanted = {"image": None, "x": Field.parse("float32[3,4]"), "t": Field.parse("ragged:int32[2]")}
    assert parse_selection("image, x=float32[3,4],t=ragged:int32[2]").fields == wanted
    assert parse_selection(["image", "x=float32[3,4]", "t=ragged:int32[2]"]).fields == wanted
    assert parse_selection({"image": None, "x": "float32[3,4]", "t": Field.parse("ragged:int32[2]")}).fields == wanted
    assert not parse_selection(None).fields


BAD_OPTIONS = {
    "unknown field": ({"fields": "y"}, "has no field 'y'; it has n, x"),
    "unknown type": ({"fields": "n=int7"}, "int7"),
    "twice": ({"fields": "n,n"}, "'n' is named twice"),
    "another kind": ({"fields": "n=text"}, "cannot become text"),
    "another shape": ({"fields": "x=float32[3]"}, r"cannot become float32\[3\]"),
    "does not hold": ({"fields": "n=int8"}, "does not hold"),
    "no images": ({"resize": 20}, "has no images"),
    "no size": ({"resize": "big"}, "resize='big'"),
    "no quality": ({"quality": 0}, "quality=0"),
    "no such module": ({"map": "nowhere:f"}, "cannot be imported"),
    "no such function": ({"map": "os:nothing"}, "cannot be imported"),
    "no function": ({"map": "os:sep"}, "is a str"),
    "no colon": ({"map": "os"}, "module:function"),
    "batch without map": ({"map_batch": 3}, "map_batch without map"),
    "key without map": ({"cache_key": "v2"}, "cache_key without map"),
    "no text as key": ({"map": dict, "cache_key": 2}, "cache_key=2"),
    "no batch": ({"map": dict, "map_batch": 0}, "map_batch=0"),
    "negative seed": ({"shuffle": -1}, "shuffle=-1"),
    "unknown on_error": ({"on_error": "ignore"}, "raise, skip, quarantine"),
    "overwrite and resume": ({"overwrite": True, "resume": True}, "give one of them"),
    "negative workers": ({"workers": -1}, "workers=-1"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_an_invalid_option_is_an_error_before_anything_is_finished(case, arrays, tmp_path):
    options, message = BAD_OPTIONS[case]
    with pytest.raises((UsageError, SourceError), match=message):
        convert(arrays, tmp_path / "out", **{"workers": 0, **options})
    assert not (tmp_path / "out" / "zarr.json").exists()


# --- a function


def doubled(sample):
    return {"n": sample["n"] * 2, "name": f"number {sample['n']}", "nested": {"first": sample["x"][0]}}


def first_of_x(sample):
    return {"x": sample["x"][0]}


def halves(batch):
    assert len(batch["n"]) <= 64
    x = Exported(batch["x"][:, :20])  # as any library may give it
    return {"x": x, "parts": [row[: n % 5] for row, n in zip(batch["x"], batch["n"], strict=True)]}


def fails_at_7(sample):
    return {"n": 1 / (int(sample["n"]) - 7)}


def fails_in_batch(batch):
    if 7 in batch["n"]:
        raise ValueError("seven")
    return {"n": batch["n"]}


def too_few(batch):
    return {"n": batch["n"][1:]}


def test_a_function_makes_each_sample(arrays, tmp_path):
    ds = made(arrays, tmp_path, map=doubled)
    assert kinds_of(ds) == {"n": "int64", "name": "text", "nested_first": "float64"}
    assert ds[9] == {"n": 18, "name": "number 9", "nested_first": np.load(arrays / "x.npy")[9, 0]}
    assert ds.manifest.provenance["map"]["function"] == "test_convert_options:doubled"


def test_a_function_makes_batches_and_fields_are_chosen_of_what_it_makes(arrays, tmp_path):
    ds = made(arrays, tmp_path, map=halves, map_batch=64, fields="parts,x=float32[20]")
    assert str(ds.fields["parts"]) == "ragged:float64"
    assert str(ds.fields["x"]) == "float32[20]"
    source = np.load(arrays / "x.npy")
    assert np.array_equal(ds[14]["parts"], source[14, :4])
    assert np.array_equal(ds.read("x", 0, ROWS), source[:, :20].astype(np.float32))


@pytest.mark.long
def test_a_module_in_the_working_directory_is_found_also_by_workers(arrays, tmp_path, monkeypatch):
    (tmp_path / "my_own_map.py").write_text("def f(sample):\n    return {'m': sample['n'] + 1}\n")
    monkeypatch.chdir(tmp_path)
    convert(arrays, tmp_path / "out", map="my_own_map:f", workers=2)
    assert dataset.open(tmp_path / "out").read("m", 0, 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize(("function", "batch"), [(fails_at_7, None), (fails_in_batch, 10)])
def test_a_sample_that_a_function_fails_for_is_named_alone(function, batch, arrays, tmp_path):
    with pytest.raises(SourceError, match=r"row 7 of the source: the map function failed: (ZeroDivision|Value)Error"):
        convert(arrays, tmp_path / "out", map=function, map_batch=batch, workers=0)
    ds = made(arrays, tmp_path, map=function, map_batch=batch, on_error="skip")
    assert len(ds) == ROWS - 1


def test_a_batch_of_another_length_is_an_error(arrays, tmp_path):
    with pytest.raises(SourceError, match=r"row 0: .*it returned \{'n': 0\} for 1 samples"):
        convert(arrays, tmp_path / "out", map=too_few, map_batch=10, workers=0)


def spread(sample, by):
    return {"x": sample["x"] * by}


def spread_a_little(sample, by):
    return {"x": sample["x"] * by}


USER = """
import operator
from functools import partial

OFFSET = 1

def helper(n):
    return n + OFFSET

def f(sample, factor=2):
    return {"n": helper(sample["n"]) * factor}

def scaled(by):
    return lambda sample: {"n": sample["n"] * by}

class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, sample):
        return {"n": sample["n"] * self.by}

exec("def g(sample): return sample")
"""
# a function of that module, what replaces a text there, and whether it is another function then
CHANGES = {
    "its source": ("f", ("* factor", "/ factor"), True),
    "a default": ("f", ("factor=2", "factor=3"), True),
    "another place": ("f", ("import operator", "import operator\n\n"), False),
    "a helper": ("f", ("n + OFFSET", "n - OFFSET"), False),
    "a global": ("f", ("OFFSET = 1", "OFFSET = 2"), False),
    "the source of a closure": ("scaled(2)", ('"n": sample', '"m": sample'), True),
    "the function of a partial": ("partial(partial(f), factor=3)", ("* factor", "/ factor"), True),
    "the class of an object": ("Scale(2)", ("* self.by", "+ self.by"), True),
    "a method": ("Scale(2).__call__", ("* self.by", "+ self.by"), True),
    "the module of a function without source": ("g", ("return sample", "return dict(sample)"), True),
    "the module of an object of a package": ("operator.itemgetter('n')", ("OFFSET = 1", "OFFSET = 2"), False),
    "the module of a method in C": ("{'n': 1}.get", ("OFFSET = 1", "OFFSET = 2"), False),
}


def options_of(function, **options):
    return parse_map(function, None, **options).options()


@pytest.mark.parametrize("case", CHANGES)
def test_a_function_with_another_source_is_another_one(case, tmp_path, monkeypatch):
    shown, replaced, other = CHANGES[case]
    found = []
    for text in (USER, USER.replace(*replaced)):
        path = tmp_path / str(len(found)) / "module_of_a_user.py"
        path.parent.mkdir()
        path.write_text(text)
        monkeypatch.setitem(sys.modules, path.stem, module_at(path))
        found.append(options_of(eval(shown, vars(sys.modules[path.stem]))))
    assert (found[0] != found[1]) == other


def test_a_function_is_known_by_its_source_and_its_key_not_by_what_it_holds():
    first, second = (functools.partial(spread, by=by) for by in (2, 3))
    assert options_of(first) == options_of(second)
    assert options_of(first) != options_of(functools.partial(spread_a_little, by=2))
    assert options_of(first, cache_key="2") != options_of(second, cache_key="3")
    assert options_of(first)["function"] == "test_convert_options:spread"


def test_a_job_resumes_with_a_function_that_holds_a_lock(arrays, tmp_path):
    lock = threading.Lock()

    def locked(sample):
        with lock:
            return {"x": sample["x"]}

    interrupted(arrays, tmp_path / "out", 2, map=locked)
    assert convert(arrays, tmp_path / "out", map=locked, layout=SMALL, workers=0).shards_kept == 2


def test_the_command_has_the_key_of_a_function(arrays, tmp_path, capsys):
    command = ("convert", arrays, tmp_path / "out", "--map", "test_convert_options:doubled", "--workers", 0, "--quiet")
    assert run(capsys, *command, "--cache-key", "v1")[0] == 0
    assert run(capsys, *command, "--cache-key", "v1", "--resume")[0] == 0
    status, _, message = run(capsys, *command, "--cache-key", "v2", "--resume")
    assert status == 2 and ": map.cache_key differ" in message


# what another option is called where the conversion is unfinished, and where it is finished
OTHER_OPTIONS = {
    "the key of what the function uses": (
        {"cache_key": "4"},
        "map.cache_key is '2' there and '4' here",
        "map.cache_key",
    ),
    "the function": (
        {"map": doubled},
        r"map\.function is 'test_convert_options:spread' there and .*; map\.source is '\w{16}' there",
        "map.function, map.source",
    ),
    "its batch": ({"map_batch": 10}, "map.batch is None there and 10 here", "map.batch"),
    "the shards": ({"layout": replace(SMALL, shard_size=2048)}, "shard_size is 4096 there", "samples_per_shard"),
    "what is decoded": ({"raw": True}, "raw is None there and True here", ": raw"),
    "the codec": ({"layout": replace(SMALL, codec="zstd")}, "codec is 'auto' there and 'zstd' here", "x.codec"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", OTHER_OPTIONS)
def test_other_options_neither_resume_nor_accept_what_is_there(case, arrays, tmp_path):
    options = {"map": functools.partial(spread, by=2), "cache_key": "2", "layout": SMALL, "workers": 0}
    changes, unfinished, finished = OTHER_OPTIONS[case]
    others, out = options | changes, tmp_path / "out"
    interrupted(arrays, out, 2, **options)
    for resume, message in ((False, f"{unfinished}.*overwrite=True"), (True, f"{finished} differ")):
        before = contents(out)
        with pytest.raises(DestinationError, match=message):
            convert(arrays, out, resume=resume, **others)
        assert contents(out) == before
        report = convert(arrays, out, resume=resume, **options)
        assert report.shards_kept == (report.shards if resume else 2)
    convert(arrays, out, overwrite=True, **others)
    convert(arrays, tmp_path / "whole", **others)
    assert contents(out) == contents(tmp_path / "whole")


# --- objects in memory


def counting(to=5):
    yield from ({"n": n, "text": f"{n}"} for n in range(to))


@pytest.mark.parametrize("given", [counting, functools.partial(counting, to=5), counting()])
def test_a_generator_function_is_taken_for_what_it_yields(given, tmp_path):
    assert convert(given, tmp_path / "out").num_samples == 5
    assert dataset.open(tmp_path / "out")[3] == {"n": 3, "text": "3"}


def test_a_generator_function_with_arguments_is_an_error(tmp_path):
    def needing(path):
        yield len(path)

    message = r"the generator function needing cannot be called .*'path'; .*functools.partial"
    with pytest.raises(UsageError, match=message):
        convert(needing, tmp_path / "out")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dict_of_arrays_is_a_source(workers, tmp_path):
    rng = np.random.default_rng(0)
    given = {
        "Image": rng.integers(0, 256, (300, 4, 5), np.uint8),
        "swapped": np.arange(300, dtype=">i4"),
        "x": torch.arange(300, dtype=torch.float32).reshape(300, 1),
        "flag": np.arange(300) % 2 == 0,
    }
    report = convert(given, tmp_path / "out", layout=SMALL, workers=workers)
    assert report.manifests[""].provenance["keys"] == {"image": "Image"}
    ds = dataset.open(tmp_path / "out")
    assert kinds_of(ds) == {"image": "uint8[4,5]", "swapped": "int32", "x": "float32[1]", "flag": "bool"}
    for key, column in given.items():
        assert np.array_equal(ds.read(key.lower(), 0, 300), np.asarray(column))
    assert convert(given, tmp_path / "out", layout=SMALL, workers=workers, resume=True).shards_kept == report.shards
    with pytest.raises(DestinationError, match=r"source\.digest.* differ"):
        convert(given | {"x": np.zeros((300, 1), np.float32)}, tmp_path / "out", layout=SMALL, workers=0, resume=True)


def test_a_dict_of_columns_may_hold_texts_and_lists(tmp_path):
    texts = np.array(["a", "bb", "c"])
    given = {"name": ["a", "b", "c"], "tokens": [[1], [2, 3], []], "n": np.arange(3), "texts": texts}
    convert(given, tmp_path / "out", workers=0)
    ds = dataset.open(tmp_path / "out")
    assert ds[1]["name"] == "b" and ds[1]["tokens"].tolist() == [2, 3] and ds[2]["n"] == 2 and ds[1]["texts"] == "bb"


def test_errors_name_options_for_python_and_for_the_command(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.arange(3))
    convert(tmp_path / "x.npy", tmp_path / "out", workers=0)
    with pytest.raises(
        DestinationError, match=r"resume=True \(--resume\) .*, or give overwrite=True \(--overwrite\)"
    ) as error:
        convert(tmp_path / "x.npy", tmp_path / "out", workers=0)
    shown = run(capsys, "convert", tmp_path / "x.npy", tmp_path / "out", "--quiet")[2]
    assert shown == f"error: {error.value}\n"


def test_columns_of_a_table_are_read_by_position(tmp_path):
    table = pandas.DataFrame({"x": ["-", "a", "b"]}).iloc[1:]  # its labels are 1 and 2
    with pytest.raises(UsageError, match=r"DataFrame has columns, not samples; give \{name: frame\[name\] for"):
        convert(table, tmp_path / "out", workers=0)
    convert({name: table[name] for name in table.columns}, tmp_path / "out", workers=0)
    assert [sample["x"] for sample in dataset.open(tmp_path / "out")] == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": np.array(3)}, "the dict's entry 'x' is a value of type ndarray; give names as text"),
        ({1: np.zeros(3)}, "the dict's entry 1 is a value of type ndarray; give names as text"),
        ({"x": {"a": [1]}}, "the dict's entry 'x' is a value of type dict"),
        ({"x": 1}, r"the dict's entry 'x' is a value of type int; .* an array or list"),
        ({"a": [1, 2], "b": [1, 2, 3]}, r"different lengths: \{'a': 2, 'b': 3\}; give one value of each"),
        (lambda: iter([{"x": 1}]), r"builtins.function has no samples to convert; .* a generator function"),
        ({"x": np.zeros(2, "M8[s]")}, r"holds datetime64\[s\]; store times as whole numbers, values.astype\('int64'\)"),
    ],
)
def test_other_dicts_are_errors(given, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        convert(given, tmp_path / "out", workers=0)


@pytest.mark.long
def test_a_script_needs_no_guard_of_its_main_module(tmp_path):
    (tmp_path / "script.py").write_text(
        "import numpy as np, streamloader as sl\n"
        "print('begun')\n"
        "print(sl.convert({'x': np.arange(9)}, 'out', workers=2).num_samples)\n"
        "def f(sample): return sample\n"
        "try:\n    sl.convert({'x': np.arange(9)}, 'other', map=f, workers=2)\n"
        "except sl.errors.UsageError as error:\n    print(error)\n"
    )
    command = [sys.executable, "script.py"]
    begun, count, message = subprocess.check_output(command, cwd=tmp_path, text=True).splitlines()
    assert (begun, count) == ("begun", "9")
    assert "f is defined in the program that runs, __main__; define its" in message and "workers=0" in message


@pytest.mark.long
def test_a_function_of_a_notebook_is_told_to_move_to_a_file(tmp_path):
    script = (
        "import numpy as np, streamloader as sl\n"
        "def f(sample): return sample\n"
        "for call in (\n"
        "    lambda: sl.convert({'x': np.arange(9)}, 'out', map=f, workers=2),\n"
        "    lambda: sl.convert({'x': np.arange(9)}, 'out', workers=0),\n"
        "    lambda: next(iter(sl.StreamingDataset('out', batch_size=2, transform=f, num_workers=1))),\n"
        "):\n"
        "    try:\n        call()\n"
        "    except sl.errors.UsageError as error:\n        print(error)\n"
    )
    messages = subprocess.check_output([sys.executable, "-c", script], cwd=tmp_path, text=True).splitlines()
    assert len(messages) == 2
    for message, argument in zip(messages, ("workers=0", "num_workers=0"), strict=True):
        assert re.search(f"defined in a notebook or an interactive session.*a module, a .py file.* {argument}", message)
        assert "__main__" not in message


@pytest.mark.parametrize("header", [b"RIFF\0\0\0\0WAVEfmt ", b"fLaC\0\0\0\0", b"OggS\0\0\0\0", b"ID3\0\0\0\0\0"])
def test_audio_that_is_taken_for_images_is_called_audio(header, tmp_path):
    with Writer(tmp_path / "clips", {"audio": "bytes:mixed"}) as out:
        out.write({"audio": header + bytes(100)})
    with pytest.raises(DecodeError, match="it is audio: leave decode= out, or name the fields of images"):
        next(iter(StreamingDataset(tmp_path / "clips", batch_size=1, decode=True)))
    for suffix in ("wav", "flac"):
        (tmp_path / "folder" / "bird").mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / "bird" / f"it.{suffix}").write_bytes(b"RIFF\0\0\0\0WAVEfmt " + bytes(100))
    with pytest.raises(SourceError, match=r"it is audio: leave resize= and quality= out, or leave such samples out"):
        convert(tmp_path / "folder", tmp_path / "out", resize=64, workers=0)


# --- images


def opened(data):
    return Image.open(io.BytesIO(data))


@pytest.mark.quick(2)
@pytest.mark.parametrize(("resize", "size"), [(20, (27, 20)), ("20x10", (10, 20)), ((20, 10), (10, 20)), (1000, None)])
def test_images_are_resized_and_keep_their_format(resize, size, photos, tmp_path):
    ds = made(photos, tmp_path, resize=resize)
    image = opened(ds[0]["image"])
    assert image.format == "PNG"
    assert image.size == (size or (40, 30))
    assert str(ds.fields["image"]) == "bytes:png"


def test_a_quality_makes_every_image_a_jpeg(photos, tmp_path):
    Image.new("L", (9, 9)).save(photos / "ant" / "grey.gif")
    Image.new("RGBA", (5, 6)).save(photos / "ant" / "clear.png")
    ds = made(photos, tmp_path, quality=80)
    assert str(ds.fields["image"]) == "bytes:jpeg"
    assert {opened(image).format for image in ds.read("image", 0, 42)} == {"JPEG"}


TURNED = [
    ({}, (400, 200)),
    ({"quality": 90}, (200, 400)),
    ({"resize": 100}, (100, 200)),
    ({"resize": "300x200"}, (200, 300)),
]


@pytest.mark.parametrize(("options", "size"), TURNED)
def test_a_photograph_has_one_orientation_however_it_comes(options, size, tmp_path, capsys):
    (tmp_path / "photos" / "a").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # the left side of the stored image is the top
    path = tmp_path / "photos" / "a" / "x.jpg"
    stored = Image.linear_gradient("L").rotate(90).resize((400, 200)).convert("RGB")  # dark on the left
    stored.save(path, exif=exif)
    data = made(tmp_path / "photos", tmp_path, **options)[0]["image"]
    assert opened(data).size == size
    assert (data == path.read_bytes()) is not bool(options)
    assert (opened(data).getexif().get(0x0112, 1) == 6) is not bool(options), "kept, or applied and dropped"
    (batch,) = StreamingDataset(tmp_path / "out", batch_size=1, decode=Decode(size=(40, 20)))
    upright = batch["image"][0, :, :, 0].numpy().astype(int)
    assert np.abs(upright - np.linspace(0, 255, 40)[:, None]).max() < 12, "dark above"
    shown = run(capsys, "inspect", tmp_path / "out")[1]
    assert f"EXIF orientation of image: {'applied by the conversion' if options else 'stored, applied by'}" in shown


def test_a_turned_photograph_is_reduced_for_the_size_that_it_gets():
    noise = np.random.default_rng(0).integers(0, 256, (400, 800, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = io.BytesIO(), io.BytesIO()
    Image.fromarray(np.rot90(noise, -1)).save(plain, "JPEG", quality=95)
    Image.fromarray(noise).save(turned, "JPEG", quality=95, exif=exif)
    recode = parse_recode((100, 400), None)
    one, other = (np.asarray(opened(recode.image(out.getvalue())), int) for out in (plain, turned))
    assert one.shape == other.shape == (100, 400, 3)
    assert abs(one.std() - other.std()) < 2, "detail is not lost by reducing too far"


@pytest.mark.parametrize("turn", range(2, 9))
def test_a_turned_photograph_of_an_odd_size_is_not_moved_when_it_is_reduced(turn):
    """The oracle is the same file without its tag, turned after it is resized at full size."""
    pixels = np.zeros((601, 603, 3), np.uint8)
    pixels[300:340, 200:240] = 255
    exif = Image.Exif()
    exif[0x0112] = turn
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=95, exif=exif)
    small = np.asarray(opened(parse_recode((64, 64), None).image(out.getvalue())).convert("L"), float)
    upright = np.asarray(ImageOps.exif_transpose(opened(out.getvalue())).convert("L"), float)
    for axis in (0, 1):
        centres = [(np.arange(len(p)) + 0.5) @ p / p.sum() / len(p) * 64 for p in (small.sum(axis), upright.sum(axis))]
        assert abs(centres[0] - centres[1]) < 0.1


@pytest.mark.parametrize(("options", "expected"), [({"quality": 100}, 128), ({"resize": 4}, 32768)])
def test_16_bits_of_grey_are_scaled_to_a_jpeg_and_kept_in_a_png(options, expected, tmp_path):
    (tmp_path / "photos" / "a").mkdir(parents=True)
    Image.fromarray(np.full((8, 8), 32768, np.uint16)).save(tmp_path / "photos" / "a" / "x.png")
    assert np.asarray(opened(made(tmp_path / "photos", tmp_path, **options)[0]["image"])).min() == expected


MODES = ["1", "L", "LA", "La", "I", "I;16", "I;16B", "F", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX"]


@pytest.mark.quick(5)
@pytest.mark.parametrize("mode", [*MODES, "CMYK", "YCbCr", "LAB", "HSV"])
def test_an_image_object_of_any_mode_keeps_its_colour(mode, tmp_path):
    colour = Image.new("RGB", (4, 4), (204, 51, 102))  # in the palette of mode P
    if mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(colour, srgb, lab, outputMode="LAB")
    elif mode in ("I;16", "I;16B", "F"):
        scale = 1 / 255 if mode == "F" else 257
        values = np.full((4, 4), 103 * scale, "f4" if mode == "F" else ">u2" if mode == "I;16B" else "u2")
        image = Image.frombytes(mode, (4, 4), values.tobytes())
    else:
        via = {"La": "LA", "RGBa": "RGBA", "PA": "P"}.get(mode, "RGB")
        image = Image.new("I", (4, 4), 103) if mode == "I" else colour.convert(via).convert(mode)
    convert([{"image": image}, {"image": colour}], tmp_path / "out", workers=0)
    ds = StreamingDataset(tmp_path / "out", batch_size=2, decode=True, shuffle=False)
    assert str(ds.fields["image"]) in ("bytes:png", "bytes:mixed")
    first, second = next(iter(ds))["image"].numpy()[:, 0, 0].astype(int)
    grey = [0 if mode == "1" else 103] * 3
    expected = grey if mode[0] in "1IFL" and mode != "LAB" else [204, 51, 102]
    assert np.abs(first - expected).max() <= 3
    assert second.tolist() == [204, 51, 102]


def test_an_image_object_that_cannot_be_stored_is_a_bad_sample(tmp_path):
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, "PNG")
    cut = opened(whole.getvalue()[:900])
    samples = [{"image": Image.new("L", (3, 3))}, {"image": cut}, {"image": Image.new("L", (0, 3))}]
    report = convert(samples, tmp_path / "out", workers=0, on_error="skip")
    assert (report.num_samples, report.num_left_out) == (1, 2)
    with pytest.raises(SourceError, match=r"is an image that cannot be stored: .*truncated"):
        convert(samples, tmp_path / "other", workers=0)


def test_an_image_whose_pixels_are_damaged_is_a_bad_sample_when_it_is_resized(photos, tmp_path):
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, "TIFF", compression="tiff_lzw")
    damaged = bytearray(whole.getvalue())
    damaged[60:300] = bytes(240)
    (photos / "bee" / "x.tif").write_bytes(damaged)
    ds = made(photos, tmp_path, resize=10, on_error="skip")
    assert len(ds) == 40


class ImageFolder:
    """What a conversion sees of the class of this name in torchvision, which needs a torch built with it."""

    target_transform = None

    def __init__(self, root, transform=None):
        self.classes = sorted(path.name for path in root.iterdir())
        files = sorted(root.glob("*/*"))
        self.samples = [(str(path), self.classes.index(path.parent.name)) for path in files]
        self.loader, self.transform = default_loader, transform
        self.transforms = transform and (lambda image, target: (transform(image), target))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        path, label = self.samples[number]
        image = self.transform(self.loader(path)) if self.transform else self.loader(path)
        return image, self.target_transform(label) if self.target_transform else label


def default_loader(path):
    with Image.open(path) as image:
        return image.convert("RGB")


DatasetFolder = type("DatasetFolder", (ImageFolder,), {"__module__": "torchvision.datasets.folder"})
default_loader.__module__ = "torchvision.datasets.folder"


def test_the_files_of_class_folders_have_their_paths_if_the_fields_name_it(photos, tmp_path):
    plain = sl.convert(photos, tmp_path / "plain", workers=0)
    with pytest.raises(FieldError, match="has no field 'pth'; it has image, label, path"):
        sl.convert(photos, tmp_path / "wrong", fields="image,label,pth", workers=0)
    named = sl.convert(photos, tmp_path / "named", fields="image,label,path", split="train=0.8,val=0.2", workers=0)
    assert list(sl.open(plain.url).fields) == ["image", "label"]
    seen = set()
    for split in ("train", "val"):
        dataset = sl.open(named.url, split=split)
        assert list(dataset.fields) == ["image", "label", "path"]
        for sample in dataset[0 : len(dataset)]["path"]:
            seen.add(sample)
        sample = dataset[len(dataset) - 1]
        assert (photos / sample["path"]).read_bytes() == sample["image"]
        assert sample["path"].split("/")[0] == dataset.classes["label"][sample["label"]]
    assert seen == {path.relative_to(photos).as_posix() for path in photos.rglob("*.*") if path.is_file()}
    assert sl.verify(named.url, against=photos).ok
    grown = sl.append(sl.convert(photos, tmp_path / "grown", fields="path,image", workers=0).url, photos, workers=0)
    paths = sl.open(grown.url).read("path", 0, 2 * len(seen))
    assert len(paths) == 2 * len(seen)
    assert set(paths) == seen


def test_an_image_folder_of_torchvision_keeps_encoded_bytes_and_class_names(photos, tmp_path):
    Image.open(photos / "ant" / "00.png").save(photos / "ant" / "00.jpg", quality=90)
    whole = DatasetFolder(photos)
    for samples, numbers in ((whole, range(41)), (torch.utils.data.Subset(whole, [40, 0, 3]), [40, 0, 3])):
        convert(samples, tmp_path / "out", workers=0, overwrite=True)
        ds = dataset.open(tmp_path / "out")
        assert kinds_of(ds) == {"image": "bytes:mixed", "label": "int64"}
        assert ds.manifest.classes == {"label": ("ant", "bee")}
        expected = [(Path(whole.samples[i][0]).read_bytes(), whole.samples[i][1]) for i in numbers]
        assert [(sample["image"], sample["label"]) for sample in ds] == expected


def test_a_folder_of_torchvision_with_a_loader_of_its_own_is_read_by_it(photos, tmp_path):
    samples = DatasetFolder(photos)
    samples.loader = functools.partial(lambda path, size: default_loader(path).resize(size), size=(3, 2))
    convert(samples, tmp_path / "out", workers=0)
    ds = dataset.open(tmp_path / "out")
    assert (kinds_of(ds), opened(ds[0]["f_0"]).size) == ({"f_0": "bytes:png", "f_1": "int64"}, (3, 2))


def test_transformed_samples_of_torchvision_are_kept_as_they_are_with_class_names(photos, tmp_path):
    samples = DatasetFolder(photos, transform=lambda image: np.asarray(image.resize((4, 4))))
    convert(torch.utils.data.Subset(samples, range(9)), tmp_path / "out", workers=0)
    ds = dataset.open(tmp_path / "out")
    assert kinds_of(ds) == {"f_0": "uint8[4,4,3]", "f_1": "int64"}
    assert ds.manifest.classes == {"f_1": ("ant", "bee")}


class Relabelled(DatasetFolder):
    def __getitem__(self, number):
        image, label = super().__getitem__(number)
        return image, label + 10


class WithNumber(torch.utils.data.Subset):
    def __getitem__(self, number):
        image, label = super().__getitem__(number)
        return image, label, number

    def __getitems__(self, numbers):
        return [self[number] for number in numbers]


@pytest.mark.long
def test_a_subclass_or_a_transform_that_was_set_later_changes_the_samples(photos, tmp_path):
    later = DatasetFolder(photos)
    later.target_transform = lambda label: label + 10
    numbered = WithNumber(DatasetFolder(photos), range(40))
    for samples in (Relabelled(photos), later, torch.utils.data.Subset(Relabelled(photos), range(40)), numbered):
        convert(samples, tmp_path / "out", workers=0, overwrite=True)
        ds = dataset.open(tmp_path / "out")
        expected = samples[39][1:]
        assert tuple(ds[39][f"f_{i}"] for i in range(1, len(ds.fields))) == expected
    assert isinstance(keep_encoded(type("ImageFolder", (DatasetFolder,), {})(photos)), Encoded)
    rows = type("Dataset", (list,), {"__module__": "datasets.arrow_dataset", "features": {}})
    assert isinstance(keep_encoded(rows()), Encoded)
    assert not isinstance(keep_encoded(type("Rows", (rows,), {})()), Encoded)


# --- order


@given(st.integers(0, 100), st.integers(0, 2**63 - 1), st.data())
@settings(max_examples=30)
def test_a_shuffle_is_a_permutation_that_only_the_seed_decides(count, seed, data):
    rows = SampleRows.of(range(count), seed)
    assert sorted(rows.read(0, count).tolist()) == list(range(count))
    some = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=count, max_size=count))).astype(np.int64)
    order = SampleRows.of(some, seed).read(0, count).tolist()
    assert sorted(order) == some.tolist()
    chosen = set(some.tolist())
    assert order == [row for row in rows.read(0, count).tolist() if row in chosen], "a split keeps the order of all"


@settings(max_examples=examples(100))
@given(st.integers(1, 60), st.booleans(), st.data())
def test_bad_rows_are_left_out_and_only_the_last_ones_move(count, shuffled, data):
    rows = SampleRows.of(range(count), 5 if shuffled else None)
    before = rows.read(0, count).tolist()
    bad = data.draw(st.sets(st.integers(0, count - 1)))
    left = rows.without(bad)
    after = left.read(0, count).tolist()
    assert left.count == len(after) == count - len(bad)
    assert sorted(after) == [row for row in range(count) if row not in bad]
    assert all(row == before[i] for i, row in enumerate(after) if before[i] not in bad), "good ones stay where they are"
    cut = data.draw(st.integers(0, count))
    assert left.read(0, cut).tolist() + left.read(cut, count).tolist() == after


def test_a_shuffled_conversion_holds_every_sample_once_in_another_order(arrays, tmp_path):
    ds = made(arrays, tmp_path, shuffle=3, layout=SMALL)
    numbers = ds.read("n", 0, ROWS).tolist()
    assert sorted(numbers) == list(range(ROWS))
    assert abs(np.corrcoef(numbers, range(ROWS))[0, 1]) < 0.15
    assert np.array_equal(ds.read("x", 0, ROWS), np.load(arrays / "x.npy")[numbers]), "fields stay together"
    assert ds.manifest.provenance["shuffle"] == {"seed": 3}
    found = {}
    for shuffle in (None, 4):
        convert(arrays, tmp_path / "splits", workers=0, split="a=0.7,b=0.3", shuffle=shuffle, overwrite=True)
        for name in "ab":
            found[name, shuffle] = dataset.open(tmp_path / "splits", split=name)[:]["n"].tolist()
    assert sorted(found["a", None] + found["b", None]) == list(range(ROWS))
    for name, count in (("a", 350), ("b", 150)):
        assert sorted(found[name, 4]) == found[name, None] != found[name, 4], "a split keeps its samples"
        assert [n for n in numbers if n in set(found[name, 4])] != found[name, 4], "another seed, another order"
        assert len(found[name, 4]) == count


# --- bad samples


BAD = ("ant/03.png", "ant/19.png", "bee/18.png")
GOOD = 37


@pytest.mark.quick(1)
@pytest.mark.parametrize(("split", "workers", "on_error"), [(None, 2, "skip"), ("train=0.8,val=0.2", 0, "quarantine")])
def test_bad_samples_are_left_out_named_and_counted(split, workers, on_error, photos, tmp_path):
    spoil(photos, *BAD)
    report = convert(photos, tmp_path / "out", on_error=on_error, layout=SMALL, workers=workers, split=split)
    assert (report.num_samples, report.num_left_out) == (GOOD, 3)
    left = [one for some in report.left_out.values() for one in some]
    assert {one.name for one in left} == {f"{photos}/{name}" for name in BAD}
    assert all("no known image header" in one.problem for one in left)
    found, left_out = [], 0
    for name, manifest in report.manifests.items():
        ds = dataset.open(tmp_path / "out", split=name or None)
        images = ds.read("image", 0, manifest.num_samples)
        assert ds.lengths("image").tolist() == [len(image) for image in images]
        found += images
        left_out += ds.manifest.provenance.get("left_out", 0)
    assert left_out == 3 and verify(tmp_path / "out").ok
    good = [path.read_bytes() for path in photos.rglob("*.png") if str(path.relative_to(photos)) not in BAD]
    assert sorted(found) == sorted(good)
    kept = {path for path in contents(tmp_path / "out") if "_streamloader/" in path and "/c/" not in path}
    assert {path.rpartition("/")[2] for path in kept} - {"quarantine.jsonl"} == {"zarr.json"}
    assert (shard_task.QUARANTINE in kept) == (on_error == "quarantine")
    if on_error == "quarantine":
        lines = map(json.loads, (tmp_path / "out" / shard_task.QUARANTINE).read_text().splitlines())
        wanted = {(row, f"{photos}/{name}", "bm8gaW1hZ2U=") for row, name in zip((3, 19, 38), BAD, strict=True)}
        assert {(line["row"], line["name"], line["data"]) for line in lines} == wanted


def test_all_samples_bad_is_an_error_that_says_why(photos, tmp_path):
    spoil(photos, *(str(path.relative_to(photos)) for path in photos.rglob("*.png")))
    with pytest.raises(SourceError, match=r"all 40 samples are bad; .*ant/00\.png: the image cannot be decoded"):
        convert(photos, tmp_path / "out", on_error="skip", layout=SMALL, workers=0)


@pytest.mark.long
def test_a_resumed_conversion_may_skip_or_raise(photos, tmp_path, monkeypatch):
    spoil(photos, *BAD)
    with pytest.raises(SourceError, match=r"bee/18\.png|ant"):
        convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    interrupted(photos, tmp_path / "out", 6, on_error="skip")
    assert list((tmp_path / "out" / "_streamloader" / "bad").iterdir())
    monkeypatch.setattr(job, "PROBE_BYTES", 1)  # else the bad ones are met again before
    with pytest.raises(SourceError, match="an earlier run left out"):
        convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    assert convert(photos, tmp_path / "out", layout=SMALL, workers=0, on_error="skip").num_samples == GOOD


class Stop(Exception):
    """A kill at some write of the destination."""


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(6))
def test_a_conversion_with_bad_samples_killed_at_any_write_is_resumed(seed, photos, tmp_path, monkeypatch):
    spoil(photos, *BAD)
    options = {"on_error": "skip", "layout": SMALL, "workers": 0, "shuffle": seed % 2 or None}
    convert(photos, tmp_path / "whole", **options)
    kind = type(open_store(tmp_path / "out"))
    rng, put, writes = np.random.default_rng(seed), kind.put, iter(())

    def put_or_stop(self, path, data):
        if next(writes, None) is None:
            raise Stop
        return put(self, path, data)

    monkeypatch.setattr(kind, "put", put_or_stop)
    report = None
    while not report:
        writes = iter(range(rng.integers(1, 25)))
        with contextlib.suppress(Stop):
            report = convert(photos, tmp_path / "out", **options)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# --- dry runs, and finished datasets


def test_a_dry_run_returns_what_a_conversion_reports_first_and_writes_nothing(photos, tmp_path):
    report = convert(photos, tmp_path / "out", dry_run=True, split="a=0.5,b=0.5", workers=0)
    assert not (tmp_path / "out").exists()
    assert report.manifests == {}
    preview, progress = report.preview, []
    assert preview.splits == {"a": 20, "b": 20}
    assert kinds_of(preview) == {"image": "bytes:png", "label": "int64"}
    real = convert(photos, tmp_path / "out", split="a=0.5,b=0.5", workers=0, progress=progress.append)
    stored = sum(layout.stored for one in real.manifests.values() for layout in one.fields.values())
    assert preview.stored == pytest.approx(stored, rel=0.1)
    assert real.preview == preview
    assert [one.preview for one in progress if one.phase == "scan"] == [None, preview]
    assert [one.phase for one in progress[:3]] == ["scan", "scan", "write"]


def test_resume_takes_a_finished_dataset_of_the_same_source_as_done(arrays, tmp_path):
    first = convert(arrays, tmp_path / "out", workers=0, split="a=0.5,b=0.5")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    report = convert(arrays, tmp_path / "out", workers=0, split="a=0.5,b=0.5", resume=True)
    assert report.manifests == first.manifests
    assert report.shards_kept == report.shards
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    np.save(arrays / "n.npy", np.arange(ROWS) + 1)
    os.utime(arrays / "n.npy", (1, 1))
    with pytest.raises(StreamloaderError, match="finished dataset of another source"):
        convert(arrays, tmp_path / "out", workers=0, split="a=0.5,b=0.5", resume=True)
    assert job.SETTLED not in contents(tmp_path / "out")
