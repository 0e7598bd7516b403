"""Batch columns of variable-size fields: what the samples hold, end to end, in memory that is used again."""

import gc
from typing import Any

import naive_reader
import numpy as np
import pytest
import torch
from amounts import examples
from datasets import assert_threads_end, before_error, seen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamloader.engine.arena import Arena, Buffers
from streamloader.engine.residence import LARGE_ROW, Chunks, Ragged
from streamloader.engine.stages import copy_all
from streamloader.errors import CorruptError, DecodeError
from streamloader.format.codecs import Items
from streamloader.format.manifest import Field
from streamloader.format.writer import Writer
from streamloader.options import Layout, Pack, Shuffle
from streamloader.order.schedule import BatchPlan
from streamloader.pytorch.dataset import StreamingDataset
from streamloader.stats import Counters

ARENA = Arena(shared=False)
lengths = st.lists(st.integers(0, 70), max_size=20)


def column(spec: str, items: list[bytes], buffers: Buffers, pack: Pack | None = None) -> Any:
    """The column of these samples, which lie at odd places of one buffer."""
    buffer = b"\xff" + b"\xff".join(items)
    starts = 1 + np.cumsum([0, *(len(item) + 1 for item in items)])[: len(items)]
    memory = ARENA.allocate(len(buffer))
    memory[:] = np.frombuffer(buffer, np.uint8)
    stops = starts + [len(item) for item in items]
    chunks = Chunks("f", Field.parse(spec), ARENA, (1, len(items)), pack)
    chunks.put(0, 0, Items(memory.data, starts.astype(np.int64), stops.astype(np.int64)))
    samples = np.arange(len(items)) + 100
    plan = BatchPlan(0, 0, len(items), *(samples,) * 5, (), ())
    found, copies = chunks.gather(np.arange(len(items)), plan, buffers)
    copy_all(copies)
    return found["f"]


class DirtyBuffers(Buffers):
    """Buffers with something else in them."""

    def __init__(self) -> None:
        super().__init__(Arena(shared=False), Counters())

    def lease(self, shape: tuple[int, ...], dtype: str) -> Any:
        array = super().lease(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xA5
        return array


@settings(max_examples=60, deadline=None)
@given(lengths, st.sampled_from(["ragged:int32", "ragged:float16[3]", "ragged:bool", "ragged:uint64[2,2]"]))
def test_ragged_samples_come_end_to_end(counts, spec):
    field = Field.parse(spec)
    rng = np.random.default_rng(len(counts))
    rows = [rng.integers(0, 2, (count, *field.shape)).astype(field.dtype) for count in counts]
    found = column(spec, [row.tobytes() for row in rows], DirtyBuffers())
    expected = np.concatenate([np.empty((0, *field.shape), field.dtype), *rows])
    assert isinstance(found, Ragged)
    assert found.values.flags.writeable
    assert found.values.flags.c_contiguous
    assert found.values.dtype == expected.dtype
    assert found.values.shape == expected.shape
    assert np.array_equal(found.values, expected)
    assert found.offsets.tolist() == [0, *np.cumsum(counts).tolist()]
    assert found.offsets.dtype == np.int64


@settings(max_examples=100, deadline=None)
@given(lengths, st.integers(1, 40), st.integers(-5, 5))
def test_packed_rows_are_the_documents_end_to_end_then_padding(counts, length, pad):
    documents = [np.arange(100 * i, 100 * i + count, dtype=np.int32) for i, count in enumerate(counts)]
    found = column("ragged:int32", [document.tobytes() for document in documents], DirtyBuffers(), Pack(length, pad))
    flat = [int(value) for document in documents for value in document]
    rows = -(-len(flat) // length)
    assert found.values.shape == (rows, length)
    assert found.values.reshape(-1).tolist() == flat + [pad] * (rows * length - len(flat))
    assert found.offsets.tolist() == [0, *np.cumsum(counts).tolist()]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=20))
def test_text_and_bytes_come_as_they_were(texts):
    encoded = [text.encode() for text in texts]
    assert column("text", encoded, DirtyBuffers()) == texts
    assert column("bytes", encoded, DirtyBuffers()) == encoded


CUT = [("text", "é".encode(), b"\xc3"), ("ragged:int32", bytes(8), bytes(6)), ("ragged:int16[3]", bytes(12), bytes(8))]


@pytest.mark.parametrize(("spec", "good", "bad"), CUT)
@pytest.mark.parametrize("pack", [None, Pack(4)])
def test_the_sample_that_is_not_what_its_field_says_is_named(spec, good, bad, pack):
    with pytest.raises(DecodeError, match="of sample 102 is not "):
        column(spec, [good, b"", bad, bad, good], DirtyBuffers(), pack)  # the second one that is cut mends the sum


@pytest.mark.long
def test_batches_whose_size_varies_share_their_memory():
    rng = np.random.default_rng(0)
    counters = Counters()
    buffers = Buffers(Arena(shared=False), counters)
    held: list[tuple[int, torch.Tensor]] = []
    for number in range(300):
        counts = rng.integers(200, 4001, 32)  # sums differ by some percent
        found = column("ragged:int32", [np.full(count, number, np.int32).tobytes() for count in counts], buffers)
        held = [*held[-2:], (number, torch.from_numpy(found.values))]
        del found
        for value, tensor in held:
            assert tensor[0] == tensor[-1] == value
    gc.collect()
    assert counters.snapshot().buffers_allocated <= 20


def test_the_memory_that_is_leased_is_at_most_a_quarter_more():
    buffers = Buffers(Arena(shared=False), Counters())
    for nbytes in [*range(1, 3000, 7), 10**6, 2**20 - 1, 2**20, 2**20 + 1, 38_535_168]:
        base = buffers.lease((nbytes,), "uint8").base
        while isinstance(base, np.ndarray):
            base = base.base
        assert base is not None
        assert nbytes <= memoryview(base).nbytes <= max(1.25 * nbytes, nbytes + 64)


@pytest.mark.long
@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_geometry_delivers_what_a_naive_reader_finds(data, tmp_path_factory):
    """Chunks, shards, blocks and lanes of any size, empty samples, several epochs; resident fields beside them."""
    count = data.draw(st.integers(1, 120))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    longest = data.draw(st.sampled_from((0, 3, 60, 400)))
    layout = Layout(
        shard_size=data.draw(st.sampled_from((1 << 11, 1 << 14))),
        block_size=data.draw(st.sampled_from((1 << 10, 1 << 12))),
        chunk_size=data.draw(st.sampled_from((1 << 7, 1 << 9))),
        codec=data.draw(st.sampled_from(("none", "lz4", "zstd"))),
    )
    folder = tmp_path_factory.mktemp("ragged")
    fields = {"tok": "ragged:int32", "raw": "bytes", "pairs": "ragged:float32[2]", "large": f"uint16[{LARGE_ROW // 2}]"}
    with Writer(folder / "d", fields, layout=layout) as out:
        for i in range(count):
            sizes = rng.integers(0, longest + 1, 3).tolist()
            pairs = np.full((sizes[2] // 4, 2), i, np.float32)
            row = {"tok": np.arange(i, i + sizes[0], dtype=np.int32), "raw": rng.bytes(sizes[1]), "pairs": pairs}
            out.write({**row, "large": np.arange(i, i + LARGE_ROW // 2, dtype=np.uint16)})
    _, truth = naive_reader.read(folder / "d")
    shuffle: bool | Shuffle = data.draw(st.booleans())
    if shuffle:
        block = StreamingDataset(folder / "d", batch_size=1)._start.sources[0].params.block
        shuffle = Shuffle(block=block, lanes=data.draw(st.integers(1, 4)), window=block * data.draw(st.integers(2, 4)))
    batch_size = data.draw(st.integers(1, min(count, 30)))
    ds = StreamingDataset(folder / "d", batch_size=batch_size, shuffle=shuffle, with_index=True)
    for _ in range(2):
        batches = list(ds)
        assert sorted(seen(batches)) == list(range(count))
        for batch in batches:
            index = batch["index"].tolist()
            assert batch["raw"] == [truth["raw"][i] for i in index]
            assert np.array_equal(batch["large"], np.stack([truth["large"][i] for i in index]))
            for name in ("tok", "pairs"):
                parts = batch[name].split(batch[f"{name}_offsets"].diff().tolist())
                assert [part.tolist() for part in parts] == [truth[name][i].tolist() for i in index]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("spec", "codec"), [("ragged:int32", "none"), ("ragged:int32", "zstd"), ("int32[300]", "none")]
)
def test_a_damaged_chunk_is_named_at_its_batch(tmp_path, spec, codec):
    rng = np.random.default_rng(0)
    layout = Layout(shard_size=1 << 14, block_size=1 << 13, chunk_size=1 << 12, codec=codec)
    with Writer(tmp_path / "d", {"tok": spec}, layout=layout) as out:
        for i in range(400):
            out.write({"tok": rng.integers(0, 1 << 30, i % 90 if "ragged" in spec else 300, np.int32)})
    shard = tmp_path / "d" / "tok" / "c" / ("2" if "ragged" in spec else "2/0")
    content = bytearray(shard.read_bytes())
    content[40] ^= 1
    shard.write_bytes(content)
    ds = StreamingDataset(tmp_path / "d", batch_size=8, shuffle=False, with_index=True)
    found, error = before_error(ds, CorruptError, r"chunk 0 of .*tok/c/2\S* \(samples (\d+) to \d+\) is damaged")
    first = int(str(error).split("samples ")[1].split()[0])
    assert found == list(range(len(found)))
    assert first - 8 < len(found) <= first
    assert_threads_end()
