"""Clips of videos as samples: which video and frames each one has, and the bytes that decoding it needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from math import prod
from typing import Any, NamedTuple

import crc32c
import numpy as np
from numpy.typing import NDArray

from streamloader.errors import CorruptError, FieldError, FormatError, ModifiedError
from streamloader.format.codecs import CRC_BYTES, Items
from streamloader.format.deleted import Remaining
from streamloader.format.geometry import BLOCKS, nearest_power, next_power
from streamloader.format.manifest import Manifest
from streamloader.format.reader import FieldReader, Run
from streamloader.format.video import BESIDE, VideoIndex, decode_frames, frame_size
from streamloader.options import MIB, Clips, Layout
from streamloader.samples import distinct
from streamloader.storage.buffers import Allocate, LRUCache, empty_buffer
from streamloader.storage.process import run_all
from streamloader.storage.store import RangeReader, Store

Ints = NDArray[np.int64]
Placed = tuple[int, Items]

ITEM_START = 8  # of a chunk of one item: the number of items, and the length of the first one
GAP_BYTES = 64 << 10  # of sound, or of frames that are not needed: reading more costs less than another request
REQUEST_BYTES = 8 * MIB  # of the clips of a video that are read together, unless one has more
SAMPLED_CLIPS = 8  # that are measured
THREADS = 4  # that read indexes
INDEX_BYTES = 64 * MIB  # of the indexes that are kept, of the videos that were read last
FRAME_BYTES = 56  # of an index in memory, for each frame
ROUNDING = 1e-6  # seconds by which a time may be before that of its frame


class ClipRun(NamedTuple):
    """Clips of one video that are read together, from the byte ranges `ranges` of the object `path`.

    `stop - start` is the number of bytes of all ranges. `packets`: where each stored frame begins in the object, its
    size and its checksum, ascending. `clips`: of each clip the header of its item, and its packets. `picks`: the number
    of the video for each clip; `first_row`: the number of the first clip. `first_sample`: the video.
    `rows`, `cached` and `content`: clips are consecutive, and a cache keeps their ranges as they are, for one version
    of the dataset, see `Run`.
    """

    path: str
    start: int
    stop: int
    ranges: Sequence[tuple[int, int]]
    packets: Ints
    clips: Sequence[tuple[bytes, Ints]]
    first_sample: int
    num_samples: int
    picks: Ints
    first_row: int
    rows: None = None
    cached: None = None
    content: str = ""

    @property
    def size(self) -> int:
        """The bytes of the items of all clips."""
        return sum(len(header) + int(self.packets[frames, 1].sum()) for header, frames in self.clips)

    @classmethod
    def of(cls, path: str, packets: Ints, clips: Sequence[tuple[bytes, Ints]], video: int, first_row: int) -> ClipRun:
        """Return the run of clips that have these packets."""
        ends = np.maximum.accumulate(packets[:, 0] + packets[:, 1])
        cuts = [0, *(np.flatnonzero(packets[1:, 0] - ends[:-1] > GAP_BYTES) + 1).tolist(), len(packets)]
        ranges = [(int(packets[low, 0]), int(ends[high - 1])) for low, high in pairwise(cuts)]
        start, picks = ranges[0][0], np.full(len(clips), video, np.int64)
        stop = start + sum(end - begin for begin, end in ranges)
        return cls(path, start, stop, ranges, packets, clips, video, 1, picks, first_row)

    def at(self) -> Ints:
        """Return where each packet begins in the bytes of all ranges."""
        begins, ends = np.array(self.ranges).T
        before = np.cumsum(ends - begins) - (ends - begins)
        number = np.searchsorted(begins, self.packets[:, 0], side="right") - 1
        return np.asarray(self.packets[:, 0] - begins[number] + before[number], np.int64)


class Clipped:
    """The clips of the field `name` of videos, numbered video by video: what an array of samples is to its users.

    It has a length, and returns the number of the video of each clip at a slice, or at an array of indexes. `frames`
    and `seconds`: of each video of a selection, `videos` (None: of all). It takes 8 bytes for each of these.
    """

    def __init__(self, name: str, clips: Clips, frames: Ints, seconds: NDArray[np.float64], videos: Any = None) -> None:
        self.name, self.clips, self.videos = name, clips, videos
        self.num_frames = int(frames.sum())
        self.clip_bytes = 1.0  # the mean of items, once they are measured
        self.frame_size = (0, 0)
        self._ends = np.cumsum(count_clips(clips, frames, seconds))
        options = json.dumps([name, clips.frames, clips.stride, clips.starts_every, clips.unit])
        chosen = b"" if videos is None else np.ascontiguousarray(videos[:], "<i8").tobytes()
        self.sha256 = hashlib.sha256(options.encode() + b"\n" + self._ends.astype("<i8").tobytes() + chosen).hexdigest()

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def __getitem__(self, key: slice | Ints) -> Ints:
        numbers = np.arange(*key.indices(len(self))) if isinstance(key, slice) else key
        videos = np.searchsorted(self._ends, numbers, side="right")
        return np.asarray(videos if self.videos is None else self.videos[videos], np.int64)

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return self._ends.nbytes + (0 if self.videos is None else int(self.videos.nbytes))

    @property
    def block(self) -> int:
        """The number of clips of a block: they have about the bytes of a block of other samples."""
        size = nearest_power(Layout().block_size / self.clip_bytes)
        return max(1, min(size, next_power(len(self)) // BLOCKS))

    def within(self, start: int, stop: int) -> Ints:
        """Return the number, within its video, of each clip [start, stop)."""
        numbers = np.arange(start, stop)
        videos = np.searchsorted(self._ends, numbers, side="right")
        return np.asarray(numbers - np.where(videos, self._ends[videos - 1], 0), np.int64)


def count_clips(clips: Clips, frames: Ints, seconds: NDArray[np.float64]) -> Ints:
    """Return the number of clips of each video."""
    span = (clips.frames - 1) * clips.stride
    if clips.unit == "frames":
        return np.asarray(np.maximum(0, (frames - 1 - span) // clips.starts_every + 1), np.int64)
    return np.maximum(0, np.ceil((seconds - span - ROUNDING) / clips.starts_every)).astype(np.int64)


def clip_frames(clips: Clips, number: int, index: VideoIndex) -> Ints:
    """Return the frames of a clip of a video, by its number within the video.

    Raises `FormatError` for a frame that the index does not have.
    """
    at = number * clips.starts_every + np.arange(clips.frames) * clips.stride
    if clips.unit == "frames":
        if at[-1] >= index.shown.size:
            problem = f"{index.where} has {index.shown.size} frames, and frame {at[-1]} is in a clip"
            raise FormatError(problem, "convert the dataset again")
        return np.asarray(at, np.int64)
    return np.maximum(0, np.searchsorted(index.times, at + ROUNDING, side="right") - 1)


class ClipReader(FieldReader):
    """Reads the clips of a field of videos: of each only the frames that decoding it needs.

    An item has a header, u32 length and JSON, then the bytes of its stored frames; `decode_clip` decodes it.
    """

    def __init__(
        self, store: Store, manifest: Manifest, name: str, remaining: Remaining | None, clips: Clipped | None
    ) -> None:
        super().__init__(store, manifest, name, remaining)
        if self.layout.chunk != 1 or self.layout.codec != "none":
            problem = f"field {name!r} of {store.url} has chunks of {self.layout.chunk}, codec {self.layout.codec!r}"
            raise FormatError(problem, "convert the dataset again: chunks of videos have one, and are not compressed")
        self._index = FieldReader(store, manifest, f"{name}_index", remaining)
        self._indexes = LRUCache[int, VideoIndex](INDEX_BYTES)
        self._clips = clips

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the clips, which only planning needs."""
        return ClipReader, (*self._opened, None)

    @property
    def kept_bytes(self) -> int:
        """The most bytes of the chunk tables and the indexes that are cached."""
        frames = 0 if self._clips is None else self._clips.num_frames
        return super().kept_bytes + self._index.kept_bytes + min(INDEX_BYTES, FRAME_BYTES * frames)

    @property
    def sample_bytes(self) -> float:
        """The mean bytes of an item."""
        return 1.0 if self._clips is None else self._clips.clip_bytes

    def block_bytes(self, start: int, stop: int) -> int:
        """Return the estimated bytes of the items of the clips [start, stop)."""
        return int((stop - start) * self.sample_bytes)

    def runs_of(self, samples: Ints, first_row: int = 0) -> list[Any]:
        """Return the requests for clips: those from number `first_row` on, which are of these videos.

        Reads the index of each video. Raises as `FieldReader.runs`.
        """
        assert self._clips is not None
        numbers, runs = self._clips.within(first_row, first_row + len(samples)), list[ClipRun]()
        videos, firsts = np.unique(samples, return_index=True)
        edges = [*firsts.tolist(), len(samples)]
        for video, index, (low, high) in zip(videos.tolist(), self.read_indexes(videos), pairwise(edges), strict=True):
            frames = [clip_frames(self._clips.clips, number, index) for number in numbers[low:high].tolist()]
            runs += self._runs_of_video(video, index, frames, first_row + low)
        return runs

    def read_indexes(self, videos: Ints, threads: int = 1) -> Iterator[VideoIndex]:
        """Yield the indexes of some videos, ascending. Raises `FormatError` or `StorageError`."""
        found = {video: self._indexes.get(video) for video in videos.tolist()}
        missing = [video for video, index in found.items() if index is None]
        runs = self._index.runs_of(np.array(missing, np.int64))
        for row, items in chain.from_iterable(run_all(self._load_indexes, runs, threads)):
            for number, video in enumerate(missing[row : row + len(items)]):
                where = f"{self._index.name!r} of sample {video} of {self.store.url}"
                index = VideoIndex.parse(bytes(items[number]), where)
                found[video] = self._indexes.add(video, index, FRAME_BYTES * len(index.pts))
        yield from (index for index in found.values() if index is not None)

    def _load_indexes(self, run: Run) -> list[Placed]:
        return self._index.load(run, self._index.request(run), None, 0) or []

    def _runs_of_video(self, video: int, index: VideoIndex, clips: Sequence[Ints], first_row: int) -> list[ClipRun]:
        where = self._locate(video, int(index.header["size"]))
        runs, needed, row = list[ClipRun](), list[tuple[bytes, Ints]](), first_row
        read, size = np.zeros(len(index.pts), np.bool_), 0
        for frames in clips:
            clip = _describe(index, frames)
            stored = clip[1]
            if needed and size + int(index.sizes[stored[~read[stored]]].sum()) > REQUEST_BYTES:
                runs.append(_run(where, index, needed, video, row))
                row, needed, size = row + len(needed), [], 0
                read[:] = False
            size += int(index.sizes[stored[~read[stored]]].sum())
            read[stored] = True
            needed.append(clip)
        return [*runs, _run(where, index, needed, video, row)]

    def _locate(self, video: int, size: int) -> tuple[str, int]:
        """Return the object that has a video of `size` bytes, and where it begins there."""
        stored = video if self._remaining is None else int(self._remaining[np.array([video])][0])
        shard, chunk = divmod(stored, self.layout.shard)
        starts, stops, _ = self.table.shard(shard)
        path, found = self.layout.shard_key(self.name, shard), int(stops[chunk] - starts[chunk])
        if found != ITEM_START + size + CRC_BYTES:
            problem = f"the video of sample {video} in {self.store.url}/{path} has another size than in its index"
            raise ModifiedError(problem, "convert the dataset again")
        return path, int(starts[chunk]) + ITEM_START

    def fetch(self, reader: RangeReader, run: Any, allocate: Allocate = empty_buffer) -> memoryview:
        """Return the bytes of the ranges of a run, one after another. Raises as `FieldReader.fetch`."""
        body, at = memoryview(allocate(run.stop - run.start)).cast("B"), 0
        for start, stop in run.ranges:
            part = body[at : at + stop - start]
            data = super().fetch(reader, run._replace(start=start, stop=stop), partial(_given, part))
            if len(data) != len(part):
                raise self._broken(run, f"{len(data)} of {len(part)} bytes were received")
            part[:] = data
            at += len(part)
        return body

    def decode(
        self, run: Any, data: memoryview, out: Any = None, first: int | None = None, allocate: Allocate = empty_buffer
    ) -> list[Placed] | None:
        """Check the checksum of every stored frame, and return the items of the clips; row 0 is clip `first`.

        Raises `CorruptError`, which names the object and the sample.
        """
        assert out is None
        if len(data) != run.stop - run.start:
            raise self._broken(run, f"{len(data)} of {run.stop - run.start} bytes were received")
        frames = [data[at : at + size] for at, size in zip(run.at().tolist(), run.packets[:, 1].tolist(), strict=True)]
        for frame, (start, size, crc) in zip(frames, run.packets.tolist(), strict=True):
            if crc32c.crc32c(frame) != crc:
                raise self._broken(run, f"the checksum of bytes {start} to {start + size} does not match")
        memory, edges = memoryview(allocate(run.size)).cast("B"), [0]
        for header, chosen in run.clips:
            end = edges[-1]
            for part in (header, *(frames[number] for number in chosen.tolist())):
                memory[end : end + len(part)] = part
                end += len(part)
            edges.append(end)
        return [(run.first_row - (run.first_row if first is None else first), Items(memory, *_bounds(edges)))]

    def decoded_bytes(self, run: Any, data: memoryview) -> int:
        """Return the bytes of the items of a run."""
        return int(run.size) if len(data) else 0

    def decoded_size(self, runs: Iterable[Any]) -> int:
        """Return the bytes of the items of runs."""
        return sum(run.size for run in runs)

    def split(self, run: Any) -> list[Any]:
        """Return a request for each clip of a run."""
        runs = []
        for number, (header, chosen) in enumerate(run.clips):
            own = distinct(chosen)
            clip = header, np.searchsorted(own, chosen)
            runs.append(ClipRun.of(run.path, run.packets[own], [clip], run.first_sample, run.first_row + number))
        return runs

    def _broken(self, run: Any, detail: str) -> CorruptError:
        problem = f"the video of sample {run.first_sample} in {self.store.url}/{run.path} is damaged: {detail}"
        return CorruptError(problem, "restore the object, or convert the dataset again")


def _given(memory: memoryview, _size: int) -> memoryview:
    return memory


def _bounds(edges: Sequence[int]) -> tuple[Ints, Ints]:
    return np.array(edges[:-1], np.int64), np.array(edges[1:], np.int64)


def _describe(index: VideoIndex, frames: Ints) -> tuple[bytes, Ints]:
    """Return the header of a clip's item, and the stored frames that it needs, in the order of decoding."""
    groups, stored = [], list[int]()
    for first, (stop, chosen) in sorted(index.groups(frames).items()):
        stored += range(first, stop)
        packets = zip(index.pts[first:stop].tolist(), index.sizes[first:stop].tolist(), strict=True)
        groups.append([list(packets), index.pts[index.shown[chosen]].tolist()])
    clip = {
        "video": dict(index.header),
        "frames": frames.tolist(),
        "times": index.times[frames].tolist(),
        "pts": index.pts[index.shown[frames]].tolist(),
        "groups": groups,
    }
    header = json.dumps(clip, separators=(",", ":")).encode()
    return len(header).to_bytes(4, "little") + header, np.array(stored, np.int64)


def _run(
    where: tuple[str, int], index: VideoIndex, clips: Sequence[tuple[bytes, Ints]], video: int, row: int
) -> ClipRun:
    """Return the run of some clips of a video; `where`: its object, and where it begins there."""
    path, base = where
    every = distinct(np.concatenate([stored for _, stored in clips]))
    every = every[np.argsort(index.starts[every], kind="stable")]
    place = np.zeros(len(index.pts), np.int64)
    place[every] = np.arange(every.size)
    packets = np.stack([index.starts[every] + base, index.sizes[every], index.crcs[every]], axis=1)
    return ClipRun.of(path, packets, [(header, place[stored]) for header, stored in clips], video, row)


def clip_header(item: memoryview) -> dict[str, Any]:
    """Return the header of an item, with `end`, where its frames begin. Raises `ValueError` for an empty item."""
    end = 4 + int.from_bytes(item[:4], "little")
    header: dict[str, Any] = json.loads(bytes(item[4:end]))
    return header | {"end": end}


def decode_clip(item: memoryview, header: dict[str, Any], out: NDArray[np.uint8]) -> None:
    """Decode an item to `out`, (frames, height, width, 3), to whose size its frames are resized.

    Raises errors of FFmpeg, and `ValueError` for frames that are not decoded.
    """
    rows: dict[int, list[int]] = {}
    for row, pts in enumerate(header["pts"]):
        rows.setdefault(pts, []).append(row)
    at = header["end"]
    for packets, wanted in header["groups"]:
        size = sum(size for _, size in packets)
        group = item[at : at + size]
        decode_frames(header["video"], _packets(packets, group), {pts: out[rows[pts][0]] for pts in wanted})
        at += size
    for first, *others in rows.values():
        for row in others:  # a time that is repeated
            out[row] = out[first]


def _packets(packets: Sequence[tuple[int, int]], data: memoryview) -> Iterator[tuple[int, memoryview]]:
    at = 0
    for pts, size in packets:
        yield pts, data[at : at + size]
        at += size


def read_clips(dataset: tuple[Store, Manifest, Remaining | None], name: str, clips: Clips, videos: Any) -> Clipped:
    """Return the clips of a field of the selected `videos`, None for all. Reads how long they are, and measures some.

    Raises `FieldError` for a field without an index of videos, and if no video is as long as a clip.
    """
    store, manifest, remaining = dataset
    if name not in manifest.fields or not manifest.fields[name].field.is_video:
        found = [each for each, layout in manifest.fields.items() if layout.field.is_video]
        kind = f"is {manifest.fields[name].field}" if name in manifest.fields else "is not a field"
        remedy = f"choose from {', '.join(found) or 'none: a field of videos has the type video when it is written'}"
        raise FieldError(f"clips= names {name!r}, which {kind}", remedy)
    if missing := {f"{name}_{suffix}" for suffix in BESIDE} - manifest.fields.keys():
        raise FieldError(f"{store.url} has no field {min(missing)!r} for videos", "convert the dataset again")
    columns = []
    for suffix in ("frames", "seconds"):
        reader = FieldReader(store, manifest, f"{name}_{suffix}", remaining)
        columns.append(np.asarray(reader.read(0, reader.num_samples, threads=4)))
    frames, seconds = (column if videos is None else column[videos[:]] for column in columns)
    clipped = Clipped(name, clips, frames, seconds, videos)
    if not len(clipped):
        longest = f"{int(frames.max(initial=0))} frames, {float(seconds.max(initial=0)):.3f} s"
        problem = f"none of {frames.size} videos is as long as a clip, {clips}: the longest has {longest}"
        raise FieldError(problem, "give fewer frames or a smaller stride")
    _measure(clipped, ClipReader(store, manifest, name, remaining, clipped))
    return clipped


def _measure(clipped: Clipped, reader: ClipReader) -> None:
    """Find the mean bytes of items, and the largest size of frames, of a few videos."""
    places = np.unique(np.linspace(0, len(clipped) - 1, SAMPLED_CLIPS).astype(np.int64))
    sizes = [frame_size(index.header) for index in reader.read_indexes(np.unique(clipped[places]), THREADS)]
    clipped.frame_size = max(sizes, key=prod)
    runs = [run for place in places.tolist() for run in reader.runs_of(clipped[place : place + 1], place)]
    clipped.clip_bytes = reader.decoded_size(runs) / places.size
