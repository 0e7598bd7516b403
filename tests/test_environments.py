"""The loader needs no writable file system, no home directory and no shared memory, which containers often lack."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import streamloader as sl

READ_ONLY = "mount --bind / / && mount -o remount,ro,bind / && mount -t tmpfs -o size=1m tmpfs /dev/shm"
TRAIN = """
import sys
import streamloader as sl
import transforms

if __name__ == "__main__":
    try:
        open("written", "w")
    except OSError as error:
        print(error.strerror)
    for workers in (0, 2):
        dataset = sl.StreamingDataset(sys.argv[1], batch_size=8, transform=transforms.double, num_workers=workers)
        print(sum(int(batch["x"][batch["valid"]][:, 0].sum()) for batch in dataset))
"""


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting needs root and unshare")
def test_a_read_only_file_system_without_shared_memory_is_enough(tmp_path):
    with sl.Writer(str(tmp_path / "data"), {"x": "int64[50000]"}) as out:
        out.write_batch({"x": np.broadcast_to(np.arange(20)[:, None], (20, 50_000))})
    (tmp_path / "transforms.py").write_text("def double(sample):\n    return {'x': 2 * sample['x']}\n")
    (tmp_path / "train.py").write_text(TRAIN)
    command = f"{READ_ONLY} && exec {sys.executable} train.py {tmp_path / 'data'}"
    environment = {**os.environ, "HOME": "/nonexistent", "PYTHONPATH": str(Path(sl.__file__).parent.parent)}
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", command],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout.split("\n")[:3] == ["Read-only file system", "380", "380"], done.stderr[-2000:]
