"""Uses the package as on another system, and prints what it got: python other_system_run.py PLATFORM URL FOLDER."""

import hashlib
import json
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
from other_system import pretend
from PIL import Image

PLATFORM, URL, FOLDER = sys.argv[1:]
if sys.platform != PLATFORM:
    pretend(PLATFORM)

import streamloader as sl  # noqa: E402 - imported as on the other system


def digest_of(batches) -> str:
    """The hash of all columns of batches."""
    digest = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            digest.update(np.ascontiguousarray(np.asarray(batch[name])).tobytes())
    return digest.hexdigest()


def written(folder: Path) -> dict[str, str]:
    """The hash of each shard and table below a folder; documents have times and random ids."""
    files = sorted(path for path in folder.rglob("*/c/*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> None:
    folder = Path(FOLDER)
    rng = np.random.default_rng(0)
    for number in range(48):
        path = folder / "photos" / f"class{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (20, 24, 3), np.uint8)).save(path)
    for _, name, _ in pkgutil.walk_packages(sl.__path__, "streamloader."):
        if not name.endswith("__main__"):
            import_module(name)
    for target in (str(folder / "local"), URL):
        sl.convert(folder / "photos", target, split={"train": 0.75, "val": 0.25})
    sl.append(folder / "local", folder / "photos", split="train", workers=2)
    sl.delete(folder / "local", ids=[3], split="val")
    assert not sl.verify(folder / "local").problems
    found = {"files": written(folder / "local")}
    images = sl.Decode(size=(16, 16), crop="random")
    for name, url in (("local", str(folder / "local")), ("s3", URL)):
        cache = sl.Cache(folder / f"cache-{name}", limit=1 << 24)
        dataset = sl.StreamingDataset(url, split="train", batch_size=8, decode=images, num_workers=2, cache=cache)
        found[name] = [digest_of(dataset), digest_of(dataset)]
        stats = dataset.stats()
        found[f"workers-{name}"] = [stats.workers, stats.workers_reason]
    with sl.Writer(folder / "written", {"x": sl.Field("tensor", "float32", (3,))}) as writer:
        writer.write({"x": np.arange(3, dtype="float32")})
    found["sample"] = sl.open(folder / "written")[0]["x"].tolist()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
