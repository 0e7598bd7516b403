"""`sl.tf_dataset`: a `tf.data.Dataset` of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streamloader.errors import UsageError
from streamloader.loader.base import Loader
from streamloader.loader.columns import batch_columns, check_exported, host_array
from streamloader.storage.optional import need


def tf_dataset(dataset: Loader, *, element_spec: Mapping[str, Any] | None = None) -> Any:
    """Return a `tf.data.Dataset` of the batches of a `NumpyDataset` or a `StreamingDataset`.

    Its `element_spec` is known before data is read: a `tf.TensorSpec` for each column, with the batch size and None for
    the axes that vary. Bytes and text are `tf.string` of shape (batch_size,). Columns that only the data tell, such as
    those of a `transform`, need an `element_spec` by name, with the dtypes of the batches; it may also leave out
    columns. Tensors share the memory of the loader where TensorFlow can, which requires that it is aligned to 64 bytes.

    Each iteration is a pass, so the next one has the next epoch. The dataset's `state_dict()` counts the batches that
    TensorFlow has taken: those after `.prefetch()` too. Raises `UsageError` for a column that needs `element_spec`. A
    column of another dtype than its spec is an error of the iteration.
    """
    check_exported(dataset, "tf_dataset")
    tf = need("tensorflow", "tensorflow-cpu")
    spec = element_spec or {name: _spec(tf, name, column) for name, column in batch_columns(dataset).items()}

    def batches() -> Any:
        return ({name: _array(tf, name, each, batch[name]) for name, each in spec.items()} for batch in dataset)

    return tf.data.Dataset.from_generator(batches, output_signature=dict(spec))


def _spec(tf: Any, name: str, column: Any) -> Any:
    if column is None:
        problem = f"the dtype and shape of {name!r} are not known before data is read"
        raise UsageError(problem, "give element_spec=, or collate= for values of different sizes")
    dtype, shape = column
    return tf.TensorSpec(shape, tf.string if dtype in ("bytes", "text") else dtype, name)


def _array(tf: Any, name: str, spec: Any, value: Any) -> Any:
    """Return a column as what TensorFlow converts: lists as arrays of objects, since others cut zeros off bytes."""
    array = np.array(value, object) if isinstance(value, list) else host_array(name, value)
    if (dtype := tf.as_dtype(array.dtype)) != spec.dtype:  # TensorFlow would wrap integers and truncate floats
        problem = f"{name!r} has {dtype.name} in batches, and {spec.dtype.name} in element_spec="
        raise UsageError(problem, f"give tf.TensorSpec(shape, tf.{dtype.name}), and cast in the tf.data.Dataset")
    return array
