"""The bench of writing: its arithmetic and page, and the project's own contestants on a real server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from bench.conversion import page  # noqa: E402
from bench.conversion.__main__ import OURS, PLAIN, measure  # noqa: E402
from bench.data import prepare  # noqa: E402
from bench.machine import describe  # noqa: E402


def line(contestant: str, seconds: float, **more: Any) -> dict[str, Any]:
    """A run that wrote 100 MB of vectors."""
    told = {"time": "2026-01-01T00:00:00", "workload": "vectors", "contestant": contestant, "peer_versions": ""}
    return {**told, "seconds": seconds, "raw_bytes": 100e6, "objects": 3, "stored_bytes": 90e6, **describe(), **more}


def test_the_ratio_is_of_medians_over_the_best_of_the_others(tmp_path: Path) -> None:
    lines = [line(page.OURS, seconds) for seconds in (1.0, 2.0, 50.0)]
    lines += [line("slow", 10.0), line("fast", 4.0), line("fast", 5.0), line("fast", 100.0), line(page.PLAIN, 1.0)]
    assert page.ratio(lines, "vectors") == pytest.approx(2.5)
    assert page.ratio(lines, "vectors", plain=True) == pytest.approx(0.5)
    text = page.write(lines, tmp_path).read_text()
    assert "| **streamloader** | 50 | 2 to 100 | 2.50 (target 2) | 0.50 | 3 | 90 |" in text
    assert (tmp_path / "conversion.png").stat().st_size > 5000


def test_who_fails_is_named_on_the_page(tmp_path: Path) -> None:
    failed = {key: value for key, value in line("slow", 1.0).items() if key != "seconds"}
    text = page.write([line(page.OURS, 1.0), line("fast", 1.0), {**failed, "failed": "no end"}], tmp_path).read_text()
    assert "- vectors, slow: no end" in text


def test_our_contestants_write_what_they_are_given(tmp_path: Path) -> None:
    raw = prepare("tokens", 200, tmp_path / "data")
    array = tmp_path / "array"
    array.mkdir()
    np.save(array / "rows.npy", np.random.default_rng(0).integers(0, 256, (500, 8192), np.uint8))
    tokens, plain = measure(OURS, "tokens", raw), measure(PLAIN, "npy", array)
    assert "failed" not in tokens | plain, (tokens, plain)
    assert tokens["samples"] == 200
    assert tokens["objects"] > 3
    assert tokens["peak_bytes"] > tokens["shard_bytes"] > 0
    assert plain["stored_bytes"] == (array / "rows.npy").stat().st_size
