"""What tests of added fields share: a dataset, and values of new fields of every kind."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import Stop, contents, dying

import streamloader as sl
from streamloader.conversion.executors import EngineChoice
from streamloader.conversion.job import Listener, RunOptions, ignore
from streamloader.maintenance.append import AppendReport, abandon
from streamloader.maintenance.columns import ColumnOptions, run_addition

SMALL = sl.Layout(shard_size=1 << 14, block_size=1 << 11, chunk_size=1 << 11, samples_per_shard=16)
FIELDS = {"n": "int64", "x": "float32[260]", "t": "text"}
COUNT = 50


def base_columns(start: int, stop: int) -> dict[str, Any]:
    """The samples [start, stop) of a dataset of `FIELDS`."""
    numbers = np.arange(start, stop)
    return {
        "n": numbers,
        "x": (numbers[:, None] * np.ones(260)).astype("float32"),
        "t": [f"s{i}" * (i % 3 + 1) for i in numbers],
    }


def new_columns(stop: int, start: int = 0) -> dict[str, Any]:
    """A resident field, a large one, and one of each variable kind."""
    numbers = np.arange(start, stop)
    return {
        "score": numbers / 2,
        "vector": (numbers[:, None] + np.arange(300)).astype("float32"),
        "caption": [f"{i}é" * (i % 4) for i in numbers],
        "tokens": [np.arange(i % 5, dtype="int32") for i in numbers],
        "raw": [bytes([i % 256]) * (i % 7) for i in numbers],
    }


NEW = ("score", "vector", "caption", "tokens=ragged:int32", "raw")


def given_columns(stop: int) -> dict[str, Any]:
    """The new columns as they are given, with a type where the values do not tell."""
    return dict(zip(NEW, new_columns(stop).values(), strict=True))


def written(url: Path, fields: dict[str, str], columns: dict[str, Any]) -> Path:
    """Write a dataset."""
    with sl.Writer(url, fields, layout=SMALL, workers=1) as out:
        out.write_batch(columns)
    return url


def add(url: Path, columns: dict[str, Any], listener: Listener = ignore, **options: Any) -> AppendReport:
    """Add fields in this process, with a listener."""
    run_options = RunOptions(0, "raise", listener, EngineChoice("local", ""))
    return run_addition(url, columns, ColumnOptions(**options), run_options)


def kill_at_each_change(
    act: Callable[[Path], Any], data: Path, split: str | None, monkeypatch: pytest.MonkeyPatch, step: int = 1
) -> int:
    """Kill `act`, which publishes a version of a copy of `data`, at every `step`-th change; return their number.

    After each kill the copy is whole, of the version before or the new one, and a second call gives the same bytes as a
    call that was not killed. Abandoned, it has the bytes from before.
    """
    whole = data.with_name("whole")
    shutil.copytree(data, whole)
    act(whole)
    opened = {ds.manifest.generation: ds for ds in (sl.open(url, split=split) for url in (data, whole))}
    samples = {generation: ds[:]["n"] for generation, ds in opened.items()}
    before, after, ended = contents(data), contents(whole), False
    for changes in range(0, 200, step):
        there = data.with_name(f"killed{changes}")
        shutil.copytree(data, there)
        with monkeypatch.context() as patch, suppress(Stop):
            dying(patch, changes)
            act(there)
            ended = True
        ds = sl.open(there, split=split)
        assert np.array_equal(ds[:]["n"], samples[ds.manifest.generation])
        assert sl.verify(there).ok
        if ended:
            assert contents(there) == after
            return changes
        if changes % 2 and ds.manifest.generation == min(samples):
            assert abandon(there, split=split) == (changes > 0)
            assert contents(there) == before
        act(there)
        assert contents(there) == after
        shutil.rmtree(there)
    raise AssertionError("more than 200 changes")
