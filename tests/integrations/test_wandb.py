"""`sl.metrics.WandB` in a run of Weights & Biases that is offline, whose file is read back."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streamloader as sl

wandb = pytest.importorskip("wandb", reason="the extra wandb")
HEADER = struct.Struct("<IHB")  # checksum, bytes and kind of a part of a record
BLOCK = 32768  # bytes, at whose end no part begins that would not fit its header


def records(path: Path) -> Iterator[bytes]:
    """The records of a run's file, which is a log of LevelDB after seven bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        record += data[at : at + size]
        at += size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def history(path: Path) -> list[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    read = (Record.FromString(record) for record in records(path))
    rows = (record.history.item for record in read if record.WhichOneof("record_type") == "history")
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


@pytest.mark.parametrize("numbered", [False, True])
def test_the_values_of_each_group_are_in_a_row_of_the_training(numbered, data, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    settings = wandb.Settings(console="off", silent=True)
    run = wandb.init(mode="offline", dir=str(tmp_path), project="test", settings=settings)
    reports = []
    log = sl.metrics.WandB(run, every=4)
    options = {"batch_size": 16, "on_batch": lambda report: (reports.append(report), log(report))}
    for step, _ in enumerate(sl.NumpyDataset(data(700, "x", "label"), **options)):
        run.log({"loss": 1 / (step + 1)}, step=step if numbered else None)
    run.finish()
    wandb.teardown()  # ends the process that writes the file
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = history(path)
    assert [row["loss"] for row in rows] == [1 / (step + 1) for step in range(44)], "no value of the training is lost"
    ours = [row for row in rows if "data/step" in row]
    assert [row["data/step"] for row in ours] == list(range(3, 44, 4))
    assert [row["_step"] + numbered for row in ours] == list(range(3, 44, 4))
    for number, row in enumerate(ours):
        group = reports[4 * number : 4 * number + 4]
        assert row["data/epoch"] == 0
        assert row["data/wait_seconds"] == pytest.approx(sum(report.wait_seconds for report in group) / 4)
        assert 0 <= row["data/wait_fraction"] <= 1
        assert row["data/samples_per_second"] == pytest.approx(64 / sum(report.seconds for report in group))
