"""Values of different sizes in a batch: padded, lists, nested tensors, or batches that a function makes."""

import io
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from shutil import copytree
from typing import Any

import collate_tasks
import numpy as np
import pytest
import torch
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import streamloader as sl
from streamloader import errors
from streamloader.engine import engine, residence
from streamloader.engine.arena import Arena, Buffers
from streamloader.engine.collate import pad_arrays
from streamloader.engine.gather import Copy, copy_all, part_of
from streamloader.engine.residence import Chunks
from streamloader.format.codecs import Items
from streamloader.format.manifest import Field
from streamloader.format.opening import open_root
from streamloader.format.reader import FieldReader
from streamloader.options import Pad
from streamloader.order.schedule import BatchPlan
from streamloader.stats import Counters
from streamloader.storage import open_store

N = 90
ARENA = Arena(shared=False)
FIELDS = {"tokens": "ragged:int32", "boxes": "ragged:float32[4]", "image": "bytes:jpeg", "label": "int64"}
pytestmark = pytest.mark.usefixtures("two_workers")


def jpeg(i: int) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((20 + i % 5 * 8, 24 + i % 3 * 8, 3), i, np.uint8)).save(data, "JPEG")
    return data.getvalue()


def value(name: str, i: int) -> Any:
    if name == "tokens":
        return np.arange(i, i + (i * 7) % 40, dtype=np.int32)
    return {"boxes": np.full((i % 4, 4), i + 1, np.float32), "image": jpeg(i), "label": np.int64(i)}[name]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("collate") / "d"
    layout = sl.Layout(chunk_size=1 << 11, block_size=1 << 12, samples_per_shard=32)
    with sl.Writer(folder, FIELDS, layout=layout, num_samples=N) as out:
        for i in range(N):
            out.write({name: value(name, i) for name in FIELDS})
    return folder


def batches(path: Path, workers: int = 0, **given: Any) -> list[dict[str, Any]]:
    options = {"batch_size": 16, "with_index": True, "seed": 4, "num_workers": workers, **given}
    dataset = sl.StreamingDataset(path, **options)
    found = list(dataset)
    dataset.close()
    return found


def expected(values: Sequence[np.ndarray], pad: Pad) -> np.ndarray:
    """The padded array, value by value."""
    longest = pad.padded(max(len(value) for value in values))
    rows = []
    for value in values:
        row = np.full((longest, *value.shape[1:]), pad.value, value.dtype)
        kept = value[:longest]
        row[slice(0, len(kept)) if pad.side == "right" else slice(longest - len(kept), longest)] = kept
        rows.append(row)
    return np.stack(rows)


PADS = [Pad(), Pad(-1, "left"), Pad(7, to=16, mask=True), Pad(to=(8, 24, 64)), Pad(3, "left", (10, 20), truncate=True)]


@pytest.mark.quick(4)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pad", PADS)
def test_padded_rows_have_the_values_of_their_samples_and_the_padding_elsewhere(pad, workers, path):
    for batch in batches(path, workers, fields=["tokens", "boxes"], collate={"tokens": pad, "boxes": "pad"}):
        numbers = batch["index"].tolist()
        for name, rule in (("tokens", pad), ("boxes", Pad())):
            values = [value(name, number) for number in numbers]
            rows = expected(values, rule)
            assert np.array_equal(batch[name].numpy(), rows)
            assert batch[f"{name}_lengths"].tolist() == [min(len(each), rows.shape[1]) for each in values]
        if pad.mask:
            inside = np.arange(batch["tokens"].shape[1]) < batch["tokens_lengths"].numpy()[:, None]
            assert np.array_equal(batch["tokens_mask"].numpy(), inside)
        assert ("tokens_mask" in batch) is pad.mask
        assert "tokens_offsets" not in batch


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_lists_and_nested_tensors_have_the_values_of_each_sample(workers, path):
    rules = {"tokens": "nested", "boxes": "list"}
    for batch in batches(path, workers, fields=["tokens", "boxes"], collate=rules):
        numbers = batch["index"].tolist()
        assert batch["tokens"].layout == torch.jagged
        for name in rules:
            rows = [each.numpy() for each in batch[name].unbind()] if name == "tokens" else batch[name]
            assert all(isinstance(row, torch.Tensor | np.ndarray) for row in rows)
            for row, number in zip(rows, numbers, strict=True):
                assert np.array_equal(np.asarray(row), value(name, number))


@pytest.mark.quick(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_images_that_keep_their_sizes_are_padded_or_a_list(layout, workers, path):
    options = {"fields": ["image"], "decode": sl.Decode(layout=layout)}
    padded = batches(path, workers, **options, collate=Pad(9, to=16))
    listed = batches(path, workers, **options, collate="list")
    for one, other in zip(padded, listed, strict=True):
        images = one["image"].movedim(1, -1) if layout == "CHW" else one["image"]
        assert images.shape[1] % 16 == images.shape[2] % 16 == 0
        for row, number in enumerate(one["index"].tolist()):
            pixels = np.asarray(Image.open(io.BytesIO(jpeg(number))))
            height, width = one["image_lengths"][row].tolist()
            image = other["image"][row].movedim(0, -1) if layout == "CHW" else other["image"][row]
            assert (height, width) == pixels.shape[:2] == tuple(image.shape[:2])
            assert np.array_equal(images[row, :height, :width].numpy(), image.numpy())
            assert np.abs(image.numpy().astype(int) - pixels).max() <= 3  # other decoders round differently
            outside = images[row].clone()
            outside[:height, :width] = 9
            assert (outside == 9).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_transform_returns_is_padded_listed_or_nested_by_name(workers, path):
    rules = {"wave": Pad(-1, to=8, mask=True), "grid": Pad(axes=2), "parts": "list", "jagged": "nested"}
    found = batches(path, workers, fields=["label"], transform=collate_tasks.sizes, collate=rules)
    for batch in found:
        for row, label in enumerate(batch["label"].tolist()):
            made = collate_tasks.sizes({"label": np.int64(label)})
            length, (height, width) = batch["wave_lengths"][row].item(), batch["grid_lengths"][row].tolist()
            assert np.array_equal(batch["wave"][row, :length], made["wave"])
            assert (batch["wave"][row, length:] == -1).all()
            assert batch["wave_mask"][row].sum() == length
            assert np.array_equal(batch["grid"][row, :height, :width], made["grid"])
            assert batch["grid"][row].sum() == made["grid"].sum()
            assert torch.equal(torch.as_tensor(batch["parts"][row]), made["parts"])
            assert np.array_equal(batch["jagged"].unbind()[row].numpy(), made["jagged"])


@pytest.mark.quick(3)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("transform", [None, collate_tasks.doubled])
def test_a_function_gets_the_samples_of_a_batch_and_makes_its_columns(transform, workers, path):
    options = {"fields": ["tokens", "label", "image"], "decode": True, "transform": transform}
    for batch in batches(path, workers, **options, collate=collate_tasks.collate):
        numbers = batch["index"].tolist()
        factor = 1 if transform is None else 2
        assert batch["total"].tolist() == [value("tokens", number).sum() * factor for number in numbers]
        assert [target["label"].item() for target in batch["targets"]] == numbers
        assert batch["shapes"] == [np.asarray(Image.open(io.BytesIO(jpeg(number)))).shape for number in numbers]
        assert batch["stacked"].shape == (len(numbers), 3, 50)
        assert (batch["stacked"] == torch.tensor(numbers)[:, None, None]).all()


def test_random_numbers_of_a_function_depend_on_seed_epoch_and_position_alone(path):
    def draw(workers: int, **given: Any) -> list[Any]:
        found = batches(path, workers, fields=["label"], collate=collate_tasks.noise, **given)
        return [(batch["rng"].tolist(), batch["torch"].tolist()) for batch in found]

    first = draw(0)
    assert len({str(each) for each in first}) == len(first)
    assert draw(2) == first
    dataset = sl.StreamingDataset(
        path, batch_size=16, seed=4, fields=["label"], collate=collate_tasks.noise, num_workers=0
    )
    iterator = iter(dataset)
    for _ in range(2):
        next(iterator)
    dataset.load_state_dict(dataset.state_dict())
    assert [(batch["rng"].tolist(), batch["torch"].tolist()) for batch in dataset] == first[2:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["mask", "replace"])
@pytest.mark.parametrize("collate", ["rules", "function"])
def test_bad_samples_are_filled_before_they_form_a_batch(collate, kind, workers, path):
    bad = {7, 30, 31, 88}
    rules = {"wave": "pad", "parts": "list", "grid": Pad(axes=2), "jagged": "nested"}
    rule: Any = rules if collate == "rules" else collate_tasks.of_waves
    options = {"fields": ["label"], "transform": collate_tasks.sizes_or_error, "on_error": kind, "max_bad": N}
    seen = []
    for batch in batches(path, workers, **options, collate=rule):
        flags = batch["error" if kind == "mask" else "replaced"]
        for row, number in enumerate(batch["index"].tolist()):
            label = batch["label"][row].item()
            masked = kind == "mask" and number in bad
            assert label == (0 if masked else number)
            assert not (masked and batch["valid"][row])
            assert flags[row].item() or number not in bad
            if not masked:
                seen.append(number)
                assert batch["wave"][row].sum() == collate_tasks.sizes({"label": np.int64(number)})["wave"].sum()
    assert not {*seen} & bad


def test_errors_of_a_function_name_the_batch(path):
    with pytest.raises(errors.TransformError, match="collate raised ZeroDivisionError on sample"):
        batches(path, fields=["label"], collate=lambda rows: 1 / 0)
    with pytest.raises(errors.TransformError, match="collate returned list for sample"):
        batches(path, fields=["label"], collate=lambda rows: rows)


RULES: list[Any] = [
    {"tokens": Pad(-1, "left", mask=True), "boxes": Pad(7, to=(1, 2, 4))},
    {"tokens": Pad(3, to=(10, 20), truncate=True, mask=True), "boxes": "nested"},
    {"tokens": "list", "boxes": "pad"},
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if one.layout == torch.jagged:
        return same(one.unbind(), other.unbind())
    return bool(one.dtype == other.dtype and torch.equal(one, other))


@pytest.mark.quick(2)
@pytest.mark.parametrize("bad", [None, "mask", "replace"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rules", RULES)
def test_steps_that_are_gathered_together_have_the_columns_of_each_by_itself(
    rules, workers, bad, path, tmp_path, monkeypatch
):
    options: dict[str, Any] = {"fields": ["tokens", "boxes", "label"], "collate": rules}
    if bad is not None:
        path = Path(copytree(path, tmp_path / "d"))
        (chunk,) = FieldReader(*reversed(open_root(open_store(path))[:2]), "tokens").runs(40, 41)
        data = bytearray((path / chunk.path).read_bytes())
        data[chunk.start + 5] ^= 0xFF
        (path / chunk.path).write_bytes(data)
        options |= {"on_error": bad, "max_bad": N}
    found, elements = [], []
    monkeypatch.setattr(engine, "LEAST_GROUPS", 1)
    for most, padded_bytes in ((1, 1 << 20), (7, 1 << 20), (7, 0)):
        for name in ("MAX_STEPS_AT_ONCE", "MAX_SHARED_STEPS"):
            monkeypatch.setattr(engine, name, most)
        monkeypatch.setattr(residence, "PADDED_BYTES", padded_bytes)
        dataset = sl.StreamingDataset(path, batch_size=4, with_index=True, seed=4, num_workers=workers, **options)
        assert dataset._engine().steps_at_once(dataset._first_share()) == most
        found.append(list(dataset))
        elements.append((dataset.stats().elements, dataset.stats().padding_elements))
        dataset.close()
    assert len({*elements}) == 1
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert [*one] == [*other]
            assert all(same(one[name], other[name]) for name in one)


def test_only_the_step_of_a_sample_beyond_the_last_edge_is_an_error(path, monkeypatch):
    monkeypatch.setattr(engine, "LEAST_GROUPS", 1)
    options: dict[str, Any] = {"fields": ["tokens"], "collate": Pad(to=(8, 38)), "with_index": True, "num_workers": 0}
    dataset = sl.StreamingDataset(path, batch_size=2, seed=1, **options)
    seen = [-1, -1]
    with pytest.raises(errors.DecodeError, match=r"has length 39, and to=\(8, 38\) ends before"):
        for batch in dataset:
            seen += batch["index"].tolist()
    step = len(seen) // 2 - 1
    assert max(len(value("tokens", i)) for i in dataset.samples(0, step).tolist()) == 39
    assert seen[2:] == [i for before in range(step) for i in dataset.samples(0, before).tolist()]
    assert step > 2


@given(st.data())
def test_padding_is_all_that_rows_leave_of_their_bytes_in_any_number_of_parts(data):
    lengths = np.array(data.draw(st.lists(st.integers(0, 6), max_size=9)), np.int64)
    widths = lengths + np.array([data.draw(st.integers(0, 4)) for _ in lengths], np.int64)
    ends = np.cumsum(widths)
    at = ends - (widths if data.draw(st.booleans()) else lengths)
    source, out = np.arange(1, 8, dtype=np.int16), np.full(int(widths.sum()) + 2, -1, np.int16)
    padded = 2, 2 * len(out) - 2, 2 * int(widths.max(initial=0))
    copy = Copy(out, source, np.zeros_like(at), 2 + 2 * at, 2 * lengths, padded=padded, value=9)
    parts = data.draw(st.integers(1, 4))
    for number in range(parts):
        copy_all(part_of([copy], number, parts))
    expected = np.full_like(out, 9)
    expected[[0, -1]] = -1
    for begin, length in zip(at, lengths, strict=True):
        expected[1 + begin : 1 + begin + length] = source[:length]
    assert out.tolist() == expected.tolist()


@given(st.data())
def test_the_memory_that_is_counted_for_padded_steps_is_what_their_columns_take(data):
    lengths = data.draw(st.lists(st.integers(0, 9), max_size=12))
    step_rows, to = data.draw(st.integers(1, 5)), data.draw(st.none() | st.integers(1, 4) | st.just((2, 5, 9)))
    side = data.draw(st.sampled_from(["left", "right"]))
    pad = Pad(-3, side, to, mask=data.draw(st.booleans()))
    values, count = [np.arange(length, dtype=np.int16) + 100 * row for row, length in enumerate(lengths)], len(lengths)
    chunks = Chunks("x", Field.parse("ragged:int16"), ARENA, (1, max(1, count)), pad)
    stored, ends = ARENA.array((sum(lengths) + 1,), "int16"), np.cumsum(lengths, dtype=np.int64)
    stored[: sum(lengths)] = np.concatenate([*values, stored[:0]])
    chunks.put(0, 0, Items(stored.view(np.uint8).data, 2 * (ends - np.array(lengths, np.int64)), 2 * ends))
    rows = np.arange(count)
    plan = BatchPlan(0, 0, step_rows, rows, rows, rows, rows, rows >= 0, (), ())
    columns, copies = chunks.gather(rows, plan, Buffers(ARENA, Counters()))
    copy_all(copies)
    steps = [lengths[first : first + step_rows] for first in range(0, max(1, count), step_rows)]
    of_steps = [columns[name] if len(steps) > 1 else (columns[name],) for name in columns if name != "x_lengths"]
    assert chunks.variable_bytes(rows, step_rows) == sum(array.nbytes for column in of_steps for array in column)
    for number, (of_step, *mask) in enumerate(zip(*of_steps, strict=True)):
        own = values[number * step_rows : (number + 1) * step_rows]
        assert len(of_step) == len(own)
        assert not own or np.array_equal(of_step, expected(own, pad))
        assert all(np.array_equal(each, of_step != -3) for each in mask)
    assert columns["x_lengths"].tolist() == lengths


def one_long(sample: dict[str, Any]) -> dict[str, Any]:
    return {"wave": np.ones(1_500_000 if sample["label"] == 40 else 1, np.float32)}


def test_what_a_transform_returns_counts_in_memory_as_it_is_padded(path):
    options: dict[str, Any] = {"batch_size": 16, "transform": one_long, "collate": {"wave": "pad"}, "num_workers": 0}
    options |= {"fields": ["label"], "shuffle": False}
    with closing(sl.NumpyDataset(path, memory="30MB", **options)) as dataset:
        batches = iter(dataset)
        assert [next(batches)["wave"].shape for _ in range(2)] == [(16, 1)] * 2
        with pytest.raises(
            errors.MemoryBudgetError, match=r"memory=\d+ bytes .* batches of 96000\d{3}, but memory=30000000"
        ):
            next(batches)
    with closing(sl.NumpyDataset(path, memory="200MB", **options)) as dataset:
        assert [batch["wave"].shape[1] for batch in dataset] == [1, 1, 1_500_000, 1, 1, 1]


def flat_image(sample: dict[str, Any]) -> dict[str, Any]:
    return {"wave": sample["image"].reshape(-1)}


def test_images_count_in_memory_beside_the_padded_columns_that_a_transform_makes_of_them(path):
    """Both are in memory while a batch is made: of 20 MB here, of which the plan has four."""
    options: dict[str, Any] = {"batch_size": 16, "transform": flat_image, "collate": {"wave": "pad"}, "num_workers": 0}
    options |= {"fields": ["image"], "shuffle": False, "decode": sl.Decode(size=(640, 640))}
    with closing(sl.NumpyDataset(path, memory="80MB", **options)) as dataset:
        message = r"memory=\d+ bytes .* batches of 98304000, but memory=80000000"
        with pytest.raises(errors.MemoryBudgetError, match=message):
            list(dataset)
    with closing(sl.NumpyDataset(path, memory="130MB", **options)) as dataset:
        assert [batch["wave"].shape for batch in dataset] == [(16, 640 * 640 * 3)] * len(dataset)


def test_a_sample_beyond_the_last_edge_is_an_error_that_names_it(path):
    with pytest.raises(
        errors.DecodeError, match=r"'tokens' of sample \d+ has length \d+, and to=\(8, 16\) ends before"
    ):
        batches(path, fields=["tokens"], collate=Pad(to=(8, 16)))


def test_boxes_that_move_with_their_image_are_padded_after_that(path):
    decode = sl.Decode(size=(32, 32), boxes="boxes")
    options = {"fields": ["image", "boxes"], "decode": decode}
    for one, other in zip(batches(path, **options), batches(path, **options, collate={"boxes": Pad(-5)}), strict=True):
        edges = one["boxes_offsets"].tolist()
        for row, (begin, end) in enumerate(pairwise(edges)):
            count = other["boxes_lengths"][row]
            assert count == end - begin
            assert torch.equal(other["boxes"][row, :count], one["boxes"][begin:end])
            assert (other["boxes"][row, count:] == -5).all()
            assert torch.equal(other["boxes_valid"][row, :count], one["boxes_valid"][begin:end])
            assert not other["boxes_valid"][row, count:].any()


def unchanged(sample):
    return sample


@pytest.mark.quick(3)
@pytest.mark.parametrize("transform", [None, unchanged])
@pytest.mark.parametrize("rule", ["list", "nested", "pad"])
def test_what_is_valid_of_boxes_is_collated_as_the_boxes_are(path, rule, transform):
    options = {"fields": ["image", "boxes"], "decode": sl.Decode(size=(32, 32), boxes="boxes"), "transform": transform}
    for one, other in zip(batches(path, **options), batches(path, **options, collate=rule), strict=True):
        edges = one["boxes_offsets"].tolist()
        assert "boxes_valid_offsets" not in other
        for row, (begin, end) in enumerate(pairwise(edges)):
            boxes, valid = other["boxes"][row][: end - begin], other["boxes_valid"][row][: end - begin]
            assert torch.equal(boxes, one["boxes"][begin:end])
            assert torch.equal(valid, one["boxes_valid"][begin:end])
        assert rule != "pad" or other["boxes_valid"].shape == other["boxes"].shape[:2]


@settings(max_examples=examples(100))
@given(st.data())
def test_arrays_are_padded_along_their_first_axes(data):
    axes = data.draw(st.integers(1, 3))
    pad = data.draw(
        st.builds(
            Pad,
            value=st.integers(-3, 3),
            side=st.sampled_from(["right", "left"]),
            to=st.none() | st.integers(1, 6),
            mask=st.just(True),
            axes=st.just(axes),
        )
    )
    shapes = data.draw(st.lists(st.tuples(*[st.integers(0, 5)] * axes), min_size=1, max_size=6))
    arrays = [np.arange(np.prod(shape, dtype=int) * 2).reshape(*shape, 2) + 10 for shape in shapes]
    columns = pad_arrays("a", arrays, range(len(arrays)), pad, np.empty)
    out, lengths, mask = columns["a"], columns["a_lengths"].reshape(len(arrays), -1), columns["a_mask"]
    assert out.shape[1 : 1 + axes] == mask.shape[1:]
    for row, array in enumerate(arrays):
        assert lengths[row].tolist() == list(array.shape[:axes])
        assert np.array_equal(out[row][mask[row]].reshape(array.shape), array)
        assert (out[row][~mask[row]] == pad.value).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"collate": "stack"}, "collate"),
        ({"collate": {"label": "pad"}}, "label"),
        ({"collate": {"tokens": Pad(0.5)}}, "tokens"),
        ({"collate": {"tokens": Pad(axes=2)}}, "axes=2"),
        ({"collate": {"image": "nested"}, "decode": True}, "nested"),
        ({"collate": "pad", "batch_size": None}, "batch_size=None"),
        ({"collate": dict, "batch_size": None}, "batch_size=None"),
    ],
)
def test_rules_that_do_not_fit_are_errors(given, message, path):
    with pytest.raises(errors.UsageError, match=message):
        sl.StreamingDataset(**{"url": path, "batch_size": 4, **given})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pad("x"),
        lambda: Pad(side="top"),
        lambda: Pad(to=0),
        lambda: Pad(to=(4, 2)),
        lambda: Pad(truncate=True),
        lambda: Pad(axes=0),
        lambda: Pad(mask=1),
    ],
)
def test_invalid_options_of_pad_are_usage_errors(make: Callable[[], Pad]):
    with pytest.raises(errors.UsageError, match="Pad"):
        make()


def test_nested_tensors_need_torch(path):
    with pytest.raises(errors.UsageError, match="nested"):
        sl.NumpyDataset(path, batch_size=4, fields=["tokens"], collate="nested")


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {"twice": np.repeat(sample["tokens"], 2)}


def square(sample: dict[str, Any]) -> dict[str, Any]:
    return {"square": np.ones((len(sample["tokens"]), 3), np.int8)}


def test_padding_of_what_a_transform_returns_counts_as_that_of_fields_does(path):
    tokens = {"batch_size": 8, "fields": ["tokens"]}
    plain = sl.NumpyDataset(path, collate="pad", **tokens)
    one = sl.NumpyDataset(path, transform=double, collate={"twice": "pad"}, **tokens)
    two = sl.NumpyDataset(path, transform=square, collate={"square": sl.Pad(axes=2, to=6)}, **tokens)
    for dataset in (plain, one):
        assert len(list(dataset)) == 12
    assert plain.stats().padding_share == one.stats().padding_share > 0
    squares = [(batch["square"].size, batch["square_lengths"]) for batch in two]
    real = sum(int(lengths.prod(axis=1).sum()) for _, lengths in squares)
    assert two.stats().padding_share == pytest.approx(1 - real / sum(size for size, _ in squares))
