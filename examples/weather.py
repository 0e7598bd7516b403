"""Trains a weather forecast on all ranks that torchrun starts, from a Zarr store as xarray writes it.

    torchrun --nproc-per-node=2 examples/weather.py --url s3://my-bucket/weather.zarr --make

The network is that of the tutorial, docs/tutorials/weather.md. Here it predicts temperature and geopotential 6 h ahead
from the last 12 h. It trains on half a year, and its error in the next month is compared with that of persistence, the
forecast that nothing changes. You can stop the script at any time and start it again without `--make`, with any number
of ranks that divides the batch: it resumes after the last checkpoint, in the middle of an epoch too. `--make` first
writes the weather of the tutorial; leave it out for your data, and change STATE and FIXED. Keys of S3 come from the
environment.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from ddp_train import leave, load, save
from step_log import log_step
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tutorials.weather import Forecast, make

import streamloader as sl

STATE = ("t2m", "z@500", "z@850")  # what is predicted
FIXED = ("orography", "latitude", "time_of_day")  # what helps to predict it
TRAIN, HELD_OUT = slice("2001-01-01", "2001-06-30"), slice("2001-07-01", "2001-07-31")
GLOBAL_BATCH = 24
SAVE_STEPS = 5  # use thousands in a real run


def main() -> None:
    """Train, save checkpoints, evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--endpoint", help="URL of the S3 server; default AWS's")
    parser.add_argument("--make", action="store_true", help="write the data first")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path, default=Path("weather.pt"))
    parser.add_argument("--step-log", type=Path, help="folder for a log of the samples of each step")
    arguments = parser.parse_args()
    storage = {"endpoint_url": arguments.endpoint} if arguments.endpoint else {}

    torch.set_num_threads(1)  # for each rank
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if arguments.make and rank == 0:
        make(arguments.url, storage or None)
    dist.barrier()

    samples = {
        "sample_axis": "time",
        "windows": sl.Window(history="12h", lead="6h"),
        "channels": {"x": sl.Channels(*STATE, *FIXED)},
        "with_index": True,
        "storage_options": storage,
    }
    sampled = next(iter(sl.StreamingDataset(arguments.url, batch_size=64, where=TRAIN, world=(0, 1), **samples)))["x"]
    channels = dict(zip(STATE + FIXED, sampled.unbind(2), strict=True))
    samples["normalize"] = {name: (values.mean().item(), values.std().item()) for name, values in channels.items()}
    batch_size = GLOBAL_BATCH // size
    train = sl.StreamingDataset(arguments.url, batch_size=batch_size, where=TRAIN, seed=1, **samples)
    held_out = sl.StreamingDataset(arguments.url, batch_size=batch_size, where=HELD_OUT, shuffle=False, **samples)

    torch.manual_seed(0)
    model = DistributedDataParallel(Forecast(2 * len(STATE + FIXED), len(STATE)))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    step = load(arguments.checkpoint, model, optimizer, train)
    if rank == 0:
        print(f"begin at step {step}, epoch {train.epoch}, world size {size}", flush=True)
    while train.epoch < arguments.epochs:
        epoch, losses = train.epoch, []
        for batch in train:
            log_step(arguments.step_log, step + 1, epoch, batch)
            x, target, valid = batch["x"], batch["x_target"][:, 0, : len(STATE)], batch["valid"]
            loss = ((model(x) - target) ** 2)[valid].sum() / target[0].numel() / batch_size
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            losses.append(loss.item())
            if step % SAVE_STEPS == 0 and rank == 0:
                save(arguments.checkpoint, model, optimizer, train, step)
        if rank == 0:
            print(f"epoch {epoch}: loss {np.mean(losses):.4f}", flush=True)
    persistence, error = evaluate(model.module, held_out)
    if rank == 0:
        for name, simple, ours in zip(STATE, persistence.tolist(), error.tolist(), strict=True):
            unit = samples["normalize"][name][1]  # of errors, which are in standard deviations
            print(f"held-out error of {name}: persistence {unit * simple:.3f}, model {unit * ours:.3f}")


@torch.no_grad()
def evaluate(model: Forecast, data: sl.StreamingDataset) -> tuple[Tensor, Tensor]:
    """Return the root mean square error of persistence and of the model for each variable, over all ranks."""
    squares, count = torch.zeros(2, len(STATE), dtype=torch.float64), torch.zeros(1)
    for batch in data:
        x, target, valid = batch["x"], batch["x_target"][:, 0, : len(STATE)], batch["valid"]
        forecasts = torch.stack([x[:, -1, : len(STATE)], model(x)])
        squares += ((forecasts - target) ** 2)[:, valid].mean((3, 4)).sum(1)
        count += valid.sum()
    dist.all_reduce(squares)
    dist.all_reduce(count)
    persistence, error = (squares / count).sqrt()
    return persistence, error


if __name__ == "__main__":
    main()
    leave()
