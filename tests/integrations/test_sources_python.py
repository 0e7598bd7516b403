"""Python objects as sources: by number, in workers, and one after another."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_convert_sources import FORMATS
from test_sources_folders import every, rows_of
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from streamloader import dataset
from streamloader.conversion.engines.local import run_tasks
from streamloader.conversion.iterables import Writing, write_iterable
from streamloader.conversion.job import convert
from streamloader.conversion.progress import Progress
from streamloader.conversion.sources.base import BadSample, Source
from streamloader.conversion.sources.objects import map_style, open_object
from streamloader.conversion.sources.wish import Wish, parse_wish
from streamloader.conversion.task import Task
from streamloader.errors import DestinationError, FieldError, SourceChangedError, SourceError, UsageError
from streamloader.format.geometry import choose_layouts
from streamloader.format.sink import Receipt, finish
from streamloader.options import Layout
from streamloader.storage import open_store


class Pictures(Dataset[tuple[Image.Image, int]]):
    """What torchvision's datasets give: an image and its label. Those of `bad` raise."""

    def __init__(self, length: int = 20, bad: tuple[int, ...] = (), shift: int = 0) -> None:
        self.length, self.bad, self.shift = length, bad, shift

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        if number in self.bad:
            raise ValueError(f"file {number} is gone")
        return Image.fromarray(np.full((2, 3, 3), number + self.shift, np.uint8)), number


class Several(Pictures):
    """One that gives several samples at once, and keeps how it was asked."""

    def __init__(self, length: int, bad: tuple[int, ...] = ()) -> None:
        super().__init__(length, bad)
        self.asked: list[int] = []

    def __getitems__(self, numbers: list[int]) -> list[tuple[Image.Image, int]]:
        self.asked.append(len(numbers))
        return [super(Several, self).__getitem__(number) for number in numbers]


class Counting(IterableDataset[dict[str, int]]):
    """An iterable that even says how long it is; torch lets it inherit a `__getitem__`."""

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"x": number} for number in range(100))


class Exported:
    """Nothing but DLPack, as CuPy's and JAX's arrays have it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class Named(NamedTuple):
    x: int
    name: str


def of_format() -> Any:
    """The module formats/python/make.py."""
    spec = importlib.util.spec_from_file_location("make_python", FORMATS / "python/make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_source_reads_what_the_format_says() -> None:
    expected = json.loads((FORMATS / "python/expected.json").read_text())
    source = open_object(of_format().Things(), Wish())
    assert {name: str(field) for name, field in source.fields.items()} == expected["fields"]
    images = source.part(np.arange(5)).read(pytest.fail)["image"]
    found = every(source)
    for row, image in zip(found, images, strict=True):
        row["image"] = {"pixels": np.asarray(Image.open(io.BytesIO(image))).tolist()}
    assert found == expected["samples"]
    assert source.notes == {
        "object": "make_python.Things",
        "keys": {"vector_1": "Vector-1"},
    }


VALUES: dict[str, tuple[Any, dict[str, str], Any]] = {
    "tensors": (TensorDataset(torch.arange(6).reshape(3, 2)), {"f_0": "int64[2]"}, {"f_0": [2, 3]}),
    "two of them": (
        TensorDataset(torch.zeros(3, 2, dtype=torch.float16), torch.arange(3)),
        {"f_0": "float16[2]", "f_1": "int64"},
        {"f_0": [0, 0], "f_1": 1},
    ),
    "a list of dicts": (
        [{"x": 1, "t": "a"}, {"x": 2, "t": "b"}, {"x": 3, "t": "c"}],
        {"x": "int64", "t": "text"},
        {"x": 2, "t": "b"},
    ),
    "named tuples": ([Named(i, "n") for i in range(3)], {"x": "int64", "name": "text"}, {"x": 1, "name": "n"}),
    "values": ([1.5, 2.5, 3.5], {"data": "float64"}, {"data": 2.5}),
    "an array": (np.arange(6, dtype=np.uint8).reshape(3, 2), {"data": "uint8[2]"}, {"data": [2, 3]}),
    "a tensor": (torch.arange(3, dtype=torch.int32), {"data": "int32"}, {"data": 1}),
    "DLPack": ([{"x": Exported(np.full(2, i, "f4"))} for i in range(3)], {"x": "float32[2]"}, {"x": [1, 1]}),
    "DLPack of several lengths": (
        [{"x": Exported(np.full((i, 2), i, "i2"))} for i in range(3)],
        {"x": "ragged:int16[2]"},
        {"x": [[1, 1]]},
    ),
    "gradients": ([torch.ones(2, requires_grad=True)] * 3, {"data": "float32[2]"}, {"data": [1, 1]}),
    "a subset": (Subset(TensorDataset(torch.arange(9)), [5, 7, 8]), {"f_0": "int64"}, {"f_0": 7}),
}


@pytest.mark.parametrize("case", VALUES)
def test_what_people_have_becomes_fields(case: str) -> None:
    samples, fields, second = VALUES[case]
    assert map_style(samples)
    source = open_object(samples, Wish())
    assert {name: str(field) for name, field in source.fields.items()} == fields
    assert every(source)[1] == second
    assert source.num_samples == 3


def test_images_are_kept_without_loss_beside_their_labels() -> None:
    source = open_object(Pictures(), parse_wish("f_0,f_1=uint8"))
    columns = source.part(np.array([3, 7])).read(pytest.fail)
    assert [str(field) for field in source.fields.values()] == ["bytes:png", "uint8"]
    assert np.asarray(columns["f_1"]).tolist() == [3, 7]
    assert [int(np.asarray(Image.open(io.BytesIO(one))).max()) for one in columns["f_0"]] == [3, 7]


@given(chosen=st.sets(st.integers(0, 199)))
@settings(max_examples=10)
def test_any_rows_are_the_same_also_in_another_process(chosen: set[int]) -> None:
    import pickle

    rows = sorted(chosen)
    for samples in ([{"x": i, "t": str(i)} for i in range(200)], Several(200)):
        source = open_object(samples, Wish(), workers=1)
        wanted = [every(source)[row] for row in rows]
        assert rows_of(source, rows) == wanted
        part = pickle.loads(pickle.dumps(source.part(np.array(rows, np.int64))))
        assert rows_of(source, rows, part=part) == wanted
        again = pickle.loads(pickle.dumps(part))
        assert rows_of(source, rows, part=again) == wanted


def convert_source(source: Source, folder: Path, workers: int) -> None:
    """Convert as a job does, without a job."""
    store = open_store(str(folder))
    kinds = dict(source.fields)
    small = Layout(shard_size=1024, block_size=512, chunk_size=512)
    sizes, codecs = dict.fromkeys(kinds, 100.0), dict.fromkeys(kinds, "none")
    geometry = choose_layouts(kinds, sizes, codecs, source.num_samples, small)
    size = geometry.samples_per_shard
    receipts: dict[int, Receipt] = {}

    def tasks() -> Iterator[Task]:
        for shard in range(-(-source.num_samples // size)):
            rows = range(shard * size, min((shard + 1) * size, source.num_samples))
            yield Task(source.part(np.arange(rows.start, rows.stop)), store, geometry, shard, rows)

    def note(task: Task, outcome: Any) -> None:
        receipts[task.shard] = outcome

    run_tasks(tasks(), workers, note)
    assert len(receipts) > 3
    finish(store, geometry, receipts, source.notes, 2)


TENSORS = TensorDataset(torch.arange(600).reshape(200, 3), torch.arange(200))


@pytest.mark.parametrize(("samples", "workers"), [(TENSORS, 0), (TENSORS, 2), (Several(200), 1)])
def test_workers_load_datasets_with_tensors(samples: Any, workers: int, tmp_path: Path) -> None:
    """Torch would give its tensors to other processes as shared memory, which ours cannot open."""
    source = open_object(samples, Wish(), workers=workers)
    convert_source(source, tmp_path / "out", workers)
    ds = dataset.open(tmp_path / "out")
    assert ds.read("f_1", 0, 200).tolist() == list(range(200))


def test_parts_of_a_list_take_their_own_samples_only() -> None:
    import pickle

    source = open_object([{"x": np.zeros(1000)} for _ in range(200)], Wish(), workers=2)
    assert len(pickle.dumps(source.part(np.array([3, 5])))) < 30_000


def test_a_sample_that_raises_is_left_out_and_named() -> None:
    for samples in (Pictures(bad=(4, 9)), Several(20, bad=(4, 9))):
        source = open_object(samples, Wish())
        bad: list[BadSample] = []
        found = rows_of(source, [2, 4, 9, 10], bad.append)
        assert [row["f_1"] for row in found] == [2, 10]
        assert [one.position for one in bad] == [1, 2]
        assert bad[1].problem == "it cannot be read: ValueError: file 9 is gone"
        assert bad[1].name.endswith("[9]")
        with pytest.raises(SourceError, match=r"\[4\]: it cannot be read: ValueError: file 4 is gone"):
            every(source)


def test_a_sample_that_does_not_fit_is_left_out_and_named() -> None:
    samples = [{"x": [1.0, 2.0]} for _ in range(200)]
    samples[77] = {"x": [1.0]}
    samples[78] = {"y": [1.0]}
    source = open_object(samples, parse_wish("x=float64[2]"))
    bad: list[BadSample] = []
    assert len(rows_of(source, list(range(200)), bad.append)) == 198
    assert [one.name for one in bad] == ["builtins.list[77]", "builtins.list[78]"]
    assert "ragged:float64" in bad[0].remedy
    assert "is missing" in bad[1].problem


def test_several_are_asked_for_at_once() -> None:
    samples = Several(200)
    source = open_object(samples, Wish())
    samples.asked.clear()
    every(source)
    assert samples.asked == [64, 64, 64, 8]


def test_an_object_that_gives_too_few_at_once_is_asked_one_by_one() -> None:
    class Short(Several):
        def __getitems__(self, numbers: list[int]) -> list[tuple[Image.Image, int]]:
            return super().__getitems__(numbers[1:])

    assert [row["f_1"] for row in every(open_object(Short(5), Wish()))] == list(range(5))


def test_another_object_is_another_source() -> None:
    """What stands for its files tells length and values; a change in between is seen where it was looked."""
    (known,) = open_object(Pictures(), Wish()).files
    assert open_object(Pictures(), Wish()).files == (known,)
    others: list[Any] = [Pictures(21), Pictures(shift=1), Pictures(bad=(19,))]
    for samples in others:
        assert open_object(samples, Wish()).files != (known,)
    assert known.size == 20


def lambdas() -> Any:
    samples = Pictures()
    samples.transform = lambda image: image  # type: ignore[attr-defined]
    return samples


UNPICKLABLE: dict[str, Callable[[], Any]] = {
    "a lambda": lambdas,
    "a generator within": lambda: [((i for i in range(3)), 1)],
    "a file": lambda: Wrapped(Path(__file__).open()),  # noqa: SIM115
}


class Wrapped(Pictures):
    """Holds something."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what


@pytest.mark.parametrize("case", UNPICKLABLE)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_cannot_be_pickled_is_told_before_anything_is_written(case: str) -> None:
    samples = UNPICKLABLE[case]()
    with pytest.raises(UsageError, match=r"cannot be given to other processes: .*workers=0"):
        open_object(samples, parse_wish("f_1"), workers=2)
    open_object(samples, parse_wish("f_1"), workers=0)


def script(folder: Path, code: str) -> str:
    """Run a program of its own; return what it printed."""
    (folder / "program.py").write_text(code)
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MAIN = """
from streamloader.conversion.sources.objects import open_object
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import UsageError

class Mine:
    def __len__(self):
        return 3
    def __getitem__(self, number):
        return {"x": number}

def double(number):
    return 2 * number

class Calling:
    def __init__(self, function):
        self.function = function

open_object(Mine(), Wish(), 0)
for samples in (Mine(), [{"x": 1, "f": double}]):
    try:
        open_object(samples, Wish({"x": None}), 2)
    except UsageError as error:
        print(error)
"""


def test_what_the_running_program_defines_is_told(tmp_path: Path) -> None:
    """A worker is a program of its own: its `__main__` is another."""
    first, second = script(tmp_path, MAIN).splitlines()
    assert first.startswith("the __main__.Mine cannot be given to other processes")
    assert "Mine is defined in the program that runs, __main__; define its classes" in first
    assert "double is defined in the program that runs" in second


def test_a_module_that_workers_lack_is_told(tmp_path: Path) -> None:
    import pickle

    (tmp_path / "gone.py").write_text("class Data(list):\n    pass\n")
    code = (
        "import pickle, sys, numpy as np\n"
        "from gone import Data\n"
        "from streamloader.conversion.sources.objects import open_object\n"
        "from streamloader.conversion.sources.wish import Wish\n"
        "source = open_object(Data([1, 2]), Wish(), 1)\n"
        "print(pickle.dumps(source.part(np.arange(2))).hex())\n"
    )
    part = pickle.loads(bytes.fromhex(script(tmp_path, code)))
    with pytest.raises(UsageError, match=r"the gone\.Data cannot be loaded in another process: ModuleNotFoundError"):
        part.read(pytest.fail)


NO_OBJECTS: dict[str, tuple[Any, str]] = {
    "a number": (7, "a builtins.int has no samples to convert"),
    "a text": ("data", "a builtins.str has no samples to convert"),
    "bytes": (b"data", "a builtins.bytes has no samples to convert"),
    "a mapping": ({"x": 1}, "a builtins.dict has no samples to convert; give a dataset, a list"),
    "a class": (Pictures, "a builtins.type has no samples"),
    "a loader": (DataLoader(Pictures(), batch_size=4), "DataLoader gives batches, not samples; give its dataset"),
}


@pytest.mark.parametrize("case", NO_OBJECTS)
def test_what_holds_no_samples_is_told(case: str) -> None:
    samples, told = NO_OBJECTS[case]
    with pytest.raises(UsageError, match=told):
        map_style(samples)


def test_only_what_has_numbers_and_a_length_is_taken_by_number() -> None:
    assert all(map_style(samples) for samples in (Pictures(), [1], (1,), np.zeros(3), torch.zeros(3)))
    assert not any(map_style(samples) for samples in (Counting(), iter([1]), (i for i in [1]), {1, 2}))


def test_no_sample_and_no_field_are_told() -> None:
    with pytest.raises(SourceError, match=r"the builtins\.list has no sample"):
        open_object([], Wish())
    with pytest.raises(FieldError, match="no field of the format holds the field 'x'"):
        open_object([{"x": {1}}], Wish())
    with pytest.raises(SourceError, match=r"Pictures\[0\]: it cannot be read: ValueError"):
        open_object(Pictures(2, bad=(0, 1)), Wish())


# one after another


def numbers(stop: int) -> Iterator[dict[str, Any]]:
    for number in range(stop):
        yield {"X": number, "tokens": list(range(number % 3)), "text": f"Nº {number}"}


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
def test_a_generator_becomes_a_dataset(length: int, tmp_path: Path) -> None:
    manifest = write_iterable(numbers(length), tmp_path / "out", writing=Writing(workers=0))
    ds = dataset.open(tmp_path / "out")
    assert manifest.digest == ds.digest
    assert len(ds) == length
    assert ds.read("x", 0, length).tolist() == list(range(length))
    assert ds.read("text", 0, length) == [f"Nº {number}" for number in range(length)]
    assert [ds[i]["tokens"].tolist() for i in range(length)] == [list(range(i % 3)) for i in range(length)]
    provenance = ds.manifest.provenance
    assert provenance["source"] == {"format": "python", "url": "python:builtins.generator"}
    assert provenance["object"] == "builtins.generator"
    assert provenance["keys"] == {"x": "X"}


def test_an_iterable_dataset_becomes_a_dataset_on_every_store(store_url: tuple[str, dict[str, Any]]) -> None:
    url, options = store_url
    small = Layout(shard_size=4096, block_size=1024, chunk_size=512)
    writing = Writing(layout=small, workers=2, storage_options=options)
    write_iterable(Counting(), url, writing=writing)
    ds = dataset.open(url, storage_options=options)
    assert ds.read("x", 0, 100).tolist() == list(range(100))
    assert ds.manifest.provenance["object"] == "test_sources_python.Counting"
    with pytest.raises(DestinationError, match="holds a dataset"):
        write_iterable(Counting(), url, writing=writing)
    write_iterable(iter([5, 6]), url, writing=Writing(overwrite=True, storage_options=options))
    assert dataset.open(url, storage_options=options).read("data", 0, 2).tolist() == [5, 6]


def test_a_wish_chooses_and_types_the_fields_of_an_iterable(tmp_path: Path) -> None:
    write_iterable(numbers(10), tmp_path / "out", wish=parse_wish("tokens=ragged:int32,x=float32"))
    ds = dataset.open(tmp_path / "out")
    assert {name: str(field) for name, field in ds.fields.items()} == {"tokens": "ragged:int32", "x": "float32"}
    assert ds[5]["tokens"].tolist() == [0, 1]
    with pytest.raises(FieldError, match=r"python:builtins\.generator has no field 'y'; it has x, tokens, text"):
        write_iterable(numbers(10), tmp_path / "more", wish=parse_wish("y"))
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("at", [3, 200])
def test_a_bad_sample_of_an_iterable_is_refused_or_left_out(at: int, tmp_path: Path) -> None:
    def samples() -> Iterator[dict[str, Any]]:
        for number in range(300):
            yield {"x": [number, number]} if number != at else {"x": [number]}

    wish = parse_wish("x=int64[2]")
    with pytest.raises(SourceError, match=f"sample {at} of the builtins.generator: .* has shape"):
        write_iterable(samples(), tmp_path / "out", wish=wish)
    assert not list(tmp_path.rglob("*.json"))
    bad: list[BadSample] = []
    manifest = write_iterable(samples(), tmp_path / "out", wish=wish, refuse=bad.append)
    assert manifest.num_samples == 299
    assert [one.position for one in bad] == [at]
    assert "ragged:int64" in bad[0].remedy
    with pytest.raises(SourceError, match=r"all samples of the builtins\.list_iterator are bad"):
        write_iterable(iter([[1], [2]]), tmp_path / "none", wish=parse_wish("f_0=text"), refuse=bad.append)


@pytest.mark.parametrize("after", [10, 1000])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_what_an_iterable_raises_leaves_nothing_behind(after: int, kind: type[BaseException], tmp_path: Path) -> None:
    def samples() -> Iterator[dict[str, Any]]:
        yield from ({"x": np.zeros(100)} for _ in range(after))
        raise kind("it ends here")

    small = Writing(Layout(shard_size=8192, block_size=1024, chunk_size=512), workers=1)
    with pytest.raises(kind, match="it ends here"):
        write_iterable(samples(), tmp_path / "out", writing=small)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_iterable_without_samples_is_told(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="gives no sample"):
        write_iterable(iter([]), tmp_path / "out")


def test_progress_of_an_iterable_counts_its_samples(tmp_path: Path) -> None:
    told: list[Progress] = []
    write_iterable(numbers(150), tmp_path / "out", progress=told.append)
    assert [one.done for one in told] == [0, 64, 128, 150]
    assert [one.phase for one in told] == ["write", "write", "write", "finish"]


def test_samples_are_taken_as_they_are_written(tmp_path: Path) -> None:
    """An iterable may be longer than the memory: only the first samples and those of a shard are held."""
    alive, most = set[int](), 0
    ids = count()

    class Large(np.ndarray[Any, Any]):
        def __del__(self) -> None:
            alive.discard(self.number)  # type: ignore[attr-defined]

    def samples() -> Iterator[dict[str, Any]]:
        nonlocal most
        for _ in range(300):
            array = np.zeros(1 << 18, np.uint8).view(Large)
            array.number = next(ids)  # type: ignore[attr-defined]
            alive.add(array.number)  # type: ignore[attr-defined]
            most = max(most, len(alive))
            yield {"x": array}
            del array

    small = Writing(Layout(shard_size=4 << 20), workers=1)
    write_iterable(samples(), tmp_path / "out", writing=small)
    assert most <= 64 + 2


# whole conversions


def test_a_dataset_is_converted_in_place_of_a_url(tmp_path: Path) -> None:
    small = Layout(shard_size=8192, block_size=1024, chunk_size=512)
    report = convert(Pictures(200), tmp_path / "out", workers=2, layout=small, split="train=0.9,val=0.1")
    found = [dataset.open(tmp_path / "out", split=name) for name in ("train", "val")]
    assert sorted(label for ds in found for label in ds.read("f_1", 0, len(ds)).tolist()) == list(range(200))
    assert report.format == "python"
    assert report.shards > 1
    left = convert(Pictures(50, bad=(7,)), tmp_path / "more", workers=0, on_error="skip")
    assert left.num_samples == 49
    convert(iter([{"x": 1}, {"x": 2}]), tmp_path / "iterated")
    assert dataset.open(tmp_path / "iterated").read("x", 0, 2).tolist() == [1, 2]


def test_a_conversion_does_not_go_on_with_another_object(tmp_path: Path) -> None:
    small = Layout(shard_size=8192, block_size=1024, chunk_size=512)

    def interrupt(progress: Progress) -> None:
        if progress.phase == "write" and progress.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(Pictures(200), tmp_path / "out", workers=0, layout=small, progress=interrupt)
    for other in (Pictures(200, shift=1), Pictures(199)):
        with pytest.raises(SourceChangedError, match="changed since the conversion"):
            convert(other, tmp_path / "out", workers=0, layout=small)
    report = convert(Pictures(200), tmp_path / "out", workers=0, layout=small)
    assert report.shards_kept > 0
    assert dataset.open(tmp_path / "out").read("f_1", 0, 200).tolist() == list(range(200))


def test_nothing_is_written_of_what_workers_cannot_load(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="workers=0"):
        convert(lambdas(), tmp_path / "out", workers=2)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
