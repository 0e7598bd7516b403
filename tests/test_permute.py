"""The hash, the keys and the block permutation."""

from __future__ import annotations

import numpy as np
import pytest
import reference_order as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.plan.permute import BlockPermutation, mix, order_keys

u64 = st.integers(0, 2**64 - 1)


@given(st.lists(u64, max_size=20))
def test_mix_is_the_reference_hash_and_leaves_its_input(values: list[int]) -> None:
    x = np.array(values, np.uint64)
    assert mix(x).tolist() == [reference.mix(value) for value in values]
    assert x.tolist() == values


def test_mix_is_splitmix64_as_published() -> None:
    # the first two outputs of the generator with seed 0
    assert mix(np.array([0, 0x9E3779B97F4A7C15], np.uint64)).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_mix_of_a_scalar_wraps_without_a_warning() -> None:
    assert int(mix(np.array(2**64 - 1, np.uint64))) == reference.mix(2**64 - 1)


@given(u64, u64, u64, u64, u64)
def test_keys_are_the_reference_keys(seed: int, epoch: int, n: int, block: int, lanes: int) -> None:
    case = reference.Case("", n, block, lanes, 2 * block, seed, epoch)
    assert list(order_keys(seed, epoch, n, block, lanes)) == reference.keys(case)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 700), u64)
def test_permutation_is_a_bijection_and_inverse_undoes_it(num_blocks: int, key: int) -> None:
    permutation = BlockPermutation(num_blocks, key)
    every = np.arange(num_blocks)
    blocks = permutation.forward(every)
    assert sorted(blocks.tolist()) == every.tolist()
    assert permutation.inverse(blocks).tolist() == every.tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2**62), u64, st.lists(st.integers(0, 2**62), min_size=1, max_size=5))
def test_permutation_equals_the_reference_at_any_size(num_blocks: int, key: int, numbers: list[int]) -> None:
    arrivals = [number % num_blocks for number in numbers]
    permutation = BlockPermutation(num_blocks, key)
    blocks = permutation.forward(np.array(arrivals))
    assert blocks.tolist() == [reference.permuted(j, num_blocks, key) for j in arrivals]
    assert permutation.inverse(blocks).tolist() == arrivals


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_permutation_of_no_or_one_block(num_blocks: int) -> None:
    every = np.arange(num_blocks)
    assert BlockPermutation(num_blocks, 5).forward(every).tolist() == every.tolist()


def test_permutation_keeps_the_shape() -> None:
    assert BlockPermutation(6, 5).forward(np.arange(6).reshape(2, 3)).shape == (2, 3)


def test_permutation_depends_on_the_key() -> None:
    every = np.arange(100)
    assert BlockPermutation(100, 1).forward(every).tolist() != BlockPermutation(100, 2).forward(every).tolist()
