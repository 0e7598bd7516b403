"""Engines: the same tasks on processes of this machine, on Dask, on Ray and on Spark, each with real workers."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from engine_tasks import Run
from servers import free_ports
from test_convert_job import contents

import streamloader as sl
from streamloader.conversion.engines.drive import ATTEMPTS
from streamloader.conversion.engines.engine import EngineChoice, parse_engine
from streamloader.errors import EngineError, SourceError, UsageError

HERE = Path(__file__).parent
ENGINES = ["dask", "ray", "spark"]
END_SECONDS = 30.0

pytestmark = [
    pytest.mark.timeout(300),
]


def running_in(folder: Path) -> list[psutil.Process]:
    """The processes that work in a folder, or below: children inherit it. This one is left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and Path(process.cwd()).is_relative_to(folder):
                found.append(process)
    return found


class Cluster:
    """Programs that make a cluster, and end with the block."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.address = name, folder, ""
        self._programs: list[tuple[subprocess.Popen[str], threading.Thread]] = []
        self.environment = os.environ | {"TMPDIR": str(folder)}

    def start(self, until: str, *command: str) -> None:
        """Start a program, and wait until it has printed a line with the text `until`."""
        program = subprocess.Popen(
            command,
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert program.stdout is not None
        heard = []
        for line in program.stdout:
            heard.append(line)
            if until in line:
                break
        else:
            raise AssertionError("".join(heard))
        reader = threading.Thread(target=program.stdout.read, daemon=True)
        reader.start()
        self._programs.append((program, reader))

    def __enter__(self) -> Cluster:
        (port,) = free_ports(1)
        if self.name == "dask":
            self.address = f"tcp://127.0.0.1:{port}"
            python = (sys.executable, "-m")
            scheduler = ("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard")
            self.start("Scheduler at", *python, *scheduler)
            size = ("--nworkers", "2", "--nthreads", "1", "--no-dashboard", "--local-directory", str(self.folder))
            self.start("Starting established connection", *python, "distributed.cli.dask_worker", *size, self.address)
        elif self.name == "ray":
            self.address = f"127.0.0.1:{port}"
            start = ("start", "--head", "--block", "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats")
            store = ("--object-store-memory=100000000", f"--temp-dir={self.folder}", f"--port={port}")
            self.start("Ray runtime started", str(Path(sys.executable).parent / "ray"), *start, *store)
        else:
            import pyspark

            self.address = f"spark://127.0.0.1:{port}"
            run = (str(Path(pyspark.__file__).parent / "bin" / "spark-class"),)
            deploy = "org.apache.spark.deploy."
            free = ("--webui-port", "0", "--host", "127.0.0.1")
            self.start("elected leader", *run, f"{deploy}master.Master", *free, "--port", str(port))
            size = ("--cores", "2", "--memory", "2g", "--work-dir", str(self.folder))
            self.start("Successfully registered", *run, f"{deploy}worker.Worker", *free, *size, self.address)
        return self

    def __exit__(self, *error: object) -> None:
        while processes := running_in(self.folder):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "resource_tracker" not in str(process.cmdline()):  # these end by themselves, and clean up
                        process.kill()
            psutil.wait_procs(processes)
        for program, reader in self._programs:
            reader.join()
            program.wait()
            assert program.stdout is not None
            program.stdout.close()


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What workers import, and no home of anybody: Ray keeps a token there."""
    importlib.import_module("ray")  # it sets an environment variable
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent.parent)]))
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        yield


@pytest.fixture(scope="module", params=ENGINES)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster that others started: two workers behind an address."""
    with contextlib.ExitStack() as stack:
        import tempfile

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sl-", ignore_cleanup_errors=True)))
        yield stack.enter_context(Cluster(request.param, folder))


def state() -> tuple[object, ...]:
    """What a run must leave as it was in this process."""
    return dict(os.environ), list(sys.path), [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which this process works, with one for temporary files beside it."""
    for name in ("temporary", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)  # it remembers
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def shared_memory(work: Path) -> set[str]:
    """What the processes that work there have mapped, semaphores too."""
    maps = []
    for process in running_in(work):
        with contextlib.suppress(psutil.NoSuchProcess):
            maps += [one.path for one in process.memory_maps()]
    return {path for path in maps if path.startswith("/dev/shm/")}


def nothing_is_left(work: Path) -> None:
    """No process and no file, as soon as those that notice the end of their starter have ended."""
    _, alive = psutil.wait_procs(running_in(work), END_SECONDS)
    assert not alive
    assert not [*work.iterdir(), *(work.parent / "temporary").iterdir()]


def shards(root: Path) -> dict[str, bytes]:
    found = contents(root)
    return {path: data for path, data in found.items() if not path.startswith("_streamloader/receipts")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The shards, as one process writes them."""
    folder = tmp_path_factory.mktemp("local")
    return shards(Run(folder).run("local").folder / "out")


def test_a_cluster_with_an_address_writes_the_same_bytes_and_stays(
    cluster: Cluster, expected: dict[str, bytes], tmp_path: Path, work: Path
) -> None:
    """That it stays is seen by the tests that use it next."""
    before = state()
    run = Run(tmp_path, {3: "killed once"}).run(f"{cluster.name}={cluster.address}")
    assert sorted(run.done) == list(range(10))
    assert shards(run.folder / "out") == expected
    assert run.reads(3) == 2
    assert run.made_at_first <= 6, "tasks are made before they are needed"
    assert state() == before
    nothing_is_left(work)


def test_a_cluster_of_its_own_writes_the_same_bytes_and_is_gone_after_it(
    cluster: Cluster, expected: dict[str, bytes], tmp_path: Path, work: Path
) -> None:
    """In a process that has used another cluster before."""
    before = state()
    run = Run(tmp_path, {3: "killed once"}).run(cluster.name, workers=2)
    assert sorted(run.done) == list(range(10))
    assert shards(run.folder / "out") == expected
    assert run.reads(3) == 2
    assert state() == before
    nothing_is_left(work)


@pytest.fixture(scope="module")
def engine(cluster: Cluster) -> Iterator[str]:
    """The engine on the cluster. This process is connected already: Ray and Spark allow for but one connection."""
    with contextlib.ExitStack() as stack:
        if cluster.name == "ray":
            import ray

            ray.init(cluster.address, log_to_driver=False)
            stack.callback(ray.shutdown)
        elif cluster.name == "spark":
            from pyspark import SparkConf, SparkContext

            stack.enter_context(SparkContext(cluster.address, conf=SparkConf().set("spark.ui.enabled", "false")))
        yield f"dask={cluster.address}" if cluster.name == "dask" else cluster.name


def test_the_failure_of_the_earliest_task_is_raised_as_it_was(engine: str, tmp_path: Path) -> None:
    run = Run(tmp_path, {2: "bad", 3: "bad"}, count=20)
    with pytest.raises(SourceError, match=r"^row 2 is bad; remove it \[SL501\]$") as caught:
        run.run(engine)
    assert (caught.value.problem, caught.value.remedy) == ("row 2 is bad", "remove it")
    assert {0, 1} <= set(run.done), "those under way are finished"
    assert run.made < 10, "no task is begun after a failure"


def test_a_task_that_always_kills_its_worker_is_given_up(engine: str, tmp_path: Path) -> None:
    run = Run(tmp_path, {3: "always killed"})
    attempts = ATTEMPTS if engine == "ray" else 4  # here the schedulers of Dask and Spark count for themselves
    with pytest.raises(EngineError, match=rf"shard 3 of .*out died, {attempts} times in all.*fewer workers"):
        run.run(engine)
    assert run.reads(3) == attempts


def test_a_bug_is_an_engine_error_with_its_traceback(engine: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"shard 1 .*KeyError: 'a bug of ours' \(at .*in read.*report it") as caught:
        Run(tmp_path, {1: "bug"}).run(engine)
    assert any("Traceback" in note and "a bug of ours" in note for note in caught.value.__notes__)
    assert len(Run(tmp_path / "again").run(engine).done) == 10, "the connection is as it was"


def test_a_connection_that_this_process_has_is_not_mistaken(cluster: Cluster, engine: str, tmp_path: Path) -> None:
    if cluster.name == "dask":  # which allows for many connections
        distributed = importlib.import_module("distributed")
        with distributed.Client(cluster.address) as client:
            assert len(Run(tmp_path).run(engine).done) == 10
            assert distributed.get_client() is client
        return
    other = cluster.address if cluster.name == "ray" else "local[7]"
    with pytest.raises(UsageError, match=f"this process .*; write {cluster.name}, without an address"):
        Run(tmp_path).run(f"{cluster.name}={other}")


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("how", ["ctrl-c", "killed"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_is_ended_leaves_nothing(engine: str, how: str, tmp_path: Path, work: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    told = json.dumps({2: "endless", 3: "endless"})
    command = [sys.executable, str(HERE / "engine_tasks.py"), engine, str(tmp_path), told]
    with (
        (tmp_path / "stderr").open("w") as errors,
        subprocess.Popen(command, stderr=errors, start_new_session=True) as run,
    ):
        assert (tmp_path / "fifo").read_text().startswith("begun")
        shared = shared_memory(work)
        assert shared or engine != "dask"
        if how == "ctrl-c":
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        else:
            run.kill()
        assert run.wait(END_SECONDS) == (-signal.SIGINT if how == "ctrl-c" else -signal.SIGKILL)
    nothing_is_left(work)
    assert not [path for path in shared if Path(path).exists()]
    said = (tmp_path / "stderr").read_text()
    assert said.count("Traceback") == (how == "ctrl-c"), said


def convert(engine: str, tmp_path: Path, out: str, *more: str) -> list[str]:
    """The command that converts some hundred rows, of which each shard has 16."""
    if not (tmp_path / "it.npz").exists():
        np.savez(tmp_path / "it.npz", x=np.random.default_rng(0).random((1500, 30)), y=np.arange(1500))
    command = [sys.executable, "-m", "streamloader.cli.main", "convert", str(tmp_path / "it.npz"), str(tmp_path / out)]
    return [*command, "--engine", engine, "--shard-size", "4KiB", "--quiet", "--workers", "2", *more]


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("moment", ["while it starts", "while it writes"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_conversion_that_ctrl_c_ends_goes_on_to_the_same_bytes(
    engine: str, moment: str, tmp_path: Path, work: Path
) -> None:
    subprocess.run(convert("local", tmp_path, "whole"), check=True)
    rng = random.Random(f"{os.environ.get('STREAMLOADER_TEST_SEED', '0')} {engine}")
    job = tmp_path / "out" / "_streamloader"
    wanted, seconds = ("receipts/*.json", 0.05) if moment == "while it writes" else ("job.json", 1.0)
    count = rng.randrange(1, 60) if moment == "while it writes" else 1
    with (
        (tmp_path / "stderr").open("w") as errors,
        subprocess.Popen(convert(engine, tmp_path, "out"), stderr=errors, start_new_session=True) as run,
    ):
        while run.poll() is None and len(list(job.glob(wanted))) < count:
            time.sleep(0.002)
        time.sleep(rng.random() * seconds)
        shared = shared_memory(work)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(END_SECONDS) == 130
    nothing_is_left(work)
    assert not [path for path in shared if Path(path).exists()]
    said = (tmp_path / "stderr").read_text()
    assert "interrupted: finished shards are kept, run the same command again" in said
    assert "Traceback" not in said
    done = subprocess.run(convert(engine, tmp_path, "out"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    nothing_is_left(work)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_conversion_is_the_same_dataset_on_every_engine(engine: str, tmp_path: Path, work: Path) -> None:
    np.savez(tmp_path / "it.npz", x=np.random.default_rng(0).random((600, 30)), y=np.arange(600))
    options = ["--shard-size", "16KiB", "--split", "a=0.5,b=0.5", "--quiet", "--workers", "2"]
    for name in ("local", engine):
        command = [
            "-m",
            "streamloader.cli.main",
            "convert",
            str(tmp_path / "it.npz"),
            str(tmp_path / name),
            "--engine",
            name,
        ]
        done = subprocess.run([sys.executable, *command, *options], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert contents(tmp_path / engine) == contents(tmp_path / "local")
    assert sl.open(tmp_path / engine, split="a").digest == sl.open(tmp_path / "local", split="a").digest
    nothing_is_left(work)


@pytest.mark.parametrize("engine", ENGINES)
def test_memory_of_this_process_is_out_of_reach(engine: str, tmp_path: Path) -> None:
    np.save(tmp_path / "it.npy", np.arange(3))
    with pytest.raises(UsageError, match=f"memory://x lies in the memory .* workers of {engine}"):
        sl.convert(tmp_path / "it.npy", "memory://x", engine=engine)


@pytest.mark.parametrize("engine", ["dask=tcp://", "ray=", "ray=ray://", "spark=spark://"])
def test_an_address_where_nobody_answers_is_named_at_once(engine: str, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(EngineError, match=rf"nobody answers at .*{address}: .*refused; see that {engine[:3]}.* runs"):
        Run(tmp_path).run(f"{engine}{address}")


@pytest.mark.parametrize("package", ["distributed", "ray", "pyspark"])
def test_a_package_that_is_not_here_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"distributed": "dask", "pyspark": "spark"}.get(package, package)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"{package} is not installed here; install it with pip install {package}"):
        Run(tmp_path).run(engine)


@pytest.mark.parametrize(
    ("text", "name", "address"),
    [
        ("local", "local", ""),
        ("dask", "dask", ""),
        ("dask=tcp://host:8786", "dask", "tcp://host:8786"),
        ("dask=tls://[::1]:8786", "dask", "tls://[::1]:8786"),
        ("ray=auto", "ray", "auto"),
        ("ray=127.0.0.1:6379", "ray", "127.0.0.1:6379"),
        ("ray=ray://host:10001", "ray", "ray://host:10001"),
        ("spark=local[2]", "spark", "local[2]"),
        ("spark=spark://one:7077,two:7077", "spark", "spark://one:7077,two:7077"),
        (" spark = spark://host:7077 ", "spark", "spark://host:7077"),
    ],
)
def test_an_engine_has_a_name_and_an_address(text: str, name: str, address: str) -> None:
    assert parse_engine(text) == EngineChoice(name, address)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no engine ''; choose local, dask, ray, spark"),
        ("slurm", "there is no engine 'slurm'"),
        ("Dask", "there is no engine 'Dask'"),
        ("local=4", "has an address; local is this machine; --workers"),
        ("dask=", "'dask=' has no address; write dask, or e.g. dask=tcp://host:8786"),
        ("dask=host", "has no address"),
        ("ray=host", "'ray=host' has no address; write ray, or e.g. ray=ray://host:10001"),
        ("spark=host:7077", "'spark=host:7077' has no address; write spark, or e.g. spark=spark://host:7077"),
        ("spark=sc://host", "sc://host is Spark Connect"),
    ],
)
def test_other_engines_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_engine(text)
    assert message in str(caught.value)
