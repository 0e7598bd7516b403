"""What one rank does under torchrun: runs the cases of a job file and writes what it saw; a script, not a test.

torchrun --nproc-per-node 2 ranks.py job.json writes rank<r>.json beside it: for each case its batches, as lists of
sample numbers, and its state. What is slow to import is imported by the cases that need it: each worker runs this file.
"""

import gc
import itertools
import json
import multiprocessing
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import datasets
import torch.distributed as dist
from datasets import take
from torch.utils.data import DataLoader

from streamloader.errors import StateError
from streamloader.loader.arguments import Source
from streamloader.pytorch.dataset import Mixture, StreamingDataset


def run_case(job: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """One pass, or as many batches of it as the case says."""
    arguments = {"batch_size": 8, "fields": ["x", "label", "name"], "with_index": True, **case.get("arguments", {})}
    if "mesh" in case:  # its shape and names, and the names of the data-parallel dimensions
        from torch.distributed.device_mesh import init_device_mesh

        shape, names, chosen = case["mesh"]
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
        arguments["world"] = mesh.get_group(chosen[0]) if case.get("group") else (mesh, tuple(chosen))
    ds = StreamingDataset(job["url"], storage_options=job["options"], **arguments)
    if "state" in case:
        ds.load_state_dict(case["state"])
    if "load" in case:
        from torch.distributed import checkpoint

        checkpoint.load({"data": ds}, checkpoint_id=case["load"])
    source: Any = ds
    if case.get("workers"):
        context = case["context"]
        same = case.get("forever", False)  # workers all along: a test counts them
        source = DataLoader(
            ds, batch_size=None, num_workers=case["workers"], multiprocessing_context=context, persistent_workers=same
        )
    for number in itertools.count() if case.get("forever") else ():  # until someone kills this rank
        for step, _ in enumerate(source):
            if (number, step) == (0, 2):
                os.write(1, f"{os.getpid()}\n".encode())  # in one piece: the ranks share their output
    iterator = iter(source)
    batches = list(itertools.islice(iterator, case.get("batches")))
    for batch in batches:
        datasets.check_batch(batch, ["x", "label", "name"])
    state = ds.state_dict() if not case.get("workers") else None
    if "save" in case:
        from torch.distributed import checkpoint

        checkpoint.save({"data": ds}, checkpoint_id=case["save"])
    del iterator
    dist.barrier()  # a rank that hung would be missed here
    return {"batches": take(batches), "state": state, "epoch": ds.epoch, "client": ds.stats().client}


def run_mixture(job: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Two parts of the dataset as a mixture: an epoch, or what follows a state."""
    sources = {Source(job["url"], where=where, storage_options=job["options"] or {}): 1 for where in case["mixture"]}
    ds = Mixture(sources, batch_size=case["batch"], fields=["x"], with_index=True, stop="last")
    if "state" in case:
        ds.load_state_dict(case["state"])
    batches = take(ds, case.get("batches"))
    dist.barrier()
    return {"batches": batches, "state": ds.state_dict()}


def run_stateful(job: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Batches of torchdata's loader: before its state was taken, after it, and those of one that goes on from it."""

    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader(batch_size: int = 8) -> StatefulDataLoader[Any]:
        options = {"storage_options": job["options"], "fields": ["x"], "with_index": True}
        ds = StreamingDataset(job["url"], batch_size=batch_size, **options)
        context = {"multiprocessing_context": case["context"]} if case["workers"] else {}
        return StatefulDataLoader(ds, batch_size=None, num_workers=case["workers"], **context)

    first, second = loader(), loader()
    iterator = iter(first)
    begun = take(iterator, case["batches"])
    state = pickle.loads(pickle.dumps(first.state_dict()))
    ahead = take(iterator)
    second.load_state_dict(state)
    rest, following = take(second), take(second)
    refused = ""
    if case["workers"]:
        other = loader(batch_size=16)
        other.load_state_dict(state)
        try:
            next(iter(other))
        except (StateError, RuntimeError) as error:  # torch raises what it can make again
            refused = str(error)
        del other
        gc.collect()  # torchdata waits 10 s for its workers if its loader is deleted inside an import
    dist.barrier()
    return {"refused": refused, "begun": begun, "ahead": ahead, "rest": rest, "following": following}


def main() -> None:
    """Run the job."""
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    multiprocessing.set_forkserver_preload(
        ["datasets", "streamloader.pytorch.dataset", "torchdata.stateful_dataloader"]
    )
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    kinds = {"stateful": run_stateful, "mixture": run_mixture}
    runners = {case["name"]: next((kinds[key] for key in case if key in kinds), run_case) for case in job["cases"]}
    results = {case["name"]: runners[case["name"]](job, case) for case in job["cases"]}
    (path.parent / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
