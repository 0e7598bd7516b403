"""What tests of conversions share: folders of images, what is in a folder, interruptions, and processes to kill."""

import contextlib
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import COMMAND
from PIL import Image

import streamloader as sl
from streamloader.conversion.job import Progress
from streamloader.storage import open_store

# `streamloader`, whose conversions wait before their last steps while there is a file, the first argument: they run
# until somebody has seen them, also on a busy machine
HELD = """
import os, sys, time
from pathlib import Path
from streamloader.cli.main import main
from streamloader.cli.show import Display
update, held, parent = Display.update, Path(sys.argv[1]), os.getppid()
def wait(display, progress):
    update(display, progress)
    while progress.phase == "finish" and held.exists() and os.getppid() == parent:
        time.sleep(0.01)
Display.update = wait
main(sys.argv[2:])
"""
SMALL = sl.Layout(shard_size=4096, block_size=1024, chunk_size=512)  # many shards of little


def module_at(path: Path) -> Any:
    """Return a script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def meanwhile(phase: str, act: Callable[[], Any], done: int = 0) -> Callable[[Progress], Any]:
    """A listener that calls `act` once, in this phase, when so many samples are done."""
    once = iter([act])
    return lambda progress: progress.phase == phase and progress.done >= done and next(once, lambda: None)()


class Stop(Exception):
    """A kill at some change of the store."""


def dying(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Let the store fail for good after so many changes; None are undone."""
    kind = type(open_store("/tmp"))
    for name in ("put", "create", "replace", "delete"):
        original = getattr(kind, name)

        def change(self: Any, *arguments: Any, original: Any = original) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Stop
            return original(self, *arguments)

        monkeypatch.setattr(kind, name, change)


def call_at(shards: int, act: Callable[[], Any], phase: str = "write") -> Callable[[Progress], None]:
    """Return a listener that calls `act` once, when so many shards are written."""
    seen = itertools.count()

    def listen(progress: Progress) -> None:
        if progress.phase == phase and next(seen) == shards:
            act()

    return listen


def _stop() -> None:
    raise KeyboardInterrupt


def interrupted(src: Any, dst: Path | str, shards: int, phase: str = "write", **options: Any) -> None:
    """Convert until so many shards are written, and no further, as Ctrl-C does."""
    with pytest.raises(KeyboardInterrupt):
        sl.convert(src, dst, **{"layout": SMALL, "workers": 0, **options}, progress=call_at(shards, _stop, phase))


def write_photos(root: Path, classes: dict[str, int], size: Callable[[int], Any], name: str = "{:03}.png") -> Path:
    """Write so many images of noise in a folder for each class; `size` gives the height and width of each."""
    rng = np.random.default_rng(0)
    for folder, count in classes.items():
        (root / folder).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (*size(i), 3), dtype=np.uint8)).save(root / folder / name.format(i))
    return root


class Exported:
    """An array of another library, such as CuPy or JAX: only DLPack and a length."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


class OnDevice(Exported):
    """An array on a CUDA device, which its library copies to the CPU if it is asked to, or cannot."""

    def __init__(self, array: np.ndarray[Any, Any], *, copies: bool = True) -> None:
        super().__init__(array)
        self._copies = copies

    def __dlpack__(self, **options: Any) -> Any:
        if options.get("dl_device") != (1, 0) or not self._copies:
            raise BufferError("the array is on a device")
        return super().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def contents(root: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def wait_for(happened: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Return what `happened` returns once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)
    return found


def group(pgid: int) -> list[int]:
    """The processes of a group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == pgid and state != "Z":
                found.append(int(stat.parent.name))
    return found


def errors_of(dst: Path) -> str:
    """What the last conversion to `dst` that `converting` ran wrote to stderr."""
    return dst.with_suffix(".stderr").read_text()


@contextlib.contextmanager
def converting(src: Path, dst: Path, *options: str, held: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run `streamloader convert` in a process group of its own, which has ended afterwards without temporary files.

    It waits before its last steps while there is a file `held`.
    """
    temporary = dst.with_suffix(".tmp")
    temporary.mkdir(exist_ok=True)
    program = COMMAND if held is None else [sys.executable, "-c", HELD, str(held)]
    env, command = {**os.environ, "TMPDIR": str(temporary)}, [*program, "convert", str(src), str(dst), *options]
    with dst.with_suffix(".stderr").open("w") as errors:  # a file: nobody reads a pipe meanwhile
        process = subprocess.Popen(command, env=env, start_new_session=True, stderr=errors, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    wait_for(lambda: not group(process.pid))
    assert not list(temporary.iterdir()), "temporary files are left"
    assert {path.suffix for path in dst.parent.iterdir() if path.stem == dst.stem} <= {"", ".tmp", ".stderr"}
