"""The demo, step by step; any step that fails ends it with one error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import streamloader as sl
from streamloader.demo.check import Taken, check_exactly_once, read_log, repeated_steps
from streamloader.demo.images import write_digits, write_photographs
from streamloader.demo.launch import Event, Job, finish, ranks
from streamloader.demo.server import s3_server
from streamloader.errors import DestinationError, EngineError, StreamloaderError

BUCKET = "demo"
DIGITS = f"s3://{BUCKET}/digits"
PHOTOGRAPHS = f"s3://{BUCKET}/photographs"
EPOCHS = 12
KILLED_IN_EPOCH = 3
RANKS_BEFORE, RANKS_AFTER = 2, 3
GOAL = 0.95
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class Stage:
    """Where the demo plays: a folder, a server, the environment that leads to it, and where to tell it."""

    folder: Path
    endpoint: str
    console: Console

    @property
    def env(self) -> dict[str, str]:
        """Return the environment in which a process finds this server, and no other keys than its own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        temporary = {"TMPDIR": str(self.folder / "tmp")}
        network = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "AWS_ENDPOINT_URL": self.endpoint}
        gloo = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        python = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}  # a rank that dies of a signal says where
        return {**kept, **CREDENTIALS, **temporary, **network, **gloo, **python}

    @property
    def storage_options(self) -> dict[str, Any]:
        """Return the same as options of the S3 filesystem."""
        return {"key": "demo", "secret": "demo", "endpoint_url": self.endpoint}

    def say(self, text: str) -> None:
        """Print one line."""
        self.console.print(text, soft_wrap=True)

    def streamloader(self, *arguments: str) -> None:
        """Run the command line tool as a user would. Raises `EngineError` where it fails."""
        self.console.print(f"\n[bold]$ streamloader {' '.join(arguments)}[/bold]", soft_wrap=True)
        code = "from streamloader.cli.main import main; main()"
        done = subprocess.run([sys.executable, "-c", code, *arguments], env=self.env, check=False)
        if done.returncode:
            raise EngineError(
                f"streamloader {arguments[0]} ended with exit code {done.returncode}", "see its line above"
            )


def tell(keep: Path | None) -> None:
    """Run the demo in a temporary folder, or in the new folder `keep`.

    Raises a `StreamloaderError` if a step fails; then the temporary folder is kept too, since the error names its logs.
    """
    console = Console(highlight=False)
    begin = time.perf_counter()
    with _folder(keep) as folder, s3_server(BUCKET, folder / "server.log") as endpoint:
        (folder / "tmp").mkdir()
        stage = Stage(folder, endpoint, console)
        _make_datasets(stage)
        _stream_photographs(stage)
        _train(stage)
    where = "its folder is gone" if keep is None else f"everything is in {keep}"
    console.print(f"\n[bold green]done[/bold green] in {time.perf_counter() - begin:.0f} s; {where}", soft_wrap=True)


def _make_datasets(stage: Stage) -> None:
    _title(stage, "1. real images become datasets in a bucket")
    digits, photographs = stage.folder / "digits", stage.folder / "photographs"
    stage.say(f"wrote {write_digits(digits)} handwritten digits as PNG into {digits}/0 ... 9")
    stage.say(
        f"wrote {write_photographs(photographs)} crops of two photographs as JPEG into {photographs}/china, flower"
    )
    stage.say(f"an S3 server (moto) listens on {stage.endpoint}; its bucket is s3://{BUCKET}")
    stage.streamloader("convert", str(digits), DIGITS, "--split", "train=0.8,val=0.2")
    stage.streamloader("convert", str(photographs), PHOTOGRAPHS)
    stage.streamloader("inspect", DIGITS, "--split", "train")
    stage.streamloader("inspect", PHOTOGRAPHS)


def _stream_photographs(stage: Stage) -> None:
    _title(stage, "2. one process streams the photographs")
    dataset = sl.StreamingDataset(
        PHOTOGRAPHS,
        batch_size=32,
        decode="auto",
        with_index=True,
        world=(0, 1),
        storage_options=stage.storage_options,
    )
    taken = []
    for step, batch in enumerate(dataset):
        taken.append(Taken(0, step, tuple(batch["index"][batch["valid"]].tolist())))
    check_exactly_once(taken, dataset.num_samples, epochs=1)
    stage.say(f"every one of {dataset.num_samples} samples once, decoded to {tuple(batch['image'].shape)} batches")
    stage.say(f"{dataset.stats()}")
    dataset.close()


def _train(stage: Stage) -> None:
    _title(stage, f"3. {RANKS_BEFORE} processes train on the digits, straight from the bucket, and are killed")
    job = Job(DIGITS, stage.folder, EPOCHS, stage.env)
    with ranks(job, "first", RANKS_BEFORE) as running:
        seen = _until_mid_epoch(running, job)
        running.kill()
    where = f"after step {seen['step']}, in the middle of epoch {seen['epoch']} of {EPOCHS}"
    stage.say(f"kill -9 of {len(running.pids)} ranks {where}")

    _title(stage, f"4. {RANKS_AFTER} processes go on from the checkpoint")
    with ranks(job, "second", RANKS_AFTER) as running:
        events = finish(running, job.folder / "second.log")
    begun = next(event for event in events if event["event"] == "begun")
    stage.say(
        f"resumed with {RANKS_AFTER} ranks at step {begun['step']}, "
        f"epoch {begun['epoch']}, {begun['position']} samples into it"
    )
    _prove(stage, begun["step"])
    _report(stage, events)


def _until_mid_epoch(running: Any, job: Job) -> Event:
    """Return the first checkpoint that lies in the middle of a later epoch."""
    for event in running:
        if event["event"] == "checkpoint" and event["epoch"] >= KILLED_IN_EPOCH and event["position"] > 0:
            return dict(event)
    finish(running, job.folder / "first.log")
    raise EngineError("the training ended before it could be killed", "run the demo again")


def _prove(stage: Stage, resumed_at: int) -> None:
    num_samples = len(sl.open(DIGITS, split="train", storage_options=stage.storage_options))
    before, after = read_log(stage.folder, "first"), read_log(stage.folder, "second")
    check_exactly_once([part for part in before if part.step < resumed_at] + after, num_samples, EPOCHS)
    again = repeated_steps(before, after, resumed_at)
    stage.say(f"all {EPOCHS} epochs had each of the {num_samples} samples exactly once, the one with the kill too")
    stage.say(f"the killed run was {again} step(s) past its checkpoint: the same batches were trained again")


def _report(stage: Stage, events: list[Event]) -> None:
    _title(stage, "5. how well, how fast, and how long training waited for data")
    trained = [event for event in events if event["event"] == "trained"]
    (evaluated,) = (event for event in events if event["event"] == "evaluated")
    accuracy = evaluated["right"] / evaluated["count"]
    stage.say(f"val accuracy {accuracy:.1%}: {evaluated['right']} of {evaluated['count']} digits")
    stage.say(f"speed {sum(event['rate'] for event in trained):.0f} samples/s over {len(trained)} ranks")
    for event in sorted(trained, key=lambda event: int(event["rank"])):
        stage.say(f"rank {event['rank']} waited {event['waited']:.1%} of the time for data")
    stage.say(f"rank {trained[0]['rank']} says: {trained[0]['verdict']} (data plane: {trained[0]['client']})")
    if accuracy < GOAL:
        raise EngineError(f"val accuracy is {accuracy:.1%}, below {GOAL:.0%}", "report this")


def _title(stage: Stage, text: str) -> None:
    stage.console.print()
    stage.console.rule(f"[bold]{text}", align="left")


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        folder = Path(tempfile.mkdtemp(prefix="streamloader-demo-"))
        failed = False
        try:
            yield folder
        except StreamloaderError:
            failed = True
            raise
        finally:
            if not failed:
                shutil.rmtree(folder)
        return
    if keep.exists() and any(keep.iterdir()):
        raise DestinationError(f"{keep} is not empty", "give --keep a new folder")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()
