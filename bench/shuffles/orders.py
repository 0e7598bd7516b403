"""Whose orders are compared, and how each is had: from the planner, from numpy, or from the peer itself."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench import venvs
from bench.shuffles.quality import Ids, resident
from streamloader.order.epoch_order import EpochOrder, OrderParams

HERE = Path(__file__).parent
TIMEOUT = 600.0


@dataclass(frozen=True)
class Setting:
    """A dataset of `samples` numbers, in the order of its classes, read in batches.

    `block` is what streamloader fetches at once, `shard` what the peers do: 4 MiB and 64 MB, their defaults, of samples
    of 128 KiB. `lanes` and `window` are streamloader's defaults for so many blocks.
    """

    samples: int = 131_072
    batch: int = 256
    block: int = 32
    lanes: int = 64
    window: int = 128
    shard: int = 512
    classes: int = 128


@dataclass(frozen=True)
class Mixer:
    """Who made an order: `unit` is what it holds as long as any sample of it is to come; 0: single samples.

    `held`: how many samples it holds, where the units do not tell that. `peer` names the environment that it runs in.
    """

    name: str
    unit: int
    peer: str = ""
    options: tuple[tuple[str, str | int], ...] = ()
    held: int = 0


class OrderError(Exception):
    """A peer did not give its order; the message has the end of what it said."""


def ours(setting: Setting, seed: int) -> Ids:
    """Return the first epoch of streamloader."""
    params = OrderParams(setting.block, setting.lanes, setting.window)
    return EpochOrder(setting.samples, params, seed, 0).samples_at(0, setting.samples)


def mixers(setting: Setting) -> list[Mixer]:
    """Return who takes part: each holds as many samples as streamloader does, where it has an option for that."""
    memory = resident(ours(setting, 0), setting.block)
    chunk = memory // 2 // setting.shard * setting.shard  # of LitData, with a chunk in each of two workers
    return [
        Mixer("full permutation", 0, held=setting.samples),
        Mixer("streamloader", setting.block),
        Mixer("Mosaic py1e", setting.shard, "mosaic", (("algorithm", "py1e"), ("block", memory))),
        Mixer("Mosaic py2s", setting.shard, "mosaic", (("algorithm", "py2s"), ("block", 0))),
        Mixer("WebDataset, buffer", 0, "webdataset", (("buffer", memory),), held=memory),
        Mixer("LitData, 64 MB chunks", setting.shard, "litdata", (("chunk", setting.shard), ("items", "auto"))),
        Mixer("LitData, large chunks", chunk, "litdata", (("chunk", chunk), ("items", "full"))),
        Mixer("as stored", 0, held=setting.batch),
    ]


def order(mixer: Mixer, setting: Setting, seed: int) -> Ids:
    """Return an epoch as this mixer delivers it. Raises `OrderError` where a peer fails, or leaves samples out."""
    if mixer.peer:
        return _of_peer(mixer, setting, seed)
    if mixer.name == "streamloader":
        return ours(setting, seed)
    if mixer.name == "as stored":
        return np.arange(setting.samples)
    return np.random.default_rng(seed).permutation(setting.samples)


def _of_peer(mixer: Mixer, setting: Setting, seed: int) -> Ids:
    problem = venvs.make(mixer.peer, print)
    if problem:
        raise OrderError(problem)
    with tempfile.TemporaryDirectory(prefix="slorder-") as folder:
        spec = {**asdict(setting), **dict(mixer.options), "seed": seed, "folder": folder}
        program = str(HERE / f"order_{mixer.peer}.py")
        done = subprocess.run(
            [str(venvs.python_of(mixer.peer)), program, json.dumps(spec)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        if done.returncode:
            raise OrderError(f"{mixer.name}: {' | '.join(done.stderr.strip().splitlines()[-3:])}")
        ids: Ids = np.load(Path(folder) / "order.npy")
    missing = setting.samples - len(np.unique(ids))
    if missing or len(ids) != setting.samples:
        raise OrderError(f"{mixer.name} delivered {len(ids)} samples, {missing} of {setting.samples} not once")
    return ids


def every(setting: Setting, seeds: range) -> Iterator[tuple[Mixer, list[Ids]]]:
    """Yield each mixer with its orders, one for each seed."""
    for mixer in mixers(setting):
        yield mixer, [order(mixer, setting, seed) for seed in seeds]
