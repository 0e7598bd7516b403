"""One of several JAX processes: `python jax_rank.py PORT RANK SIZE URL` prints the global batches as JSON."""

import itertools
import json
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import streamloader as sl
from streamloader.errors import UsageError, WorldError


def refusal(url: str, world: tuple[int, int], sharding: NamedSharding, **options: Any) -> tuple[int, str]:
    """The number of global batches, and the error that ended them."""
    given: dict[str, Any] = {"batch_size": 8, "fields": ["tok"], "num_workers": 0, "remainder": "drop", "world": world}
    count = 0
    try:
        for _ in sl.jax_batches(sl.NumpyDataset(url, **given | options), sharding=sharding):
            count += 1
    except UsageError as error:
        return count, str(error)
    return count, ""


def refusals(url: str, world: tuple[int, int], sharding: NamedSharding) -> dict[str, tuple[int, str]]:
    """What becomes of columns that functions make, by kind."""
    calls = itertools.count()

    def longer_later(samples: Any) -> dict[str, Any]:
        return {"a": np.zeros((len(samples), 1 + next(calls) // 4))}

    return {
        name: refusal(url, world, sharding, **options)
        for name, options in {
            "alike": {"transform": lambda _: {"a": np.zeros(3)}},
            "ragged": {"transform": lambda sample: sample},
            "padded": {
                "transform": lambda sample: {"tok": np.zeros(1 + world[0], np.int32)},
                "collate": {"tok": "pad"},
            },
            "collated": {"collate": lambda samples: {"a": np.zeros((len(samples), 1 + world[0]))}},
            "dtype": {"transform": lambda _: {"a": np.zeros(3, ("f4", "i4")[world[0]])}},
            "later": {"collate": longer_later},
        }.items()
    }


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
    made = refusals(url, world, sharding)
    try:
        next(sl.jax_batches(sl.NumpyDataset(url, world=(1 - world[0], 2), **given), sharding=sharding))
    except WorldError as error:
        print(json.dumps({"batches": found, "sum": int(total), "error": str(error), "held": held, "made": made}))


if __name__ == "__main__":
    main()
