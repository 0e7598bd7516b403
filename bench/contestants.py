"""Who takes part: the project, its ceilings, and one peer for each `bench/peers/peer_<name>.py`; and how one is run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.venvs import python_of, requirements_of
from bench.workloads import ROOT

PEERS = ROOT / "bench" / "peers"
START_SECONDS = 90.0  # what a process may take beside its epochs: imports, opening, workers


@dataclass(frozen=True)
class Contestant:
    """`kind`: "ours", "ceiling" or "peer". `workloads`: those it takes part in, all where none is named."""

    name: str
    kind: str
    file: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    workloads: tuple[str, ...] = ()

    @property
    def python(self) -> str:
        """Return the interpreter: a peer's own, else the project's."""
        return str(python_of(self.name)) if self.kind == "peer" else sys.executable

    def fingerprint(self) -> str:
        """Return what its written data depends on: its program, and what that writes with."""
        helpers = [
            path for path in sorted(PEERS.glob("*.py")) if not path.name.startswith(("peer_", "ours", "ceiling"))
        ]
        sources = [PEERS / self.file, *helpers, *requirements_of(self.name)]
        if self.kind != "peer":
            package = ROOT / "streamloader"
            sources += [package / "options.py", *sorted((package / "format").glob("*.py"))]
        digest = hashlib.sha256()
        for path in sources:
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


OURS = Contestant("streamloader", "ours", "ours.py")
CEILINGS = (
    Contestant("ceiling: fetch", "ceiling", "ceiling.py", {"ceiling": "fetch"}),
    Contestant("ceiling: fetch+decode", "ceiling", "ceiling.py", {"ceiling": "decode"}),
    Contestant("ceiling: image decode", "ceiling", "ceiling.py", {"ceiling": "image"}, ("jpeg",)),
)


# Not loaders: libraries that read blocks, with what a careful user writes around them (bench/peers/blocks.py).
BLOCK_READERS = {"s3connector", "tensorstore", "zarr"}
# Those that list objects.
LISTING = {"lancedb", "s3connector"}
# Those whose threads fetch and decode: without DataLoader workers in a quick run.
THREADED = {"lancedb"}


def peers() -> list[Contestant]:
    """Return the peers that have a program and requirements."""
    found = sorted(PEERS.glob("peer_*.py"))
    names = [path.stem.removeprefix("peer_") for path in found]
    return [
        Contestant(name, "peer", path.name) for name, path in zip(names, found, strict=True) if requirements_of(name)
    ]


class ContestError(Exception):
    """A contestant failed; the message has the end of what it said."""


def run(contestant: Contestant, mode: str, spec: Mapping[str, Any], timeout: float) -> list[dict[str, Any]]:
    """Run it in a process of its own, with an empty folder for its cache, and return the lines it printed.

    Raises `ContestError` where it fails or needs longer than `timeout` seconds; its processes are ended then.
    """
    with _cache() as cache:
        path = cache / "spec.json"
        extra = {**contestant.extra, **spec.get("extra", {})}
        (cache / "data").mkdir()
        (cache / "tmp").mkdir()
        path.write_text(json.dumps({**spec, "extra": extra, "cache": spec.get("cache") or str(cache / "data")}))
        environment = {**os.environ, "TMPDIR": str(cache / "tmp"), "HF_HOME": str(cache / "hf")}
        log = cache / "stderr"
        with (
            log.open("wb") as errors,
            subprocess.Popen(
                [contestant.python, str(PEERS / contestant.file), mode, str(path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
                text=True,
            ) as process,
        ):
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                raise ContestError(f"{contestant.name}: no end after {timeout:.0f} s; {_tail(log)}") from None
            finally:
                with contextlib.suppress(ProcessLookupError):  # whatever it left running, workers too
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            raise ContestError(f"{contestant.name}: ended with {process.returncode}; {_tail(log)}")
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return " | ".join(lines[-3:])[-600:]


@contextlib.contextmanager
def _cache() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="slbench-"))  # short: a socket's path has 107 characters at most
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
