"""The project's own conversion of a workload, in the contract of bench/peers/common.py, with a process a core."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "peers")]

import s3fs  # noqa: E402, F401 - imported before the clock starts, as the peers import theirs
from common import Spec, emit, main  # noqa: E402

from bench.conversion.sources import Documents  # noqa: E402
from streamloader import convert  # noqa: E402


def write(spec: Spec) -> int:
    """Convert what `spec.source` names: a folder, or the raw data of tokens."""
    source: Any = Documents(spec.source) if spec.workload == "tokens" else spec.source
    report = convert(source, spec.url, overwrite=True, storage_options=spec.s3fs_options, source_options={})
    # the largest of its worker processes (one that is being started counts as this one, which must not be large), and
    # what one shard of the dataset takes in memory
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    (manifest,) = report.manifests.values()
    shard = sum(layout.nbytes for layout in manifest.fields.values()) / max(1, manifest.num_samples)
    emit({"peak_bytes": peak, "shard_bytes": round(shard * min(manifest.samples_per_shard, manifest.num_samples))})
    return report.num_samples


if __name__ == "__main__":
    main(write=write, read=lambda _: None)
