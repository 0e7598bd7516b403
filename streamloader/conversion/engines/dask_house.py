"""The program of a Dask cluster for one run: a scheduler, and workers, which are started again when they die.

`python -m streamloader.conversion.engines.dask_house <workers> <folder>`: it prints the scheduler's address, and runs
until its standard input is closed. A process of its own, so that it can be killed: Dask's own end takes long while
workers are at a task, and fails where one is being started again. Its workers die with it.
"""

from __future__ import annotations

import os
import sys

from streamloader.conversion.sources.needs import need


def main(workers: int, folder: str) -> None:
    """Run the cluster with so many worker processes; scratch files and the log go to `folder`."""
    # no retry of Dask's own: we count; no dashboard; no memory limit: parts are bounded, and the machine's is the limit
    need("dask", "dask").config.set({"temporary-directory": folder, "distributed.scheduler.allowed-failures": 0})
    cluster = need("distributed", "dask").LocalCluster(
        n_workers=0, threads_per_worker=1, processes=True, memory_limit=0, dashboard_address=None
    )
    sys.stdout.write(f"{cluster.scheduler_address}\n")
    sys.stdout.flush()
    os.dup2(2, 1)  # what workers print would fill the pipe, which nobody reads from now on
    cluster.scale(workers)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
