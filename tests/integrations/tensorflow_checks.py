"""TensorFlow: a `tf.data.Dataset` of batches, with an exact `element_spec`."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch
from datasets import seen

import streamloader as sl
from streamloader.errors import UsageError

N = 100
GIVEN: dict[str, Any] = {"batch_size": 8, "seed": 3, "with_index": True}


@pytest.mark.parametrize("kind", [sl.NumpyDataset, sl.StreamingDataset])
def test_elements_have_the_spec_and_the_values_of_the_batches(kind, data):
    url = data(N)
    elements = sl.tf_dataset(kind(url, **GIVEN))
    assert elements.element_spec == {
        "x": tf.TensorSpec((8, 300), tf.float32, "x"),
        "wide": tf.TensorSpec((8, 20, 30), tf.uint16, "wide"),
        "flag": tf.TensorSpec((8,), tf.bool, "flag"),
        "count": tf.TensorSpec((8,), tf.uint16, "count"),
        "half": tf.TensorSpec((8, 3), tf.float16, "half"),
        "label": tf.TensorSpec((8,), tf.int64, "label"),
        "raw": tf.TensorSpec((8,), tf.string, "raw"),
        "name": tf.TensorSpec((8,), tf.string, "name"),
        "tok": tf.TensorSpec((None,), tf.int32, "tok"),
        "tok_offsets": tf.TensorSpec((9,), tf.int64, "tok_offsets"),
        "pairs": tf.TensorSpec((None, 2), tf.float32, "pairs"),
        "pairs_offsets": tf.TensorSpec((9,), tf.int64, "pairs_offsets"),
        "index": tf.TensorSpec((8,), tf.int64, "index"),
        "valid": tf.TensorSpec((8,), tf.bool, "valid"),
    }
    for ours, theirs in zip(elements, sl.NumpyDataset(url, **GIVEN), strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            wanted = [text.encode() for text in value] if name == "name" else value
            np.testing.assert_array_equal(
                ours[name].numpy(), np.array(wanted, object) if isinstance(wanted, list) else wanted
            )


def test_each_iteration_is_the_next_epoch(data):
    url = data(N)
    dataset, same = sl.NumpyDataset(url, **GIVEN), sl.NumpyDataset(url, **GIVEN)
    elements = sl.tf_dataset(dataset)
    found = [seen(elements.as_numpy_iterator()) for _ in range(2)]
    assert found == [seen(same), seen(same)]
    assert found[0] != found[1]
    assert dataset.epoch == 2


def test_the_state_counts_the_batches_that_were_taken(data):
    url = data(N)
    dataset, resumed = sl.NumpyDataset(url, **GIVEN), sl.NumpyDataset(url, **GIVEN)
    begun = seen(sl.tf_dataset(dataset).take(5).as_numpy_iterator())
    resumed.load_state_dict(dataset.state_dict())
    assert sorted(begun + seen(sl.tf_dataset(resumed).as_numpy_iterator())) == list(range(N))


def test_tensors_share_the_memory_of_the_loader_and_keep_their_values(data):
    url, places = data(400), []
    options: dict[str, Any] = {"batch_size": 16, "fields": ["x"], "with_index": True, "memory": "2MB", "num_workers": 0}

    class Noting(sl.NumpyDataset):
        """Notes where the arrays of batches are."""

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                places.append(batch["x"].ctypes.data)
                yield batch

    kept = list(sl.tf_dataset(Noting(url, **options)))
    views = [torch.from_dlpack(tf.experimental.dlpack.to_dlpack(element["x"])) for element in kept]
    shared = [view.data_ptr() == place for view, place in zip(views, places, strict=True)]
    assert all(shared), shared
    for element in kept:
        np.testing.assert_array_equal(element["x"].numpy()[:, 0], element["index"].numpy().astype(np.float32))


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {"twice": sample["wide"].astype(np.int32) * 2}


def test_columns_that_only_the_data_tell_need_a_spec(data):
    dataset = sl.NumpyDataset(data(N), batch_size=8, fields=["wide"], transform=doubled)
    with pytest.raises(UsageError, match=r"transform=.*give element_spec="):
        sl.tf_dataset(dataset)
    spec = {"twice": tf.TensorSpec((8, 20, 30), tf.int32)}
    elements = sl.tf_dataset(dataset, element_spec=spec)
    assert elements.element_spec == spec
    assert sum(1 for _ in elements) == len(dataset)
    with pytest.raises(UsageError, match="'tok' are not known before data is read"):
        sl.tf_dataset(sl.NumpyDataset(data(N), batch_size=8, fields=["tok"], collate="list"))


def test_a_column_of_another_dtype_than_its_spec_is_an_error(data):
    """TensorFlow would wrap integers and truncate floats."""
    for name, shape, dtype, shown in (
        ("label", (8,), tf.int32, "'label' has int64 in batches, and int32 in element_spec="),
        ("x", (8, 300), tf.int32, "'x' has float32 in batches, and int32"),
        ("name", (8,), tf.int64, "'name' has string in batches, and int64"),
    ):
        spec = {name: tf.TensorSpec(shape, dtype)}
        elements = sl.tf_dataset(sl.NumpyDataset(data(N), batch_size=8, fields=[name]), element_spec=spec)
        with pytest.raises(tf.errors.OpError, match=shown):
            next(iter(elements))


def test_bytes_keep_the_zeros_at_their_end(tmp_path):
    with sl.Writer(tmp_path / "d", {"raw": "bytes"}) as out:
        for value in (b"a\0", b"\0\0b"):
            out.write({"raw": value})
    dataset = sl.NumpyDataset(tmp_path / "d", batch_size=2, shuffle=False)
    assert next(iter(sl.tf_dataset(dataset)))["raw"].numpy().tolist() == [b"a\0", b"\0\0b"]


def test_what_is_no_dataset_is_refused(data):
    dataset = sl.StreamingDataset(data(N), batch_size=8)
    for other in (torch.utils.data.DataLoader(dataset, batch_size=None), [{}]):
        with pytest.raises(UsageError, match=rf"tf_dataset\(\) of a {type(other).__name__}; give a NumpyDataset"):
            sl.tf_dataset(other)


def test_an_error_of_the_loader_ends_the_iteration_with_its_message(data):
    dataset = sl.NumpyDataset(data(N), batch_size=8, fields=["wide"], memory=1)
    with pytest.raises(tf.errors.OpError, match="needs memory="):
        next(iter(sl.tf_dataset(dataset)))
