"""Every argument that is an integer takes those of numpy, and refuses anything else by its name."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr
from conversions import contents

import streamloader as sl
from streamloader.conversion.transforms import parse_recode
from streamloader.errors import StreamloaderError
from streamloader.options import Pack

N = 40


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two datasets of numbers, one of texts of numbers, and an array of Zarr."""
    root = tmp_path_factory.mktemp("integers")
    layout = sl.Layout(samples_per_shard=8)
    sl.convert({"x": np.arange(N)}, root / "a", workers=0, layout=layout)
    sl.convert({"x": np.arange(N) + N}, root / "b", workers=0, layout=layout)
    sl.convert([{"t": list(range(i + 1))} for i in range(N)], root / "ragged", workers=0)
    group = zarr.open_group(root / "z.zarr", mode="w")
    values = np.arange(512, dtype="f4").reshape(8, 8, 8)
    group.create_array("v", data=values, chunks=(2, 8, 8), dimension_names=["time", "y", "x"])
    return root


def delivered(ds: Any) -> Any:
    """Return the first two batches, and the state after them, which is JSON."""
    batches = iter(ds)
    found = [next(batches) for _ in range(2)]
    return [{name: value.tolist() for name, value in batch.items()} for batch in found], json.dumps(ds.state_dict())


def stream(root: Any, name: str = "a", **options: Any) -> sl.StreamingDataset:
    return sl.StreamingDataset(root / name, **{"batch_size": 4, **options})


def arrays(root: Any, **options: Any) -> Any:
    return delivered(stream(root, "z.zarr", batch_size=1, sample_axis="time", **options))


def mixed(root: Any, **options: Any) -> Any:
    weights = {str(root / "a"): 1, str(root / "b"): 1}
    return delivered(sl.Mixture(weights, **{"batch_size": 4, **options}))


def shuffled(name: str) -> Callable[..., Any]:
    return lambda root, value: delivered(stream(root, shuffle=sl.Shuffle(**{name: value})))


def at_epoch(root: Any, epoch: Any) -> Any:
    ds = stream(root)
    ds.set_epoch(epoch)
    return delivered(ds)


def converted(name: str, **options: Any) -> Callable[..., Any]:
    def make(root: Any, value: Any) -> Any:
        sl.convert({"x": np.arange(N)}, root / "out", **{"workers": 0, "overwrite": True, **options, name: value})
        return contents(root / "out")

    return make


def laid_out(name: str) -> Callable[..., Any]:
    return lambda root, value: converted("layout")(root, sl.Layout(**{name: value}))


def written(name: str) -> Callable[..., Any]:
    def make(root: Any, value: Any) -> Any:
        with sl.Writer(root / "out", {"x": "int64"}, overwrite=True, **{name: value}) as out:
            out.write_batch({"x": np.arange(4)})
        return contents(root / "out")

    return make


# what a message names, a good value, and a function of the folder and a value
ARGUMENTS: list[tuple[str, int, Callable[[Any, Any], Any]]] = [
    ("batch_size=", 4, lambda root, value: delivered(stream(root, batch_size=value))),
    ("seed=", 200, lambda root, value: delivered(stream(root, seed=value))),
    ("steps_per_epoch=", 3, lambda root, value: delivered(stream(root, steps_per_epoch=value))),
    ("num_workers=", 0, lambda root, value: repr(stream(root, transform=dict, num_workers=value))),
    ("skip_steps={0: ", 1, lambda root, value: delivered(stream(root, skip_steps={0: [value]}))),
    ("skip_steps={", 0, lambda root, value: delivered(stream(root, skip_steps={value: [1]}))),
    ("rank or world size", 1, lambda root, value: delivered(stream(root, world=(value, 2)))),
    ("rank or world size", 2, lambda root, value: delivered(stream(root, world=(0, value)))),
    ("set_epoch(", 1, at_epoch),
    ("epoch=", 1, lambda root, value: stream(root).samples(value, 0).tolist()),
    ("step=", 2, lambda root, value: stream(root).samples(0, value).tolist()),
    ("rank=", 0, lambda root, value: stream(root).samples(0, 0, value).tolist()),
    ("workers=", 1, lambda root, value: stream(root).samples(0, 0, workers=value).tolist()),
    ("batches=", 1, lambda root, value: json.dumps(stream(root).state_dict(value))),
    ("workers=", 1, lambda root, value: json.dumps(stream(root).state_dict(1, workers=value))),
    ("epoch=", 0, lambda root, value: [batch["x"].tolist() for batch in stream(root).replay(value, [1])]),
    ("steps={0: ", 1, lambda root, value: [batch["x"].tolist() for batch in stream(root).replay(0, [value])]),
    ("Shuffle(window=", 64, shuffled("window")),
    ("Shuffle(lanes=", 2, shuffled("lanes")),
    ("Shuffle(block=", 8, shuffled("block")),
    ("Pack(length=", 8, lambda root, value: delivered(stream(root, "ragged", pack={"t": value}))),
    ("Pack(length=", 200, lambda root, value: delivered(stream(root, "ragged", pack={"t": Pack(value)}))),
    ("Decode(size=", 8, lambda root, value: repr(sl.Decode(size=(value, value)))),
    ("Window(length=", 2, lambda root, value: arrays(root, windows=sl.Window(value))),
    ("Window(stride=", 2, lambda root, value: arrays(root, windows=sl.Window(2, stride=value))),
    ("Window(history=", 2, lambda root, value: arrays(root, windows=sl.Window(history=value, lead=1))),
    ("Window(lead=", 2, lambda root, value: arrays(root, windows=sl.Window(history=1, lead=(1, value)))),
    ("Patch(size=", 4, lambda root, value: arrays(root, patches=sl.Patch({"y": value}))),
    ("Patch(stride=", 4, lambda root, value: arrays(root, patches=sl.Patch({"y": 4}, stride=value))),
    ("Patch(margin=", 1, lambda root, value: arrays(root, patches=sl.Patch({"y": 4}, margin={"y": value}))),
    ("batch_size=", 4, lambda root, value: mixed(root, batch_size=value)),
    ("unit=", 2, lambda root, value: mixed(root, unit=value)),
    ("schedule={", 1, lambda root, value: mixed(root, schedule={value: {str(root / "a"): 1}})),
    ("Layout(shard_size=", 4096, laid_out("shard_size")),
    ("Layout(block_size=", 4096, laid_out("block_size")),
    ("Layout(chunk_size=", 4096, laid_out("chunk_size")),
    ("Layout(samples_per_shard=", 8, laid_out("samples_per_shard")),
    ("workers=", 0, converted("workers")),
    ("shuffle=", 200, converted("shuffle")),
    ("map_batch=", 200, converted("map_batch", map=dict)),
    ("quality=", 90, lambda _, value: json.dumps(parse_recode(None, value).options())),
    ("workers=", 2, written("workers")),
    ("num_samples=", 4, written("num_samples")),
    ("first_contact_attempts=", 2, lambda _, value: repr(sl.RetryPolicy(first_contact_attempts=value))),
]
OPTIONAL = ("batch_size=", "steps_per_epoch=", "rank=", "batches=", "Shuffle", "Patch(stride=", "unit=", "workers=")
OPTIONAL += ("Layout(samples", "shuffle=", "map_batch=", "quality=", "num_samples=")
TEXTS = ("rank or world size", "Window")  # "1" of an environment variable, a duration


@pytest.mark.quick(21)
@pytest.mark.parametrize(("name", "good", "call"), ARGUMENTS, ids=lambda value: value if isinstance(value, str) else "")
def test_an_integer_may_be_one_of_numpy_and_anything_else_is_an_error_that_names_it(name, good, call, root):
    expected = call(root, good)
    assert call(root, np.int64(good)) == expected
    if good < 256:
        assert call(root, np.uint8(good)) == expected  # which would wrap
    for bad in (1.5, True, np.float64(good), *([str(good)] if not name.startswith(TEXTS) else [])):
        with pytest.raises(StreamloaderError, match=re.escape(name)):
            call(root, bad)
    if not name.startswith(OPTIONAL):
        with pytest.raises(StreamloaderError):
            call(root, None)


def test_the_axis_of_samples_and_the_samples_to_read_may_be_integers_of_numpy(root):
    zarr.open_group(root / "unnamed.zarr", mode="w").create_array("v", data=np.eye(8))
    found, expected = (stream(root, "unnamed.zarr", sample_axis=axis) for axis in (np.int64(1), 1))
    assert delivered(found) == delivered(expected)
    ds = sl.open(root / "a")
    assert ds[np.uint8(9)] == ds[9]
    assert ds.read("x", np.uint8(8), np.uint8(20)).tolist() == list(range(8, 20))
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        ds.read("x", 0, 1.5)
