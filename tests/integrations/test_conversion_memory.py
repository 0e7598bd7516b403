"""The memory of a process that converts: below four shards, whatever they hold and however large the source is."""

import io
import json
import shutil
import tarfile
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from amounts import longer
from PIL import Image
from torchrun import run_python

from streamloader.format.geometry import EXPANSION

SHARD = 64 << 20
SOURCE = 5 * SHARD
# the largest resident memory of all workers, and of the process that leads them
PROGRAM = """
import json, os, resource, sys
from pathlib import Path
import streamloader as sl
from streamloader.options import Layout
source, shard, workers = sys.argv[1], int(sys.argv[3]), int(sys.argv[4])
if source == "iterable":
    source = ({"data": os.urandom(65536)} for _ in range(5 * shard // 65536))
report = sl.convert(source, sys.argv[2], layout=Layout(shard_size=shard), workers=workers)
(manifest,) = report.manifests.values()
sample = sum(one.nbytes for one in manifest.fields.values()) / manifest.num_samples
own = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])  # getrusage has our parent's too
peaks = [one * 1024 for one in (resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, own)]
print(json.dumps([sample * manifest.samples_per_shard, *peaks]))
"""


def make_array(root):
    np.save(root / "x.npy", np.random.default_rng(0).integers(0, 256, (SOURCE // 8192, 8192), np.uint8))


def make_small_numbers(root):
    np.save(root / "x.npy", np.random.default_rng(0).integers(0, 9, (SOURCE // 4096, 1024), np.int32))


def make_tar(root):
    rng = np.random.default_rng(0)
    with tarfile.open(root / "0.tar", "w") as tar:
        for number in range(SOURCE // 65536):
            member = tarfile.TarInfo(f"{number:06}.bin")
            member.size = 65536
            tar.addfile(member, io.BytesIO(rng.bytes(65536)))


def make_images(root):
    (root / "a").mkdir()
    first = root / "a" / "0.png"
    pixels = np.random.default_rng(0).integers(0, 256, (500, 700, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(first, compress_level=0)
    for number in range(1, -(-SOURCE // first.stat().st_size)):
        shutil.copy(first, root / "a" / f"{number}.png")


def make_parquet(root, rows=1024):
    rng = np.random.default_rng(0)
    with pq.ParquetWriter(root / "x.parquet", pa.schema({"data": pa.binary()})) as writer:
        for _ in range(SOURCE // (4096 * rows)):
            writer.write_table(pa.table({"data": [rng.bytes(4096) for _ in range(rows)]}), row_group_size=rows)


def make_parquet_of_repeated_values(root):
    rng = np.random.default_rng(0)
    values = [rng.bytes(4096) for _ in range(100)]
    count = SOURCE // 8192
    runs = pa.FixedSizeListArray.from_arrays(np.repeat(np.arange(count, dtype=np.int64), 512), 512)
    table = pa.table({"data": [values[i % 100] for i in range(count)], "runs": runs})  # a dictionary, and run lengths
    pq.write_table(table, root / "x.parquet", row_group_size=count)
    assert (root / "x.parquet").stat().st_size < SOURCE // 100


SOURCES = {
    "array": (make_array, SHARD),
    "small numbers": (make_small_numbers, SHARD),
    "tar": (make_tar, SHARD),
    "images": (make_images, SHARD),
    "parquet": (make_parquet, SHARD),
    "parquet of large groups": (partial(make_parquet, rows=15_000), SHARD),
    "parquet, 100 times smaller on disk": (make_parquet_of_repeated_values, SHARD // EXPANSION),
    "iterable": (None, SHARD),
}


LONGER = ("small numbers", "images", "parquet of large groups")


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [longer(kind) if kind in LONGER else kind for kind in SOURCES])
def test_a_process_holds_less_than_four_shards(kind, tmp_path):
    make, stored = SOURCES[kind]
    source, workers = kind, "1"
    if make is not None:
        source, workers = str(tmp_path / "source"), "2"
        (tmp_path / "source").mkdir()
        make(tmp_path / "source")
    shard, *peaks = json.loads(run_python("-c", PROGRAM, source, tmp_path / "out", stored, workers).stdout)
    print(f"{kind}: shards of {shard / 1e6:.0f} MB, peaks of {[round(peak / 1e6) for peak in peaks]} MB")
    assert shard > SHARD / 2, "the shards are too small to tell"
    assert max(peaks) < 4 * shard


READ = """
import sys
import numpy as np, pyarrow as pa
from streamloader.conversion.sources.base import raise_bad
from streamloader.conversion.sources.formats import open_source
from streamloader.conversion.sources.fields import FieldSelection
_, source = open_source(sys.argv[1], None, {}, FieldSelection())
columns = source.fragment(np.arange(0, source.num_samples, 20))(raise_bad)
assert (columns["y"] == np.arange(0, source.num_samples, 20)).all()
assert all(item == b"%02d" % (20 * i % 7) * (5000 if i % 1000 < 500 else 5) for i, item in enumerate(columns["s"]))
print(pa.default_memory_pool().max_memory())
"""


def test_batches_of_parquet_are_bounded_by_what_they_decode_to(tmp_path):
    for part in range(2):  # small files, which are read side by side
        count, first = 20_000, part * 20_000
        texts = [f"{i % 7:02}" * (5000 if i // 20 % 1000 < 500 else 5) for i in range(first, first + count)]
        table = pa.table({"s": texts, "y": np.arange(first, first + count)})
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=count)
        assert (tmp_path / f"{part}.parquet").stat().st_size < 1 << 20, "each text is stored once"
    assert int(run_python("-c", READ, tmp_path).stdout) < 40e6
