"""`NumpyDataset`: what `StreamingDataset` yields, as arrays, without torch."""

import inspect
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from datasets import seen
from torchrun import run_python

import streamloader as sl

N = 300


def equal(array: Any, tensor: Any) -> bool:
    """Whether both are the same value, as an array or a number of numpy and as a tensor."""
    if isinstance(tensor, torch.Tensor):
        assert isinstance(array, np.ndarray | np.generic)
        expected = tensor.numpy()
        return array.dtype == expected.dtype and array.shape == expected.shape and bool(np.all(array == expected))
    return type(array) is type(tensor) and bool(array == tensor)


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [{"batch_size": 32, "pack": {"tok": 16}}, {"batch_size": None}])
def test_it_yields_the_arrays_of_the_tensors(data, options):
    url = data(N)
    arrays = sl.NumpyDataset(url, with_index=True, seed=3, **options)
    tensors = sl.StreamingDataset(url, with_index=True, seed=3, **options)
    assert len(arrays) == len(tensors)
    for ours, theirs in zip(arrays, tensors, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(equal(ours[name], theirs[name]) for name in theirs)
    if options["batch_size"]:
        assert equal(arrays.samples(1, 2), tensors.samples(1, 2))


def test_either_resumes_at_a_state_of_the_other(data):
    kinds = sl.NumpyDataset, sl.StreamingDataset
    for first, second in (kinds, kinds[::-1]):
        before, after = (kind(data(N), batch_size=32, with_index=True) for kind in (first, second))
        iterator = iter(before)
        begun = seen(next(iterator) for _ in range(4))
        after.load_state_dict(before.state_dict())
        rest = seen(after)
        assert rest == seen(iterator)
        assert sorted(begun + rest) == list(range(N))


def test_it_takes_the_same_arguments():
    arrays, tensors = map(inspect.signature, (sl.NumpyDataset, sl.StreamingDataset))
    assert arrays == tensors


def test_a_pickled_copy_yields_the_same(data):
    dataset = sl.NumpyDataset(data(N), batch_size=32, with_index=True)
    assert seen(pickle.loads(pickle.dumps(dataset))) == seen(dataset)


WITHOUT_TORCH = """
import sys, runpy, streamloader as sl
sys.modules['torch'] = None  # importing it is an error
url = sys.argv[1]
assert len(list(sl.NumpyDataset(url, batch_size=8))) == 8
for command in (['plan', url], ['inspect', url], ['stats', url], ['bench', url, '--seconds', '0.1']):
    sys.argv = ['streamloader', *command]
    try:
        runpy.run_module('streamloader.cli.main', run_name='__main__')
    except SystemExit as ended:
        assert not ended.code, (command, ended.code)
print('done')
"""


@pytest.mark.long
def test_arrays_and_the_commands_need_no_torch(data):
    assert run_python("-c", WITHOUT_TORCH, data(64, "x", "label")).stdout.splitlines()[-1] == "done"
