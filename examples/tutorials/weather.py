"""Forecasts the temperature of the next day from a Zarr store such as ERA5's, read in place, and maps the error.

    python examples/tutorials/weather.py

Unless there is a store at `--url`, it writes one: three years of weather that is carried east and changes at random,
with seasons and days. The page docs/tutorials/weather.md explains each part.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

import streamloader as sl

STATE = ("t2m", "z@500", "z@850")  # what changes
FIXED = ("orography", "latitude", "time_of_day", "time_of_year")  # what is known
TRAIN, TEST = slice("2001", "2002"), slice("2003", "2003")
EPOCHS = 2


def make(url: str, storage: dict[str, str] | None = None) -> xr.Dataset:
    """Write weather of three years, every 6 hours and 10 degrees, as packed integers: t2m, z and the orography."""
    rng = np.random.default_rng(0)
    time = np.arange("2001", "2004", 6, dtype="datetime64[h]").astype("datetime64[ns]")
    latitude, longitude, level = np.arange(85.0, -90, -10), np.arange(0.0, 360, 10), np.array([500, 850])
    north, east = np.radians(latitude)[:, None], np.radians(longitude)

    # Anomalies, as waves along the longitude: each step carries them east, damps them, and adds smooth noise.
    waves = np.arange(19)
    noise = np.fft.rfft(rng.normal(0, 1, (2, len(time), 18, 36))) * np.exp(-((waves / 6) ** 2))
    noise = np.exp(-((np.subtract.outer(range(18), range(18)) / 1.5) ** 2)) @ noise
    carry = 0.999 * np.exp(-1j * waves * np.radians(1.5 + 4 * np.sin(2 * north) ** 2))
    pressure, warmth = np.zeros_like(noise)
    pressure[0], warmth[0] = 20 * noise[:, 0]  # as strong as later
    for step in range(1, len(time)):
        pressure[step] = carry * pressure[step - 1] + noise[0, step]
        warmth[step] = carry * (warmth[step - 1] + 0.03j * waves * pressure[step - 1]) + noise[1, step]
    pressure, warmth = (np.fft.irfft(each) / np.fft.irfft(each).std() for each in (pressure, warmth))

    hours = (np.arange(len(time)) * 6.0)[:, None, None]
    height = 2000 * np.exp(-(((east - 2) / 0.5) ** 2) - ((north - 0.6) / 0.3) ** 2)
    season = -12 * np.sin(north) * np.cos(2 * np.pi * hours / 8766)
    day = -3 * np.cos(north) * np.cos(2 * np.pi * hours / 24 + east)
    t2m = 255 + 45 * np.cos(north) ** 2 - 0.0065 * height + season + day + 5 * warmth
    z = np.stack([54_000 + 900 * pressure, 14_000 + 450 * pressure - 200 * warmth], axis=1)
    grid, packed = ("latitude", "longitude"), {"dtype": "int16", "_FillValue": -32768}
    store = xr.Dataset(
        {
            "t2m": (("time", *grid), t2m, {"units": "K"}),
            "z": (("time", "level", *grid), z, {"units": "m2 s-2"}),
            "orography": (grid, height, {"units": "m"}),
        },
        {"time": time, "level": level, "latitude": latitude, "longitude": longitude},
    )
    encoding = {
        "t2m": packed | {"scale_factor": 0.01, "add_offset": 270.0, "chunks": (100, 18, 36)},
        "z": packed | {"scale_factor": 2.0, "add_offset": 35_000.0, "chunks": (100, 1, 18, 36)},
    }
    store.to_zarr(url, mode="w", zarr_format=2, encoding=encoding, storage_options=storage)
    return store


class Forecast(nn.Module):
    """(batch, times, channels, latitude, longitude) -> the state a day later: (batch, state, ...)."""

    def __init__(self, inputs: int, outputs: int, width: int = 24) -> None:
        super().__init__()
        # along the latitudes; longitudes are a circle, see forward
        kernel = {"kernel_size": 3, "padding": (1, 0)}
        layers = [nn.Conv2d(inputs, width, **kernel), nn.GELU()]
        layers += [nn.Conv2d(width, width, **kernel), nn.GELU()]
        self.change = nn.Sequential(*layers, nn.Conv2d(width, outputs, **kernel))
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        around = nn.functional.pad(x.flatten(1, 2), (3, 3, 0, 0), mode="circular")
        return x[:, -1, : self.outputs] + self.change(around)


@torch.no_grad()
def errors(model: Forecast, data: sl.StreamingDataset, kelvin: float) -> list[np.ndarray]:
    """Return maps of the RMSE of temperature, of persistence and of the model."""
    squares, count = 0, 0
    for batch in data:
        x, target, valid = batch["x"], batch["x_target"][:, 0, 0], batch["valid"]
        forecasts = torch.stack([x[:, -1, 0], model(x)[:, 0]])
        squares = squares + ((forecasts - target)[:, valid] ** 2).sum(1)
        count += valid.sum()  # the last batch is filled up with earlier windows
    return list(kelvin * (squares / count).sqrt().numpy())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("weather"), help="folder for all files that are written")
    parser.add_argument("--url", help="the store; default: weather.zarr in that folder")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    url = arguments.url or str(arguments.out / "weather.zarr")
    try:
        store = xr.open_zarr(url)
    except FileNotFoundError:
        store = make(url)
    statistics = arguments.out / "statistics.json"
    command = [sys.executable, "-m", "streamloader", "stats", url, "--sample-axis", "time"]
    command += ["--channels", ",".join(STATE + FIXED), "--where", "2001-01:2002-12"]
    subprocess.run([*command, "--output", statistics], check=True)
    kelvin = json.loads(statistics.read_text())["statistics"]["t2m"]["std"]

    samples = {
        "sample_axis": "time",
        "windows": sl.Window(history="12h", lead=("24h",)),
        "channels": {"x": sl.Channels(*STATE, *FIXED)},
        "normalize": statistics,
    }
    train = sl.StreamingDataset(url, batch_size=32, where=TRAIN, **samples)
    test = sl.StreamingDataset(url, batch_size=32, where=TEST, shuffle=False, **samples)
    print(f"{train.num_samples} windows to train on, {test.num_samples} to test, in {url}", flush=True)

    torch.set_num_threads(1)  # the loader has threads of its own, and a small network gains nothing from more
    torch.manual_seed(0)
    model = Forecast(inputs=2 * len(STATE + FIXED), outputs=len(STATE))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    while train.epoch < EPOCHS:
        losses = []
        for batch in train:
            error = (model(batch["x"]) - batch["x_target"][:, 0, : len(STATE)])[batch["valid"]]
            loss = (error**2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {train.epoch}: loss {np.mean(losses):.4f}", flush=True)

    maps = errors(model, test, kelvin)
    area = np.cos(np.radians(store["latitude"].values))  # of an element of the grid
    persistence, error = (np.sqrt(np.average((each**2).mean(1), weights=area)) for each in maps)
    titles = [f"persistence: RMSE {persistence:.2f} K", f"network: RMSE {error:.2f} K"]
    draw(arguments.out / "weather.png", store, dict(zip(titles, maps, strict=True)))
    print(f"test error {error:.2f} K, persistence {persistence:.2f} K")


def draw(path: Path, store: xr.Dataset, maps: dict[str, np.ndarray]) -> None:
    """Draw maps of errors in K, with the height of the ground as lines."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
    place = store["longitude"], store["latitude"]
    for axes, (title, each) in zip(panels, maps.items(), strict=True):
        image = axes.pcolormesh(*place, each, vmin=0, vmax=np.max(list(maps.values())), cmap="magma_r")
        axes.contour(*place, store["orography"], levels=3, colors="tab:gray", linewidths=0.8)
        axes.set(title=title, xlabel="longitude", xticks=range(0, 360, 60))
    panels[0].set_ylabel("latitude")
    figure.colorbar(image, ax=panels, label="K")
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
