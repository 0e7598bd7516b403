"""What one rank does in a soak test; a script, not a test.

soak_rank.py JOB: JOB is JSON with what `main` reads. The rank checks the bytes of each sample and notes each step in
its log: where the run stands after it, the state there, and the samples of this rank; after each epoch, what it holds.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
from datasets import numbers, value

import streamloader as sl


def main() -> None:
    """Train until the epoch `until` begins, or until someone kills this rank."""
    job = json.loads(sys.argv[1])
    kind = sl.StreamingDataset if job["torch"] else sl.NumpyDataset
    loader = kind(
        job["url"],
        batch_size=8,
        seed=job["seed"],
        with_index=True,
        world=job["world"],
        num_workers=job["workers"],
        memory=job["memory"],  # little, so that blocks are read again in each epoch
        storage_options=job["options"],
        cache=sl.Cache(job["cache"], limit=job["limit"], free="100MB"),
    )
    if job["state"] is not None:
        loader.load_state_dict(job["state"])
    with Path(job["log"]).open("w") as log:
        while loader.epoch < job["until"]:
            for batch in loader:
                check(batch)
                state = loader.state_dict()
                entry = {"after": [state["epoch"], state["position"]], "samples": numbers(batch), "state": state}
                print(json.dumps(entry), file=log, flush=True)
                print("step", flush=True)
            print(json.dumps({"epoch": loader.epoch, "held": held()}), file=log, flush=True)
    loader.close()


def check(batch: dict[str, Any]) -> None:
    """Fail unless every sample is what its number says."""
    found = np.asarray(batch["index"]).tolist()
    assert list(batch["name"]) == [value("name", number) for number in found], found
    wanted = np.stack([value("x", number) for number in found])
    np.testing.assert_array_equal(np.asarray(batch["x"]), wanted, str(found))


def held() -> list[int]:
    """Return the resident bytes, the descriptors and the threads of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return [resident, len(os.listdir("/proc/self/fd")), threading.active_count()]  # noqa: PTH208


if __name__ == "__main__":
    main()
