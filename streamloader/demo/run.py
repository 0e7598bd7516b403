"""Runs the demo: converts real images to datasets in a bucket, trains on them, kills the ranks and resumes exactly.

The first step that fails raises an error.
"""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
from PIL import Image

import streamloader as sl
from streamloader.errors import DestinationError, EngineError, StreamloaderError

CROP = 160  # pixels
CROP_STEP = 40  # pixels
RUN_SECONDS = 240.0  # a training run that takes longer is killed
TIMEOUT_SECONDS = 20.0
BUCKET = "demo"
DIGITS = f"s3://{BUCKET}/digits"
PHOTOGRAPHS = f"s3://{BUCKET}/photographs"
EPOCHS = 12
KILLED_IN_EPOCH = 3
RANKS_BEFORE, RANKS_AFTER = 2, 3
MIN_ACCURACY = 0.95
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo", "AWS_DEFAULT_REGION": "us-east-1"}

_ERROR = re.compile(r"Error|^(Fatal Python error|what\(\):|terminate called|FATAL)")

Event = dict[str, Any]


def write_digits(folder: Path) -> int:
    """Write scikit-learn's 1797 digits as grey 8 x 8 images `<folder>/<digit>/<number>.png`; return their number."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.minimum(data.images * 16, 255).astype(np.uint8)  # values are from 0 to 16
    for number, (pixels, label) in enumerate(zip(images, data.target, strict=True)):
        _save(pixels, folder / str(label) / f"{number:04d}.png")
    return len(images)


def write_photographs(folder: Path) -> int:
    """Write crops of scikit-learn's photographs as `<folder>/<photograph>/<y>-<x>.jpg`; return their number."""
    from sklearn.datasets import load_sample_images

    data = load_sample_images()
    for name, pixels in zip(data.filenames, data.images, strict=True):
        starts = (range(0, side - CROP + 1, CROP_STEP) for side in pixels.shape[:2])
        for y, x in product(*starts):
            _save(pixels[y : y + CROP, x : x + CROP], folder / Path(name).stem / f"{y:03d}-{x:03d}.jpg")
    return len(list(folder.glob("*/*.jpg")))


def _save(pixels: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.ascontiguousarray(pixels)).save(path)


@dataclass(frozen=True)
class RankStep:
    """The numbers of the samples that one rank trained on in one step, without padding."""

    epoch: int
    step: int
    index: tuple[int, ...]


def read_log(folder: Path, run: str) -> list[RankStep]:
    """Return the logged steps of all ranks of a run, without a last line that a kill truncated."""
    paths = sorted(folder.glob(f"{run}-rank*.jsonl"))
    lines = [line for path in paths for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [RankStep(entry["epoch"], entry["step"], tuple(entry["index"])) for entry in map(json.loads, lines)]


def check_exactly_once(steps: Iterable[RankStep], num_samples: int, epochs: int) -> None:
    """Raise `EngineError` unless each epoch has each sample number below `num_samples` exactly once."""
    counts = {epoch: Counter[int]() for epoch in range(epochs)}
    for step in steps:
        counts.setdefault(step.epoch, Counter()).update(step.index)
    for epoch, count in counts.items():
        expected = Counter(range(num_samples if epoch < epochs else 0))
        wrong = [number for number in expected | count if count[number] != expected[number]]
        if wrong:
            shown = ", ".join(f"{number}: {count[number]}" for number in sorted(wrong)[:4])
            problem = f"epoch {epoch} has {len(wrong)} of {num_samples} samples not exactly once (number: times)"
            raise EngineError(f"{problem} {shown}", "report this")


def repeated_steps(before: Iterable[RankStep], after: Iterable[RankStep], resumed_at: int) -> int:
    """Return how many steps after its last checkpoint the killed run had trained.

    Raises `EngineError` if the resumed run has other samples in one of them: global batches must not depend on the
    number of ranks.
    """
    batches = defaultdict[int, set[int]](set)
    for step in after:
        batches[step.step].update(step.index)
    lost = [step for step in before if step.step >= resumed_at]
    for step in lost:
        if not batches[step.step].issuperset(step.index):
            raise EngineError(f"step {step.step} has another batch after the resume", "report this")
    return len({step.step for step in lost})


class Ranks:
    """A training run of `count` ranks on the loopback device; iterating over it yields the events that they report.

    The ranks end with the `with` block, or with this process.
    """

    def __init__(self, demo: "Demo", run: str, count: int) -> None:
        torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--log-dir={demo.folder}/tmp"]
        script = ["streamloader.demo.train", DIGITS, str(demo.folder), run, str(EPOCHS)]
        self.log = demo.folder / f"{run}.log"
        self.pids: list[int] = []
        command = [sys.executable, "-m", *torchrun, f"--nproc-per-node={count}", "-m", *script]
        options: dict[str, Any] = {"env": demo.env, "text": True, "start_new_session": True}
        pipe = subprocess.PIPE  # the ranks exit at the end of their standard input, which this process holds open
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, **options)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._watchdog = threading.Timer(RUN_SECONDS, self._end)
        self._watchdog.daemon = True
        self._watchdog.start()

    def __iter__(self) -> Iterator[Event]:
        for line in self._stdout:
            if line.startswith("{"):
                event: Event = json.loads(line)
                if event["event"] == "started":
                    self.pids.append(event["pid"])
                yield event

    def kill(self) -> None:
        """Send SIGKILL to every rank, and wait for torchrun."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has one way to end a process
        deque(self, maxlen=0)
        self.process.wait(RUN_SECONDS)

    def finish(self) -> list[Event]:
        """Return the remaining events. Raises `EngineError` if a rank fails."""
        events = list(self)
        code = self.process.wait(RUN_SECONDS)
        if code:
            raise EngineError(f"training ended with exit code {code}: {reason(self.log)}", f"see {self.log}")
        return events

    def _end(self) -> None:
        """Kill torchrun; its ranks exit at the end of their standard input."""
        self.process.kill()
        self._stdin.close()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        self._end()
        self.process.wait()
        self._stdout.close()


def reason(log: Path) -> str:
    """Return the most informative line of the log, and the exit code of the rank that failed first.

    That line is the error of a rank, else that of another process, else the last line. torchrun's own error says only
    that a rank failed, and its summary ends with the first one.
    """
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line) and "ChildFailedError" not in line]
    of_ranks = [line for line in errors if line.startswith("[rank")]
    exit_codes = [line for line in lines if line.startswith("exitcode")]
    return "; ".join((of_ranks or errors)[:1] + exit_codes[-1:]) or (lines or ["the log is empty"])[-1]


@contextmanager
def s3_server(bucket: str) -> Iterator[str]:
    """Run an S3 server with one empty bucket on a free port of this machine, and yield its URL.

    Raises `EngineError` if moto is not installed.
    """
    try:
        from moto.server import ThreadedMotoServer
    except ImportError as error:
        raise EngineError(f"the S3 server did not start: {error}", "pip install 'moto[s3]' flask flask-cors") from error
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else it logs every request
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        request = urllib.request.Request(f"http://{host}:{port}/{bucket}", method="PUT")
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=TIMEOUT_SECONDS).close()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@dataclass(frozen=True)
class Demo:
    """The folder and the S3 server of a demo."""

    folder: Path
    endpoint: str

    @property
    def env(self) -> dict[str, str]:
        """The environment of a process that uses this server, without other AWS settings."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        env |= CREDENTIALS | {"AWS_ENDPOINT_URL": self.endpoint, "TMPDIR": str(self.folder / "tmp")}
        env |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        env |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        return env | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}  # a rank killed by a signal prints its stack

    @property
    def storage_options(self) -> dict[str, Any]:
        """The same settings as storage options."""
        return {"key": "demo", "secret": "demo", "endpoint_url": self.endpoint}

    def run_command(self, *arguments: str) -> None:
        """Run the command `streamloader` in a process. Raises `EngineError` if it fails."""
        _title(f"$ streamloader {' '.join(arguments)}")
        code = "from streamloader.cli.main import main; main()"
        done = subprocess.run([sys.executable, "-c", code, *arguments], env=self.env, stdout=_stdout(), check=False)
        if done.returncode:
            problem = f"streamloader {arguments[0]} ended with exit code {done.returncode}"
            raise EngineError(problem, "see its error above")


def _stdout() -> int | None:
    """Return the file that `sys.stdout` writes to, for the output of other processes; None for that of this one."""
    try:
        return sys.stdout.fileno()
    except (OSError, AttributeError):
        return None


def run_demo(keep: Path | None) -> dict[str, Any]:
    """Run the demo in a temporary folder, or in the new folder `keep`; return what it measured, as JSON values.

    Raises a `StreamloaderError` if a step fails. The temporary folder is then kept, since the error names its logs.
    """
    begin = time.perf_counter()
    with _folder(keep) as folder, s3_server(BUCKET) as endpoint:
        (folder / "tmp").mkdir()
        demo = Demo(folder, endpoint)
        _make_datasets(demo)
        _stream_photographs(demo)
        results = _train(demo)
    seconds = time.perf_counter() - begin
    location = "its folder is removed" if keep is None else f"everything is in {keep}"
    _title(f"done in {seconds:.0f} s; {location}")
    return {**results, "seconds": seconds, "folder": None if keep is None else str(keep)}


def _title(text: str) -> None:
    click.secho(f"\n{text}", bold=True)


def _make_datasets(demo: Demo) -> None:
    _title("1. real images become datasets in a bucket")
    digits, photographs = demo.folder / "digits", demo.folder / "photographs"
    click.echo(f"wrote {write_digits(digits)} handwritten digits as PNG into {digits}/0 ... 9")
    click.echo(f"wrote {write_photographs(photographs)} crops of two photographs as JPEG into {photographs}")
    click.echo(f"an S3 server (moto, in this process) listens on {demo.endpoint}; its bucket is s3://{BUCKET}")
    demo.run_command("convert", str(digits), DIGITS, "--split", "train=0.8,val=0.2")
    demo.run_command("convert", str(photographs), PHOTOGRAPHS)
    demo.run_command("inspect", DIGITS, "--split", "train")
    demo.run_command("inspect", PHOTOGRAPHS)


def _stream_photographs(demo: Demo) -> None:
    _title("2. one process streams the photographs")
    options: dict[str, Any] = {"world": (0, 1), "storage_options": demo.storage_options}
    dataset = sl.StreamingDataset(PHOTOGRAPHS, batch_size=32, decode="auto", with_index=True, **options)
    steps = []
    for step, batch in enumerate(dataset):
        steps.append(RankStep(0, step, tuple(batch["index"][batch["valid"]].tolist())))
    check_exactly_once(steps, dataset.num_samples, epochs=1)
    click.echo(f"each of {dataset.num_samples} samples once, decoded to batches of shape {tuple(batch['image'].shape)}")
    click.echo(f"{dataset.stats()}")
    dataset.close()


def _train(demo: Demo) -> dict[str, Any]:
    _title(f"3. {RANKS_BEFORE} processes train on the digits, straight from the bucket, and are killed")
    with Ranks(demo, "first", RANKS_BEFORE) as running:
        checkpoints = (event for event in running if event["event"] == "checkpoint")
        late = (event for event in checkpoints if event["epoch"] >= KILLED_IN_EPOCH and event["position"] > 0)
        checkpoint = next(late, None)
        if checkpoint is None:
            running.finish()
        running.kill()
        if checkpoint is None or running.process.returncode == 0:
            raise EngineError("the training ended before it was killed", "run the demo again")
    position = f"step {checkpoint['step']}, in the middle of epoch {checkpoint['epoch']} of {EPOCHS}"
    click.echo(f"kill -9 of {len(running.pids)} ranks after {position}")

    _title(f"4. {RANKS_AFTER} processes resume from the checkpoint")
    with Ranks(demo, "second", RANKS_AFTER) as running:
        events = running.finish()
    begun = next(event for event in events if event["event"] == "begun")
    position = f"step {begun['step']}, {begun['position']} samples into epoch {begun['epoch']}"
    click.echo(f"resumed with {RANKS_AFTER} ranks at {position}")
    num_samples = len(sl.open(DIGITS, split="train", storage_options=demo.storage_options))
    before, after = read_log(demo.folder, "first"), read_log(demo.folder, "second")
    check_exactly_once([step for step in before if step.step < begun["step"]] + after, num_samples, EPOCHS)
    repeated = repeated_steps(before, after, begun["step"])
    click.echo(f"all {EPOCHS} epochs have each of the {num_samples} samples exactly once, also the one with the kill")
    click.echo(f"the killed run was {repeated} step(s) past its checkpoint: the same batches were trained again")
    steps = {"killed_at": checkpoint["step"], "resumed_at": begun["step"], "repeated_steps": repeated}
    return {"samples": num_samples, "epochs": EPOCHS, **steps, **_report(events)}


def _report(events: list[Event]) -> dict[str, Any]:
    _title("5. accuracy, speed, and how long training waited for data")
    trained = sorted((event for event in events if event["event"] == "trained"), key=lambda event: int(event["rank"]))
    (evaluated,) = (event for event in events if event["event"] == "evaluated")
    accuracy = evaluated["right"] / evaluated["count"]
    click.echo(f"val accuracy {accuracy:.1%}: {evaluated['right']} of {evaluated['count']} digits")
    click.echo(f"speed {sum(event['rate'] for event in trained):.0f} samples/s over {len(trained)} ranks")
    for event in trained:
        click.echo(f"rank {event['rank']} waited {event['waited']:.1%} of the time for data")
    click.echo(f"rank {trained[0]['rank']} is {trained[0]['verdict']} (data plane: {trained[0]['client']})")
    if accuracy < MIN_ACCURACY:
        raise EngineError(f"val accuracy is {accuracy:.1%}, below {MIN_ACCURACY:.0%}", "report this")
    ranks = [{key: event[key] for key in ("rank", "rate", "waited", "verdict")} for event in trained]
    return {"accuracy": accuracy, "samples_per_second": sum(event["rate"] for event in trained), "ranks": ranks}


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Yield `keep`, which must be empty, or a temporary folder, which is kept if a step fails: the error names it."""
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise DestinationError(f"{keep} is not empty", "give --keep a new folder")
        try:
            keep.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DestinationError(f"{keep} cannot be made: {error.strerror}", "give --keep another folder") from error
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="streamloader-demo-"))
    try:
        yield folder
    finally:
        if not isinstance(sys.exception(), StreamloaderError):
            shutil.rmtree(folder)
