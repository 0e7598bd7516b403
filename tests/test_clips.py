"""Clips of videos as samples: their frames, the bytes that they need, their order, and what ends a run."""

import itertools
import json
import pickle
import shutil
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import videos
from commands import run
from folder_server import folder_server
from hypothesis import given
from hypothesis import strategies as st

import streamloader as sl
from streamloader import errors
from streamloader.engine.dataset import Dataset
from streamloader.format.clips import Clipped, ClipReader, clip_frames, count_clips
from streamloader.format.opening import open_root
from streamloader.format.reader import FieldReader
from streamloader.format.video import VideoIndex, index_video
from streamloader.images import clips as clips_module
from streamloader.loader.dataset import NumpyMixture
from streamloader.storage import open_store

KINDS = ("h264", "h264, one key frame", "h264, open groups", "h264, Matroska", "vp9", "hevc")
CLIPS = {"clips": {"video": sl.Clips(4, stride=3, step=5)}}


@pytest.fixture(scope="module")
def made() -> list[bytes]:
    return [videos.encode(KINDS[i % 6], frames=20 + 9 * i, seed=i) for i in range(8)]


@pytest.fixture(scope="module")
def every(made: list[bytes]) -> list[np.ndarray]:
    return [videos.decode(video)[0] for video in made]


@pytest.fixture(scope="module")
def url(made: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("clips") / "d"
    with sl.Writer(path, {"video": "video", "label": "int64", "name": "text", "tok": "ragged:int32"}) as out:
        for number, video in enumerate(made):
            out.write({"video": video, "label": number, "name": f"video {number}", "tok": [number] * number})
    return str(path)


def dataset(url: str, **given: Any) -> sl.NumpyDataset:
    return sl.NumpyDataset(**{"url": url, "batch_size": 6, "with_index": True, "num_workers": 0, **CLIPS, **given})


def read(url: str, state: Any = None, **given: Any) -> list[list[tuple[int, int]]]:
    """The (video, first frame) of the valid samples of each batch."""
    ds = dataset(url, **given)
    if state is not None:
        ds.load_state_dict(state)
    found = [clips_of(batch) for batch in ds]
    ds.close()
    return found


def clips_of(batch: Any) -> list[tuple[int, int]]:
    valid = batch.get("valid", np.ones(len(batch["index"]), bool))
    return [*zip(batch["index"][valid].tolist(), batch["video_start"][valid].tolist(), strict=True)]


def flat(batches: list[list[Any]]) -> list[Any]:
    return [*itertools.chain.from_iterable(batches)]


# ---- frames


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"memory": "24MB"}, {"shuffle": False}])
def test_an_epoch_has_each_clip_once_and_its_frames_are_those_of_the_whole_file(options, workers, url, every):
    seen = []
    for batch in dataset(url, num_workers=workers, **options):
        assert batch["video"].shape[1:] == (4, 48, 64, 3)
        seen += clips_of(batch)
        columns = ("index", "video", "video_start", "video_times", "label", "name", "video_frames")
        for index, clip, start, times, label, name, frames in zip(*(batch[name] for name in columns), strict=True):
            chosen = start + 3 * np.arange(4)
            assert np.array_equal(clip, every[index][chosen])
            assert np.allclose(times, chosen / 30, atol=2e-3)
            assert (label, name, frames) == (index, f"video {index}", len(every[index]))
    expected = [(i, start) for i, frames in enumerate(every) for start in range(0, len(frames) - 9, 5)]
    assert sorted(seen) == expected
    assert (seen == expected) == (options == {"shuffle": False})


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1])
def test_clips_come_from_a_cache(workers, url, tmp_path):
    expected = [batch["video"] for batch in dataset(url)]
    with folder_server(Path(url).parent) as server:
        for epoch in range(2):
            cached = dataset(f"{server.url}/d", num_workers=workers, cache=sl.Cache(tmp_path, free=0))
            for batch, frames in zip(cached, expected, strict=True):
                assert np.array_equal(batch["video"], frames)
            cached.close()
            paths, server.paths[:] = [*server.paths], []
            assert all(path.endswith("zarr.json") for path in paths) == (epoch == 1)


@pytest.mark.long
def test_clips_of_videos_of_any_key_frames_are_those_of_the_whole_file(tmp_path):
    made = [videos.encode(kind, 40, seed=seed) for seed, kind in enumerate(videos.MORE_KINDS)]
    made += [videos.encode(kind, 40, seed=7).replace(b"stss", b"free") for kind in ("hevc", "mpeg4")]
    whole, seen = [videos.decode(video)[0] for video in made], 0
    with sl.Writer(tmp_path / "d", {"video": "video"}) as out:
        out.write_batch({"video": made})
    for batch in dataset(str(tmp_path / "d"), clips={"video": sl.Clips(3, stride=2, step=7)}, remainder="uneven"):
        for index, clip, start in zip(batch["index"], batch["video"], batch["video_start"], strict=True):
            assert np.array_equal(clip, whole[index][start : start + 5 : 2]), (index, start)
            seen += 1
    assert seen == len(made) * 6


def test_clips_by_time_have_the_frames_that_are_shown_then(url, every):
    clips = {"video": sl.Clips(3, stride=0.11, step=0.2, unit="seconds")}
    seen = 0
    for batch in dataset(url, clips=clips, remainder="drop", shuffle=False):
        for index, clip, start, times in zip(
            *(batch[name] for name in ("index", "video", "video_start", "video_times")), strict=True
        ):
            shown = np.floor((start / 30 + np.arange(3) * 0.11 + 0.5 / 30) * 30)  # within one frame
            numbers = np.rint(times * 30).astype(int)
            assert np.all(np.abs(numbers - shown) <= 1)
            assert np.array_equal(clip, every[index][numbers])
            seen += 1
    assert seen >= 60


INDEXES = [(index_video("v", videos.encode("h264", n), 0)) for n in (1, 7, 40)]


@given(st.sampled_from(INDEXES), st.integers(1, 9), st.integers(1, 6), st.integers(1, 50))
def test_clips_by_frames_are_all_that_lie_within_the_video(indexed, frames, stride, step):
    index, clips = VideoIndex.parse(indexed[0], ""), sl.Clips(frames, stride, step)
    (count,) = count_clips(clips, np.array([indexed[1]]), np.array([indexed[2]]))
    starts = [start for start in range(0, indexed[1], step) if start + (frames - 1) * stride < indexed[1]]
    assert count == len(starts)
    for number, start in enumerate(starts):
        assert clip_frames(clips, number, index).tolist() == [start + stride * i for i in range(frames)]


@given(st.sampled_from(INDEXES), st.integers(1, 9), st.integers(1, 30), st.integers(1, 50))
def test_clips_by_seconds_lie_within_the_video_and_show_the_frames_of_their_times(indexed, frames, stride, step):
    index, clips = VideoIndex.parse(indexed[0], ""), sl.Clips(frames, stride / 64, step / 64, unit="seconds")
    (count,) = count_clips(clips, np.array([indexed[1]]), np.array([indexed[2]]))
    assert count == sum(k * step / 64 + (frames - 1) * stride / 64 < indexed[2] for k in range(300))
    for number in range(count):
        times = number * step / 64 + np.arange(frames) * stride / 64
        expected = [max(i for i, shown in enumerate(index.times) if shown <= time + 1e-6) for time in times]
        assert clip_frames(clips, number, index).tolist() == expected


@pytest.mark.parametrize("number", [39, 40, 2**40])
def test_a_clip_of_frames_that_the_index_does_not_have_is_an_error(number):
    index, clips = VideoIndex.parse(INDEXES[2][0], "the index of sample 3"), sl.Clips(2, step=1)
    with pytest.raises(errors.FormatError, match=rf"the index of sample 3 has 40 frames, .* frame {number + 1} "):
        clip_frames(clips, number, index)


def test_frames_are_resized_and_given_to_a_transform(url, every):
    clips = {"video": sl.Clips(2, size=(24, 40))}
    for batch in dataset(url, clips=clips, transform=lambda sample: {"mean": sample["video"].mean((1, 2))}):
        assert batch["mean"].shape == (6, 2, 3)
    batch = next(iter(dataset(url, clips=clips)))
    assert batch["video"].shape == (6, 2, 24, 40, 3)
    for index, clip, start in zip(batch["index"], batch["video"], batch["video_start"], strict=True):
        whole = every[index][start : start + 2].astype(float)
        small = whole.reshape(2, 24, 2, 64, 3).mean(2).mean(2)
        assert np.abs(clip.astype(float).mean(2) - small).mean() < 12


# ---- bytes


def reader_of(url: str, clips: sl.Clips) -> tuple[ClipReader, Clipped]:
    opened = open_root(open_store(url, {}))
    clipped = sl.NumpyDataset(url, batch_size=1, clips={"video": clips})._datasets[0].selection
    assert isinstance(clipped, Clipped)
    return ClipReader(opened.store, opened.manifest, "video", None, clipped), clipped


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A video of a few hundred kilobytes, with a key frame every 12 frames."""
    path = tmp_path_factory.mktemp("long") / "d"
    with sl.Writer(path, {"video": "video"}) as out:
        out.write({"video": videos.encode("h264", 240, size=(160, 160))})
    return str(path)


def test_only_the_groups_of_pictures_of_a_clip_are_fetched(long):
    reader, clipped = reader_of(long, sl.Clips(4, stride=2, step=120))
    (index,) = reader.read_indexes(np.array([0]))
    size = index.header["size"]
    assert size > 500_000
    run, *others = reader.runs_of(clipped[1:2], 1)
    assert not others
    assert run.stop - run.start < size / 15  # 12 of 240 frames at most
    group = slice(120, 132)
    begin, end = index.starts[group].min(), (index.starts + index.sizes)[group].max()
    base = run.start - index.starts[120]
    assert all(base + begin <= start < stop <= base + end for start, stop in run.ranges)


def test_groups_between_those_of_a_clip_are_left_out(long):
    reader, clipped = reader_of(long, sl.Clips(2, stride=200))
    (run,) = reader.runs_of(clipped[:1], 0)
    (index,) = reader.read_indexes(np.array([0]))
    assert len(run.ranges) == 2
    assert run.stop - run.start < index.header["size"] / 8
    assert reader.runs_of(clipped[:1], 0)[0].ranges == run.ranges
    assert sl.NumpyDataset(long, batch_size=1, clips={"video": sl.Clips(2, stride=200)}).num_samples == 1
    batch = next(iter(sl.NumpyDataset(long, batch_size=1, clips={"video": sl.Clips(2, stride=200)})))
    assert np.array_equal(batch["video"][0], videos.decode(sl.open(long)[0]["video"])[0][[0, 200]])


def test_a_pass_fetches_little_of_the_video(long):
    size = len(sl.open(long)[0]["video"])
    with closing(dataset(long, clips={"video": sl.Clips(2, step=500)}, batch_size=1)) as ds:
        assert len(list(ds)) == 1
        assert ds.stats().bytes_fetched < size / 10


def damage(url: str, copy: Path, begin: int, end: int) -> str:
    """A copy of a dataset of one video, with other bytes in part of the video."""
    shutil.copytree(url, copy)
    path = copy / "video" / "c" / "0"
    data = bytearray(path.read_bytes())
    data[8 + begin : 8 + end] = bytes(255 - byte for byte in data[8 + begin : 8 + end])
    path.write_bytes(data)
    return str(copy)


def test_bytes_that_a_clip_needs_are_checked_and_others_are_not_read(long, tmp_path):
    reader, _ = reader_of(long, sl.Clips(4))
    (index,) = reader.read_indexes(np.array([0]))
    clips = {"video": sl.Clips(4, step=120)}
    batches = list(dataset(long, clips=clips, batch_size=1, shuffle=False))
    begin = int(index.starts[24])
    other = damage(long, tmp_path / "other", begin, begin + 50)
    for batch, same in zip(batches, dataset(other, clips=clips, batch_size=1, shuffle=False), strict=True):
        assert np.array_equal(batch["video"], same["video"])
    begin = int(index.starts[121])
    own = damage(long, tmp_path / "own", begin, begin + 50)
    with pytest.raises(errors.CorruptError, match=r"the video of sample 0 in .*video/c/0 is damaged: the checksum of"):
        list(dataset(own, clips=clips, batch_size=1, shuffle=False))
    masked = list(dataset(own, clips=clips, batch_size=2, shuffle=False, on_error="mask", max_bad=1.0))
    assert [batch["error"].tolist() for batch in masked] == [[False, True]]
    assert np.array_equal(masked[0]["video"][0], batches[0]["video"][0])
    assert not masked[0]["video"][1].any()


def test_a_frame_that_does_not_decode_is_a_bad_sample_of_its_clips_and_found_by_verify(tmp_path):
    good = videos.encode("h264", 30)
    index = VideoIndex.parse(index_video("video", good, 0)[0], "")
    bad, begin, size = bytearray(good), int(index.starts[13]), int(index.sizes[13])
    bad[begin : begin + size] = b"\xff" * size
    with sl.Writer(tmp_path / "d", {"video": "video"}) as out:
        out.write_batch({"video": [good, bytes(bad)]})
    problems = sl.verify(tmp_path / "d", decode=True).problems
    assert [problem.problem.partition(" (")[0] for problem in problems] == [
        "sample 1 of field 'video' does not decode as a video"
    ]
    clips = {"clips": {"video": sl.Clips(2, step=14)}, "shuffle": False}
    shown = r"a clip of sample 1 of field 'video' does not decode.*on_error='mask'"
    with pytest.raises(errors.DecodeError, match=shown):
        list(dataset(str(tmp_path / "d"), **clips))
    (batch,) = dataset(str(tmp_path / "d"), **clips, on_error="mask", max_bad=1.0)
    assert batch["error"].tolist() == [False] * 4 + [True, False]
    assert np.array_equal(batch["video"][3], videos.decode(good)[0][:2])


def test_verify_reads_the_container_of_each_video_once(url, made, monkeypatch):
    indexed = []
    monkeypatch.setattr(clips_module, "index_video", lambda *given: indexed.append(given[2]) or index_video(*given))
    assert sl.verify(url, decode=True).decoded == len(made)
    assert sorted(indexed) == [*range(len(made))]


def test_items_are_the_same_after_pickling_and_from_split_requests(long):
    reader, clipped = reader_of(long, sl.Clips(4, stride=2, step=10))
    (run,) = reader.runs_of(clipped[:5], 0)
    ((row, items),) = reader.load(run, reader.request(run))
    assert (row, len(items)) == (0, 5)
    there = pickle.loads(pickle.dumps(reader))
    for number, part in enumerate(reader.split(run)):
        ((row, one),) = there.load(part, there.request(part), None, 0)
        assert (row, bytes(one[0])) == (number, bytes(items[number]))


# ---- the order


@pytest.mark.long
def test_global_batches_are_the_same_at_any_number_of_ranks(url):
    whole = read(url, batch_size=12, remainder="drop")
    assert len(whole) == 5
    assert read(url, batch_size=12, remainder="drop") == whole
    for size in (2, 3, 4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            ranks = [read(url, batch_size=12 // size, remainder="drop", world=(rank, size)) for rank in range(size)]
        assert [sorted(flat([rank[step] for rank in ranks])) for step in range(len(whole))] == [*map(sorted, whole)]


@pytest.mark.long
def test_a_run_resumes_exactly_at_any_world_size(url):
    whole = read(url, batch_size=12, remainder="drop")
    for stop in (1, 4):
        with closing(dataset(url, batch_size=12, remainder="drop")) as ds:
            for _ in zip(range(stop), ds, strict=False):
                pass
            state = ds.state_dict()
        assert len(str(state)) < 2000
        assert read(url, state, batch_size=12, remainder="drop") == whole[stop:]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            ranks = [read(url, state, batch_size=6, remainder="drop", world=(rank, 2)) for rank in range(2)]
        assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [*map(sorted, whole[stop:])]


@pytest.mark.long
def test_steps_are_known_skipped_and_repeated(url):
    whole = read(url, remainder="drop")
    with closing(dataset(url, remainder="drop")) as ds:
        assert [ds.samples(0, step).tolist() for step in range(len(ds))] == [[i for i, _ in step] for step in whole]
        assert [clips_of(batch) for batch in ds.replay(0, [2, 5])] == [whole[2], whole[5]]
    assert read(url, remainder="drop", skip_steps={0: [1, 2]}) == [whole[0], *whole[3:]]


@pytest.mark.parametrize("change", [sl.Clips(4, stride=3, step=6), sl.Clips(4, stride=2, step=5)])
def test_a_state_belongs_to_its_clips(change, url):
    state = dataset(url).state_dict()
    with pytest.raises(errors.StateError):
        dataset(url, clips={"video": change}).load_state_dict(state)
    dataset(url).load_state_dict(state)


@pytest.mark.long
def test_videos_are_selected_and_deleted(url, tmp_path):
    whole = set(flat(read(url)))
    assert set(flat(read(url, where="label >= 3", exclude=[5]))) == {c for c in whole if c[0] >= 3 and c[0] != 5}
    shutil.copytree(url, tmp_path / "d")
    sl.delete(tmp_path / "d", where="label == 2")
    left = {(i - (i > 2), start) for i, start in whole if i != 2}
    assert set(flat(read(str(tmp_path / "d")))) == left


def test_videos_that_are_shorter_than_a_clip_have_none(url, every):
    clips = {"video": sl.Clips(10, stride=5)}
    assert {i for i, _ in flat(read(url, clips=clips))} == {i for i, frames in enumerate(every) if len(frames) >= 46}


def test_a_mixture_has_the_clips_of_its_sources(url):
    sources = {sl.Source(url, where="label < 4"): 1, sl.Source(url, where="label >= 4"): 3}
    with closing(NumpyMixture(sources, batch_size=4, num_workers=0, **CLIPS)) as ds:
        batches = [*itertools.islice(ds, 4)]
    assert all(batch["video"].shape == (4, 4, 48, 64, 3) for batch in batches)
    assert sum(label < 4 for batch in batches for label in batch["label"].tolist()) == 4


@pytest.mark.long
def test_indexes_of_several_videos_in_a_chunk_are_those_of_the_videos(tmp_path):
    made = [videos.encode("h264", 4 + number, seed=number) for number in range(3)]
    chosen = np.arange(200) * 7 % 3
    with sl.Writer(tmp_path / "d", {"video": "video", "label": "int64"}, num_samples=200) as out:
        out.write_batch({"video": [made[kind] for kind in chosen], "label": np.arange(200)})
    assert sl.open(tmp_path / "d").manifest.fields["video_index"].chunk > 1
    whole = [videos.decode(video)[0] for video in made]
    for where, numbers in ((None, range(200)), (slice(1, 200, 5), range(1, 200, 5))):
        seen = []
        for batch in dataset(str(tmp_path / "d"), clips={"video": sl.Clips(2)}, where=where, batch_size=20):
            seen += clips_of(batch)
            for index, clip, start in zip(batch["index"], batch["video"], batch["video_start"], strict=True):
                assert np.array_equal(clip, whole[chosen[index]][start : start + 2])
        expected = [(n, start) for n in numbers for start in range(0, 3 + chosen[n], 2)]
        assert sorted(seen) == expected


def test_the_other_readers_of_a_block_of_clips_are_those_of_samples(url):
    ds = dataset(url, fields=["video", "video_index", "label"])
    found: Dataset = ds._datasets[0]
    assert {name: type(reader) for name, reader in found.readers.items()} == {
        "video": ClipReader,
        "video_index": FieldReader,
        "label": FieldReader,
    }
    assert "video_index" in next(iter(ds))
    assert "video_index" not in next(iter(dataset(url)))


def test_clips_have_the_joined_fields_of_their_videos(url, tmp_path):
    with sl.Writer(tmp_path / "d", {"label": "int64", "more": "float32[500]"}) as out:
        for number in range(8)[::-1]:
            out.write({"label": number, "more": np.full(500, number)})
    joined = sl.Join(url, tmp_path / "d", on="label")
    seen = []
    for batch in dataset(joined):
        assert np.array_equal(batch["more"][:, 0], batch["index"])
        seen += clips_of(batch)
    assert sorted(seen) == sorted(flat(read(url)))
    with pytest.raises(errors.FieldError, match="clips= names 'video', which is not a field"):
        dataset(sl.Join(tmp_path / "d", url, on="label"))


# ---- errors

PACKED = errors.UsageError, r"clips= with pack= of rows"


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"clips": {"label": sl.Clips(2)}}, errors.FieldError, "clips= names 'label', which is int64"),
        ({"clips": {"film": sl.Clips(2)}}, errors.FieldError, "clips= names 'film', which is not a field"),
        ({"clips": sl.Clips(2)}, errors.UsageError, r"clips=Clips\(frames=2"),
        ({"clips": {"video": 16}}, errors.UsageError, "clips={'video': 16}"),
        ({"clips": {"video": sl.Clips(999)}}, errors.FieldError, "none of 8 videos is as long .* 83 frames"),
        ({"fields": ["label"]}, errors.FieldError, "'video', which is not fetched"),
        ({"weights": "label"}, errors.UsageError, "clips= with weights="),
        ({"fields": ["video", "video_index", "tok"], "pack": {"tok": sl.Pack(9, fit="best")}}, *PACKED),
    ],
)
def test_clips_that_cannot_be_made_are_errors(given, kind, message, url):
    with pytest.raises(kind, match=message):
        dataset(url, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"frames": 0},
        {"stride": 0},
        {"stride": 0.5},
        {"step": -1},
        {"unit": "minutes"},
        {"stride": 0, "unit": "seconds"},
        {"step": float("inf"), "unit": "seconds"},
        {"size": 5},
    ],
)
def test_invalid_clips_are_errors(given):
    with pytest.raises(errors.UsageError, match=r"Clips\("):
        sl.Clips(**given)


def test_clips_by_seconds_begin_before_the_end_of_their_video():
    frames, seconds = np.array([21, 21]), np.array([2.1, 2.0])
    assert count_clips(sl.Clips(1, stride=0.3, unit="seconds"), frames, seconds).tolist() == [7, 7]


# ---- memory


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """13 videos of 8 clips each; the size of one, which is none of those that are measured, is 25 times the others'."""
    path = tmp_path_factory.mktemp("sizes") / "d"
    small, large = (videos.encode("h264", 39, size=size) for size in ((48, 64), (240, 320)))
    with sl.Writer(path, {"video": "video"}) as out:
        out.write_batch({"video": [large if number == 2 else small for number in range(13)]})
    return str(path)


MEASURED = {"clips": {"video": sl.Clips(32, step=1)}, "shuffle": False, "remainder": "drop"}


def height(sample: Any) -> dict[str, Any]:
    return {"height": len(sample["video"][0])}


@pytest.mark.quick(1)
@pytest.mark.parametrize("transform", [None, height])
def test_the_memory_of_a_batch_of_larger_videos_than_were_measured_is_counted(transform, sizes):
    given = {**MEASURED, "batch_size": 8, "memory": "40MB", "transform": transform}
    with closing(dataset(sizes, **given)) as ds:
        (clipped,) = (each.selection for each in ds._datasets)
        assert clipped.frame_size == (48, 64)
        batches = iter(ds)
        assert [len(next(batches)["index"]) for _ in range(2)] == [8, 8]
        with pytest.raises(errors.MemoryBudgetError, match=r"more memory than planned: memory=\d+ bytes .*=40000000;"):
            next(batches)
    for more in ({"memory": "400MB"}, {"memory": "80MB", "clips": {"video": sl.Clips(32, step=1, size=(48, 64))}}):
        with closing(dataset(sizes, **{**given, **more})) as ds:
            assert [set(batch["index"]) for batch in itertools.islice(ds, 3)] == [{0}, {1}, {2}]


@pytest.mark.quick(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_gets_clips_of_different_sizes(workers, sizes):
    given = {**MEASURED, "clips": {"video": sl.Clips(3)}, "batch_size": 39, "num_workers": workers}
    with closing(dataset(sizes, **given, transform=height)) as ds:
        batch = next(iter(ds))
    assert batch["height"].tolist() == [240 if index == 2 else 48 for index in batch["index"]]
    assert {*batch["index"].tolist()} == {0, 1, 2}
    with pytest.raises(errors.UsageError, match=r"has the shape .*; give Clips\(size="):
        list(dataset(sizes, **given))


@pytest.mark.parametrize(
    ("given", "clips"),
    [("video=4", sl.Clips(4)), ("video=3,stride=2,step=5,size=16x24", sl.Clips(3, 2, 5, size=(16, 24)))],
)
def test_a_plan_of_clips_has_the_requests_and_bytes_of_the_epoch_that_follows(long, given, clips, capsys):
    planned = json.loads(run(capsys, "plan", long, "--clips", given, "--batch-size", 4, "--json")[1])
    ds = sl.NumpyDataset(long, batch_size=4, clips={"video": clips}, memory=planned["least_memory"])
    assert (planned["num_samples"], planned["steps"]) == (ds.num_samples, len(list(ds)))
    assert ds.stats().requests == pytest.approx(planned["requests"], rel=0.1)
    assert ds.stats().bytes_fetched == pytest.approx(planned["bytes"], rel=0.1)
    for text, shown in (
        ("video=4,fps=3", "write it as video=16"),
        ("video=0", "at least 1"),
        ("video=2,size=3", "size"),
    ):
        status, _, err = run(capsys, "plan", long, "--clips", text)
        assert status == 2
        assert shown in err
