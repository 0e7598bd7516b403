"""Runs the fuzzer over the targets: `python -m fuzz.run --seconds 3600 [NAME ...]`, in tests/.

Each target runs in a process of its own, from its kept corpus on (tests/fuzz/corpus/NAME.txt, a line of base64 for each
input). What it finds anew is in build/fuzz/NAME; a crash is in build/fuzz/crashes. `--replay FILE NAME` runs one input.
"""

import argparse
import base64
import contextlib
import hashlib
import importlib
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
CORPUS = Path(__file__).parent / "corpus"
BUILD = TESTS.parent / "build" / "fuzz"
MOST_GROWTH = 256 << 20  # bytes by which one input may raise the peak of resident memory
MOST_CLAIMED = 2 << 30  # bytes of data that it may allocate, used or not, beside what the process had
MOST_CPU = 10.0  # seconds of the processor that one input may take
MOST_SECONDS = 60  # by the clock, on a busy machine: what hangs
LONGEST = 2048  # bytes of an input: longer ones are no better, since they are edits
MOST_INPUTS = 40_000  # of a process: atheris keeps up to 30 KB of memory for each, which is less than MOST_CLAIMED


def inputs(name: str) -> list[bytes]:
    """Return the kept inputs of a target."""
    path = CORPUS / f"{name}.txt"
    return [base64.b64decode(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(name: str, found: list[bytes]) -> None:
    """Write the kept inputs of a target."""
    CORPUS.mkdir(exist_ok=True)
    lines = sorted({base64.b64encode(data).decode() for data in found}, key=lambda line: (len(line), line))
    (CORPUS / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))


def write(folder: Path, found: list[bytes]) -> None:
    """Write inputs as files, as libFuzzer reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    for data in found:
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)


def limited() -> None:
    """Let an allocation of gigabytes fail."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    most = 1024 * int(status["VmData"].split()[0]) + MOST_CLAIMED
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(1 << 20)  # each is claimed whole


def collected(name: str, run):
    """Return a target that writes each input which fails, one for each place in the code, and goes on.

    An input also fails that takes too much memory or time of the processor.
    """
    places = set()

    def test(data: bytes) -> None:
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            run(bytes(data))
            grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            took = time.process_time() - began
            assert grown < MOST_GROWTH, f"the input took {grown >> 20} MiB"
            assert took < MOST_CPU, f"the input took {took:.1f} s of the processor"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a defect
            frames = traceback.extract_tb(error.__traceback__)
            place = [(frame.filename, frame.lineno) for frame in frames][-3:]
            if str(place) not in places:
                places.add(str(place))
                path = BUILD / "crashes" / f"{name}-{type(error).__name__}-{hashlib.sha1(data).hexdigest()[:10]}"
                path.write_bytes(data)
                path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))

    return test


def child(name: str, seconds: float, folder: Path, arguments: list[str]) -> int:
    """Run the fuzzer for a target in a child of this process, which has imported everything; return its pid."""
    import atheris

    from fuzz.source_targets import TARGETS

    pid = os.fork()
    if pid:
        return pid
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    target, crashes = TARGETS[name], BUILD / "crashes"
    crashes.mkdir(parents=True, exist_ok=True)
    write(folder / name, [*inputs(name), *target.seeds])
    (BUILD / name).mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    limited()
    flags = [f"-max_total_time={max(1, round(seconds))}", f"-timeout={MOST_SECONDS}", "-rss_limit_mb=3000"]
    flags += [f"-artifact_prefix={crashes}/{name}-", f"-max_len={LONGEST}", "-print_final_stats=1"]
    flags += ["-len_control=0", "-report_slow_units=1000000"]
    status: object = 70
    try:
        atheris.Setup(
            [sys.argv[0], *flags, *arguments, str(BUILD / name), str(folder / name)], collected(name, target.run)
        )
        atheris.Fuzz()
    except SystemExit as error:  # what it ends with; what the parent has to clean up is not this process's
        status = error.code
    finally:
        os._exit(status if isinstance(status, int) else 70)


def fuzz_all(names: list[str], seconds: float, processes: int, arguments: list[str]) -> int:
    """Fuzz the targets, each for an equal part of the time that is left; return how many fail, print what was found."""
    shutil.rmtree(BUILD / "crashes", ignore_errors=True)
    end, waiting, running, failed = time.monotonic() + seconds, list(names), dict[int, str](), 0
    tried = dict.fromkeys(names, 0)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as made:
        folder = Path(made)
        try:
            while waiting or running:
                while waiting and len(running) < processes:
                    share = (end - time.monotonic()) * processes / len(waiting)  # what kept inputs took is not there
                    name = waiting.pop(0)
                    running[child(name, share, folder, arguments)] = name
                pid, status = os.wait()
                name = running.pop(pid)
                lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()
                ended, found = os.waitstatus_to_exitcode(status), sorted((BUILD / "crashes").glob(f"{name}-*"))
                failed += bool(ended or found)
                counted = sum(int(line.split()[-1]) for line in lines if "number_of_executed_units" in line)
                tried[name] += counted
                if counted >= MOST_INPUTS and not found and time.monotonic() < end:
                    waiting.append(name)  # in a new process, when all others had their turn
                    continue
                print(f"{name}: {tried[name]} inputs", flush=True)
                if ended:
                    print(f"{name} ended with status {ended}:", *lines[-60:], sep="\n", flush=True)
                for path in found:
                    shown = path.read_text() if path.suffix else f"python -m fuzz.run {name} --replay {path}"
                    print(shown, flush=True)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
    return failed


def reached(run, data: bytes) -> set[tuple[str, int, int]]:
    """Return the steps from line to line of the package that a target takes for an input, in all threads."""
    found = set()

    def enter(frame, _event, _arg):
        name, before = frame.f_code.co_filename, frame.f_lineno
        if f"{os.sep}streamloader{os.sep}" not in name:
            return None

        def step(frame, event, _arg):
            nonlocal before
            if event == "line":
                found.add((name, before, frame.f_lineno))
                before = frame.f_lineno
            return step

        return step

    threading.settrace(enter)
    sys.settrace(enter)
    try:
        run(data)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    return found


def minimise(name: str, most: float) -> None:
    """Keep inputs that together reach what all reach, each time the one that adds most, of `most` seconds in all."""
    from fuzz.source_targets import TARGETS

    paths = sorted((BUILD / name).iterdir()) if (BUILD / name).exists() else []
    found = {*inputs(name), *TARGETS[name].seeds, *(path.read_bytes() for path in paths)}
    steps, seconds = {}, {}
    for data in sorted(found, key=lambda data: (len(data), data)):
        began = time.process_time()
        TARGETS[name].run(data)
        seconds[data] = time.process_time() - began
        steps[data] = reached(TARGETS[name].run, data)
    kept, covered = list[bytes](), set[tuple[str, int, int]]()
    while steps:
        best = max(steps, key=lambda data: len(steps[data] - covered))
        if not steps[best] - covered or sum(seconds[data] for data in [*kept, best]) > most:
            break
        covered |= steps.pop(best)
        kept.append(best)
    keep(name, kept)
    print(f"{name}: {len(found)} inputs, {len(kept)} kept, which take {len(covered)} steps", flush=True)


def main() -> int:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=3600, help="of all targets together")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minimise", type=float, help="keep inputs that take so many seconds, of each target")
    parser.add_argument("--replay", type=Path, help="an input to run once, for one target, without the fuzzer")
    parser.add_argument("--seed", type=int, default=0, help="of the edits, another one each time by default")
    parser.add_argument("--runs", type=int, default=MOST_INPUTS, help="of a process, at most")
    given = parser.parse_args()
    if not given.replay and not given.minimise:
        import atheris

        with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["streamloader"]):
            importlib.import_module("fuzz.source_targets")
        importlib.import_module("pandas")  # which pyarrow would import within an input, in a minute on a busy machine
    from fuzz.source_targets import TARGETS

    names = given.names or sorted(TARGETS)
    if given.replay:
        TARGETS[names[0]].run(given.replay.read_bytes())
    elif given.minimise:
        for name in names:
            minimise(name, given.minimise)
    else:
        return fuzz_all(names, given.seconds, given.processes, [f"-runs={given.runs}", f"-seed={given.seed}"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
