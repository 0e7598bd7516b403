"""Python objects as sources: by number, in workers, and one after another."""

import io
import json
import pickle
import weakref
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from conversions import SMALL, Exported, interrupted, module_at
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sources import FORMATS, assert_error, bad_rows, kinds_of, read, rows_of
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchrun import run_python

import streamloader as sl
from streamloader.conversion.sources.fields import FieldSelection, parse_selection
from streamloader.conversion.sources.objects import map_style, open_object
from streamloader.errors import DestinationError, FieldError, SourceChangedError, SourceError, UsageError

ALL = FieldSelection()


class Pictures(Dataset[tuple[Image.Image, int]]):
    """What torchvision's datasets give: an image and its label. Those of `bad` raise."""

    def __init__(self, length=20, bad=(), shift=0):
        self.length, self.bad, self.shift = length, bad, shift

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        if number in self.bad:
            raise ValueError(f"file {number} is gone")
        return Image.fromarray(np.full((2, 3, 3), number + self.shift, np.uint8)), number


class Several(Pictures):
    """One that gives several samples at once, and keeps how it was asked."""

    def __init__(self, length, bad=()):
        super().__init__(length, bad)
        self.asked = []

    def __getitems__(self, numbers):
        self.asked.append(len(numbers))
        return [super(Several, self).__getitem__(number) for number in numbers]


class Counting(IterableDataset[dict[str, int]]):
    """An iterable with a length; torch lets it inherit a `__getitem__`."""

    def __len__(self):
        return 100

    def __iter__(self):
        return ({"x": number} for number in range(100))


Named = namedtuple("Named", ["x", "name"])


def test_a_source_has_the_expected_samples():
    expected = json.loads((FORMATS / "python/expected.json").read_text())
    source = open_object(module_at(FORMATS / "python/make.py").Things(), ALL)
    assert kinds_of(source) == expected["fields"]
    images = read(source)["image"]
    pixels = [{"image": {"pixels": np.asarray(Image.open(io.BytesIO(image))).tolist()}} for image in images]
    assert [row | image for row, image in zip(rows_of(source), pixels, strict=True)] == expected["samples"]
    assert source.notes == {"object": "make.Things", "keys": {"vector_1": "Vector-1"}}


HALVES = TensorDataset(torch.zeros(3, 2, dtype=torch.float16), torch.arange(3))
RAGGED = [{"x": Exported(np.full((i, 2), i, "i2"))} for i in range(3)]
VALUES = {
    "tensors": (TensorDataset(torch.arange(6).reshape(3, 2)), {"f_0": "int64[2]"}, {"f_0": [2, 3]}),
    "two of them": (HALVES, {"f_0": "float16[2]", "f_1": "int64"}, {"f_0": [0, 0], "f_1": 1}),
    "a list of dicts": ([{"x": i, "t": f"{i}"} for i in range(3)], {"x": "int64", "t": "text"}, {"x": 1, "t": "1"}),
    "named tuples": ([Named(i, "n") for i in range(3)], {"x": "int64", "name": "text"}, {"x": 1, "name": "n"}),
    "values": ([1.5, 2.5, 3.5], {"data": "float64"}, {"data": 2.5}),
    "an array": (np.arange(6, dtype=np.uint8).reshape(3, 2), {"data": "uint8[2]"}, {"data": [2, 3]}),
    "a tensor": (torch.arange(3, dtype=torch.int32), {"data": "int32"}, {"data": 1}),
    "DLPack": ([{"x": Exported(np.full(2, i, "f4"))} for i in range(3)], {"x": "float32[2]"}, {"x": [1, 1]}),
    "DLPack of several lengths": (RAGGED, {"x": "ragged:int16[2]"}, {"x": [[1, 1]]}),
    "gradients": ([torch.ones(2, requires_grad=True)] * 3, {"data": "float32[2]"}, {"data": [1, 1]}),
    "a subset": (Subset(TensorDataset(torch.arange(9)), [5, 7, 8]), {"f_0": "int64"}, {"f_0": 7}),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_become_fields(case):
    samples, fields, second = VALUES[case]
    assert map_style(samples)
    source = open_object(samples, ALL)
    assert kinds_of(source) == fields
    assert rows_of(source)[1] == second
    assert source.num_samples == 3


@given(chosen=st.sets(st.integers(0, 199)))
@settings(max_examples=10)
def test_any_rows_are_the_same_also_in_another_process(chosen):
    rows = sorted(chosen)
    for samples in ([{"x": i, "t": str(i)} for i in range(200)], Several(200)):
        source = open_object(samples, ALL, workers=1)
        wanted = [rows_of(source)[row] for row in rows]
        assert rows_of(source, rows) == wanted
        part = pickle.loads(pickle.dumps(source.fragment(np.array(rows, np.int64))))
        for one in (part, pickle.loads(pickle.dumps(part))):
            assert rows_of(source, rows, part=one) == wanted


TINY = sl.Layout(shard_size=1024, block_size=512, chunk_size=512)
TENSORS = TensorDataset(torch.arange(600).reshape(200, 3), torch.arange(200))


@pytest.mark.parametrize(("samples", "workers"), [(TENSORS, 0), (TENSORS, 1), (Several(200), 1)])
def test_workers_load_datasets_with_tensors(samples, workers, tmp_path):
    """Torch would give its tensors to other processes as shared memory, which ours cannot open."""
    assert sl.convert(samples, tmp_path / "out", workers=workers, layout=TINY).shards > 3
    assert sl.open(tmp_path / "out").read("f_1", 0, 200).tolist() == list(range(200))


def test_parts_of_a_list_take_their_own_samples_only():
    source = open_object([{"x": np.zeros(1000)} for _ in range(200)], ALL, workers=2)
    assert len(pickle.dumps(source.fragment(np.array([3, 5])))) < 30_000


def test_a_sample_that_raises_is_reported_and_left_out():
    for samples in (Pictures(bad=(4, 9)), Several(20, bad=(4, 9))):
        source = open_object(samples, ALL)
        found, bad = bad_rows(source, [2, 4, 9, 10])
        assert [row["f_1"] for row in found] == [2, 10]
        assert [one.position for one in bad] == [1, 2]
        assert bad[1].problem == "it cannot be read: ValueError: file 9 is gone"
        assert bad[1].name.endswith("[9]")
        assert_error(SourceError, r"\[4\]: it cannot be read: ValueError: file 4 is gone", source)


def test_a_sample_that_does_not_fit_is_reported_and_left_out():
    samples = [{"x": [1.0, 2.0]} for _ in range(200)]
    samples[77] = {"x": [1.0]}
    samples[78] = {"y": [1.0]}
    good, bad = bad_rows(open_object(samples, parse_selection("x=float64[2]")))
    assert len(good) == 198
    assert [one.name for one in bad] == ["builtins.list[77]", "builtins.list[78]"]
    assert "ragged:float64" in bad[0].remedy
    assert "is missing" in bad[1].problem


def test_several_are_asked_for_at_once():
    samples = Several(200)
    source = open_object(samples, ALL)
    samples.asked.clear()
    rows_of(source)
    assert samples.asked == [64, 64, 64, 8]


def test_an_object_that_gives_too_few_at_once_is_asked_one_by_one():
    class Short(Several):
        def __getitems__(self, numbers):
            return super().__getitems__(numbers[1:])

    assert [row["f_1"] for row in rows_of(open_object(Short(5), ALL))] == list(range(5))


def test_another_object_is_another_source():
    """Its identity depends on its length and on the values of the probed samples."""
    (known,) = open_object(Pictures(), ALL).files
    assert open_object(Pictures(), ALL).files == (known,)
    assert known.size == 20
    for samples in (Pictures(21), Pictures(shift=1), Pictures(bad=(19,))):
        assert open_object(samples, ALL).files != (known,)


def with_transform(transform):
    samples = Pictures()
    samples.transform = transform
    return samples


UNPICKLABLE = {
    "a lambda": lambda: with_transform(lambda image: image),
    "a generator within": lambda: [((i for i in range(3)), 1)],
    "a file": lambda: with_transform(Path(__file__).open()),  # noqa: SIM115
}


@pytest.mark.parametrize("case", UNPICKLABLE)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_cannot_be_pickled_is_an_error_before_anything_is_written(case, tmp_path):
    samples = UNPICKLABLE[case]()
    with pytest.raises(UsageError, match=r"cannot be given to other processes: .*workers=0"):
        sl.convert(samples, tmp_path / "out", fields="f_1", workers=2)
    assert not list(tmp_path.iterdir())
    open_object(samples, parse_selection("f_1"), workers=0)


def script(folder, code):
    """Run a program of its own; return what it printed."""
    (folder / "program.py").write_text(code)
    return run_python("program.py", cwd=folder).stdout


MAIN = """
from streamloader.conversion.sources.objects import open_object
from streamloader.conversion.sources.fields import FieldSelection
from streamloader.errors import UsageError

class Mine:
    def __len__(self):
        return 3
    def __getitem__(self, number):
        return {"x": number}

def double(number):
    return 2 * number

open_object(Mine(), FieldSelection(), 0)
for samples in (Mine(), [{"x": 1, "f": double}]):
    try:
        open_object(samples, FieldSelection({"x": None}), 2)
    except UsageError as error:
        print(error)
"""


def test_what_the_main_module_defines_is_an_error(tmp_path):
    """A worker is a program of its own: its `__main__` is another."""
    first, second = script(tmp_path, MAIN).splitlines()
    assert first.startswith("the __main__.Mine cannot be given to other processes")
    assert "Mine is defined in the program that runs, __main__; define its classes" in first
    assert "double is defined in the program that runs" in second


PICKLED = """
import pickle, numpy as np
from gone import Data
from streamloader.conversion.sources.objects import open_object
from streamloader.conversion.sources.fields import FieldSelection
print(pickle.dumps(open_object(Data([1, 2]), FieldSelection(), 1).fragment(np.arange(2))).hex())
"""


def test_a_module_that_workers_lack_is_an_error(tmp_path):
    (tmp_path / "gone.py").write_text("class Data(list):\n    pass\n")
    part = pickle.loads(bytes.fromhex(script(tmp_path, PICKLED)))
    with pytest.raises(UsageError, match=r"the gone\.Data cannot be loaded in another process: ModuleNotFoundError"):
        part(pytest.fail)


NO_OBJECTS = {
    "a number": (7, "a builtins.int has no samples to convert"),
    "a text": ("data", "a builtins.str has no samples to convert"),
    "a mapping": ({"x": 1}, "a builtins.dict has no samples to convert; give a dataset, a list"),
    "a class": (Pictures, "a builtins.type has no samples"),
    "a loader": (DataLoader(Pictures(), batch_size=4), "DataLoader gives batches, not samples; give its dataset"),
}


@pytest.mark.parametrize("case", NO_OBJECTS)
def test_objects_without_samples_are_errors(case):
    samples, message = NO_OBJECTS[case]
    with pytest.raises(UsageError, match=message):
        map_style(samples)


def test_only_what_has_numbers_and_a_length_is_taken_by_number():
    assert all(map_style(samples) for samples in (Pictures(), [1], (1,), np.zeros(3), torch.zeros(3)))
    assert not any(map_style(samples) for samples in (Counting(), iter([1]), (i for i in [1]), {1, 2}))


def test_no_sample_and_no_field_are_errors():
    with pytest.raises(SourceError, match=r"the builtins\.list has no sample"):
        open_object([], ALL)
    with pytest.raises(FieldError, match="no field of the format holds the field 'x'"):
        open_object([{"x": {1}}], ALL)
    with pytest.raises(SourceError, match=r"Pictures\[0\]: it cannot be read: ValueError"):
        open_object(Pictures(2, bad=(0, 1)), ALL)


# one after another


def numbers(stop):
    for number in range(stop):
        yield {"X": number, "tokens": list(range(number % 3)), "text": f"Nº {number}"}


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
def test_a_generator_becomes_a_dataset(length, tmp_path):
    report = sl.convert(numbers(length), tmp_path / "out", workers=0)
    ds = sl.open(tmp_path / "out")
    assert report.manifests[""].digest == ds.digest
    assert len(ds) == length
    assert ds.read("x", 0, length).tolist() == list(range(length))
    assert ds.read("text", 0, length) == [f"Nº {number}" for number in range(length)]
    assert [ds[i]["tokens"].tolist() for i in range(length)] == [list(range(i % 3)) for i in range(length)]
    provenance = ds.manifest.provenance
    assert provenance["source"] == {"format": "python", "url": "python:builtins.generator"}
    assert provenance["object"] == "builtins.generator"
    assert provenance["keys"] == {"x": "X"}


def test_an_iterable_dataset_becomes_a_dataset_on_every_store(store_url):
    url, options = store_url
    sl.convert(Counting(), url, layout=SMALL, workers=2, storage_options=options)
    ds = sl.open(url, storage_options=options)
    assert ds.read("x", 0, 100).tolist() == list(range(100))
    assert ds.manifest.provenance["object"] == "test_sources_python.Counting"
    with pytest.raises(DestinationError, match="holds a dataset"):
        sl.convert(Counting(), url, storage_options=options)
    sl.convert(iter([5, 6]), url, overwrite=True, storage_options=options)
    assert sl.open(url, storage_options=options).read("data", 0, 2).tolist() == [5, 6]


def test_fields_of_an_iterable_are_chosen_and_typed(tmp_path):
    sl.convert(numbers(10), tmp_path / "out", fields="tokens=ragged:int32,x=float32")
    ds = sl.open(tmp_path / "out")
    assert kinds_of(ds) == {"tokens": "ragged:int32", "x": "float32"}
    assert ds[5]["tokens"].tolist() == [0, 1]
    with pytest.raises(FieldError, match=r"python:builtins\.generator has no field 'y'; it has x, tokens, text"):
        sl.convert(numbers(10), tmp_path / "more", fields="y")
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("at", [3, 200])
def test_a_bad_sample_of_an_iterable_is_an_error_or_left_out(at, tmp_path):
    def samples():
        for number in range(300):
            yield {"x": [number, number]} if number != at else {"x": [number]}

    with pytest.raises(SourceError, match=rf"sample {at} of the builtins.generator: .* has shape .*ragged:int64"):
        sl.convert(samples(), tmp_path / "out", fields="x=int64[2]")
    assert not list(tmp_path.rglob("*.json"))
    report = sl.convert(samples(), tmp_path / "out", fields="x=int64[2]", on_error="skip")
    assert report.num_samples == 299
    assert [one.row for one in report.left_out[""]] == [at]
    with pytest.raises(SourceError, match=r"all \d+ samples of the builtins\.list_iterator are bad"):
        sl.convert(iter([[1], [2]]), tmp_path / "none", fields="f_0=text", on_error="skip")


@pytest.mark.parametrize("after", [10, 1000])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_what_an_iterable_raises_leaves_nothing_behind(after, kind, tmp_path):
    def samples():
        yield from ({"x": np.zeros(100)} for _ in range(after))
        raise kind("it ends here")

    with pytest.raises(kind, match="it ends here"):
        sl.convert(samples(), tmp_path / "out", layout=SMALL, workers=1)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_progress_of_an_iterable_counts_its_samples(tmp_path):
    reports = []
    sl.convert(numbers(150), tmp_path / "out", progress=reports.append)
    assert [one.done for one in reports] == [0, 64, 128, 150]
    assert [one.phase for one in reports] == ["write", "write", "write", "finish"]


def test_samples_are_taken_as_they_are_written(tmp_path):
    """An iterable may be longer than the memory: only the first samples and those of a shard are held."""
    alive, most = set[int](), 0

    def samples():
        nonlocal most
        for number in range(300):
            array = np.zeros(1 << 18, np.uint8)
            alive.add(number)
            weakref.finalize(array, alive.discard, number)
            most = max(most, len(alive))
            yield {"x": array}
            del array

    sl.convert(samples(), tmp_path / "out", layout=sl.Layout(shard_size=4 << 20), workers=1)
    assert most <= 64 + 2


# whole conversions


def test_a_dataset_object_is_converted_like_a_url(tmp_path):
    report = sl.convert(Pictures(200), tmp_path / "out", workers=0, layout=SMALL, split="train=0.9,val=0.1")
    found = [sl.open(tmp_path / "out", split=name) for name in ("train", "val")]
    assert sorted(label for ds in found for label in ds.read("f_1", 0, len(ds)).tolist()) == list(range(200))
    assert report.format == "python"
    assert report.shards > 1
    assert sl.convert(Pictures(50, bad=(7,)), tmp_path / "more", workers=0, on_error="skip").num_samples == 49


def test_a_conversion_is_not_resumed_with_another_object(tmp_path):
    interrupted(Pictures(200), tmp_path / "out", 1)
    for other in (Pictures(200, shift=1), Pictures(199)):
        with pytest.raises(SourceChangedError, match="changed since the conversion"):
            sl.convert(other, tmp_path / "out", workers=0, layout=SMALL)
    assert sl.convert(Pictures(200), tmp_path / "out", workers=0, layout=SMALL).shards_kept > 0
    assert sl.open(tmp_path / "out").read("f_1", 0, 200).tolist() == list(range(200))


HUGGING_FACE = """
import io, json, sys
sys.path = [path for path in sys.path if not path.endswith("tests")]  # whose datasets.py has the name of the package
import numpy as np
import streamloader as sl
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Pillow
from torch.utils.data import Subset

def jpeg(number):
    out = io.BytesIO()
    Pillow.fromarray(np.full((8, 12, 3), number, np.uint8)).save(out, "JPEG")
    return out.getvalue()

with open("file.jpg", "wb") as file:
    file.write(jpeg(2))
values = [jpeg(0), jpeg(1), {"bytes": None, "path": "file.jpg"}, jpeg(3), None]
features = Features({"image": Image(), "label": ClassLabel(names=["cat", "dog"]), "x": Value("float32")})
samples = {"image": [v if v is None or isinstance(v, dict) else {"bytes": v, "path": None} for v in values]}
ds = Dataset.from_dict({**samples, "label": [0, 1, 1, 0, 0], "x": [0.5] * 5}, features=features)
cases = {
    "dataset": ds, "selected": ds.select([3, 1, 2, 0]), "as torch": ds.with_format("torch"),
    "subset": Subset(ds, [2, 0]), "iterable": ds.to_iterable_dataset(),
    "transformed": ds.with_transform(lambda batch: {"label": batch["label"]}),
}
for name, case in cases.items():
    report = sl.convert(case, "out", workers=0, overwrite=True, on_error="skip")
    out = sl.open("out")
    images = [[number for number in range(4) if jpeg(number) == sample.get("image")] for sample in out]
    kinds = {field: str(kind) for field, kind in out.fields.items()}
    print(json.dumps([name, kinds, out.manifest.classes, images, report.num_left_out]))
"""


def test_a_dataset_of_hugging_face_keeps_encoded_bytes_and_class_names(tmp_path):
    lines = run_python("-c", HUGGING_FACE, cwd=tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)).stdout.splitlines()
    found = {name: rest for name, *rest in map(json.loads, lines)}
    classes = {"label": ["cat", "dog"]}
    fields = {"image": "bytes:jpeg", "label": "int64", "x": "float64"}
    assert found["dataset"] == [fields, classes, [[0], [1], [2], [3]], 1]
    assert found["selected"] == [fields, classes, [[3], [1], [2], [0]], 0]
    assert found["subset"] == [fields, classes, [[2], [0]], 0]
    assert found["iterable"] == found["dataset"]
    assert found["as torch"] == [fields | {"x": "float32"}, *found["dataset"][1:]]
    assert found["transformed"] == [{"label": "int64"}, {}, [[]] * 5, 0]
