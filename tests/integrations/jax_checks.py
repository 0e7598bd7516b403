"""JAX: batches as arrays of one device, and as global arrays over several devices and processes; DLPack."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from datasets import seen
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from servers import free_ports
from torchrun import environment, run_python

import streamloader as sl
from streamloader.errors import UsageError, WorldError

HERE = Path(__file__).parent
N = 100


def batches_of(url: str, **given: Any) -> list[dict[str, Any]]:
    options = {"batch_size": 8, "fields": ["wide", "flag", "half", "name"], "seed": 3, "with_index": True}
    return list(sl.NumpyDataset(url, **options | given))


@pytest.mark.parametrize("kind", [sl.NumpyDataset, sl.StreamingDataset])
def test_batches_have_the_arrays_and_lists_of_the_dataset(kind, data):
    url = data(N)
    options = {"batch_size": 8, "fields": ["wide", "flag", "half", "name"], "seed": 3, "with_index": True}
    batches = sl.jax_batches(kind(url, **options))
    for ours, theirs in zip(batches, batches_of(url), strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["name"] == theirs["name"]
        for name in ours.keys() - {"name"}:
            assert isinstance(ours[name], jax.Array)
            np.testing.assert_array_equal(np.asarray(ours[name]), theirs[name])
        assert ours["wide"].dtype == np.uint16


def test_arrays_keep_their_values_while_later_batches_are_read(data):
    """On the CPU they share the loader's memory, which must not be used again before they end."""
    url = data(400)
    options: dict[str, Any] = {"batch_size": 16, "fields": ["x"], "with_index": True, "memory": "2MB"}
    kept = list(sl.jax_batches(sl.NumpyDataset(url, **options)))
    for batch in kept:
        np.testing.assert_array_equal(np.asarray(batch["x"])[:, 0], np.asarray(batch["index"]).astype(np.float32))


def test_the_state_counts_what_was_returned(data):
    url = data(N)
    options: dict[str, Any] = {"batch_size": 8, "fields": ["flag"], "with_index": True}
    dataset = sl.NumpyDataset(url, **options)
    iterator = sl.jax_batches(dataset)
    begun = seen(next(iterator) for _ in range(5))
    state = dataset.state_dict()
    resumed = sl.NumpyDataset(url, **options)
    resumed.load_state_dict(state)
    assert sorted(begun + seen(sl.jax_batches(resumed))) == list(range(N))


def test_integers_that_do_not_fit_into_32_bits_are_an_error(data):
    dataset = sl.NumpyDataset(data(N), batch_size=8, fields=["label"])
    with pytest.raises(UsageError, match=r"'label' has integers from -10995.*jax_enable_x64"):
        next(sl.jax_batches(dataset))
    with jax.enable_x64(True):
        assert next(sl.jax_batches(dataset))["label"].dtype == np.int64


def test_what_cannot_be_a_global_array_is_refused_before_data_is_read(data):
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    for options, shown in (
        ({"max_tokens": 60, "bucket_by": "tok", "fields": ["tok"], "collate": "pad"}, "sharding= with max_tokens="),
        ({"fields": ["tok"]}, "first axis of 'tok' does not count samples"),
        ({"fields": ["tok"], "collate": "pad", "world": (0, 2)}, "'tok' may have another size on each of 2 ranks"),
        ({"remainder": "uneven"}, "remainder='uneven'"),
        ({"batch_size": None}, "batch_size=None"),
    ):
        with pytest.raises(UsageError, match=shown):
            sl.jax_batches(sl.NumpyDataset(data(N), **{"batch_size": 8, **options}), sharding=sharding)
    with pytest.raises(
        WorldError, match=r"hold rows 0 to 16 of the global batch of 16, and rank 1 of 2 has 8 from 8 on"
    ):
        next(sl.jax_batches(sl.NumpyDataset(data(N), batch_size=8, fields=["x"], world=(1, 2)), sharding=sharding))


def test_a_sharding_that_is_none_and_a_loader_that_is_none_are_refused(data):
    dataset, mesh = sl.NumpyDataset(data(N), batch_size=8, fields=["x"]), Mesh(np.array(jax.devices()), ("data",))
    for sharding in (mesh, jax.devices()[0], {}, PartitionSpec("data")):
        with pytest.raises(UsageError, match=f"sharding= is a {type(sharding).__name__}.*give NamedSharding"):
            sl.jax_batches(dataset, sharding=sharding)
    two = NamedSharding(Mesh(np.array(jax.devices()).reshape(1, 1), ("data", "model")), PartitionSpec("data", "model"))
    with pytest.raises(UsageError, match=r"does not divide 'valid' of the global shape \(8,\)"):
        sl.jax_batches(dataset, sharding=two)
    for other in (torch.utils.data.DataLoader(sl.StreamingDataset(data(N), batch_size=8), batch_size=None), [{}]):
        with pytest.raises(UsageError, match=rf"jax_batches\(\) of a {type(other).__name__}; give a NumpyDataset"):
            sl.jax_batches(other)


def test_a_column_of_a_function_without_samples_cannot_be_a_global_array(data):
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    given = {"batch_size": 8, "fields": ["flag"], "num_workers": 0}
    for made in (np.array(1.0), np.zeros(3)):
        dataset = sl.NumpyDataset(data(N), collate=lambda _, made=made: {"a": made}, **given)
        with pytest.raises(UsageError, match="first axis of 'a' does not count samples"):
            next(sl.jax_batches(dataset, sharding=sharding))


def test_nested_tensors_are_refused(data):
    dataset = sl.StreamingDataset(data(N), batch_size=8, fields=["tok"], collate="nested")
    with pytest.raises(UsageError, match=r"'tok' is a nested tensor.*collate='pad'"):
        next(sl.jax_batches(dataset))


def test_unsigned_integers_that_do_not_fit_into_32_bits_are_an_error(tmp_path):
    with sl.Writer(tmp_path / "d", {"n": "uint64"}) as out:
        for number in range(2):
            out.write({"n": 2**32 - 1 + number})
    batches = sl.jax_batches(sl.NumpyDataset(tmp_path / "d", batch_size=1, shuffle=False))
    assert int(next(batches)["n"][0]) == 2**32 - 1
    with pytest.raises(UsageError, match="'n' has integers from 4294967296 to 4294967296"):
        next(batches)


FOUR_DEVICES = """
import sys, numpy as np, jax, streamloader as sl
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

assert len(jax.devices()) == 4
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
given = {"batch_size": 8, "fields": ["wide"], "seed": 3, "remainder": "drop"}
for spec in (P("data"), P(("data", "model")), P(), P("data", "model")):
    sharding = NamedSharding(mesh, spec)
    ours_and_theirs = sl.NumpyDataset(sys.argv[1], **given), sl.NumpyDataset(sys.argv[1], **given)
    batches = sl.jax_batches(ours_and_theirs[0], sharding=sharding)
    for ours, theirs in zip(batches, ours_and_theirs[1], strict=True):
        array = ours["wide"]
        assert array.shape == (8, 20, 30) and array.sharding.is_equivalent_to(sharding, 3)
        np.testing.assert_array_equal(np.asarray(array), theirs["wide"])
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), theirs["wide"][shard.index])
try:
    sharding = NamedSharding(mesh, P("data", "model"))
    sl.jax_batches(sl.NumpyDataset(sys.argv[1], **given | {"remainder": "pad"}), sharding=sharding)
except sl.errors.UsageError as error:
    assert "does not divide 'valid' of the global shape (8,)" in str(error), error
else:
    raise AssertionError
for options in ({}, {"transform": lambda sample: sample, "num_workers": 0}):
    dataset = sl.NumpyDataset(sys.argv[1], **given | {"batch_size": 6} | options)
    try:
        batches = sl.jax_batches(dataset, sharding=NamedSharding(mesh, P(("data", "model"))))
        assert options  # others are refused before data is read
        next(batches)
    except sl.errors.UsageError as error:
        assert "does not divide 'wide' of the global shape (6, 20, 30)" in str(error), error
    else:
        raise AssertionError
"""


def test_one_process_shards_its_batches_over_its_devices(data):
    run_python("-c", FOUR_DEVICES, data(N), XLA_FLAGS="--xla_force_host_platform_device_count=4")


def test_two_processes_make_the_global_batches_in_order(data, tmp_path):
    url, (port,) = data(N), free_ports(1)
    env = environment() | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, str(HERE / "jax_rank.py"), str(port)]
    ranks = []
    for rank in range(2):
        with (tmp_path / f"{rank}.json").open("w") as out, (tmp_path / f"{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen([*command, str(rank), "2", url], env=env, stdout=out, stderr=log))
    for number, rank in enumerate(ranks):
        assert not rank.wait(timeout=120), (tmp_path / f"{number}.log").read_text()[-4000:]
    printed = [(tmp_path / f"{rank}.json").read_text() for rank in range(2)]
    found = [json.loads(each.splitlines()[-1]) for each in printed]  # after lines of JAX's own
    ranks_own = [batches_of(url, world=(rank, 2)) for rank in range(2)]
    joined = {
        name: [np.concatenate([own[name] for own in step]) for step in zip(*ranks_own, strict=True)]
        for name in ("index", "valid", "wide")
    }
    assert found[0]["sum"] == found[1]["sum"] == int(joined["wide"][-1].sum())
    for number, rank in enumerate(found):
        assert rank["held"] == [batches_of(url)[0]["wide"].tolist()] * 2
        assert f"and rank {1 - number} of 2 has 8 from {8 - 8 * number} on" in rank["error"]
        assert [batch["name"] for batch in rank["batches"]] == [batch["name"] for batch in ranks_own[number]]
        made = rank["made"]
        assert made["alike"] == [6, ""]
        assert made["ragged"][0] == 0
        for kind in ("padded", "collated", "dtype"):
            assert made[kind][0] == 0
            assert "the columns of global arrays differ between processes" in made[kind][1]
        assert made["later"][0] > 0
        assert "the columns of global arrays differ between batches: {'a'" in made["later"][1]
        for name, expected in joined.items():
            assert [batch[name] for batch in rank["batches"]] == [array.tolist() for array in expected]
    whole = batches_of(url, batch_size=16)  # one rank has the same samples in each step, in another order
    assert [sorted(index.tolist()) for index in joined["index"]] == [sorted(batch["index"].tolist()) for batch in whole]


@pytest.mark.parametrize(
    "consume", [np.from_dlpack, torch.from_dlpack, jax.dlpack.from_dlpack], ids=["numpy", "torch", "jax"]
)
def test_arrays_are_exported_by_dlpack_without_a_copy_and_kept_as_long_as_that_is_used(consume, data):
    options: dict[str, Any] = {"batch_size": 16, "fields": ["x"], "with_index": True, "memory": "2MB", "num_workers": 0}
    dataset, kept, shared = sl.NumpyDataset(data(400), **options), [], 0
    for batch in dataset:
        index, array = batch["index"].copy(), batch["x"]
        consumer = consume(array)
        pointer = (
            consumer.unsafe_buffer_pointer() if isinstance(consumer, jax.Array) else np.asarray(consumer).ctypes.data
        )
        shared += pointer == array.ctypes.data
        kept.append((index, consumer))
        del batch, array
    assert shared == len(kept)
    for index, consumer in kept:
        np.testing.assert_array_equal(np.asarray(consumer)[:, 0], index.astype(np.float32))
