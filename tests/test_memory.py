"""`memory=` holds for uneven samples too: what is in use is counted, and a need beyond it is an error that names it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamloader.engine.arena import Bodies
from streamloader.errors import MemoryBudgetError
from streamloader.format.writer import Writer
from streamloader.options import CodecChoice, Layout, Shuffle
from streamloader.torch_dataset import StreamingDataset


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_blocks_that_do_not_fit_at_once_are_an_error_that_names_the_need(codec: CodecChoice, tmp_path: Path) -> None:
    with Writer(tmp_path / "d", {"x": "bytes"}, num_samples=1000, layout=Layout(codec=codec)) as out:
        for i in range(1000):
            out.write({"x": bytes([i % 251]) * (4 << 20 if 16 <= i < 32 else 5000)})
    arguments = {"batch_size": 16, "with_index": True, "shuffle": Shuffle(lanes=1)}
    sizes = {}
    for batch in StreamingDataset(tmp_path / "d", **arguments):
        sizes |= dict(zip(batch["index"].tolist(), batch["x"], strict=True))
    assert sizes == {i: bytes([i % 251]) * (4 << 20 if 16 <= i < 32 else 5000) for i in range(1000)}
    with pytest.raises(
        MemoryBudgetError, match=r"samples are uneven: .* needs memory=\d+ .*, but memory=24000000;"
    ) as e:
        for batch in StreamingDataset(tmp_path / "d", memory=24 * 10**6, **arguments):
            del batch
    need = int(re.search(r"give memory=(\d+)", str(e.value))[1])
    assert need > 40 * 10**6
    assert sum(len(b["x"]) for b in StreamingDataset(tmp_path / "d", memory=4 * need, **arguments)) == 1008


def test_bodies_count_what_is_in_use_and_free_what_is_not_within_their_limit() -> None:
    bodies = Bodies(8, most=10 << 20)
    large = bodies.room(9 << 20)
    foreign = bodies.adopt(memoryview(bytes(1 << 20)))
    assert 10 << 20 <= bodies.used < 12 << 20
    del foreign
    part = large[:5]
    del large
    assert 9 << 20 <= bodies.used < 11 << 20, "a view keeps the whole"
    del part
    assert bodies.used == 0
    small = bodies.room(8 << 20)
    assert bodies.used < 10 << 20
    assert bodies._buffers._alive() == bodies.used, "the unused one of another size is freed"
    del small
