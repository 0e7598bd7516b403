"""JAX and TensorFlow, each in a process of its own: their threads would not survive the forks of other tests."""

import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import environment

HERE = Path(__file__).parent


@pytest.mark.long
@pytest.mark.parametrize("file", ["jax_checks.py", "tensorflow_checks.py"])
def test_batches_are_those_of_the_dataset_in_the_arrays_of_a_framework(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
