"""An MPI rank: `mpirun -n 2 python mpi_rank.py URL` prints what both ranks read, as JSON."""

import json
import sys
from typing import Any

from datasets import take
from mpi4py import MPI

import streamloader as sl

GIVEN: dict[str, Any] = {"batch_size": 8, "fields": ["flag"], "with_index": True, "seed": 3}


def main() -> None:
    ranks = MPI.COMM_WORLD
    world = ranks.Get_rank(), ranks.Get_size()
    found = {"by mpi4py": take(sl.NumpyDataset(sys.argv[1], world=world, **GIVEN))}
    found |= {kind.__name__: take(kind(sys.argv[1], **GIVEN)) for kind in (sl.NumpyDataset, sl.StreamingDataset)}
    every = ranks.gather(found)
    if every is not None:
        print(json.dumps(every))


if __name__ == "__main__":
    main()
