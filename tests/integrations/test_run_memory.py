"""`memory=` holds for uneven samples too: the peak of a process stays within 60 MB of it, or the need is an error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrun import environment

from streamloader.format.manifest import Field
from streamloader.format.writer import Writer
from streamloader.options import CodecChoice, Layout

ALLOWANCE = 60 * 10**6
SPIKE = 8 << 20

RUN = """
import json, re, sys
from streamloader.errors import MemoryBudgetError
from streamloader.options import Shuffle
from streamloader.torch_dataset import StreamingDataset

url, arguments = sys.argv[1], json.loads(sys.argv[2])
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
memory, lanes = arguments.pop("memory"), arguments.pop("lanes")
for _ in StreamingDataset(sys.argv[3], batch_size=8):
    pass  # torch, clients and threads are there
before, rows, needs = peak(), 0, None
ds = StreamingDataset(url, batch_size=16, memory=memory, shuffle=Shuffle(lanes=lanes, block=16, window=64), **arguments)
try:
    for _ in range(2):
        for batch in ds:
            rows += int(batch["valid"].sum())
except MemoryBudgetError as error:
    needs = int(re.search(r"give memory=(\\d+)", str(error))[1])
print(json.dumps([needs, rows, peak() - before]))
"""


def write_uneven(url: Path, spec: str | Field, codec: CodecChoice, spikes: range, count: int = 1000) -> None:
    """Write small samples, and `spikes` of 8 MiB, which compress to nothing where `codec` compresses."""
    rng = np.random.default_rng(0)
    with Writer(url, {"x": spec}, num_samples=count, layout=Layout(codec=codec)) as out:
        for i in range(count):
            size = SPIKE if i in spikes else 5000
            value = np.resize(rng.integers(32, 127, 256 if size == SPIKE and codec != "none" else size, np.uint8), size)
            data = value.tobytes()
            out.write({"x": {"bytes": data, "text": data.decode()}.get(str(spec), value)})


def run_within(memory: int | None, url: Path, tmp_path: Path, **arguments: Any) -> tuple[int | None, int, int]:
    """Return (the memory that is needed or None, samples, peak bytes) of two epochs in a process of their own."""
    small = tmp_path / "small"
    if not small.exists():
        with Writer(small, {"x": "bytes"}) as out:
            for _ in range(64):
                out.write({"x": b"x"})
    command = [sys.executable, "-c", RUN, str(url), json.dumps({"memory": memory, **arguments}), str(small)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    need, rows, peak = json.loads(done.stdout)
    print(memory, need, rows, peak)
    return need, rows, peak


@pytest.mark.parametrize(
    ("spec", "codec", "lanes"),
    [
        (Field("ragged", "uint8", ()), "none", 1),
        ("text", "zstd", None),
    ],
)
def test_uneven_samples_stay_within_memory_or_their_need_is_an_error(
    spec: str | Field, codec: CodecChoice, lanes: int | None, tmp_path: Path
) -> None:
    write_uneven(tmp_path / "d", spec, codec, range(16, 32))
    memory, rows, needs = 48 * 10**6, 0, 0
    for _ in range(5):
        need, rows, peak = run_within(memory, tmp_path / "d", tmp_path, lanes=lanes)
        assert peak <= memory + ALLOWANCE
        if need is None:
            break
        assert need > memory
        memory, needs = need, needs + 1
    assert needs > 0, "the spikes of a window do not fit into so little"
    assert rows == 2 * 1000
    assert run_within(None, tmp_path / "d", tmp_path, lanes=lanes)[0] is None, "the default is what the window needs"
