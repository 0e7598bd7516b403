"""Videos: their index, what is written and converted, and frames that are decoded without their file."""

import ctypes
import io
import json
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import crc32c
import numpy as np
import pytest
import videos
from amounts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import streamloader as sl
from streamloader.conversion.sources.media import video_problem
from streamloader.errors import FieldError, FormatError, SourceError, UsageError
from streamloader.format import video as video_module
from streamloader.format.keyframes import find_entries
from streamloader.format.video import VideoIndex, count_frames, decode_frames, frame_size, index_video

INPUT_PADDING = 64  # AV_INPUT_BUFFER_PADDING_SIZE: zeros that FFmpeg's decoders may read after a packet
BESIDE = {"video_index": "bytes", "video_frames": "int64", "video_seconds": "float64"}


def indexed(video: bytes) -> VideoIndex:
    return VideoIndex.parse(index_video("video", video, 0)[0], "the index")


def frames_of(index: VideoIndex, video: bytes, numbers: list[int]) -> np.ndarray:
    """Frames of a video, decoded from their groups of pictures only."""
    out = np.zeros((len(numbers), *frame_size(index.header), 3), np.uint8)
    by_frame = dict(zip(numbers, out, strict=True))
    for first, (stop, frames) in index.groups(np.array(numbers)).items():
        packets = [
            (int(index.pts[i]), memoryview(video)[index.starts[i] : index.starts[i] + index.sizes[i]])
            for i in range(first, stop)
        ]
        decode_frames(index.header, iter(packets), {int(index.pts[index.shown[f]]): by_frame[f] for f in frames})
    return out


@pytest.mark.quick(10)
@pytest.mark.parametrize("kind", [*videos.KINDS, *videos.MORE_KINDS])
def test_frames_of_some_groups_are_those_of_the_whole_file(kind):
    video = videos.encode(kind)
    every, times = videos.decode(video)
    index = indexed(video)
    assert len(index.shown) == len(every) == 60
    np.testing.assert_allclose(index.times, times, atol=2e-3)
    for numbers in ([0, 2, 4, 6], [11], [12], [10, 11, 12, 13], [5, 40], [59], list(range(60))):
        assert np.array_equal(frames_of(index, video, numbers), every[numbers]), numbers


def keys_of(video: bytes) -> list[int]:
    return np.flatnonzero(indexed(video).flags & 1).tolist()


def keys_of_container(video: bytes) -> list[int]:
    with av.open(io.BytesIO(video)) as file:
        return [at for at, packet in enumerate(file.demux(video=0)) if packet.is_keyframe]


def assert_frames_after_each_key_are_those_of_the_whole_file(video: bytes) -> None:
    """All that are shown after it: so the frames before it do not count, however many are decoded after it."""
    (every, _), index, keys = videos.decode(video), indexed(video), keys_of(video)
    for key in keys[:: 1 + len(keys) // 8]:
        stored, later = index.shown, index.pts[key]
        frames = [frame for frame, at in enumerate(stored) if at >= key and index.pts[at] >= later]
        out = np.zeros((len(frames), *every.shape[1:]), np.uint8)
        packets = [
            (pts, memoryview(video)[start : start + size])
            for pts, start, size in zip(index.pts.tolist(), index.starts.tolist(), index.sizes.tolist(), strict=True)
        ]
        wanted = dict(zip(index.pts[stored[frames]].tolist(), out, strict=True))
        decode_frames(index.header, iter(packets[key:]), wanted)
        assert np.array_equal(out, every[frames]), key


@pytest.mark.quick(7)
@pytest.mark.parametrize("kind", [*videos.KINDS, *videos.MORE_KINDS])
def test_frames_after_each_key_frame_of_the_index_need_none_before_it(kind):
    video = videos.encode(kind)
    assert_frames_after_each_key_are_those_of_the_whole_file(video)
    restarts = kind not in ("h264, intra refresh", "an unknown codec")
    assert keys_of(video) == (keys_of_container(video) if restarts else [0])
    assert len(keys_of_container(video)) > 1 or "one key frame" in kind


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["hevc", "mpeg4", "mpeg2", "h264, intra refresh"])
def test_the_key_frames_of_a_file_without_a_table_of_them_are_those_of_its_bytes(kind):
    video = videos.encode(kind)
    without = video.replace(b"stss", b"free")
    assert keys_of_container(without) == [*range(60)] or kind.startswith("h264")  # which FFmpeg's parser reads
    assert keys_of(without) == keys_of(video)
    assert_frames_after_each_key_are_those_of_the_whole_file(without)


@pytest.mark.parametrize(("kind", "codec"), [("h264, open groups", "h264"), ("hevc", "hevc")])
def test_units_of_packets_have_lengths_or_start_codes(kind, codec):
    video = videos.encode(kind)
    with av.open(io.BytesIO(video)) as file:
        stream = file.streams.video[0]
        converter = av.bitstream.BitStreamFilterContext(f"{codec}_mp4toannexb", stream)
        packets = [out for packet in file.demux(stream) if packet.size for out in converter.filter(packet)]
    assert all(bytes(packet).startswith((b"\0\0\0\1", b"\0\0\1")) for packet in packets)
    parameters = bytes(packets[0])  # among others
    found = find_entries(codec, parameters, [(bytes(packet), packet.is_keyframe) for packet in packets])
    assert np.flatnonzero([*found]).tolist() == keys_of(video)


def test_a_packet_is_no_key_frame_if_it_lacks_parameters_of_those_before_it():
    idr, parameters, other = b"\0\0\1\x65\x88\x80", b"\0\0\1\x67\x42", b"\0\0\1\x68\xce"
    packets = [parameters + other + idr, idr, parameters + idr, other + parameters + idr, b"\0\0\1\x41\x9a"]
    assert [*find_entries("h264", b"", [(data, True) for data in packets])] == [True, False, False, True, False]
    assert [*find_entries("h264", parameters + other, [(data, True) for data in packets])] == [True] * 4 + [False]


def test_user_data_of_mpeg4_is_a_parameter_only_where_it_names_an_encoder():
    layer, group, picture = b"\0\0\1\x20\xc4\x8d", b"\0\0\1\xb3\x01", b"\0\0\1\xb6\x10\x60"
    for name, expected in ((b"12:00:0%d", [True] * 3), (b"XviD006%d", [True, False, False])):
        packets = [group + b"\0\0\1\xb2" + name % number + picture for number in range(3)]
        assert [*find_entries("mpeg4", layer, [(data, True) for data in packets])] == expected


@settings(max_examples=examples(100))
@pytest.mark.parametrize("codec", ["h264", "hevc", "mpeg4", "mpeg2video", "vp8", "vp9", "av1", "ffv1"])
@given(data=st.binary(max_size=60), extradata=st.sampled_from([b"", b"\1" * 30]))
def test_packets_of_any_bytes_are_key_frames_or_not(codec, data, extradata):
    first, second = find_entries(codec, extradata, [(data, False), (data[::-1], True)])
    assert (first, type(second)) == (False, bool)


def test_a_packet_of_av1_whose_length_does_not_end_is_decided_at_once():
    begin = time.process_time()
    assert [*find_entries("av1", b"", [(b"\xff" * 2**20, False)] * 2)] == [False, False]
    assert time.process_time() - begin < 0.5


def golomb(bits: str, at: int) -> tuple[int, int]:
    """The number that begins at a bit, and where it ends."""
    zeros = bits.index("1", at) - at
    return int(bits[at + zeros : at + 2 * zeros + 1], 2) - 1, at + 2 * zeros + 1


def without_reordering(sequence: bytes) -> bytes:
    """The sequence parameters of x264 without their last part, the limits of motion and of reordering."""
    bits = "".join(f"{byte:08b}" for byte in sequence)
    stop = bits.rindex("1")
    for at in range(stop - 30, stop):
        numbers, end = [], at + 4  # the flag of the part, another one, and two zeros
        while end < stop and len(numbers) < 4:
            number, end = golomb(bits, end)
            numbers.append(number)
        if bits[at : at + 4] == "1111" and end == stop and numbers[:2] == [8, 8]:
            return int((bits[:at] + "01").ljust(len(bits), "0"), 2).to_bytes(len(sequence), "big")
    raise AssertionError(bits)


def without_limits(video: bytes) -> bytes:
    with av.open(io.BytesIO(video)) as file:
        parameters = file.streams.video[0].codec_context.extradata
    sequence = parameters[8 : 8 + int.from_bytes(parameters[6:8], "big")]
    changed = video.replace(sequence, without_reordering(sequence))
    assert changed != video
    return changed


def test_all_frames_are_counted_if_more_are_reordered_later_in_a_stream():
    video = videos.encode("h264, one key frame, Matroska", 120, forward=60)
    for each in (video, without_limits(video)):
        assert count_frames(each) == len(indexed(each).shown) == 120


def test_no_frame_is_lost_if_a_stream_does_not_state_how_many_are_reordered():
    video = videos.encode("h264, one key frame")
    changed = without_limits(video)
    assert np.array_equal(videos.decode(changed)[0], videos.decode(video)[0])
    assert_frames_after_each_key_are_those_of_the_whole_file(changed)


def test_only_the_frames_from_the_last_key_frame_on_are_needed():
    index = indexed(videos.encode("h264"))
    assert [*index.groups(np.arange(24, 30))] == [24]
    assert [*index.groups(np.array([3, 50]))] == [0, 48]
    assert index.groups(np.array([28]))[24][0] <= 32  # frames after it that it does not need are left out


def test_the_index_has_the_bytes_of_each_frame_with_their_checksum():
    video = videos.encode("vp9")
    blob, frames, seconds = index_video("video", video, 0)
    index = VideoIndex.parse(blob, "the index")
    assert (frames, index.header["codec"], index.header["size"]) == (60, "vp9", len(video))
    assert seconds == pytest.approx(2, abs=0.01)
    for start, size, crc in zip(index.starts.tolist(), index.sizes.tolist(), index.crcs.tolist(), strict=True):
        assert crc32c.crc32c(video[start : start + size]) == crc
    assert index_video("video", video, 0)[0] == blob


def with_edit(video: bytes, frames: int) -> bytes:
    """A video whose edit list begins some frames later."""
    changed = bytearray(video)
    at = changed.index(b"elst") + 16
    changed[at : at + 4] = (int.from_bytes(changed[at : at + 4], "big") + frames * 512).to_bytes(4, "big")
    return bytes(changed)


def test_frames_outside_of_the_edit_list_are_not_shown():
    video = with_edit(videos.encode("h264", 40), 5)
    every, _ = videos.decode(video)
    index = indexed(video)
    assert (len(index.pts), len(index.shown), len(every)) == (40, 35, 35)
    assert np.array_equal(frames_of(index, video, [0, 1, 2, 30]), every[[0, 1, 2, 30]])


def cut(video: bytes, first: int) -> bytes:
    """A video in Matroska, without the stored frames before one."""
    out = io.BytesIO()
    with av.open(io.BytesIO(video)) as source, av.open(out, "w", format="matroska") as file:
        stream = file.add_stream_from_template(source.streams.video[0])
        for packet in [packet for packet in source.demux(video=0) if packet.size][first:]:
            packet.stream = stream
            file.mux(packet)
    return out.getvalue()


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["hevc", "mpeg2", "mpeg4", "h264, open pyramids", "h264, intra refresh"])
def test_frames_that_a_decoder_skips_at_the_beginning_of_a_file_are_not_shown(kind):
    whole, skipped = videos.encode(kind), 0
    for first in keys_of_container(whole)[1:]:
        video = cut(whole, first)
        (every, times), index = videos.decode(video), indexed(video)
        assert np.array_equal(frames_of(index, video, [*range(len(every))]), every)
        np.testing.assert_allclose(index.times, times, atol=2e-3)
        skipped += len(index.pts) - len(every)
    assert skipped or kind == "h264, open pyramids"  # whose leading frames are shown, damaged


def test_a_reader_of_the_specification_alone_decodes_a_frame():
    video = videos.encode("hevc")
    blob = index_video("video", video, 0)[0]
    line, columns = blob.split(b"\n", 1)
    head, found, at = json.loads(line), [], 0
    for kind in "qqIIB":
        size = struct.calcsize(f"<{head['frames']}{kind}")
        found.append(struct.unpack_from(f"<{head['frames']}{kind}", columns, at))
        at += size
    assert at == len(columns)
    times, starts, sizes, crcs, flags = found
    order = sorted((i for i in range(head["frames"]) if not flags[i] & 2), key=lambda i: times[i])
    stored = order[29]
    first = max(i for i in range(stored + 1) if flags[i] & 1 and times[i] <= times[stored])
    context = av.CodecContext.create(head["codec"], "r")
    context.extradata = bytes.fromhex(head["extradata"])
    frames = []
    for i in [*range(first, stored + 1), None]:
        packet = None
        if i is not None:
            data = video[starts[i] : starts[i] + sizes[i]]
            assert crc32c.crc32c(data) == crcs[i]
            packet = av.Packet(data)
            packet.pts = times[i]
        frames += context.decode(packet)
    (frame,) = (frame for frame in frames if frame.pts == times[stored])
    assert np.array_equal(frame.to_ndarray(format="rgb24"), videos.decode(video)[0][29])


@pytest.mark.parametrize("turn", [90, 180, 270])
def test_a_video_that_is_stored_turned_is_decoded_upright(turn):
    video = videos.encode("h264", 5, turn=turn)
    index = indexed(video)
    upright = [np.rot90(frame, index.header["rotation"] // 90) for frame in videos.decode(video)[0]]
    assert index.header["rotation"] % 360 in (turn, 360 - turn)
    assert frame_size(index.header) == upright[0].shape[:2]
    assert np.array_equal(frames_of(index, video, [1, 4]), [upright[1], upright[4]])


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_a_video_that_is_shown_mirrored_is_an_error(turn):
    with pytest.raises(FieldError, match=r"'film' of sample 7 is shown mirrored; encode it again: ffmpeg -i IN OUT"):
        index_video("film", videos.encode(frames=2, turn=turn, mirrored=True), 7)


@pytest.mark.parametrize(
    ("video", "problem"),
    [
        (videos.encode(frames=5, turn=45), "it is turned by 45 degrees"),
        (with_edit(videos.encode(frames=5), 5), "no frame is shown"),
    ],
)
def test_videos_that_cannot_be_shown_upright_or_at_all_are_errors(video, problem):
    with pytest.raises(FieldError, match=rf"'film' of sample 7 is no video that can be read: {problem}"):
        index_video("film", video, 7)


def box(video: bytes, name: bytes) -> slice:
    begin = video.index(name) - 4
    return slice(begin, begin + int.from_bytes(video[begin : begin + 4], "big"))


def with_second_entry(video: bytes, other: bytes) -> bytes:
    """An MP4 video whose frames from 24 on have the sample entry of another one."""
    entry, second = (each[box(each, b"stsd")][16:] for each in (video, other))
    first, *sizes = struct.unpack(">61I", video[box(video, b"stco")][16:] + video[box(video, b"stsz")][20:])
    tables = {
        b"stsd": struct.pack(">2I", 0, 2) + entry + second,
        b"stsc": struct.pack(">8I", 0, 2, 1, 24, 1, 2, 36, 2),
        b"stco": struct.pack(">4I", 0, 2, first, first + sum(sizes[:24])),
    }
    changed = video
    for name, table in tables.items():
        at = box(changed, name)
        changed = changed[: at.start] + struct.pack(">I4s", len(table) + 8, name) + table + changed[at.stop :]
    for name in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
        at = box(changed, name)
        size = at.stop - at.start + len(changed) - len(video)
        changed = changed[: at.start] + size.to_bytes(4, "big") + changed[at.start + 4 :]
    return changed


def test_a_video_whose_parameters_change_is_an_error_unless_they_are_the_same():
    video = videos.encode("h264")
    alike = with_second_entry(video, video)
    assert np.array_equal(frames_of(indexed(alike), alike, [*range(60)]), videos.decode(video)[0])
    changed = with_second_entry(video, videos.encode("h264", size=(96, 128)))
    with pytest.raises(FieldError, match="'film' of sample 7 has other parameters from frame 24 on"):
        index_video("film", changed, 7)


@pytest.mark.parametrize("kind", ["h264", "hevc", "vp9"])
def test_decoders_find_zeros_after_each_packet(kind, monkeypatch):
    video, packets = videos.encode(kind, 30), list[Any]()
    index = indexed(video)

    def recorded(size: int) -> Any:
        packets.append(av.Packet(size))
        return packets[-1]

    recording = SimpleNamespace(CodecContext=av.CodecContext, Packet=recorded)
    monkeypatch.setattr(video_module, "need", lambda _: recording)
    frames_of(index, video, [20])
    for packet in packets:
        assert ctypes.string_at(packet.buffer_ptr + packet.buffer_size, INPUT_PADDING) == bytes(INPUT_PADDING)
    assert packets


@pytest.mark.parametrize("cut", [0, 10, 350, -1])
def test_a_damaged_index_is_an_error(cut):
    blob = index_video("video", videos.encode(frames=5), 0)[0]
    with pytest.raises(FormatError, match="the index of sample 3 is not an index"):
        VideoIndex.parse(blob[:cut] if cut else b"", "the index of sample 3")


def with_header(blob: bytes, **changes: Any) -> bytes:
    line, columns = blob.split(b"\n", 1)
    header = {**json.loads(line), **changes}
    return json.dumps({key: value for key, value in header.items() if value is not None}).encode() + b"\n" + columns


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name in ("frames", "size") for value in (1e400, 10**30, -1, "5", 5.0)),
        {"frames": 0},
        *({name: None} for name in ("time_base", "width", "color_trc", "codec", "extradata", "rotation")),
        *({"time_base": value} for value in (5, [1], [1, 0], [1, 10**30], [1, "2"], [1, [2]])),
        {"rotation": "90"},
        {"width": 0},
        {"codec": ["h264"]},
        {"extradata": "x"},
        {"extradata": 5},
    ],
    ids=str,
)
def test_an_index_with_an_invalid_header_is_an_error(changes):
    blob = with_header(index_video("video", videos.encode(frames=5), 0)[0], **changes)
    with pytest.raises(FormatError, match="the index of sample 3 is not an index"):
        VideoIndex.parse(blob, "the index of sample 3")


def test_an_index_of_no_frames_or_of_bytes_outside_of_the_file_is_an_error():
    blob = index_video("video", videos.encode(frames=5), 0)[0]
    line = blob[: blob.index(b"\n") + 1]
    starts = slice(len(line) + 5 * 8, len(line) + 6 * 8)
    cases = [
        b"[" * 100_000 + b"\n",
        b"[]\n",
        with_header(line, frames=0),
        blob[:-5] + b"\3" * 5,  # all frames are hidden
        *(blob[: starts.start] + struct.pack("<q", start) + blob[starts.stop :] for start in (-1, 2**63 - 1)),
    ]
    for case in cases:
        with pytest.raises(FormatError, match="the index of sample 3 is not an index"):
            VideoIndex.parse(case, "the index of sample 3")


def test_values_that_are_no_video_are_errors_that_name_the_sample(tmp_path):
    sound = io.BytesIO()
    with av.open(sound, "w", format="mp4") as file:
        stream: Any = file.add_stream("aac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        file.mux([*stream.encode(frame), *stream.encode(None)])
    transport = io.BytesIO()
    with av.open(transport, "w", format="mpegts") as file, av.open(io.BytesIO(videos.encode(frames=3))) as source:
        copied = file.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = copied
                file.mux(packet)
    cases = {b"no video": "cannot|can be read", sound.getvalue(): "no video stream", transport.getvalue(): "mpegts"}
    cases[videos.encode()[:2000]] = "can be read"
    with sl.Writer(tmp_path / "d", {"video": "video"}) as out:
        for data, message in cases.items():
            with pytest.raises(FieldError, match=f"'video' of sample 0 .*({message})"):
                out.write({"video": data})
        assert len(out) == 0


def test_a_written_video_is_kept_as_it_is_with_its_index_beside_it(tmp_path):
    made = [videos.encode(frames=frames, seed=frames) for frames in (5, 12, 30)]
    with sl.Writer(tmp_path / "d", {"video": "video", "label": "int64"}, layout=sl.Layout(codec="zstd")) as out:
        out.write({"video": made[0], "label": 0})
        out.write_batch({"video": made[1:], "label": [1, 2]})
    dataset = sl.open(tmp_path / "d")
    assert {name: str(field) for name, field in dataset.fields.items()} == {
        **BESIDE,
        "label": "int64",
        "video": "bytes:video",
    }
    layout = dataset.manifest.fields["video"]
    assert (layout.chunk, layout.codec) == (1, "none")
    for number, video in enumerate(made):
        sample = dataset[number]
        assert sample["video"] == video
        assert (sample["video_index"], sample["video_frames"], sample["video_seconds"]) == index_video("v", video, 0)
    assert next(iter(sl.NumpyDataset(tmp_path / "d", batch_size=3, shuffle=False)))["video"] == made


def test_another_field_with_the_name_of_an_index_is_an_error(tmp_path):
    with pytest.raises(FieldError, match="video_frames is text"):
        sl.Writer(tmp_path / "d", {"video": "video", "video_frames": "text"})


def write_folder(folder: Path, frames: dict[str, int]) -> None:
    for name, count in frames.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(videos.encode(frames=count, seed=count))


def test_a_folder_of_videos_is_converted_and_appended_to(tmp_path):
    write_folder(tmp_path / "a", {"left/x.mp4": 4, "right/y.MP4": 5})
    write_folder(tmp_path / "b", {"right/z.mp4": 6, "up/w.mp4": 7})
    report = sl.convert(tmp_path / "a", tmp_path / "d", workers=0)
    assert report.format == "videofolder"
    sl.append(tmp_path / "d", tmp_path / "b", workers=0)
    dataset = sl.open(tmp_path / "d")
    assert [dataset[i]["video_frames"] for i in range(4)] == [4, 5, 6, 7]
    assert [dataset[i]["label"] for i in range(4)] == [0, 1, 1, 2]
    assert dataset[3]["video"] == (tmp_path / "b/up/w.mp4").read_bytes()
    assert sl.verify(tmp_path / "d").ok


def test_videos_in_one_folder_have_their_paths(tmp_path):
    write_folder(tmp_path / "a", {"x.mp4": 4, "y.mp4": 5})
    sl.convert(tmp_path / "a", tmp_path / "d", workers=0)
    assert [sl.open(tmp_path / "d")[i]["path"] for i in range(2)] == ["x.mp4", "y.mp4"]


def test_a_video_that_cannot_be_read_is_a_bad_sample(tmp_path):
    write_folder(tmp_path / "a", {"x.mp4": 4, "y.mp4": 5, "z.mp4": 6})
    (tmp_path / "a/y.mp4").write_bytes((tmp_path / "a/y.mp4").read_bytes()[:300])
    with pytest.raises(SourceError, match=r"'video' of sample \d is no video that can be read"):
        sl.convert(tmp_path / "a", tmp_path / "d", workers=0)
    report = sl.convert(tmp_path / "a", tmp_path / "d", workers=0, on_error="skip")
    assert (report.manifests[""].num_samples, report.num_left_out) == (2, 1)


def test_videos_are_added_to_a_dataset_as_a_field(tmp_path):
    made = [videos.encode(frames=5 + number) for number in range(3)]
    with sl.Writer(tmp_path / "d", {"label": "int64"}) as out:
        out.write_batch({"label": np.arange(3)})
    sl.add_columns(tmp_path / "d", {"film=video": made}, workers=0)
    assert [sl.open(tmp_path / "d")[i]["film_frames"] for i in range(3)] == [5, 6, 7]
    (batch,) = sl.NumpyDataset(tmp_path / "d", batch_size=3, clips={"film": sl.Clips(5)}, shuffle=False)
    assert np.array_equal(batch["film"], [videos.decode(video)[0][:5] for video in made])


def test_without_pyav_the_error_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with sl.Writer(tmp_path / "d", {"video": "video"}) as out, pytest.raises(UsageError, match="pip install av"):
        out.write({"video": b"x"})


def test_a_video_of_an_unknown_codec_is_an_error_that_names_its_sample():
    data = videos.encode(frames=5)
    assert data.count(b"avc1") >= 1
    with pytest.raises(FieldError, match="'film' of sample 7 "):
        index_video("film", data.replace(b"avc1", b"zzzz"), 7)


def test_early_quicktime_files_are_videos():
    data = videos.encode(frames=5)
    assert not video_problem(data)
    assert not video_problem((8).to_bytes(4, "big") + b"wide" + data)
    assert video_problem(b"RIFF" + data)
