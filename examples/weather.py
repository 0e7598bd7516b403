"""Trains a weather forecast on all ranks that torchrun starts, from a Zarr store as xarray writes it.

    torchrun --nproc-per-node=2 examples/weather.py --url s3://my-bucket/weather.zarr --make

A small network predicts temperature and geopotential 6 h ahead from the last 12 h. It trains on the dates up to TRAIN,
and its error on the later ones is compared with that of persistence, the forecast that nothing changes. You can stop
the script at any time and start it again without `--make`, with any number of ranks that divides the batch: it resumes
after the last checkpoint, in the middle of an epoch too. `--make` first writes weather of its own, three waves that
travel east; leave it out for your data, and change STATE and FIXED. Keys of S3 come from the environment.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from ddp_train import leave, load, save
from step_log import log_step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import streamloader as sl

STATE = ("t2m", "z@500", "z@850")  # what is predicted
FIXED = ("orography", "lat", "time_of_day")  # what helps to predict it
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
        make(arguments.url, storage)
    dist.barrier()

    samples = {
        "sample_axis": "time",
        "windows": sl.Window(history="12h", lead="6h"),
        "channels": {"x": sl.Channels(*STATE, *FIXED)},
        "with_index": True,
        "storage_options": storage,
    }
    batch_size = GLOBAL_BATCH // size
    train = sl.StreamingDataset(arguments.url, batch_size=batch_size, where=TRAIN, seed=1, **samples)
    held_out = sl.StreamingDataset(arguments.url, batch_size=batch_size, where=HELD_OUT, shuffle=False, **samples)
    sampled = sl.StreamingDataset(arguments.url, batch_size=64, where=TRAIN, world=(0, 1), **samples)

    torch.manual_seed(0)
    model = DistributedDataParallel(Forecast(next(iter(sampled))["x"]))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    step = load(arguments.checkpoint, model, optimizer, train)
    if rank == 0:
        print(f"begin at step {step}, epoch {train.epoch}, world size {size}", flush=True)
    while train.epoch < arguments.epochs:
        epoch, losses = train.epoch, []
        for batch in train:
            log_step(arguments.step_log, step + 1, epoch, batch)
            x, target, valid = batch["x"], batch["x_target"][:, 0, : len(STATE)], batch["valid"]
            loss = (model.module.scaled(model(x) - target) ** 2)[valid].sum() / target[0].numel() / batch_size
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
        for name, values in zip(STATE, zip(persistence.tolist(), error.tolist(), strict=True), strict=True):
            print(f"held-out error of {name}: persistence {values[0]:.3f}, model {values[1]:.3f}")


class Forecast(nn.Module):
    """A network of (b, 2, channels, lat, lon) -> (b, state, lat, lon): the present state, and a change of it."""

    def __init__(self, sample: Tensor) -> None:
        """Measure the mean and the deviation of each channel in a sample of the data."""
        super().__init__()
        self.register_buffer("mean", sample.mean((0, 1, 3, 4))[:, None, None])
        self.register_buffer("std", sample.std((0, 1, 3, 4))[:, None, None])
        tall = {"kernel_size": 3, "padding": (1, 0)}  # along the latitudes; longitudes are a circle, see `forward`
        layers = [nn.Conv2d(2 * sample.shape[2], 32, **tall), nn.GELU(), nn.Conv2d(32, 32, **tall), nn.GELU()]
        self.change = nn.Sequential(*layers, nn.Conv2d(32, len(STATE), **tall))

    def forward(self, x: Tensor) -> Tensor:
        """Return the predicted state, in the units of the data."""
        scaled = ((x - self.mean) / self.std).flatten(1, 2)
        change = self.change(nn.functional.pad(scaled, (3, 3, 0, 0), mode="circular"))
        return x[:, -1, : len(STATE)] + change * self.std[: len(STATE)]

    def scaled(self, difference: Tensor) -> Tensor:
        """Return a difference of states in standard deviations."""
        return difference / self.std[: len(STATE)]


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


def make(url: str, storage: dict[str, str]) -> None:
    """Write 7 months of 6-hourly weather on a grid of 32 x 64: t2m, z on three levels, and the orography."""
    import xarray as xr

    random = np.random.default_rng(0)
    time = np.arange("2001-01-01", "2001-08-01", 6, dtype="datetime64[h]").astype("datetime64[ns]")
    lat, lon, level = np.linspace(87, -87, 32), np.arange(64) * 5.625, np.array([500, 850, 1000])
    hours = np.arange(len(time))[:, None, None] * 6.0
    north, east = np.radians(lat)[:, None], np.radians(lon)
    waves = []
    for number in (2, 3, 5):  # each with a phase that wanders, and faster near the equator
        phase = np.cumsum(random.normal(0, 0.15, len(time)))[:, None, None]
        speed = 0.02 * (1 + np.cos(north))
        waves.append(np.sin(number * (east - speed * hours) + 2 * north + phase) * np.cos(north))
    heights = 1500 * np.exp(-(((east - 2) / 0.5) ** 2) - ((north - 0.6) / 0.3) ** 2)
    noise = random.normal(0, 0.3, (len(time), len(lat), len(lon)))
    day = 3 * np.sin(2 * np.pi * hours / 24 + east)
    t2m = 260 + 35 * np.cos(north) - 0.0065 * heights + 4 * waves[0] + 3 * waves[1] + 2 * waves[2] + day + noise
    z = np.stack([a + b * (waves[0] + waves[2]) for a, b in ((54000, 900), (14000, 500), (1000, 300))], axis=1)
    grid = ("time", "lat", "lon")
    weather = xr.Dataset(
        {
            "t2m": (grid, t2m, {"units": "K"}),
            "z": (("time", "level", "lat", "lon"), z.astype(np.float32), {"units": "m2 s-2"}),
            "orography": (("lat", "lon"), heights.astype(np.float32), {"units": "m"}),
        },
        {"time": time, "level": level, "lat": lat, "lon": lon},
    )
    packed = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768}
    encoding = {"t2m": packed | {"chunks": (40, 32, 64)}, "z": {"chunks": (20, 1, 32, 64)}}
    weather.to_zarr(url, mode="w", encoding=encoding, storage_options=storage or None)


if __name__ == "__main__":
    main()
    leave()
