"""Make `input/` and `expected.json` beside this file: python formats/audiofolder/make.py (needs soundfile and av)."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import av
import numpy as np
import soundfile

HERE = Path(__file__).parent
RATE = 8000
CLIPS = {  # path: (samples, format, what it is encoded as); in the order of the dataset
    "Owl/a.WAV": (400, "WAV", "PCM_16"),
    "bird/b.flac": (9000, "FLAC", "PCM_16"),
    "bird/deep/er/c.ogg": (900, "OGG", "VORBIS"),
    "bird/e.opus": (900, "OGG", "OPUS"),
    "cat/d.mp3": (4000, "MP3", "MPEG_LAYER_III"),
    "cat/f.aiff": (300, "AIFF", "PCM_24"),
    "cat/g.m4a": (4000, "", ""),  # soundfile does not write it
}
OTHERS = {".hidden/x.wav": b"hidden", "cat/.x.wav": b"hidden", "readme.md": b"text", "cat/LICENSE.txt": b"anybody"}


def main() -> None:
    """Write every file, and read the clips back."""
    samples = []
    classes = sorted({path.split("/")[0] for path in CLIPS})
    for number, (path, (count, kind, subtype)) in enumerate(CLIPS.items()):
        file = HERE / "input" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        wave = np.sin(np.arange(count) * 0.05 * (number + 1)).astype("float32") / 2
        if kind:
            soundfile.write(file, wave, RATE, format=kind, subtype=subtype)
            if kind == "OGG":
                file.write_bytes(steady(file.read_bytes()))
            assert len(soundfile.read(file)[0]) == count
        else:
            write_m4a(file, wave)
        text = f"clip Nº {number}"
        file.with_suffix(".txt").write_text(text)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        samples.append({"audio": {"sha256": digest}, "label": classes.index(path.split("/")[0]), "text": text})
    for path, data in OTHERS.items():
        file = HERE / "input" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    expected = {
        "fields": {"audio": "bytes:mixed", "label": "int64", "text": "text"},
        "classes": classes,
        "passed_over": len(OTHERS),
        "samples": samples,
    }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


def write_m4a(file: Path, wave: np.ndarray) -> None:
    """Write AAC in MP4 boxes."""
    with av.open(str(file), "w", format="ipod", options={"fflags": "+bitexact"}) as out:
        stream = out.add_stream("aac", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(wave[None], format="fltp", layout="mono")
        frame.sample_rate = RATE
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            out.mux(packet)
    with av.open(str(file)) as back:
        assert sum(frame.samples for frame in back.decode(audio=0)) >= len(wave)


def steady(data: bytes) -> bytes:
    """Return an Ogg with a fixed serial number in place of a random one, and its pages' checksums made anew."""
    at, out = 0, b""
    while at < len(data):
        count = data[at + 26]
        end = at + 27 + count + sum(data[at + 27 : at + 27 + count])
        page = bytearray(data[at:end])
        page[14:18], page[22:26] = struct.pack("<I", 7), bytes(4)
        page[22:26] = struct.pack("<I", checksum(page))
        out, at = out + bytes(page), end
    return out


def checksum(page: bytearray) -> int:
    """Return the CRC-32 of an Ogg page: not reflected, starting from zero."""
    crc = 0
    for byte in page:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1 ^ (0x104C11DB7 if crc & 0x80000000 else 0)) & 0xFFFFFFFFFF
    return crc


if __name__ == "__main__":
    main()
