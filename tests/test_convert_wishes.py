"""What is asked of a conversion besides the source: fields, functions, images anew, another order, bad samples."""

from __future__ import annotations

import functools
import io
import json
import operator
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_convert_job import SMALL, contents, interrupt_after

from streamloader import dataset
from streamloader.cli.main import main
from streamloader.conversion import refused, schema, splitrun
from streamloader.conversion.function_digest import function_digest
from streamloader.conversion.job import convert, python_words
from streamloader.conversion.progress import Progress, Report
from streamloader.conversion.rows import SampleRows
from streamloader.conversion.sources.wish import parse_wish
from streamloader.errors import DestinationError, SourceError, StreamloaderError, UsageError
from streamloader.format.manifest import Field
from streamloader.options import Layout
from streamloader.storage import open_store

ROWS = 500


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """A folder of arrays, 500 rows each."""
    folder = tmp_path / "arrays"
    folder.mkdir()
    rng = np.random.default_rng(1)
    np.save(folder / "n.npy", np.arange(ROWS))
    np.save(folder / "x.npy", rng.random((ROWS, 40)))
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """40 images in two classes, of which two cannot be decoded."""
    rng = np.random.default_rng(0)
    root = tmp_path / "photos"
    for name in ("ant", "bee"):
        (root / name).mkdir(parents=True)
        for i in range(20):
            pixels = rng.integers(0, 256, (30 + i, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:02}.png")
    return root


def spoil(photos: Path, *names: str) -> None:
    for name in names:
        (photos / name).write_bytes(b"no image")


def made(src: Path, tmp_path: Path, **wishes: Any) -> dataset.Dataset:
    convert(src, tmp_path / "out", workers=0, **wishes)
    return dataset.open(tmp_path / "out")


# --- fields


def test_fields_are_chosen_and_typed(arrays: Path, tmp_path: Path) -> None:
    ds = made(arrays, tmp_path, fields="x=ragged:float32,n=int16")
    assert {name: str(field) for name, field in ds.fields.items()} == {"n": "int16", "x": "ragged:float32"}
    assert np.array_equal(ds[7]["x"], np.load(arrays / "x.npy")[7].astype(np.float32))
    assert ds.read("n", 0, ROWS).tolist() == list(range(ROWS))


def test_wishes_are_read_in_every_way_they_are_written() -> None:
    wanted = {"image": None, "x": Field.parse("float32[3,4]"), "t": Field.parse("ragged:int32[2]")}
    assert parse_wish("image, x=float32[3,4],t=ragged:int32[2]").fields == wanted
    assert parse_wish(["image", "x=float32[3,4]", "t=ragged:int32[2]"]).fields == wanted
    assert parse_wish({"image": None, "x": "float32[3,4]", "t": Field.parse("ragged:int32[2]")}).fields == wanted
    assert not parse_wish(None).fields


BAD_WISHES: dict[str, tuple[dict[str, Any], str]] = {
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
    "batch without map": ({"map_batch": 3}, "map_batch=3"),
    "negative seed": ({"shuffle": -1}, "shuffle=-1"),
    "no such manner": ({"on_error": "ignore"}, "raise, skip, quarantine"),
    "both": ({"overwrite": True, "resume": True}, "give one of them"),
}


@pytest.mark.parametrize("case", BAD_WISHES)
def test_a_wish_that_cannot_be_is_told_before_anything_is_finished(case: str, arrays: Path, tmp_path: Path) -> None:
    wishes, told = BAD_WISHES[case]
    with pytest.raises((UsageError, SourceError), match=told):
        convert(arrays, tmp_path / "out", workers=0, **wishes)
    assert not (tmp_path / "out" / "zarr.json").exists()


# --- a function


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {"n": sample["n"] * 2, "name": f"number {sample['n']}", "nested": {"first": sample["x"][0]}}


def first_of_x(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"][0]}


def halves(batch: dict[str, Any]) -> dict[str, Any]:
    assert len(batch["n"]) <= 64
    return {"x": batch["x"][:, :20], "parts": [row[: n % 5] for row, n in zip(batch["x"], batch["n"], strict=True)]}


class OnDevice:
    """An array of another library: numpy's, known by DLPack alone."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __dlpack__(self, **wishes: Any) -> Any:
        return self._array.__dlpack__(**wishes)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def on_device(batch: dict[str, Any]) -> dict[str, Any]:
    return {"y": OnDevice(batch["x"] * 2)}


def fails_at_7(sample: dict[str, Any]) -> dict[str, Any]:
    return {"n": 1 / (int(sample["n"]) - 7)}


def fails_in_batch(batch: dict[str, Any]) -> dict[str, Any]:
    if 7 in batch["n"]:
        raise ValueError("seven")
    return {"n": batch["n"]}


def too_few(batch: dict[str, Any]) -> dict[str, Any]:
    return {"n": batch["n"][1:]}


def test_a_function_makes_each_sample(arrays: Path, tmp_path: Path) -> None:
    ds = made(arrays, tmp_path, map=doubled)
    assert {name: str(field) for name, field in ds.fields.items()} == {
        **{"n": "int64", "name": "text", "nested_first": "float64"}
    }
    assert ds[9] == {"n": 18, "name": "number 9", "nested_first": np.load(arrays / "x.npy")[9, 0]}
    assert ds.manifest.provenance["map"] == "test_convert_wishes:doubled"


def test_a_function_makes_batches_and_fields_are_chosen_of_what_it_makes(arrays: Path, tmp_path: Path) -> None:
    ds = made(arrays, tmp_path, map=halves, map_batch=64, fields="parts,x=float32[20]")
    assert str(ds.fields["parts"]) == "ragged:float64"
    assert str(ds.fields["x"]) == "float32[20]"
    source = np.load(arrays / "x.npy")
    assert np.array_equal(ds[14]["parts"], source[14, :4])
    assert np.array_equal(ds.read("x", 0, ROWS), source[:, :20].astype(np.float32))


def test_arrays_of_any_library_are_taken_by_dlpack(arrays: Path, tmp_path: Path) -> None:
    ds = made(arrays, tmp_path, map=on_device, map_batch=100)
    assert np.array_equal(ds.read("y", 0, ROWS), np.load(arrays / "x.npy") * 2)


def test_a_module_in_the_working_directory_is_found_also_by_workers(
    arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_map.py").write_text("def f(sample):\n    return {'m': sample['n'] + 1}\n")
    monkeypatch.chdir(tmp_path)
    convert(arrays, tmp_path / "out", map="my_own_map:f", workers=2)
    assert dataset.open(tmp_path / "out").read("m", 0, 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize(("function", "batch"), [(fails_at_7, None), (fails_in_batch, 10)])
def test_a_sample_that_a_function_fails_for_is_named_alone(
    function: Callable[..., Any], batch: int | None, arrays: Path, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=r"row 7 of the source: the map function failed: (ZeroDivision|Value)Error"):
        convert(arrays, tmp_path / "out", map=function, map_batch=batch, workers=0)
    ds = made(arrays, tmp_path, map=function, map_batch=batch, on_error="skip")
    assert len(ds) == ROWS - 1


def test_a_batch_of_another_length_is_refused(arrays: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"row 0: .*it returned \{'n': 0\} for 1 samples"):
        convert(arrays, tmp_path / "out", map=too_few, map_batch=10, workers=0)


def test_another_function_does_not_go_on_with_a_job(arrays: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(arrays, tmp_path / "out", map=doubled, layout=SMALL, workers=0, progress=interrupt_after(2))
    with pytest.raises(DestinationError, match=r"map\.function is 'test_convert_wishes:doubled' there"):
        convert(arrays, tmp_path / "out", map=first_of_x, layout=SMALL, workers=0)


def source_of(factor: int = 2, constant: int = 1, *, helper: str = "return n") -> Callable[..., Any]:
    """A function whose body is the same each time, of a module whose helper, default and constants are not."""
    text = f"""
OFFSET = {constant}
class Shift:
    def apply(self, n): {helper}
def helper(n): return Shift().apply(n) + OFFSET
def f(sample, factor={factor}): return {{"n": helper(int(sample["n"])) * factor, "x": sample["x"]}}
"""
    module: dict[str, Any] = {"__name__": "module_of_a_user"}
    exec(text, module)
    function: Callable[..., Any] = module["f"]
    return function


def scaled(sample: dict[str, Any], by: int) -> dict[str, Any]:
    return {"n": sample["n"] * by, "x": sample["x"]}


def spread(sample: dict[str, Any], by: int) -> dict[str, Any]:
    return {"x": sample["x"] * by}


def closed_over(by: Any) -> Callable[..., Any]:
    return lambda sample: {"n": sample["n"] * by[0], "x": sample["x"]}


class Scale:
    """A callable with state."""

    def __init__(self, by: int) -> None:
        self.table = {"by": np.array([by])}

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"n": sample["n"] * self.table["by"][0], "x": sample["x"]}


FUNCTIONS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "the value of a partial": (
        lambda: functools.partial(scaled, by=2),
        lambda: functools.partial(scaled, by=3),
    ),
    "the function of a partial": (
        lambda: functools.partial(source_of(), factor=2),
        lambda: functools.partial(source_of(helper="return n + 1"), factor=2),
    ),
    "a closure": (lambda: closed_over([2]), lambda: closed_over([3])),
    "a default": (lambda: source_of(factor=2), lambda: source_of(factor=3)),
    "a global": (lambda: source_of(constant=2), lambda: source_of(constant=3)),
    "a helper": (source_of, lambda: source_of(helper="return n + 1")),
    "state": (lambda: Scale(2), lambda: Scale(3)),
    "a bound method": (lambda: Scale(2).__call__, lambda: Scale(3).__call__),
    "a C function's state": (lambda: operator.itemgetter("n"), lambda: operator.itemgetter("x")),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_function_that_does_something_else_is_another_one(case: str) -> None:
    one, other = FUNCTIONS[case]
    assert function_digest(one()) == function_digest(one()), "made anew, it is the same"
    assert function_digest(one()).digest != function_digest(other()).digest
    assert not function_digest(one()).unknown


def test_a_function_is_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "of_a_user.py").write_text("def f(sample):\n    return {'n': sample['n'] in {'a', 'b', 'c'}}\n")
    program = (
        "from of_a_user import f; from streamloader.conversion.function_digest import function_digest as d; print(d(f))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


@pytest.mark.parametrize("case", ["the value of a partial", "a closure", "a helper", "state"])
def test_a_function_that_does_something_else_does_not_go_on_with_a_job(case: str, arrays: Path, tmp_path: Path) -> None:
    one, other = FUNCTIONS[case]
    with pytest.raises(KeyboardInterrupt):
        convert(arrays, tmp_path / "out", map=one(), layout=SMALL, workers=0, progress=interrupt_after(2))
    with pytest.raises(DestinationError, match=r"map\.source is '\w+' there and '\w+' here"):
        convert(arrays, tmp_path / "out", map=other(), layout=SMALL, workers=0)
    assert convert(arrays, tmp_path / "out", map=one(), layout=SMALL, workers=0).shards_kept == 2


def test_a_function_of_which_not_all_is_known_never_goes_on_with_a_job(arrays: Path, tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(sample: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return {"x": sample["x"]}

    with pytest.raises(KeyboardInterrupt):
        convert(arrays, tmp_path / "out", map=locked, layout=SMALL, workers=0, progress=interrupt_after(2))
    with pytest.raises(
        DestinationError, match=r"since 'lock' in the closure of .*locked is a _thread.lock.*overwrite=True"
    ):
        convert(arrays, tmp_path / "out", map=locked, layout=SMALL, workers=0)
    assert convert(arrays, tmp_path / "out", map=locked, layout=SMALL, workers=0, overwrite=True).shards_kept == 0
    with pytest.raises(DestinationError, match=r"'lock' in the closure of"):
        convert(arrays, tmp_path / "out", map=locked, layout=SMALL, workers=0, resume=True)


OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    "the function": ({"map": functools.partial(spread, by=4)}, r"options differ or are not known \(map.source\)"),
    "its batch": ({"map_batch": 10}, r"options differ or are not known \(map.batch\)"),
    "the shards": ({"layout": Layout(shard_size=2048, block_size=1024, chunk_size=512)}, r"shard\w* is \d+ there"),
    "what is decoded": ({"raw": True}, "its raw differ"),
    "the codec": ({"layout": Layout(shard_size=4096, block_size=1024, chunk_size=512, codec="zstd")}, "x.codec is"),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_resume_refuses_a_finished_dataset_that_was_made_otherwise(case: str, arrays: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"map": functools.partial(spread, by=2), "layout": SMALL, "workers": 0}
    convert(arrays, tmp_path / "out", **options)
    before = contents(tmp_path / "out")
    assert convert(arrays, tmp_path / "out", resume=True, **options).shards_kept
    changes, told = OTHERWISE[case]
    with pytest.raises(DestinationError, match=told):
        convert(arrays, tmp_path / "out", resume=True, **(options | changes))
    assert contents(tmp_path / "out") == before


# --- objects in memory


def counting(to: int = 5) -> Iterator[dict[str, Any]]:
    yield from ({"n": n, "text": f"{n}"} for n in range(to))


@pytest.mark.parametrize("given", [counting, functools.partial(counting, to=5), counting()])
def test_a_generator_function_is_taken_for_what_it_yields(given: Any, tmp_path: Path) -> None:
    assert convert(given, tmp_path / "out").num_samples == 5
    assert dataset.open(tmp_path / "out")[3] == {"n": 3, "text": "3"}


def test_a_generator_function_with_arguments_is_told(tmp_path: Path) -> None:
    def needing(path: str) -> Iterator[int]:
        yield len(path)

    with pytest.raises(
        UsageError, match=r"the generator function needing cannot be called .*'path'; .*functools.partial"
    ):
        convert(needing, tmp_path / "out")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dict_of_arrays_is_a_source(workers: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    given: dict[str, Any] = {
        "Image": rng.integers(0, 256, (300, 4, 5), np.uint8),
        "swapped": np.arange(300, dtype=">i4"),
        "x": torch.arange(300, dtype=torch.float32).reshape(300, 1),
        "flag": np.arange(300) % 2 == 0,
    }
    report = convert(given, tmp_path / "out", layout=SMALL, workers=workers)
    assert report.manifests[""].provenance["keys"] == {"image": "Image"}
    ds = dataset.open(tmp_path / "out")
    assert {name: str(field) for name, field in ds.fields.items()} == {
        **{"image": "uint8[4,5]", "swapped": "int32", "x": "float32[1]", "flag": "bool"}
    }
    for key, column in given.items():
        assert np.array_equal(ds.read(key.lower(), 0, 300), np.asarray(column))
    assert convert(given, tmp_path / "out", layout=SMALL, workers=workers, resume=True).shards_kept == report.shards
    with pytest.raises(DestinationError, match="its source differs"):
        convert(given | {"x": np.zeros((300, 1), np.float32)}, tmp_path / "out", layout=SMALL, workers=0, resume=True)


def test_a_dict_of_columns_may_hold_texts_and_lists(tmp_path: Path) -> None:
    given = {"name": ["a", "b", "c"], "tokens": [[1], [2, 3], []], "n": np.arange(3)}
    convert(given, tmp_path / "out", workers=0)
    ds = dataset.open(tmp_path / "out")
    assert ds[1]["name"] == "b" and ds[1]["tokens"].tolist() == [2, 3] and ds[2]["n"] == 2
    with pytest.raises(UsageError, match=r"different lengths: \{'a': 2, 'b': 3\}; give one value of each"):
        convert({"a": [1, 2], "b": [1, 2, 3]}, tmp_path / "other")
    with pytest.raises(UsageError, match=r"the dict's entry 'a' is a value of type int; .* an array or list"):
        convert({"a": 1}, tmp_path / "other")


@pytest.mark.parametrize(
    ("command", "python"),
    [
        ("or leave such samples out with --on-error skip", 'or leave such samples out with on_error="skip"'),
        (
            "go on with --on-error skip or quarantine, or --overwrite",
            'go on with on_error="skip" or quarantine, or',
        ),
        ("name them, as in --fields x,y[2,3], or --map", 'name them, as in fields="x,y[2,3]", or map='),
        ('such as --fields "tokens=uint16[2048]", or --fields', 'such as fields="tokens=uint16[2048]", or fields='),
        ("store counts, --fields x,when=int64, or --fill y=VALUE", 'fields="x,when=int64", or fill={"y": VALUE}'),
        ("give a value with --fill, or leave --raw out", "give a value with fill=, or leave raw=True out"),
        ("end it: streamloader append --abandon", "end it: streamloader append --abandon"),
    ],
)
def test_remedies_name_the_arguments_of_python(command: str, python: str) -> None:
    assert python in python_words(command)


def test_each_interface_names_its_own_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    convert(tmp_path / "x.npy", tmp_path / "out", workers=0)
    with pytest.raises(DestinationError, match=r"resume=True .*; or overwrite=True"):
        convert(tmp_path / "x.npy", tmp_path / "out", workers=0)
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "x.npy"), str(tmp_path / "out"), "--quiet"])
    assert "--resume takes" in capsys.readouterr().err


def test_a_dict_of_columns_may_hold_arrays_of_text(tmp_path: Path) -> None:
    convert({"name": np.array(["a", "bb"]), "n": np.arange(2)}, tmp_path / "out", workers=0)
    assert [sample["name"] for sample in dataset.open(tmp_path / "out")] == ["a", "bb"]


class Frame:
    """As a table of pandas: indexing gives columns."""

    columns = ("x",)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, name: str) -> Any:
        return {"x": Series()}[name]

    def to_dict(self) -> dict[str, Any]:
        return {"x": [1, 2]}


class Series:
    """As a column of pandas that was filtered: indexing goes by label."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, label: int) -> str:
        return {7: "a", 9: "b"}[label]

    def to_numpy(self) -> np.ndarray[Any, Any]:
        return np.array(["a", "b"], object)

    __array__ = to_numpy


def test_columns_of_a_table_are_taken_by_place(tmp_path: Path) -> None:
    frame = Frame()
    with pytest.raises(UsageError, match=r"Frame has columns, not samples; give \{name: frame\[name\] for"):
        convert(frame, tmp_path / "out", workers=0)
    convert({name: frame[name] for name in frame.columns}, tmp_path / "out", workers=0)
    assert [sample["x"] for sample in dataset.open(tmp_path / "out")] == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"x": np.array(3)}, "the dict's entry 'x' is a value of type ndarray; give names as text"),
        ({1: np.zeros(3)}, "the dict's entry 1 is a value of type ndarray; give names as text"),
        ({"x": {"a": [1]}}, "the dict's entry 'x' is a value of type dict"),
        (lambda: iter([{"x": 1}]), r"builtins.function has no samples to convert; .* a generator function"),
        ({"x": np.zeros(2, "M8[s]")}, r"holds datetime64\[s\]; store times as whole numbers, values.astype\('int64'\)"),
    ],
)
def test_what_is_no_dict_of_columns_says_what_to_give(given: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        convert(given, tmp_path / "out", workers=0)


def test_a_script_needs_no_guard_of_its_main_module(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import numpy as np, streamloader as sl\n"
        "print('begun')\n"
        "print(sl.convert({'x': np.arange(9)}, 'out', workers=2).num_samples)\n"
        "def f(sample): return sample\n"
        "try:\n    sl.convert({'x': np.arange(9)}, 'other', map=f, workers=2)\n"
        "except sl.errors.UsageError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    begun, count, told = run.stdout.splitlines()
    assert (begun, count) == ("begun", "9")
    assert "f is defined in the program that runs, __main__; define its" in told and "workers=0" in told


# --- images


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize(("resize", "size"), [(20, (27, 20)), ("20x10", (10, 20)), ((20, 10), (10, 20)), (1000, None)])
def test_images_are_resized_and_keep_their_format(resize: Any, size: Any, photos: Path, tmp_path: Path) -> None:
    ds = made(photos, tmp_path, resize=resize)
    image = opened(ds[0]["image"])
    assert image.format == "PNG"
    assert image.size == (size or (40, 30))
    assert str(ds.fields["image"]) == "bytes:png"


def test_a_quality_makes_every_image_a_jpeg(photos: Path, tmp_path: Path) -> None:
    grey = Image.fromarray(np.zeros((9, 9), np.uint8))
    grey.save(photos / "ant" / "grey.gif")
    Image.new("RGBA", (5, 6)).save(photos / "ant" / "clear.png")
    ds = made(photos, tmp_path, quality=80)
    assert str(ds.fields["image"]) == "bytes:jpeg"
    assert {opened(image).format for image in ds.read("image", 0, 42)} == {"JPEG"}


def test_the_orientation_is_applied_when_an_image_is_encoded_anew(tmp_path: Path) -> None:
    (tmp_path / "photos" / "a").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "photos" / "a" / "x.jpg", exif=exif)
    assert opened(made(tmp_path / "photos", tmp_path, quality=90)[0]["image"]).size == (20, 40)


def test_an_image_whose_pixels_are_damaged_is_refused_when_it_is_resized(photos: Path, tmp_path: Path) -> None:
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(whole, "TIFF", compression="tiff_lzw")
    damaged = bytearray(whole.getvalue())
    damaged[60:300] = bytes(240)
    (photos / "bee" / "x.tif").write_bytes(damaged)
    ds = made(photos, tmp_path, resize=10, on_error="skip")
    assert len(ds) == 40


# --- order


@given(st.integers(0, 300), st.integers(0, 2**63 - 1), st.data())
@settings(max_examples=60)
def test_a_shuffle_is_a_permutation_that_only_the_seed_decides(count: int, seed: int, data: st.DataObject) -> None:
    rows = SampleRows.of(range(count), seed)
    assert sorted(rows.read(0, count).tolist()) == list(range(count))
    some = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=count, max_size=count))).astype(np.int64)
    order = SampleRows.of(some, seed).read(0, count).tolist()
    assert sorted(order) == some.tolist()
    chosen = set(some.tolist())
    assert order == [row for row in rows.read(0, count).tolist() if row in chosen], "a split keeps the order of all"


@given(st.integers(1, 60), st.booleans(), st.data())
def test_bad_rows_are_left_out_and_only_the_last_ones_move(count: int, shuffled: bool, data: st.DataObject) -> None:
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


def test_a_shuffled_conversion_holds_every_sample_once_in_another_order(arrays: Path, tmp_path: Path) -> None:
    ds = made(arrays, tmp_path, shuffle=3, layout=SMALL)
    numbers = ds.read("n", 0, ROWS).tolist()
    assert sorted(numbers) == list(range(ROWS))
    assert abs(np.corrcoef(numbers, range(ROWS))[0, 1]) < 0.15
    assert np.array_equal(ds.read("x", 0, ROWS), np.load(arrays / "x.npy")[numbers]), "fields stay together"
    assert ds.manifest.provenance["shuffle"] == {"seed": 3}
    convert(arrays, tmp_path / "again", workers=2, shuffle=3, layout=SMALL)
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    convert(arrays, tmp_path / "other", workers=0, shuffle=4, layout=SMALL)
    assert dataset.open(tmp_path / "other").read("n", 0, ROWS).tolist() != numbers


def test_shuffled_splits_keep_their_samples(arrays: Path, tmp_path: Path) -> None:
    convert(arrays, tmp_path / "plain", split="a=0.7,b=0.3", workers=0)
    convert(arrays, tmp_path / "mixed", split="a=0.7,b=0.3", shuffle=1, workers=0)
    for name, count in (("a", 350), ("b", 150)):
        plain = dataset.open(tmp_path / "plain", split=name).read("n", 0, count).tolist()
        mixed = dataset.open(tmp_path / "mixed", split=name).read("n", 0, count).tolist()
        assert sorted(mixed) == plain != mixed


# --- bad samples


BAD = ("ant/03.png", "ant/19.png", "bee/18.png")
GOOD = 37


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", [None, "train=0.8,val=0.2"])
def test_bad_samples_are_left_out_named_and_counted(
    workers: int, split: str | None, photos: Path, tmp_path: Path
) -> None:
    spoil(photos, *BAD)
    report = convert(photos, tmp_path / "out", on_error="skip", layout=SMALL, workers=workers, split=split)
    assert report.num_samples == GOOD
    assert report.num_left_out == 3
    left = [one for some in report.left_out.values() for one in some]
    assert {one.name for one in left} == {f"{photos}/{name}" for name in BAD}
    assert all("no known image header" in one.problem for one in left)
    found: list[bytes] = []
    for name, manifest in report.manifests.items():
        ds = dataset.open(tmp_path / "out", split=name or None)
        found += ds.read("image", 0, manifest.num_samples)
    good = [path.read_bytes() for path in photos.rglob("*.png") if str(path.relative_to(photos)) not in BAD]
    assert sorted(found) == sorted(good)
    kept = {path for path in contents(tmp_path / "out") if "_streamloader/" in path and "chunks" not in path}
    assert {path.rpartition("/")[2] for path in kept} == {"zarr.json"}


def test_a_quarantine_keeps_the_bad_samples_with_their_reasons(photos: Path, tmp_path: Path) -> None:
    spoil(photos, *BAD)
    convert(photos, tmp_path / "out", on_error="quarantine", layout=SMALL, workers=0)
    lines = [json.loads(line) for line in (tmp_path / "out" / refused.QUARANTINE).read_text().splitlines()]
    assert [line["row"] for line in lines] == [3, 19, 38]
    assert [line["name"] for line in lines] == [f"{photos}/{name}" for name in BAD]
    assert {line["data"] for line in lines} == {"bm8gaW1hZ2U="}
    assert dataset.open(tmp_path / "out").manifest.provenance["left_out"] == 3


def test_all_samples_bad_is_an_error_that_says_why(photos: Path, tmp_path: Path) -> None:
    spoil(photos, *(str(path.relative_to(photos)) for path in photos.rglob("*.png")))
    with pytest.raises(SourceError, match=r"all 40 samples are bad; .*ant/00\.png: the image cannot be decoded"):
        convert(photos, tmp_path / "out", on_error="skip", layout=SMALL, workers=0)


def test_after_an_error_the_same_command_may_skip(photos: Path, tmp_path: Path) -> None:
    spoil(photos, *BAD)
    with pytest.raises(SourceError, match=r"bee/18\.png|ant"):
        convert(photos, tmp_path / "out", layout=SMALL, workers=0)
    report = convert(photos, tmp_path / "out", layout=SMALL, workers=0, on_error="skip")
    assert report.shards_kept > 0 or report.num_samples == GOOD
    assert report.num_samples == GOOD


class Stop(Exception):
    """A kill at some write of the destination."""


@pytest.mark.parametrize("seed", range(12))
def test_a_conversion_with_bad_samples_that_is_killed_at_any_write_goes_on_to_the_same_bytes(
    seed: int, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(photos, *BAD)
    wishes: dict[str, Any] = {"on_error": "skip", "layout": SMALL, "workers": 0, "shuffle": seed % 2 or None}
    convert(photos, tmp_path / "whole", **wishes)
    kind = type(open_store(tmp_path / "out"))
    rng = np.random.default_rng(seed)
    put = kind.put
    left = 0

    def dying(self: Any, path: str, data: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Stop
        return put(self, path, data)

    monkeypatch.setattr(kind, "put", dying)
    while True:
        left = int(rng.integers(1, 25))
        try:
            convert(photos, tmp_path / "out", **wishes)
        except Stop:
            continue
        break
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_raising_after_an_earlier_run_left_samples_out_names_one(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(photos, "ant/03.png", "bee/18.png")
    with pytest.raises(KeyboardInterrupt):
        convert(photos, tmp_path / "out", on_error="skip", layout=SMALL, workers=0, progress=interrupt_after(6))
    assert list((tmp_path / "out" / "_streamloader" / "bad").iterdir())
    monkeypatch.setattr(schema, "PROBE_BYTES", 1)  # else the bad ones are met again before
    with pytest.raises(SourceError, match="an earlier run left out"):
        convert(photos, tmp_path / "out", layout=SMALL, workers=0)


# --- dry runs, and finished datasets


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(photos: Path, tmp_path: Path) -> None:
    report = convert(photos, tmp_path / "out", dry_run=True, split="a=0.5,b=0.5", workers=0)
    assert not (tmp_path / "out").exists()
    assert report.manifests == {}
    preview = report.preview
    assert preview.splits == {"a": 20, "b": 20}
    assert {name: str(field) for name, field in preview.fields.items()} == {"image": "bytes:png", "label": "int64"}
    real = convert(photos, tmp_path / "out", split="a=0.5,b=0.5", workers=0)
    stored = sum(layout.stored for one in real.manifests.values() for layout in one.fields.values())
    assert preview.stored == pytest.approx(stored, rel=0.1)
    assert real.preview == preview


def seen(src: Path, dst: Path, **wishes: Any) -> tuple[Report, list[Progress]]:
    told: list[Progress] = []
    report = convert(src, dst, workers=0, progress=told.append, **wishes)
    return report, told


def test_the_schema_is_told_before_anything_is_written(arrays: Path, tmp_path: Path) -> None:
    report, told = seen(arrays, tmp_path / "out")
    (preview,) = [one.preview for one in told if one.preview]
    assert preview == report.preview
    assert [one.phase for one in told].index("write") > [bool(one.preview) for one in told].index(True)


def test_resume_takes_a_finished_dataset_of_the_same_source_as_done(arrays: Path, tmp_path: Path) -> None:
    first = convert(arrays, tmp_path / "out", workers=0, split="a=0.5,b=0.5")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    with pytest.raises(DestinationError, match="holds a dataset"):
        convert(arrays, tmp_path / "out", workers=0, split="a=0.5,b=0.5")
    report = convert(arrays, tmp_path / "out", workers=0, split="a=0.5,b=0.5", resume=True)
    assert report.manifests == first.manifests
    assert report.shards_kept == report.shards
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    np.save(arrays / "n.npy", np.arange(ROWS) + 1)
    os.utime(arrays / "n.npy", (1, 1))
    with pytest.raises(StreamloaderError, match="finished dataset of another source"):
        convert(arrays, tmp_path / "out", workers=0, split="a=0.5,b=0.5", resume=True)
    assert splitrun.SETTLED not in contents(tmp_path / "out")
