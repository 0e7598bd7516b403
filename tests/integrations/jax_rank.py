"""One of several JAX processes: `python jax_rank.py PORT RANK SIZE URL` prints the global batches as JSON."""

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import streamloader as sl
from streamloader.errors import WorldError


def main() -> None:
    port, rank, size, url = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(size), int(rank))
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    given: dict[str, Any] = {"batch_size": 8, "fields": ["wide", "name"], "seed": 3, "with_index": True}
    world = (jax.process_index(), jax.process_count())
    dataset, found = sl.NumpyDataset(url, world=world, **given), []
    for batch in sl.jax_batches(dataset, sharding=sharding):
        whole = {
            name: multihost_utils.process_allgather(batch[name], tiled=True) for name in ("index", "wide", "valid")
        }
        found.append({name: value.tolist() for name, value in whole.items()} | {"name": batch["name"]})
    total = jax.jit(lambda array: array.sum())(batch["wide"])  # a computation over the devices of all processes
    # every device has all rows, so both processes have the same rank
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    same = next(sl.jax_batches(sl.NumpyDataset(url, world=(0, 1), **given), sharding=replicated))["wide"]
    held = [np.asarray(shard.data).tolist() for shard in same.addressable_shards]
    try:
        next(sl.jax_batches(sl.NumpyDataset(url, world=(1 - world[0], 2), **given), sharding=sharding))
    except WorldError as error:
        print(json.dumps({"batches": found, "sum": int(total), "error": str(error), "held": held}))


if __name__ == "__main__":
    main()
