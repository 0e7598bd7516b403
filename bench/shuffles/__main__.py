"""`python -m bench.shuffles`: measure, and report in bench/results/shuffles.*. From the repository's root."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from bench import venvs
from bench.context import RESULTS
from bench.photos import photographs
from bench.shuffles import page
from bench.shuffles.learning import Task
from bench.shuffles.orders import Mixer, OrderError, Setting, every
from bench.shuffles.quality import Quality, quality
from bench.workloads import DATA


def version(mixer: Mixer) -> str:
    """Return which version of a peer was asked; nothing for an order of our own."""
    found = venvs.versions(mixer.peer).split(", ") if mixer.peer else []
    return next((one for one in found if mixer.peer in one), "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every mixer; 0 where all gave their orders."""
    parser = argparse.ArgumentParser("python -m bench.shuffles", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", default=str(DATA), help="where the photographs are kept")
    parser.add_argument("--results", default=str(RESULTS))
    options = parser.parse_args(arguments)
    setting, results = Setting(), Path(options.results)
    task = Task(photographs(Path(options.data) / "photos"), setting.samples)
    lines = []
    try:
        for mixer, orders in every(setting, range(options.seeds)):
            measures = {"batch": setting.batch, "run": setting.shard, "classes": setting.classes}
            found = [quality(ids, unit=mixer.unit or 1, **measures) for ids in orders]
            mean = Quality(*np.mean([list(asdict(one).values()) for one in found], axis=0).tolist())
            line = {
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "name": mixer.name,
                "version": version(mixer),
                "setting": asdict(setting),
                "options": dict(mixer.options),
                "seeds": options.seeds,
                **asdict(mean),
                "held": mixer.held or round(mean.resident),
                "errors": task.curve(orders, setting.batch),
            }
            lines.append(line)
            print(f"{mixer.name}: {mean.runs:.1f} runs in a batch, design effect {mean.measured:.2f}", flush=True)
    except OrderError as error:
        print(error, file=sys.stderr)
        return 1
    (results / "shuffles.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(page.write(lines, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
