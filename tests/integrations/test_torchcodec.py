"""Clips equal the frames that TorchCodec decodes of the whole file; it decodes the JPEGs of a batch as the CPU does.

For videos TorchCodec needs the libraries of FFmpeg by their plain names. It gets those in PyAV's wheel, in a process of
its own.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import videos
from torchrun import TESTS, environment

import streamloader as sl

WHOLE = """
import sys
import numpy as np
import torchcodec_of_any_build
from torchcodec.decoders import VideoDecoder
for path in sys.argv[1:]:
    decoder = VideoDecoder(path, dimension_order="NHWC", seek_mode="exact")
    np.savez(path + ".npz", frames=decoder[:].numpy(), times=decoder.get_frames_in_range(0, len(decoder)).pts_seconds)
"""


def beside_this() -> dict[str, str]:
    """The environment of a process that imports what is beside this file."""
    given = environment()
    return given | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), given["PYTHONPATH"]])}


def ffmpeg_libraries(folder: Path) -> str:
    """Link the libraries of PyAV's wheel by their plain names; return the search path of libraries."""
    spec = find_spec("av")
    assert spec is not None
    assert spec.origin is not None
    libraries = Path(spec.origin).parent.parent / "av.libs"
    folder.mkdir()
    for path in libraries.glob("lib[as][vw]*.so.*"):
        plain = re.sub(r"-[0-9a-f]+(\.so\.\d+).*", r"\1", path.name)
        (folder / plain).symlink_to(path)
    return f"{folder}:{libraries}"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="PyAV's libraries have other names elsewhere")
def test_clips_equal_what_torchcodec_decodes_of_the_whole_file(tmp_path):
    made = [videos.encode(kind, 50, seed=seed, turn=90 * (seed == 0)) for seed, kind in enumerate(videos.KINDS)]
    paths = [tmp_path / f"{number}.video" for number in range(len(made))]
    with sl.Writer(tmp_path / "d", {"video": "video"}) as out:
        for path, video in zip(paths, made, strict=True):
            path.write_bytes(video)
            out.write({"video": video})
    libraries = {"LD_LIBRARY_PATH": ffmpeg_libraries(tmp_path / "libraries")}
    subprocess.run([sys.executable, "-c", WHOLE, *paths], env=beside_this() | libraries, check=True, timeout=300)
    whole = [np.load(f"{path}.npz") for path in paths]
    for clips in (sl.Clips(5, stride=4, step=3), sl.Clips(4, stride=0.1, step=0.2, unit="seconds")):
        ds = sl.NumpyDataset(
            tmp_path / "d", batch_size=1, clips={"video": clips}, with_index=True, num_workers=0, shuffle=False
        )
        for batch in ds:
            frames, times = (whole[batch["index"][0]][name] for name in ("frames", "times"))
            numbers = np.searchsorted(times - times[0], batch["video_times"][0] + 1e-3, side="right") - 1
            assert numbers[0] == batch["video_start"][0]
            assert np.array_equal(batch["video"][0], frames[numbers])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="libraries have other names elsewhere")
def test_torchcodec_decodes_batches_of_jpegs_within_the_tolerance(tmp_path):
    chosen = "photographs or turned or turn_pictures or any_size or cannot_decode"
    options = ["-p", "torchcodec_of_any_build", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'pytest'}"]
    command = [sys.executable, "-m", "pytest", *options, "-k", chosen, str(TESTS / "test_device_decode.py")]
    done = subprocess.run(command, env=beside_this(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) >= 40
