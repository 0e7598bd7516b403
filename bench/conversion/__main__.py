"""`python -m bench.conversion`: measure, and report in bench/results/conversion.*. From the repository's root.

Everybody writes the same samples into a new SeaweedFS, whose objects lie in memory where there is room for them, with a
process for each core. Contestants take turns; each run is a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import contestants, venvs
from bench.contestants import PEERS, Contestant, ContestError
from bench.context import RESULTS
from bench.conversion import page
from bench.conversion.sources import image_folder, one_array
from bench.data import prepare
from bench.machine import describe, load
from bench.objects import BUCKET, make_bucket, stored
from bench.servers import Endpoint, endpoint
from bench.workloads import DATA, ROOT, WORKLOADS

HERE = ROOT / "bench" / "conversion"
OURS = Contestant("streamloader", "ours", "../conversion/ours.py")
PLAIN = Contestant("plain objects", "ceiling", "../conversion/plain.py")
RIVALS = tuple(Contestant(name, "peer", f"peer_{name}.py") for name in ("mosaic", "litdata", "webdataset"))
WRITTEN = ("images", "vectors", "jpeg", "tokens")
COUNTS = {"jpeg": 24_576}  # 1.2 GB, as of the others: of less, starting would be most of what is measured
TIMEOUT = 900.0
NEEDED_BYTES = 8 << 30
MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def server() -> Iterator[Endpoint]:
    """Run SeaweedFS over a new folder, in memory if 8 GiB are free there: a disk would be all that is measured.

    For one contestant: what is deleted stays in its files for a while, and is removed while the next one writes.
    """
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > NEEDED_BYTES
    folder = Path(tempfile.mkdtemp(prefix="streamloader-conversion-", dir=MEMORY if roomy else None))
    try:
        with endpoint("seaweedfs", folder) as found:
            make_bucket(found)
            yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(contestant: Contestant, workload: str, source: Path) -> dict[str, Any]:
    """Let one contestant write one workload to a server of its own; return its line."""
    with server() as place:
        return _measure(place, contestant, workload, source)


def _measure(place: Endpoint, contestant: Contestant, workload: str, source: Path) -> dict[str, Any]:
    prefix = f"{contestant.name.replace(' ', '-')}/{workload}"
    spec = {
        "workload": workload,
        "source": str(source),
        "url": f"s3://{BUCKET}/{prefix}",
        "endpoint": place.url,
        "key": place.key,
        "secret": place.secret,
    }
    try:
        lines = contestants.run(contestant, "write", spec, TIMEOUT)
        result = {key: value for line in lines for key, value in line.items()} or {"failed": "it printed nothing"}
    except ContestError as error:
        result = {"failed": str(error)}
    objects, size = stored(place, prefix)
    version = f"{contestant.name}: {venvs.versions(contestant.name)}" if contestant.kind == "peer" else ""
    told = {"workload": workload, "contestant": contestant.name, "peer_versions": version, "load": load()}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"time": now, **told, **result, "objects": objects, "stored_bytes": size}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every contestant; 0 where all of them wrote everything."""
    parser = argparse.ArgumentParser("python -m bench.conversion", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a quarter of the counts")
    parser.add_argument("--workloads", nargs="*", default=WRITTEN, choices=WRITTEN)
    parser.add_argument("--data", default=str(DATA))
    parser.add_argument("--results", default=str(RESULTS))
    options = parser.parse_args(arguments)
    data, results = Path(options.data), Path(options.results)
    lines: list[dict[str, Any]] = []
    about = {**describe(), "server": "seaweedfs"}
    cells: list[tuple[str, Path, Path, int, Sequence[Contestant]]] = []
    for name in options.workloads:
        count = COUNTS.get(name, WORKLOADS[name].count) // (4 if options.quick else 1)
        raw = prepare(name, count, data)
        size = json.loads((raw / "meta.json").read_text())["bytes"]
        cells.append((name, raw, image_folder(raw) if name == "jpeg" else raw, size, (OURS, *RIVALS, PLAIN)))
    array = one_array(data)
    cells.append(("npy", array, array, (array / "rows.npy").stat().st_size, (OURS, PLAIN)))
    for peer in RIVALS:
        if problem := venvs.make(peer.name, print):
            sys.exit(problem)
    for number in range(options.rounds):
        for name, raw, own, size, those in cells:
            for contestant in those:
                line = measure(contestant, name, own if contestant is OURS else raw)
                lines.append({**line, "round": number, "raw_bytes": size, **about})
                told = f"{size / 1e6 / line['seconds']:.0f} MB/s" if "seconds" in line else line.get("failed")
                print(f"{name} {contestant.name}: {told}", flush=True)
    (results / "conversion.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(page.write(lines, results))
    return int(any("failed" in line for line in lines))


assert (PEERS / OURS.file).resolve().parent == HERE

if __name__ == "__main__":
    sys.exit(main())
