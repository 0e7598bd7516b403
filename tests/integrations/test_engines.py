"""Engines: the same tasks on processes of this machine, on Dask, on Ray and on Spark, each with real workers."""

import contextlib
import importlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import zarr
from amounts import covering
from commands import COMMAND
from conversions import HELD, contents
from engine_tasks import Run
from servers import free_ports

import streamloader as sl
from streamloader.conversion.executors import ATTEMPTS, EngineChoice, parse_engine
from streamloader.errors import EngineError, SourceError, UsageError

HERE = Path(__file__).parent
ENGINES = ["dask", "ray", "spark"]
END_SECONDS = 300.0


def running_in(folder):
    """The processes that work in a folder, or below: children inherit it. This one is left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and Path(process.cwd()).is_relative_to(folder):
                found.append(process)
    return found


class Cluster:
    """Programs that make a cluster, and end with the block."""

    def __init__(self, name, folder):
        self.name, self.folder, self.address = name, folder, ""
        self._programs = []
        self.environment = os.environ | {"TMPDIR": str(folder)}

    def start(self, until, *command):
        """Start a program, and wait until it has printed a line with the text `until`."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        place = {"env": self.environment, "cwd": self.folder, "start_new_session": True}
        program = subprocess.Popen(command, text=True, **place, **streams)
        lines = []
        for line in program.stdout:
            lines.append(line)
            if until in line:
                break
        else:
            raise AssertionError("".join(lines))
        reader = threading.Thread(target=program.stdout.read, daemon=True)
        reader.start()
        self._programs.append((program, reader))

    def __enter__(self):
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

    def __exit__(self, *error):
        while processes := running_in(self.folder):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "resource_tracker" not in str(process.cmdline()):  # these end by themselves, and clean up
                        process.kill()
            psutil.wait_procs(processes)
        for program, reader in self._programs:
            reader.join()
            program.wait()
            program.stdout.close()


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory):
    """What workers import, and no home of anybody: Ray keeps a token there."""
    importlib.import_module("ray")  # it sets an environment variable
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent.parent)]))
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        yield


@pytest.fixture(scope="module", params=ENGINES)
def cluster(request):
    """A cluster that others started: two workers behind an address."""
    with (
        tempfile.TemporaryDirectory(prefix="sl-", ignore_cleanup_errors=True) as folder,
        Cluster(request.param, Path(folder)) as cluster,
    ):
        yield cluster


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder in which this process works: where the processes that it starts are found."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def no_process_is_left(work):
    _, alive = psutil.wait_procs(running_in(work), END_SECONDS)
    assert not alive


def shards(root):
    return {path: data for path, data in contents(root).items() if "/receipts/" not in path}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The shards, as one process writes them."""
    folder = tmp_path_factory.mktemp("local")
    return shards(Run(folder).run("local").folder / "out")


@pytest.mark.quick(1)
def test_a_cluster_with_an_address_writes_the_same_bytes_and_stays(cluster, expected, tmp_path):
    """That it stays is seen by the tests that use it next."""
    run = Run(tmp_path, {3: "killed once"}).run(f"{cluster.name}={cluster.address}")
    assert sorted(run.done) == list(range(10))
    assert shards(run.folder / "out") == expected
    assert run.reads(3) == 2
    assert run.made_at_first <= 6, "tasks are made before they are needed"


@pytest.mark.long
def test_a_killed_worker_of_spark_s_local_mode_is_retried(expected, tmp_path, work):
    """Its attempts are ours to set. In a program of its own: the Java machine ends with the process that started it."""
    command = [sys.executable, str(HERE.parent / "engine_tasks.py"), "spark", str(tmp_path), '{"3": "killed once"}']
    subprocess.run(command, check=True, timeout=300)
    assert shards(tmp_path / "out") == expected
    assert Run(tmp_path).reads(3) == 2
    no_process_is_left(work)


@pytest.fixture(scope="module")
def engine(cluster):
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


@pytest.mark.quick(2)
def test_the_failure_of_the_earliest_task_is_raised_as_it_was(engine, tmp_path):
    run = Run(tmp_path, dict.fromkeys(range(2, 20), "bad"), count=20)  # whichever ends first
    with pytest.raises(SourceError, match=r"^row 2 is bad; remove it \[SL501\]$") as caught:
        run.run(engine)
    assert (caught.value.problem, caught.value.remedy) == ("row 2 is bad", "remove it")
    assert {0, 1} <= set(run.done), "those under way are finished"
    assert run.made < 10, "no task is begun after a failure"


@pytest.mark.quick(1)
def test_a_task_that_always_kills_its_worker_is_given_up(engine, tmp_path):
    run = Run(tmp_path, {3: "always killed"})
    # Dask and Spark count for themselves
    attempts, died = (ATTEMPTS, "died, 3 times in all") if engine == "ray" else (4, r"(KilledWorker|Py4JJavaError): .*")
    with pytest.raises(EngineError, match=rf"shard 3 of .*out:? {died}.*fewer workers"):
        run.run(engine)
    assert run.reads(3) == attempts


@pytest.mark.quick(2)
def test_a_bug_is_an_engine_error_with_its_traceback(engine, tmp_path):
    message = r"shard 1 .*KeyError: 'a bug of ours' \(at .*in __call__.*report it"
    with pytest.raises(EngineError, match=message) as caught:
        Run(tmp_path, {1: "bug"}).run(engine)
    assert any("Traceback" in note and "a bug of ours" in note for note in caught.value.__notes__)
    assert len(Run(tmp_path / "again").run(engine).done) == 10, "the connection is as it was"


def test_a_connection_that_this_process_has_stays(cluster, engine, tmp_path):
    if cluster.name == "dask":  # which allows for many connections
        distributed = importlib.import_module("distributed")
        with distributed.Client(cluster.address) as client:
            assert len(Run(tmp_path).run(engine).done) == 10
            assert distributed.get_client() is client
        return
    other = cluster.address if cluster.name == "ray" else "local[7]"
    with pytest.raises(UsageError, match=f"this process .*; write {cluster.name}, without an address"):
        Run(tmp_path).run(f"{cluster.name}={other}")


def convert(engine, source, tmp_path, out, program=COMMAND):
    """The command that converts some hundred rows, of which each shard has 16, or slices of them."""
    if not (tmp_path / source).exists():
        x, y = np.random.default_rng(0).random((1500, 30)), np.arange(1500)
        if source == "it.npz":
            np.savez(tmp_path / source, x=x, y=y)
        else:
            group = zarr.open_group(tmp_path / source, mode="w")
            group.create_array("level", data=np.arange(2), dimension_names=["level"])
            z = np.stack([x - 1, x], axis=1)
            group.create_array("z", data=z, chunks=(100, 1, 30), dimension_names=["time", "level", "x"])
            group.create_array("y", data=y, chunks=(100,), dimension_names=["time"])
    command = [*program, "convert", str(tmp_path / source), str(tmp_path / out)]
    command += ["--rechunk", "z@1,y"] if source == "it.zarr" else []
    return [*command, "--engine", engine, "--shard-size", "4KiB", "--quiet", "--workers", "2", "--split", "a=0.5,b=0.5"]


@pytest.mark.long
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("engine", "source"), covering(ENGINES, ["it.npz", "it.zarr"]))
def test_a_conversion_that_ctrl_c_ends_is_resumed_to_the_same_bytes(engine, source, tmp_path, work):
    subprocess.run(convert("local", source, tmp_path, "expected"), check=True)
    rng = random.Random(f"{os.environ.get('STREAMLOADER_TEST_SEED', '0')} {engine}")
    count = rng.randrange(1, 60)
    (tmp_path / "held").touch()
    command = convert(engine, source, tmp_path, "out", [sys.executable, "-c", HELD, str(tmp_path / "held")])
    with (
        (tmp_path / "stderr").open("w") as errors,
        subprocess.Popen(command, stderr=errors, start_new_session=True) as run,
    ):
        while run.poll() is None and len(list((tmp_path / "out").glob("*/_streamloader/receipts/*.json"))) < count:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        os.killpg(run.pid, signal.SIGINT)
        try:
            assert run.wait(END_SECONDS) == 130
        finally:
            run.kill()
    no_process_is_left(work)
    assert "interrupted: finished shards are kept, run the same command again" in (tmp_path / "stderr").read_text()
    assert subprocess.check_output(convert(engine, source, tmp_path, "out")) == b""
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    no_process_is_left(work)


@pytest.mark.parametrize("engine", ENGINES)
def test_workers_of_clusters_do_not_reach_the_memory_of_this_process(engine, tmp_path):
    np.save(tmp_path / "it.npy", np.arange(3))
    with pytest.raises(UsageError, match=f"memory://x is in the memory .* workers of {engine}"):
        sl.convert(tmp_path / "it.npy", "memory://x", engine=engine)


@pytest.mark.parametrize("engine", ["dask=tcp://", "ray=", "ray=ray://", "spark=spark://"])
def test_an_address_where_nothing_listens_is_named_at_once(engine, tmp_path):
    with socket.socket() as closed:  # bound, so that nobody listens there meanwhile
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        message = rf"no connection to .*{address}: .*refused; check that {engine[:3]}.* runs"
        with pytest.raises(EngineError, match=message):
            Run(tmp_path).run(f"{engine}{address}")


@pytest.mark.parametrize("package", ["distributed", "ray", "pyspark"])
def test_a_missing_package_is_named(package, tmp_path, monkeypatch):
    engine = {"distributed": "dask", "pyspark": "spark"}.get(package, package)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"{package} is not installed here; install it with pip install {package}"):
        Run(tmp_path).run(engine)


NAMES = [
    ("local", [""]),
    ("dask", ["", "tcp://host:8786", "tls://[::1]:8786"]),
    ("ray", ["auto", "127.0.0.1:6379", "ray://host:10001"]),
    ("spark", ["local[2]", "spark://one:7077,two:7077"]),
]


@pytest.mark.parametrize(("name", "addresses"), NAMES)
def test_an_engine_has_a_name_and_an_address(name, addresses):
    for address in addresses:
        assert parse_engine(f"{name}={address}" if address else name) == EngineChoice(name, address)
        assert parse_engine(f" {name} = {address} " if address else f" {name} ") == EngineChoice(name, address)


OTHERS = [
    ("", "there is no engine ''; choose local, dask, ray, spark"),
    ("slurm", "there is no engine 'slurm'"),
    ("Dask", "there is no engine 'Dask'"),
    ("local=4", "has an address; local is this machine; workers="),
    ("dask=", "'dask=' has no address; write dask, or e.g. dask=tcp://host:8786"),
    ("dask=host", "has no address"),
    ("ray=host", "'ray=host' has no address; write ray, or e.g. ray=ray://host:10001"),
    ("spark=host:7077", "'spark=host:7077' has no address; write spark, or e.g. spark=spark://host:7077"),
    ("spark=sc://host", "sc://host is Spark Connect"),
]


@pytest.mark.parametrize(("text", "message"), OTHERS)
def test_other_engines_are_errors(text, message):
    with pytest.raises(UsageError) as caught:
        parse_engine(text)
    assert message in str(caught.value)
