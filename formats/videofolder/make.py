"""Make `input/` and `expected.json` beside this file: python formats/videofolder/make.py (needs av)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import av
import numpy as np

HERE = Path(__file__).parent
VIDEOS = {  # path: (frames, codec, format); in the order of the dataset
    "Jump/a.MP4": (12, "libx264", "mp4"),
    "run/b.webm": (7, "libvpx-vp9", "webm"),
    "run/d.mov": (5, "mpeg4", "mov"),
    "run/deep/er/c.mkv": (9, "libx264", "matroska"),
}
OTHERS = {".hidden/x.mp4": b"hidden", "run/.x.mp4": b"hidden", "readme.md": b"text"}


def main() -> None:
    """Write every file, and read the videos back."""
    samples = []
    classes = sorted({path.split("/")[0] for path in VIDEOS})
    for path, (count, codec, container) in VIDEOS.items():
        file = HERE / "input" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        with av.open(str(file), "w", format=container, options={"fflags": "+bitexact"}) as out:
            stream = out.add_stream(codec, rate=25)
            stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
            stream.codec_context.thread_count = 1
            for number in range(count):
                pixels = np.full((24, 32, 3), 10 * number, np.uint8)
                for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                    out.mux(packet)
            for packet in stream.encode(None):
                out.mux(packet)
        with av.open(str(file)) as back:
            assert sum(1 for _ in back.decode(video=0)) == count
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        samples.append({"video": {"sha256": digest}, "label": classes.index(path.split("/")[0])})
    for path, data in OTHERS.items():
        file = HERE / "input" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    expected = {
        "fields": {"video": "bytes:video", "label": "int64"},
        "beside": {"video_index": "bytes", "video_frames": "int64", "video_seconds": "float64"},
        "classes": classes,
        "passed_over": len(OTHERS),
        "samples": samples,
    }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
