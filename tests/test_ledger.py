"""The ledger tells what a step delivers before, or long after, it was delivered."""

import datasets
import pytest
import torch
from hypothesis import given
from test_schedule import runs
from torch.utils.data import DataLoader

from streamloader.errors import UsageError, WorldError
from streamloader.order.epoch_order import EpochOrder
from streamloader.order.schedule import Share, schedule, step_samples
from streamloader.pytorch.dataset import StreamingDataset

N = 603


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("ledger") / "data"
    datasets.write(path, N, ["x", "label"])
    return str(path)


def dataset(url: str, batch_size: int = 16, world: tuple[int, int] = (0, 1), **more: object) -> StreamingDataset:
    return StreamingDataset(url, batch_size=batch_size, fields=["label"], with_index=True, world=world, **more)  # type: ignore[arg-type]


@given(runs())
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_ledger_says_of_each_step_what_the_schedule_plans(shuffle, run):
    order, share, position = run
    if not shuffle:
        order = EpochOrder(order.num_samples, order.params, order.seed, order.epoch, shuffle=False)
        share = Share(share.num_samples, 1, share.batch, share.world, share.remainder)
    for plan in schedule(order, share, position):
        place = position + plan.step * share.global_batch
        assert step_samples(order, share, place).tolist() == plan.samples.tolist()
    with pytest.raises(UsageError, match="no step starts at position"):
        step_samples(order, share, position + share.global_steps(position) * share.global_batch)


@pytest.mark.parametrize("remainder", ["pad", "uneven"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_it_names_the_samples_of_every_batch_on_every_rank(url, size, remainder):
    ranks = [dataset(url, world=(rank, size), remainder=remainder) for rank in range(size)]
    for epoch in range(2):
        passes = [list(ds) for ds in ranks]
        for step, batches in enumerate(zip(*passes, strict=False)):
            for rank, batch in enumerate(batches):
                assert torch.equal(ranks[0].samples(epoch, step, rank), batch["index"])
            together = torch.cat([batch["index"] for batch in batches])
            assert torch.equal(ranks[-1].samples(epoch, step), together)


def test_it_reads_nothing(url):
    ds = dataset(url)
    assert ds.samples(10**6, 5).shape == (16,)
    assert ds.stats().requests == 0
    assert ds.epoch == 0


@pytest.mark.filterwarnings("ignore:.* DataLoader workers on each rank")
def test_it_knows_the_batches_of_workers(url):
    ds = dataset(url, world=(1, 2))
    for step, batch in enumerate(DataLoader(ds, batch_size=None, num_workers=2)):
        assert torch.equal(ds.samples(0, step, 1, workers=2), batch["index"])


def test_steps_after_a_resume_at_another_batch_size_lie_where_they_were_delivered(url):
    before = dataset(url, batch_size=10)
    iterator = iter(before)
    for _ in range(3):
        next(iterator)
    after = dataset(url, batch_size=16)
    after.load_state_dict(before.state_dict())
    for step, batch in enumerate(after, 30 // 16):  # it begins within the second step of the epoch
        assert torch.equal(after.samples(0, step), batch["index"])


def test_a_step_a_rank_and_an_epoch_that_are_not_there_are_refused(url):
    ds = dataset(url, world=(0, 2))
    assert len(ds) == 19
    for step in (19, -1, 10**12):
        with pytest.raises(UsageError, match=r"no step starts at position .* ask for a step below 19"):
            ds.samples(0, step)
    with pytest.raises(WorldError, match="rank 2 is invalid for world size 2"):
        ds.samples(0, 0, 2)
    with pytest.raises(WorldError, match="worker 0 is invalid for 0 workers"):
        ds.samples(0, 0, workers=0)
    with pytest.raises(UsageError, match="epoch=-1"):
        ds.samples(-1, 0)
