"""Small videos whose every frame differs, and how all of their frames decode."""

import io
import os
from typing import Any

import av
import numpy as np
from av.video.frame import PictureType

os.environ["SVT_LOG"] = "1"  # the encoder of AV1 prints errors only

# of each kind: codec, container, frames between key frames, and options of the encoder
KINDS: dict[str, tuple[str, str, int, dict[str, str]]] = {
    "h264": ("libx264", "mp4", 12, {"bf": "2", "sc_threshold": "0"}),
    "h264, one key frame": ("libx264", "mp4", 250, {"bf": "3"}),
    "h264, key frames only": ("libx264", "mp4", 1, {}),
    "h264, open groups": ("libx264", "mp4", 12, {"bf": "2", "x264-params": "open-gop=1"}),
    "h264, fragments": ("libx264", "mp4", 12, {"bf": "2", "movflags": "frag_keyframe+empty_moov"}),
    "h264, Matroska": ("libx264", "matroska", 7, {"bf": "2"}),
    "hevc": ("libx265", "mp4", 12, {"x265-params": "keyint=12:log-level=none"}),
    "mpeg4": ("mpeg4", "mov", 10, {"bf": "2"}),
    "vp9": ("libvpx-vp9", "webm", 9, {}),
}
# others, by what begins in them at a picture
MORE_KINDS: dict[str, tuple[str, str, int, dict[str, str]]] = {
    "h264, intra refresh": ("libx264", "mp4", 12, {"bf": "2", "x264-params": "intra-refresh=1"}),
    "h264, open groups, interlaced": ("libx264", "mp4", 12, {"bf": "3", "x264-params": "open-gop=1:tff=1:ref=4"}),
    "h264, open pyramids": ("libx264", "mp4", 12, {"bf": "5", "x264-params": "open-gop=1:ref=5:slices=3"}),
    "hevc, intra refresh": ("libx265", "mp4", 12, {"x265-params": "keyint=12:intra-refresh=1:log-level=none"}),
    "hevc, closed groups": ("libx265", "mp4", 12, {"x265-params": "keyint=12:open-gop=0:log-level=none"}),
    "h264, one key frame, Matroska": ("libx264", "matroska", 250, {"bf": "5", "b_strategy": "0"}),
    "mpeg4, Matroska": ("mpeg4", "matroska", 10, {"bf": "2"}),
    "mpeg2": ("mpeg2video", "mp4", 10, {"bf": "2"}),
    "mpeg1": ("mpeg1video", "matroska", 10, {"bf": "2"}),
    "vp8": ("libvpx", "webm", 9, {}),
    "av1": ("libsvtav1", "mp4", 9, {"preset": "12"}),
    "ffv1": ("ffv1", "matroska", 4, {"level": "3"}),
    "mjpeg": ("mjpeg", "mov", 1, {"strict": "-1"}),
    "an unknown codec": ("msmpeg4v3", "matroska", 10, {}),
}
FAST = {
    "libx264": {"preset": "veryfast"},
    "libvpx": {"deadline": "realtime", "cpu-used": "8"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"},
}


def encode(
    kind: str = "h264",
    frames: int = 60,
    *,
    size: tuple[int, int] = (48, 64),
    seed: int = 0,
    turn: int = 0,
    mirrored: bool = False,
    forward: int = 0,
) -> bytes:
    """A video of 30 frames a second, of (height, width) `size`: a bar that moves over noise.

    `forward`: how many frames it begins with that have no B pictures among them.
    """
    codec, container, group, options = (KINDS | MORE_KINDS)[kind]
    out, rng = io.BytesIO(), np.random.default_rng(seed)
    with av.open(out, "w", format=container, options={k: v for k, v in options.items() if k == "movflags"}) as file:
        stream: Any = file.add_stream(codec, rate=30)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.thread_count = 1
        stream.options = {
            "g": str(group),
            "threads": "1",
            **FAST.get(codec, {}),
            **{k: v for k, v in options.items() if k != "movflags"},
        }
        if turn or mirrored:
            stream.set_display_rotation(turn, hflip=mirrored)
        for number in range(frames):
            pixels = rng.integers(0, 60, (*size, 3), np.uint8)
            begin = 3 * number % size[1]
            pixels[:, begin : begin + 10] = 255, 100, 4 * number % 256
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if number < forward:
                frame.pict_type = PictureType.P
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def decode(video: bytes) -> tuple[np.ndarray, np.ndarray]:
    """All frames, uint8 (frames, height, width, 3), decoded from the whole file, and their times in seconds."""
    with av.open(io.BytesIO(video)) as file:
        frames = [(frame.time, frame.to_ndarray(format="rgb24")) for frame in file.decode(video=0)]
    times = np.array([time for time, _ in frames])
    return np.stack([pixels for _, pixels in frames]), times - times[0]
