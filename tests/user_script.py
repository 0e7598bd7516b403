"""A script of a user with all public names, which mypy --strict and pyright in strict mode accept; it is not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import streamloader as sl
from streamloader import metrics, testing
from streamloader.maintenance.copy import copy
from streamloader.measure.statistics import fit

URL = "s3://bucket/photos"
VERSION: str = sl.__version__


def half(sample: dict[str, Any]) -> dict[str, Any]:
    """A map function."""
    image: NDArray[np.uint8] = sample["image"]
    return {**sample, "image": image[::2, ::2]}


def augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A transform."""
    return {**sample, "flipped": bool(rng.integers(2))}


def prepare(source: Path) -> int:
    """Convert, append, change and check."""
    layout = sl.Layout(shard_size=1 << 24, codec="zstd")
    report = sl.convert(source, URL, split={"train": 0.9, "val": 0.1}, map=half, layout=layout, on_error="skip")
    for problem in report.left_out:
        print(problem)
    added = sl.append(URL, source, split="train")
    sl.add_columns(URL, {"score": np.zeros(added.added)}, split="train")
    sl.delete(URL, where="score < 0.5", split="train")
    for version in sl.log(URL, split="train"):
        print(version.number, version.published)
    print(sl.diff(URL, 0, 1, split="train").samples_added)
    sl.export(URL, "out", format="npy", fields=["label"])
    print(copy(URL, "elsewhere").kept_objects)
    checked = sl.verify(URL, decode=True)
    return sum(checked.samples.values()) if checked.ok else 0


def write(rows: Iterator[Mapping[str, Any]]) -> None:
    """Write by hand."""
    fields = {"tokens": sl.Field("ragged", "int32"), "label": sl.Field("tensor", "int64")}
    with sl.Writer("documents", fields, layout=sl.Layout()) as writer:
        for row in rows:
            writer.write(row)
        writer.write_batch({"tokens": [np.arange(3, dtype="int32")], "label": np.zeros(1, "int64")})


def read() -> NDArray[np.int64]:
    """Read at random."""
    options = {"retry": sl.RetryPolicy(outage_seconds=60)}
    dataset: sl.Dataset = sl.open(URL, split="val", storage_options=options, cache=sl.Cache("cache", limit="1GiB"))
    fields: dict[str, sl.Field] = dataset.fields
    print(len(dataset), fields["label"].shape, dataset.splits, dataset[0]["label"])
    labels: NDArray[np.int64] = dataset.read("label", 0, 10)
    return labels


def train(model: nn.Module) -> sl.Stats:
    """Train, resume and evaluate."""
    images = sl.Decode(size=(224, 224), crop="random", normalize="imagenet")
    dataset = sl.StreamingDataset(
        URL,
        split="train",
        batch_size=256,
        decode=images,
        shuffle=sl.Shuffle(window=4096),
        transform=augment,
        memory="2GiB",
        device="cuda",
        on_batch=lambda report: print(report.wait_seconds),
    )
    dataset.load_state_dict({"version": 1})
    log = sl.LossLog(dataset, "losses.jsonl")
    for epoch in range(2):
        dataset.set_epoch(epoch)
        for batch in dataset:
            image: Tensor = batch["image"]
            valid: Tensor = batch["valid"]
            losses = nn.functional.cross_entropy(model(image), batch["label"], reduction="none")
            log(batch, losses)
            loss = torch.sum(losses * valid)
            torch.autograd.backward(loss)
    state: dict[str, Any] = dataset.state_dict()
    print(len(dataset), state, dataset.samples(0, 12))
    stats = dataset.stats()
    dataset.close()
    return stats


def mixed() -> sl.Mixture:
    """Several sources, tokens in packed rows."""
    sources = {sl.Source("s3://bucket/web", where="score > 1"): 0.7, sl.Source("s3://bucket/code"): 0.3}
    mixture = sl.Mixture(sources, batch_size=8, pack={"tokens": sl.Pack(2049, fit="best")})
    for batch in mixture:
        tokens: Tensor = batch["tokens"]
        print(tokens.shape)
    return mixture


def others() -> Iterator[dict[str, Any]]:
    """Every other option."""
    sl.NumpyDataset(sl.Join("s3://bucket/a", "s3://bucket/b", on="key"), batch_size=4, collate=sl.Pad(to=512))
    sl.NumpyDataset("s3://bucket/videos", batch_size=4, clips={"video": sl.Clips(16, stride=2)})
    arrays = sl.NumpyDataset(
        "s3://bucket/era5.zarr",
        batch_size=4,
        sample_axis="time",
        windows=sl.Window(history="12h", lead="6h"),
        patches=sl.Patch({"lat": 64, "lon": 64}, random=True),
        channels=sl.Channels("t2m", "z@500"),
    )
    statistics = fit(sl.Source("s3://bucket/era5.zarr", sample_axis="time", where=slice("2001", "2017")))
    sl.NumpyDataset("s3://bucket/era5.zarr", batch_size=4, sample_axis="time", normalize=statistics)
    for batch in arrays:
        values: NDArray[np.float32] = batch["data"]
        print(values.mean())
    sl.Decode(normalize=((0.5,), (0.5,)))
    yield from sl.jax_batches(arrays)
    print(sl.tf_dataset(arrays))
    for moved in sl.to_device([torch.zeros(3)], "cpu", ahead=2):
        print(moved)


def watch(dataset: sl.StreamingDataset) -> None:
    """Metrics and errors."""
    with metrics.StatsFile(dataset, "stats.json"):
        try:
            next(iter(dataset))
        except sl.errors.CorruptError as error:
            print(error.code, error.problem, error.remedy)
        except sl.errors.StreamloaderError as error:
            raise SystemExit(str(error)) from error


def proxied() -> str:
    """Doubles for tests."""
    with testing.FaultProxy("http://localhost:9000", [testing.Fault("stall", 0.01)]) as proxy:
        return proxy.endpoint
