"""Laws of anchors: every sample once, where a loop finds it, cell by cell."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.order.anchors import (
    Anchors,
    Axis,
    choose_cells,
    count_unused,
    runs_of,
    segment_anchors,
    split_segments,
)


@st.composite
def axes(draw, name="t"):
    """An axis with anchors in segments of a length of up to 60, and the anchors found by a loop."""
    length = draw(st.integers(1, 60))
    mask = np.array(
        draw(st.lists(st.booleans(), min_size=length, max_size=length)) if draw(st.booleans()) else [1] * length
    )
    extent, stride = draw(st.integers(1, 8)), draw(st.integers(1, 9))
    segments = runs_of(np.flatnonzero(mask))
    first, count = segment_anchors(segments, extent, stride)
    starts = [a for low, high in segments.tolist() for a in range(low, high, stride) if a + extent <= high]
    offsets = None
    if draw(st.booleans()):  # the first and the last element are read
        offsets = np.array(sorted({0, extent - 1, *draw(st.lists(st.integers(0, extent - 1)))}))
    return Axis(name, length, first, count, stride, extent, draw(st.integers(1, 70)), offsets=offsets), starts


@given(axes())
def test_anchors_of_an_axis_are_those_of_a_loop(axis):
    axis, starts = axis
    assert axis.num_anchors == len(starts)
    if starts:
        assert axis.elements(np.arange(len(starts))).tolist() == starts
        before = [sum(a < cell * axis.cell for a in starts) for cell in range(axis.num_cells + 1)]
        assert axis.before_cell.tolist() == before
        used = {a + e for a in starts for e in (range(axis.extent) if axis.offsets is None else axis.offsets.tolist())}
        assert count_unused(axis) == axis.length - len(used)


@settings(max_examples=60)
@given(axes("t"), axes("y"), axes("x"), st.booleans())
def test_samples_are_all_combinations_once_and_cells_are_consecutive(t, y, x, aligned):
    chosen = [t, y, x]
    anchors = Anchors(tuple(axis for axis, _ in chosen), aligned)
    wanted = {(a, b, c) for a in t[1] for b in y[1] for c in x[1]}
    assert len(anchors) == len(wanted)
    if not wanted:
        return
    samples = np.arange(len(wanted))
    corners = anchors.corners(samples)
    assert {tuple(corner) for corner in corners.T.tolist()} == wanted
    cells = [
        tuple(a // axis.cell for a, axis in zip(corner, anchors.axes, strict=True)) for corner in corners.T.tolist()
    ]
    changes = [cell for cell, before in zip(cells, [None, *cells], strict=False) if cell != before]
    assert len(changes) == len(set(changes))
    counts = [cells.count(cell) for cell in changes]
    assert max(counts) == anchors.block
    if aligned:
        assert sorted(counts, key=lambda count: count < anchors.block) == counts
    else:
        assert changes == sorted(changes)


@settings(max_examples=60)
@given(axes("t"), axes("y"), st.data())
def test_boxes_hold_what_their_samples_read(t, y, data):
    anchors = Anchors((t[0], y[0]))
    if not len(anchors):
        return
    start = data.draw(st.integers(0, len(anchors) - 1))
    stop = data.draw(st.integers(start + 1, len(anchors)))
    boxes = anchors.boxes(start, stop)
    assert boxes[-1][0] == stop
    begin = start
    for end, low, high in boxes:
        corners = anchors.corners(np.arange(begin, end))
        for number, axis in enumerate(anchors.axes):
            assert low[number] == corners[number].min()
            assert high[number] == corners[number].max() + axis.extent
        begin = end


@given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(1, 50), st.integers(1, 4))
def test_moves_are_a_function_of_seed_epoch_and_sample(seed, epoch, jitter, snap):
    axis = Axis("y", 1000, np.zeros(1, np.int64), np.array([100]), 9, 9, 100, jitter, jitter, snap)
    anchors = Anchors((axis,))
    samples = np.arange(100)
    moves = anchors.corners(samples, (seed, epoch)) - anchors.corners(samples)
    assert (moves % snap == 0).all()
    assert (moves >= 0).all()
    assert (moves < jitter).all()
    some = samples[::7]
    assert (anchors.corners(some, (seed, epoch)) - anchors.corners(some) == moves[:, ::7]).all()


def test_the_places_of_random_patches_are_equally_likely():
    axis = Axis("y", 100, np.zeros(1, np.int64), np.array([4]), 20, 16, 100, 20, 25)
    anchors = Anchors((axis,))
    samples = np.arange(4)
    corners = [anchors.corners(samples, (0, epoch)) for epoch in range(4000)]
    counts = np.bincount(np.concatenate(corners, axis=1)[0], minlength=85)
    assert counts.size == 85
    assert counts.min() / counts.mean() > 0.6
    assert counts.max() / counts.mean() < 1.4


def test_splits_cut_segments_before_the_borders_inside_them():
    segments = np.array([[0, 10], [20, 30]])
    assert split_segments(segments, np.array([0, 4, 15, 20, 29])).tolist() == [[0, 4], [4, 10], [20, 29], [29, 30]]


def chunked(length: int, chunk: int, stride: int, extent: int) -> Axis:
    return Axis("t", length, np.zeros(1, np.int64), np.ones(1, np.int64), stride, extent, chunk)


@pytest.mark.parametrize(
    ("axes", "size", "cells"),
    [
        ((chunked(8760, 40, 1, 1),), 1e6, (40,)),  # no halo: the chunk
        ((chunked(8760, 1, 1, 8),), 1e5, (32,)),  # windows of 8 steps: fewer chunks are read twice
        ((chunked(8760, 1, 1, 8),), 1e8, (1,)),  # but not above CELL_BYTES
        ((chunked(4, 1, 1, 1), chunked(4096, 2048, 256, 256)), 2, (1, 2048)),  # patches tile the chunks
        ((chunked(10**6, 1000, 300, 300),), 4, (3000,)),  # as many windows in each cell
    ],
)
def test_cells_are_chunks_or_larger_where_that_reads_less(axes, size, cells):
    assert choose_cells(axes, size) == cells
