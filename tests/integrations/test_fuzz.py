"""A minute of the fuzzer from the kept corpus on; and planted defects, which its targets find without it."""

import platform
import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fuzz.run import inputs
from fuzz.source_targets import TARGETS
from torchrun import TESTS, environment

from streamloader.format import codecs, conditions, manifest, reader, tables
from streamloader.order import state
from streamloader.zarr import calendar, cf

TRIES = 400  # of a planted defect
SECONDS = 30  # of a minute: the rest is needed to import and instrument everything
SEED = 1  # the same inputs each time, more or fewer of them: new ones are for `make fuzz`


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="atheris has no wheels for it")
def test_the_fuzzer_finds_nothing_in_a_minute():
    command = [sys.executable, "-m", "fuzz.run", "--seconds", str(SECONDS), "--seed", str(SEED)]
    done = subprocess.run(
        command, env=environment(), cwd=TESTS, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counts = dict(re.findall(r"^(\w+): (\d+) inputs$", done.stdout, re.MULTILINE))
    assert counts.keys() == TARGETS.keys()
    assert all(int(count) >= len(inputs(name)) > 0 for name, count in counts.items()), counts


def test_every_source_format_has_a_target():
    from streamloader.conversion.sources.formats import FORMATS

    assert {f"source_{name}" for name in FORMATS} <= TARGETS.keys()


PLANTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], Any]]] = {
    "numbers of a manifest are not checked": (
        "manifest",
        lambda patch: patch.setattr(manifest, "natural", lambda value, least=0: value),
    ),
    "a checksum is not compared": (
        "objects",
        lambda patch: patch.setattr(reader.FieldReader, "_verified_body", lambda self, run, i, data: data[:-4]),
    ),
    "a chunk's size in the table is not compared": (
        "tables",
        lambda patch: patch.setattr(tables.ChunkTable, "_check_digest", lambda self, table, url: 1 / 0),
    ),
    "lengths of items are trusted": (
        "items",
        lambda patch: patch.setattr(
            codecs, "parse_lengths", lambda data, count: np.arange(count + 1, dtype=np.int64) * 5 + 4
        ),
    ),
    "a frame's size is trusted": (
        "frames",
        lambda patch: patch.setattr(codecs, "check_frame", lambda codec, data, least, most: 1 << 40),
    ),
    "% has another sign than Python's": (
        "where",
        lambda patch: patch.setattr(conditions, "_ARITHMETIC", {**conditions._ARITHMETIC, conditions.ast.Mod: np.fmod}),
    ),
    "a state is not checked": (
        "state",
        lambda patch: patch.setattr(state, "read_value", lambda state, name, *types: state[name]),
    ),
    "fill values are kept": (
        "attributes",
        lambda patch: patch.setattr(cf.Unpacking, "apply", lambda self, stored: stored.astype(self.dtype)),
    ),
    "every year is a leap year": ("times", lambda patch: patch.setattr(calendar, "_julian", lambda year: 366 * year)),
}


def fails(name: str, data: bytes) -> bool:
    """Whether a target finds a defect."""
    try:
        TARGETS[name].run(data)
    except Exception:  # noqa: BLE001 - whatever it is, the fuzzer reports it
        return True
    return False


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_defect_is_found(plant, monkeypatch):
    name, apply = PLANTS[plant]
    draw = random.Random(0)
    tried = [*inputs(name), *TARGETS[name].seeds, *(draw.randbytes(draw.randrange(60)) for _ in range(TRIES))]
    apply(monkeypatch)
    first = next((data for data in tried if fails(name, data)), None)
    monkeypatch.undo()
    assert first is not None
    TARGETS[name].run(first)
