"""Laws of the geometry: powers of two that divide each other, near their targets, and never too large."""

import pytest
from amounts import examples
from format_data import fields as any_field
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import FieldError
from streamloader.format.geometry import (
    BLOCKS,
    CHUNKS_PER_SHARD,
    MAX_BLOCK,
    SMALL_TOTAL,
    Geometry,
    choose_layouts,
    next_power,
    order_pin,
    previous_power,
    resident_fields,
    settle,
)
from streamloader.format.manifest import RESIDENT_TOTAL, Field, OrderPin
from streamloader.options import MIB, Layout

names = st.sampled_from(["a", "b", "c", "d"])
large = st.sampled_from(["uint8[224,224,3]", "float32[512]", "uint8[2000]", "float64[1000,1000]"]).map(Field.parse)
some_fields = st.dictionaries(names, st.one_of(any_field, large), min_size=1)
counts = st.one_of(st.none(), st.integers(0, 5), st.integers(0, 10**7), st.just(10**10))
layouts = st.builds(
    Layout,
    shard_size=st.integers(1, 256 * MIB),
    block_size=st.integers(1, 16 * MIB),
    chunk_size=st.integers(1, 4 * MIB),
    samples_per_shard=st.one_of(st.none(), st.integers(1, 5000)),
)


def is_power(value: int) -> bool:
    return value >= 1 and value & (value - 1) == 0


def choose(fields: dict[str, Field], sizes: dict[str, float], count: int | None, layout: Layout) -> Geometry:
    return choose_layouts(fields, sizes, dict.fromkeys(fields, "none"), count, layout)


@given(some_fields, counts, layouts, st.data())
@settings(max_examples=examples(200), deadline=None)
def test_chunk_divides_block_divides_shard(fields, count, layout, data):
    sizes = {name: data.draw(st.one_of(st.floats(0, 10), st.floats(0, 1e7))) for name in fields}
    geometry = choose(fields, sizes, count, layout)
    final = settle(geometry, count or 0, {name: int(size * (count or 0)) for name, size in sizes.items()})
    for one in (geometry, final):
        order = one.order
        assert is_power(order.block) and is_power(order.lanes) and order.lanes <= 64
        assert order.window >= 4 * order.block and order.window % order.block == 0 and order.window < 2**31
        assert order.block <= one.samples_per_shard
        for chosen in one.layouts.values():
            assert is_power(chosen.chunk) and is_power(chosen.shard) and chosen.chunk <= chosen.shard
            if not chosen.resident:
                assert chosen.shard == one.samples_per_shard
                assert chosen.chunk <= order.block
                assert chosen.chunks_per_shard <= CHUNKS_PER_SHARD
    if count is not None:
        blocks = -(-count // final.order.block)
        assert final.order.lanes == previous_power(min(64, max(1, blocks // 8)))
        if all(one.resident for one in final.layouts.values()):
            assert (final.order.block, final.order.window) == (1, 4)
        assert final.order.window >= count // final.order.lanes or final.order.window == 4 * final.order.block
        assert geometry.samples_per_shard <= next_power(count)
        assert {name for name, one in final.layouts.items() if one.resident} == set(resident_fields(fields, count))
        assert {name for name, one in geometry.layouts.items() if one.resident} == set(resident_fields(fields, count))


def test_images_get_the_sizes_of_the_design():
    fields = {"image": Field.parse("uint8[224,224,3]"), "label": Field.parse("int64")}
    geometry = choose(fields, {"image": 150528.0, "label": 8.0}, 1_000_000, Layout())
    assert geometry.samples_per_shard == 512  # 77 MB
    assert geometry.layouts["image"].chunk == 8  # 1.2 MB
    assert geometry.order.block == 32  # 4.8 MB
    assert (geometry.order.lanes, geometry.order.window) == (64, 128)
    assert geometry.layouts["label"].resident and not geometry.layouts["image"].resident


def test_short_texts_beside_images_do_not_widen_the_block():
    fields = {"image": Field("bytes"), "caption": Field("text"), "label": Field.parse("int64")}
    for count in (None, 10**6):
        geometry = choose(fields, {"image": 1.5e5, "caption": 20.0, "label": 8.0}, count, Layout())
        assert geometry.order.block == 32
        assert settle(geometry, 10**6, {"image": 150 * 10**9, "caption": 20 * 10**6}).order.block == 32


def test_a_sample_above_every_target_is_a_chunk_a_block_and_a_shard():
    geometry = choose({"volume": Field.parse("float32[256,256,512]")}, {"volume": 1.3e8}, 1000, Layout())
    assert (geometry.samples_per_shard, geometry.order.block, geometry.layouts["volume"].chunk) == (1, 1, 1)


def test_a_small_dataset_is_cut_in_enough_blocks_to_mix():
    geometry = choose({"image": Field("bytes")}, {"image": 200.0}, 1797, Layout())
    assert 1797 / geometry.order.block >= BLOCKS / 2
    assert geometry.samples_per_shard == 2048


def test_samples_that_compress_well_do_not_make_shards_that_fill_memory():
    geometry = choose({"zeros": Field.parse("uint8[1048576]")}, {"zeros": 100.0}, 10**6, Layout())
    assert geometry.samples_per_shard <= 4 * 64


def test_small_fields_are_resident_smallest_first_while_they_fit():
    fields = {"vector": Field.parse("float32[64]"), "label": Field.parse("int64"), "flag": Field.parse("bool")}
    assert resident_fields(fields, 900_000) == ("flag", "label", "vector")
    assert resident_fields(fields, 10**7) == ("flag", "label")
    assert resident_fields(fields, RESIDENT_TOTAL + 1) == ()
    assert resident_fields({"wide": Field.parse("uint8[1025]"), "text": Field("text")}, 10) == ()


def test_small_fields_that_turn_out_too_many_become_bulk():
    fields = {"vector": Field.parse("float32[64]"), "label": Field.parse("int64")}
    unknown = choose(fields, {"vector": 256.0, "label": 8.0}, None, Layout())
    assert all(layout.resident for layout in unknown.layouts.values())
    final = settle(unknown, 10**7, {})
    assert final.layouts["label"].resident and not final.layouts["vector"].resident
    assert final.layouts["vector"].shard == unknown.samples_per_shard
    assert final.order.block == 16384  # 4 MiB of the vectors: the one bulk field


def test_a_sample_of_two_gigabytes_is_an_error():
    with pytest.raises(FieldError, match=r"'x'.*2147483648 bytes"):
        choose({"x": Field("tensor", "uint8", (2**31,))}, {"x": 1.0}, 1, Layout())


@pytest.mark.parametrize(
    ("num_samples", "block", "lanes"),
    [(0, 8, 1), (1, 8, 1), (8 * 15, 8, 1), (8 * 16 - 7, 8, 2), (8 * 31, 8, 2), (8 * 32, 8, 4), (10**12, 8, 64)],
)
def test_default_lanes_are_a_power_of_two_of_eight_blocks_each(num_samples, block, lanes):
    assert order_pin(num_samples, block) == OrderPin(block, lanes, 4 * block)


def test_small_data_is_mixed_over_whole_lanes_and_large_data_is_not():
    for total, window in ((SMALL_TOTAL, 1568), (SMALL_TOTAL + 1, 32)):
        assert order_pin(100_000, 8, total) == OrderPin(8, 64, window)
    assert order_pin(100, 1, 100) == OrderPin(1, 8, 4)  # the permutation of blocks is a shuffle of the samples


def test_blocks_hold_few_samples_however_small_these_are():
    fields = {"byte": Field.parse("uint8")}
    geometry = settle(choose(fields, {"byte": 1.0}, 10**9, Layout()), 10**9, {"byte": 10**9}, 10**9)
    assert not geometry.layouts["byte"].resident
    assert geometry.order == OrderPin(MAX_BLOCK, 64, 4 * MAX_BLOCK)
