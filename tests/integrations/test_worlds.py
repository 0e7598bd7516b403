"""Ranks that others start: by MPI, and beside Accelerate's `prepare`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import take
from torchrun import environment, run_python

import streamloader as sl

HERE = Path(__file__).parent
N = 100
GIVEN = {"batch_size": 8, "fields": ["flag"], "with_index": True, "seed": 3}
# Open MPI refuses to run as root otherwise, as tests in containers do
AS_ROOT = {f"{name}_ALLOW_RUN_AS_ROOT{end}": "1" for name in ("PRTE", "OMPI") for end in ("", "_CONFIRM")}


def test_ranks_of_mpirun_are_known_by_its_environment_and_by_mpi4py(data, tmp_path):
    command = [str(Path(sys.executable).parent / "mpirun"), "-n", "2", "--map-by", ":OVERSUBSCRIBE", sys.executable]
    env = environment() | AS_ROOT | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [*command, str(HERE / "mpi_rank.py"), data(N)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank, found in enumerate(json.loads(done.stdout)):
        expected = take(sl.NumpyDataset(data(N), world=(rank, 2), **GIVEN))
        assert found == dict.fromkeys(("by mpi4py", "NumpyDataset", "StreamingDataset"), expected)


@pytest.mark.long
def test_a_dataset_that_accelerate_prepares_yields_and_resumes_as_without_it(data, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    run_python(*torchrun, HERE / "accelerate_rank.py", data(N), tmp_path, TMPDIR=str(tmp_path))
    for rank in range(2):
        dataset = sl.StreamingDataset(data(N), world=(rank, 2), **GIVEN)
        iterator = iter(dataset)
        begun, state = take(iterator, 3), dataset.state_dict()
        rest = take(iterator)
        expected = {"begun": begun, "state": state, "rest": rest, "resumed": rest}
        assert json.loads((tmp_path / f"rank{rank}.json").read_text()) == {"": expected, "device": expected}
