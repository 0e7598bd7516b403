"""Real ranks under torchrun: disjoint shares, equal lengths, no hang at the end, with and without workers."""

from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import flat, planned
from servers import S3Server
from torchrun import run_ranks

from streamloader.pytorch.dataset import StreamingDataset

N = 603
BATCH = 8
FIELDS = ["x", "label", "name"]

Results = list[dict[str, Any]]


def workers(count: int, context: str) -> dict[str, Any]:
    return {"name": f"{count} {context}", "workers": count, "context": context}


# fork comes first where the parent has read nothing yet, and last where it has
FRESH = [workers(2, "fork"), {"name": "plain"}]
USED = [{"name": "plain"}, workers(2, "forkserver"), workers(2, "spawn"), workers(2, "fork")]
PARTS = [
    {"name": "seven", "batches": 7},
    {"name": "uneven", "arguments": {"remainder": "uneven"}},
    {"name": "drop", "arguments": {"remainder": "drop"}},
    {"name": "in order", "arguments": {"shuffle": False}},
]

STATE = {"stateful": True, "context": "forkserver", "batches": 7}
STATEFUL = [{**STATE, "name": f"stateful {count}", "workers": count} for count in (0, 2)]

PARTS_OF_IT = [f"label < {100 - 2**40}", f"label >= {100 - 2**40}"]
MIXED = {"name": "mixed", "mixture": PARTS_OF_IT, "batch": 16}

# data parallel by 2, and within each replica two ranks of tensor, pipeline or context parallelism
HYBRID = [
    {"name": "mesh", "mesh": [[2, 2], ["dp", "tp"], ["dp"]]},
    {"name": "inner", "mesh": [[2, 2], ["pp", "dp"], ["dp"]]},
    {"name": "group", "mesh": [[2, 2], ["dp", "tp"], ["dp"]], "group": True},
    {"name": "both", "mesh": [[2, 2], ["replicate", "shard"], ["replicate", "shard"]]},
    {"name": "mesh workers", "mesh": [[2, 2], ["dp", "tp"], ["dp"]], "workers": 2, "context": "fork"},
]


@pytest.fixture(scope="module")
def dataset(data: Any) -> str:
    return data(N, *FIELDS)


def run(folder: Path, ranks: int, job: dict[str, Any]) -> Results:
    results = run_ranks(folder, ranks, job)
    assert "forked after obstore" not in (folder / "stderr").read_text()
    return results


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where two ranks save, and four load."""
    return str(tmp_path_factory.mktemp("checkpoint") / "last")


@pytest.fixture(scope="module")
def two(seaweedfs: S3Server, checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Two ranks that read from a real S3 server."""
    url = seaweedfs.url("ddp")
    datasets.write(url, N, FIELDS, options=seaweedfs.storage_options)
    saving = {"name": "saving", "batches": 7, "save": checkpoint}
    mixed = [MIXED, {**MIXED, "name": "mixed five", "batches": 5}]
    job = {"url": url, "options": seaweedfs.storage_options, "cases": [*USED, *PARTS, *STATEFUL, *mixed, saving]}
    return run(tmp_path_factory.mktemp("two"), 2, job)


@pytest.fixture(scope="module")
def four(dataset: str, two: Results, checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Four ranks that read local files; the first case goes on where two ranks stopped."""
    rest = {"name": "rest", "state": two[0]["seven"]["state"]}
    loaded = {"name": "loaded", "load": checkpoint}
    mixed = {**MIXED, "name": "mixed rest", "batch": 8, "state": two[0]["mixed five"]["state"]}
    job = {"url": dataset, "options": None, "cases": [*FRESH, *PARTS, *HYBRID, rest, loaded, mixed]}
    return run(tmp_path_factory.mktemp("four"), 4, job)


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Results:
    results: Results = request.getfixturevalue({2: "two", 4: "four"}[request.param])
    return results


@pytest.fixture(scope="module")
def order(dataset: str) -> list[int]:
    return planned(StreamingDataset(dataset, batch_size=BATCH))


def steps(ranks: Results, case: str) -> list[list[int]]:
    """The sorted samples of each global batch; every rank has the same number of batches."""
    parts = [rank[case]["batches"] for rank in ranks]
    assert len({len(batches) for batches in parts}) == 1
    return [sorted(i for batch in step for i in batch) for step in zip(*parts, strict=True)]


def cut(order: list[int], size: int) -> list[list[int]]:
    return [sorted(order[at : at + size]) for at in range(0, len(order), size)]


WHOLE = [*((2, case["name"]) for case in USED), *((4, case["name"]) for case in FRESH)]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("ranks", "case"), WHOLE, indirect=["ranks"])
def test_ranks_share_an_epoch_without_overlap_or_loss(ranks, case):
    assert sorted(flat(steps(ranks, case))) == list(range(N))


def test_each_step_is_the_planned_global_batch(ranks, order):
    size = len(ranks) * BATCH
    assert steps(ranks, "plain") == cut(order, size)
    assert steps(ranks, "drop") == cut(order, size)[: N // size]
    assert steps(ranks, "in order") == cut(list(range(N)), size)
    assert [rank["plain"]["epoch"] for rank in ranks] == [1] * len(ranks)


def test_uneven_delivers_each_sample_once_and_counts_differ_by_one_at_most(ranks):
    assert sorted(i for rank in ranks for i in flat(rank["uneven"]["batches"])) == list(range(N))
    lengths = [len(rank["uneven"]["batches"]) for rank in ranks]
    assert max(lengths) - min(lengths) <= 1


def test_states_are_the_same_on_every_rank(ranks):
    states = [rank["seven"]["state"] for rank in ranks]
    assert states == [states[0]] * len(states)
    assert states[0]["position"] == 7 * BATCH * len(ranks)


def test_four_ranks_resume_exactly_where_two_stopped(two, four, order):
    assert steps(two, "seven") == cut(order, 2 * BATCH)[:7]
    assert steps(four, "rest") == cut(order[7 * BATCH * 2 :], 4 * BATCH)


def test_a_distributed_checkpoint_carries_the_state_to_another_world(two, four):
    assert two[1]["saving"]["state"] == two[0]["seven"]["state"]
    assert [rank["loaded"]["batches"] for rank in four] == [rank["rest"]["batches"] for rank in four]


@pytest.mark.parametrize("case", ["stateful 0", "stateful 2"])
def test_stateful_data_loader_resumes_exactly_and_goes_on_to_the_next_epoch(two, case):
    for rank in two:
        assert len(rank[case]["begun"]) == 7
        assert rank[case]["rest"] == rank[case]["ahead"]
        assert ("inside one of 2 DataLoader workers" in rank[case]["refused"]) == (case == "stateful 2")
    for parts in (("begun", "rest"), ("following",)):
        assert sorted(i for rank in two for part in parts for i in flat(rank[case][part])) == list(range(N))


def test_a_mixture_goes_on_from_two_ranks_at_four(two, four):
    whole = steps(two, "mixed")
    assert steps(two, "mixed five") == whole[:5]
    assert steps(four, "mixed rest") == whole[5:]
    assert set(flat(whole)) == set(range(N))


@pytest.mark.parametrize(
    ("case", "replica"), [("mesh", [0, 0, 1, 1]), ("group", [0, 0, 1, 1]), ("inner", [0, 1, 0, 1])]
)
def test_ranks_of_one_replica_get_the_same_batches(four, two, case, replica):
    assert [rank[case]["batches"] for rank in four] == [two[number]["plain"]["batches"] for number in replica]
    assert {rank[case]["state"]["position"] for rank in four} == {0}


def test_workers_of_one_replica_get_the_same_batches_too(four):
    first, second, third, fourth = (rank["mesh workers"]["batches"] for rank in four)
    assert first == second
    assert third == fourth
    assert sorted(flat(first + third)) == list(range(N))


def test_data_may_be_split_over_two_dimensions_of_a_mesh(four):
    assert [rank["both"]["batches"] for rank in four] == [rank["plain"]["batches"] for rank in four]


def test_ranks_read_s3_straight_into_place(two):
    assert {rank["plain"]["client"].split(":")[0] for rank in two} == {"http"}
