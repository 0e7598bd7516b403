"""The bench: its contract with contestants, its arithmetic, its page, and a tiny run of all of it."""

import io
import json
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from torchrun import run_python

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench" / "peers")]

import common  # noqa: E402
import crops  # noqa: E402
import measuring  # noqa: E402

from bench import contestants, cores, cores_page, device, device_page, device_trace, exactness, report  # noqa: E402
from bench.__main__ import parser, settings_of  # noqa: E402
from bench.contestants import CEILINGS, OURS, Contestant, ContestError  # noqa: E402
from bench.context import Bench, Place  # noqa: E402
from bench.conversion import __main__ as conversion  # noqa: E402
from bench.conversion import page as writing  # noqa: E402
from bench.data import prepare  # noqa: E402
from bench.figures import best_peer, ratio, rows, traffic  # noqa: E402
from bench.machine import describe  # noqa: E402
from bench.objects import Requests, counted  # noqa: E402
from bench.plan import Settings, cells, steps  # noqa: E402
from bench.progress import Show  # noqa: E402
from bench.servers import Endpoint, configuration  # noqa: E402
from bench.targets import reached  # noqa: E402

FETCH_DECODE = CEILINGS[1].name
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")


def line(contestant, kind, seconds, **other):
    """A line as a run records it: images, 1000 samples of 150,000 bytes."""
    epoch = {"samples": 1000, "first_batch_seconds": 0.1, "faults": 3, "peak_bytes": 500_000_000}
    epochs = [{**epoch, "epoch": n, "seconds": s, "cpu_seconds": s / 2} for n, s in enumerate(seconds)]
    machine = {"processor": "x", "cores": 2, "memory_bytes": 8e9, "kernel": "6", "python": "3.11"}
    return {
        **{"run": "1", "time": "2026-01-01T00:00:00", "server": "seaweedfs", "kind": "read", "workload": "images"},
        **{"variant": "", "unit": "samples", "contestant": contestant, "contestant_kind": kind, "workers": 0},
        **{"repeat": 0, "front": "", "samples": 1000, "units": 1000, "raw_bytes": 150_000_000, "epochs": epochs},
        **{
            "part": 1,
            "stored_bytes": 150_000_000,
            "commit": "abc",
            "machine": machine,
            "versions": {"streamloader": "0"},
        },
        **other,
    }


def slopes(height, width):
    """A smooth picture."""
    y, x = np.mgrid[0:height, 0:width]
    channels = np.stack([y / height, x / width, (y + x) / (height + width)], axis=2)
    return np.ascontiguousarray((channels * 255).astype(np.uint8))


def a_run():
    """Two rounds of the project at 1000 and 800 samples/s, its ceiling at 1000, and a peer with two worker counts."""
    return [
        line(FETCH_DECODE, "ceiling", [1.0, 1.0]),
        line(OURS.name, "ours", [1.0, 0.5]),
        line("slow", "peer", [10.0, 5.0]),
        line("slow", "peer", [4.0, 8.0], workers=2),
        line(FETCH_DECODE, "ceiling", [1.0, 1.0], repeat=1),
        line(OURS.name, "ours", [1.25, 0.5], repeat=1),
        line(OURS.name, "ours", [2.0], front="count", requests={"gets": 40, "others": 2, "bytes": 151_500_000}),
        {**line("broken", "peer", []), "failed": "it ended | with 1"},
    ]


def test_each_epoch_of_a_row_is_taken_at_its_best_worker_count():
    found = {row.contestant: row for row in rows(a_run())}
    assert found["slow"].workers == (2, 0)
    assert [spread.median for spread in found["slow"].rates] == [250, 200]
    ours = found[OURS.name].rates[0]
    assert (ours.median, ours.least, ours.greatest, ours.count) == (900, 800, 1000, 2)
    assert "broken" not in found


def test_ratios_are_taken_round_by_round():
    found = ratio(a_run(), "images", OURS.name, FETCH_DECODE)
    assert (found.median, found.least, found.greatest) == (0.9, 0.8, 1.0)
    assert ratio(a_run(), "images", OURS.name, "nobody") is None
    peer = best_peer(a_run(), "images", 1)
    assert peer is not None and peer.rates[1].median == 200


def test_loaders_that_mix_worse_and_blocks_read_by_hand_are_no_rivals():
    lines = [line(name, "peer", [seconds, seconds]) for name, seconds in (("a", 1.0), ("b", 2.0), ("zarr", 0.1))]
    for one, effect in zip(lines, (3.0, 1.2, 1.0), strict=True):
        one["epochs"][0]["design_effect"] = effect
    assert [best_peer(lines, "images", 0, effect).contestant for effect in (4.0, 2.0)] == ["a", "b"]
    assert best_peer(lines, "images", 0, 1.1) is None


def test_traffic_compares_what_was_fetched_with_what_was_needed():
    seen = traffic(a_run())["images", OURS.name]
    assert seen.requests_per_gigabyte == pytest.approx(280)
    assert seen.fetched_over_needed == pytest.approx(1.01)


def test_the_page_names_every_target_that_was_measured_and_what_was_left_out(tmp_path):
    lines = a_run()
    law = {"kind": "law", "run": "1", "name": "memory", "value": 100e6, "growth": 0.5, "memory": 1, "peaks": [1, 2]}
    text = "".join(json.dumps(one) + "\n" for one in [{**lines[0], "run": "0"}, *lines, law])
    (tmp_path / "x.jsonl").write_text(text)
    page = report.write("x", tmp_path).read_text()
    met = {one.figure: one.met for one in reached([*lines, law])}
    assert met["images over slow, the best at equal mixing"] and met[f"images over {FETCH_DECODE}, first epoch"]
    assert not met["growth of the peak in 20 epochs"]
    for figure in met:
        assert f"| {figure} |" in page
    assert "it ended \\| with 1" in page
    assert (tmp_path / "x-rates.png").read_bytes().startswith(b"\x89PNG")
    assert "![x-rates.png](x-rates.png)" in page


def test_rounds_interleave_and_repeat_only_the_best_worker_count():
    settings = Settings(quick=True, name="x", workers=(0, 2), repeats=3, peer_repeats=2)
    peer = Contestant("p", "peer", "peer_p.py")
    by_cell = {cell.name: list(steps(settings, cell, [peer])) for cell in cells(settings)}
    assert set(by_cell) == {"images", "vectors", "jpeg", "tokens", "tokens packed", "mixed"}
    measured = [step for step in by_cell["images"] if not step.front]
    assert [step.workers for step in measured if step.contestant is peer] == [0, 2, None]
    assert [step.repeat for step in measured] == sorted(step.repeat for step in measured)
    assert sum(step.contestant is OURS for step in measured) == 3
    assert any(step.contestant.extra.get("ceiling") == "image" for step in by_cell["jpeg"])
    assert not any(step.contestant.extra.get("ceiling") == "image" for step in by_cell["images"])


@pytest.mark.quick(2)
@pytest.mark.parametrize(("workload", "count"), [("vectors", 300), ("tokens", 300), ("jpeg", 50), ("mixed", 300)])
def test_raw_data_is_the_same_each_time_and_whole(workload, count, tmp_path, photos):
    """`jpeg` and `mixed` on two small photographs, since the real ones are a download."""
    folders = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "photos").symlink_to(photos)
        folders.append(prepare(workload, count, tmp_path / name))
    for path in sorted(folders[0].iterdir()):
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name
    source = common.Source(folders[0])
    last = source.sample(count - 1)
    assert set(last) == set(source.columns) and len(list(source.samples())) == count
    if workload == "tokens":
        assert source.units == len(source.array("tokens"))
        assert 200 <= len(last["tokens"]) <= 4000 and last["tokens"][1:].max() < common.FIRST_TOKEN
        assert last["tokens"][0] == common.FIRST_TOKEN + count - 1
        rows_ = source.packed_rows()
        assert np.array_equal(rows_.ravel(), source.array("tokens")[: rows_.size])
        assert np.array_equal(list(common.pack_documents(one["tokens"] for one in source.samples())), rows_)
    if workload == "jpeg":
        assert last["jpeg"][:3] == b"\xff\xd8\xff"
    if workload == "mixed":
        assert last["image"].shape == (96, 96, 3) and last["text"].isascii() and last["vector"].shape == (16,)


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A folder like scikit-image's, with a picture of slopes under its names."""
    from PIL import Image

    from bench.photos import OF_SKIMAGE

    root = tmp_path_factory.mktemp("photos")
    folder = root / "skimage" / "data"
    folder.mkdir(parents=True)
    for name in OF_SKIMAGE:
        Image.fromarray(slopes(450, 600)).save(folder / name)
    return root


def test_both_jpeg_transforms_deliver_normalised_crops_of_the_same_size():
    import random

    import simplejpeg

    data = simplejpeg.encode_jpeg(slopes(375, 500), 95)
    for seed in range(20):
        random.seed(seed)
        fast = crops.jpeg_transform("fast")(data)
        random.seed(seed)
        plain = crops.jpeg_transform("pillow")(data)
        assert fast.shape == plain.shape == (224, 224, 3)
        assert fast.dtype == plain.dtype == np.float32
        assert np.abs(fast - plain).mean() < 0.05


def test_random_crops_stay_inside_and_have_the_stated_areas():
    for height, width in ((375, 500), (10, 3000), (224, 224)):
        for _ in range(200):
            top, left, h, w = crops.random_crop(height, width)
            assert top >= 0 and left >= 0 and top + h <= height and left + w <= width and h > 0 and w > 0


@pytest.mark.quick(1)
@pytest.mark.parametrize(("mixed", "least", "most"), [(True, 0.8, 1.2), (False, 90, 101)])
def test_epochs_are_whole_and_their_order_is_seen_and_batches_must_be_tensors(tmp_path, capsys, mixed, least, most):
    import torch

    source = {"bytes": 1000, "samples": 51_200, "columns": {}}
    (tmp_path / "meta.json").write_text(json.dumps(source))
    order = np.random.default_rng(0).permutation(51_200) if mixed else np.arange(51_200)
    batches = [{"label": torch.from_numpy(rows)} for rows in order.reshape(-1, 100)]
    spec = common.Spec("images", str(tmp_path), "s3://bench/x", epochs=2, seconds=0.05)
    measuring.measure_loader(lambda: batches, spec)
    found = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert len(found) >= 2 and sum(one["seconds"] for one in found[1:]) >= 0.05 - 1e-4 * len(found)
    assert {one["samples"] for one in found} == {51_200}
    assert least < found[0]["design_effect"] < most
    assert all(one["peak_bytes"] > 0 for one in found)
    with pytest.raises(TypeError, match="ndarray"):
        measuring.touch({"a": np.ones(4)})
    measuring.touch({"a": [torch.ones(1), torch.ones(0)], "b": ["text"], "c": torch.ones(2, 2)})


def test_cpu_and_memory_of_children_count():
    code = "import time; x = bytearray(b'1') * 300_000_000; print('held', flush=True); input()"
    with measuring.Memory() as memory:
        memory.begin_epoch()
        before, alone = measuring.tree_usage(), memory.peak()
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdout.readline()
        assert child.pid in measuring.processes()
        memory.look()
        assert memory.peak() > 300_000_000
        assert memory.peak() >= alone
        child.communicate(b"\n")
    assert measuring.tree_usage() > before


def test_a_contestant_that_fails_or_never_ends_is_an_error_with_its_output(tmp_path, monkeypatch):
    monkeypatch.setattr(contestants, "PEERS", tmp_path)
    (tmp_path / "bad.py").write_text("import sys; sys.exit('no such luck')")
    (tmp_path / "ever.py").write_text("import time; time.sleep(1000)")
    (tmp_path / "good.py").write_text("import json, sys; print('x'); print(open(sys.argv[2]).read())")
    with pytest.raises(ContestError, match="no such luck"):
        contestants.run(Contestant("bad", "ours", "bad.py"), "read", {}, 60)
    with pytest.raises(ContestError, match="no end after"):
        contestants.run(Contestant("ever", "ours", "ever.py"), "read", {}, 0.2)
    (spec,) = contestants.run(Contestant("good", "ours", "good.py", {"a": 1}), "read", {"extra": {"b": 2}}, 60)
    assert spec["extra"] == {"a": 1, "b": 2}
    assert not Path(spec["cache"]).exists()


def test_requests_are_counted_in_the_log_of_the_proxy(tmp_path):
    log = tmp_path / "access.log"
    log.write_text("PUT\t200\t0\t/b/x\t\n")
    offset = log.stat().st_size
    more = "GET\t206\t100\t/b/x\t\nGET\t200\t7\t/b/y\t?\nGET\t404\t9\t/b/z\t\nHEAD\t200\t0\t/b/x\t\n"
    log.write_text(log.read_text() + more)
    assert counted(log, offset) == Requests(gets=2, others=2, bytes=107)


def test_nginx_delays_only_where_it_is_configured_to(tmp_path):
    assert "limit_rate" not in configuration(1234, tmp_path, "plain")
    assert "ssl_certificate server.pem" in configuration(1234, tmp_path, "tls")
    assert "access.log requests" in configuration(1234, tmp_path, "count")


def test_nginx_over_a_folder_asks_the_store_for_listings(tmp_path):
    store = Endpoint("store", "http://127.0.0.1:99")
    assert "proxy_pass" not in configuration(1234, tmp_path, "plain")
    listing = configuration(1234, tmp_path, "plain", store)
    assert f"root {tmp_path};" in listing and "if ($args ~ list-type) { proxy_pass http://store; }" in listing
    assert "server 127.0.0.1:99;" in listing and configuration(1234, store, "plain").count("proxy_pass") == 1


def test_progress_in_a_pipe_is_plain_lines_with_the_time_left():
    stream = io.StringIO()
    show = Show(stream, total=100.0)
    show.begin("not shown in a pipe")
    show.end("data written")
    show.end("images streamloader: 5,000 samples/s", expected=25.0)
    show.close()
    assert not CONTROL.search(stream.getvalue())
    first, second = stream.getvalue().splitlines()
    assert first == "[  0%] data written"
    assert re.fullmatch(r"\[ 25%, \d+ min left\] images streamloader: 5,000 samples/s", second)


@pytest.mark.long
def test_a_tiny_run_goes_from_data_to_page(tmp_path):
    command = ["-m", "bench", "--quick", "--workloads", "vectors", "--peers", "--samples", "5000"]
    command += [
        "--repeats",
        "1",
        "--no-fronts",
        "--server",
        "moto",
        "--out",
        "tiny",
        "--touch",
        "0",
        "--seconds",
        "0.1",
    ]
    command += ["--data", str(tmp_path / "data"), "--results", str(tmp_path)]
    done = run_python(*command, cwd=ROOT)
    assert not CONTROL.search(done.stderr) and "100%" in done.stderr
    lines = [json.loads(text) for text in (tmp_path / "tiny.jsonl").read_text().splitlines()]
    read = {one["contestant"]: one for one in lines if one["kind"] == "read"}
    assert set(read) == {OURS.name, FETCH_DECODE}
    for one in read.values():
        assert {epoch["samples"] for epoch in one["epochs"]} == {5000} and len(one["epochs"]) > 1
        assert one["machine"]["cores"] >= 1 and one["commit"] and one["stored_bytes"] > 5000 * 264
    assert "## vectors" in (tmp_path / "tiny.md").read_text()


@pytest.mark.long
def test_a_tiny_run_of_cores_measures_the_loader_and_its_bounds(tmp_path):
    command = ["-m", "bench.cores", "--workloads", "vectors", "--peers", "--cores", "1", "--part", "1000"]
    command += ["--each", "0.1", "--data", str(tmp_path / "data"), "--results", str(tmp_path)]
    done = run_python(*command, cwd=ROOT)
    lines = [json.loads(text) for text in (tmp_path / "cores.jsonl").read_text().splitlines()]
    loader = [one for one in lines if one["kind"] == "loader"]
    assert loader and not any("failed" in one for one in lines), done.stderr
    for one in loader:
        assert one["samples"] >= 4000 and one["bytes"] > 4000 * 264 and one["cores"] == 1
        assert one["parent_cpu_seconds"] > 0 and one["first_batch_seconds"] > 0 and one["parent_bytes"] > 1e6
    page = (tmp_path / "cores.md").read_text()
    assert "### vectors, million rows/s" in page
    assert ("| plain GETs |" in page) == bool(shutil.which("nginx"))


def test_runs_on_most_cores_come_first_and_the_page_has_a_row_for_each():
    options = cores.parser().parse_args(["--cores", "1", "4", "--workloads", "jpeg", "--peers", "webdataset"])
    found = list(cores.runs(options, "nginx"))
    assert [run.cores for run in found[:2]] == [4, 4] and {run.cores for run in found} == {1, 4}
    assert {(run.kind, run.place) for run in found} >= {("loader", "nginx"), ("loader", "files"), ("peer", "files")}
    loader = {"workload": "jpeg", "contestant": "streamloader", "kind": "loader", "workers": 2, "place": "nginx"}
    measured = {"samples": 3000, "bytes": 1, "seconds": 2.0, "parent_cpu_seconds": 0.06, "cpu_seconds": 6.0}
    memory = {"parent_bytes": 1e8, "children_bytes": 2e8, "children": 2}
    first = {"first_batch_seconds": 0.5, "later_first_batch_seconds": 0.1}
    lines = [{**loader, **measured, **memory, **first, **describe(), "time": "2026-01-01", "cores": n} for n in (1, 4)]
    lines += [{**lines[0], "kind": "compare", "equal": False, "digests": {"0": "a", "5": "b"}}]
    page = cores_page.markdown(lines)
    assert "| **2 workers, nginx** | 1,500 | 1,500 |" in page
    assert "| 2 workers (2 processes), nginx | 4 | 20 | 2,000 | 0.50 | 0.100 | 100 | 200 |" in page
    assert "**not the same**" in page and page.startswith("# The loader on many cores")


def test_bad_arguments_end_with_one_line():
    with pytest.raises(SystemExit, match=r"^no such peer: nobody.*$"):
        settings_of(parser().parse_args(["--no-fronts", "--no-laws", "--peers", "nobody"]))


# --- the bench of writing


def wrote(contestant, seconds, **more):
    """A run that wrote 100 MB of vectors."""
    line = {"time": "2026-01-01T00:00:00", "workload": "vectors", "contestant": contestant, "peer_versions": ""}
    return {**line, "seconds": seconds, "raw_bytes": 100e6, "objects": 3, "stored_bytes": 90e6, **describe(), **more}


def test_the_ratio_is_of_medians_over_the_best_of_the_others_and_failures_are_named(tmp_path):
    lines = [wrote(writing.OURS, seconds) for seconds in (1.0, 2.0, 50.0)]
    runs = (("slow", 10.0), ("fast", 4.0), ("fast", 5.0), ("fast", 100.0), (writing.PLAIN, 1.0))
    lines += [wrote(*one) for one in runs]
    assert writing.ratio(lines, "vectors") == pytest.approx(2.5)
    assert writing.ratio(lines, "vectors", plain=True) == pytest.approx(0.5)
    failed = {key: value for key, value in wrote("slow", 1.0).items() if key != "seconds"}
    text = writing.write([*lines, {**failed, "failed": "no end"}], tmp_path).read_text()
    assert "- vectors, slow: no end" in text
    assert "| **streamloader** | 50 | 2 to 100 | 2.50 (target 2) | 0.50 | 3 | 90 |" in text
    assert (tmp_path / "conversion.png").stat().st_size > 5000


@pytest.mark.long
def test_our_contestants_write_what_they_are_given(tmp_path):
    raw = prepare("tokens", 200, tmp_path / "data")
    array = tmp_path / "array"
    array.mkdir()
    np.save(array / "rows.npy", np.random.default_rng(0).integers(0, 256, (500, 8192), np.uint8))
    tokens = conversion.measure(conversion.OURS, "tokens", raw)
    plain = conversion.measure(conversion.PLAIN, "npy", array)
    assert "failed" not in tokens | plain, (tokens, plain)
    assert tokens["samples"] == 200
    assert tokens["objects"] > 3
    assert tokens["peak_bytes"] > tokens["shard_bytes"] > 0
    assert plain["stored_bytes"] == (array / "rows.npy").stat().st_size


def test_orders_are_compared_step_by_step_and_say_what_is_lost_and_repeated():
    whole = [[1, 2], [3, 4]]
    for found, text in (
        ([[2, 1], [3, 4]], "the same"),
        ([[3, 4], [1, 2]], "another order"),
        ([[1, 3], [2, 4]], "another order"),
        ([[1, 2]], "differs: 2 lost, 0 repeated of 4"),
        ([[1, 2], [3, 3], [4]], "differs: 0 lost, 1 repeated of 4"),
    ):
        assert exactness.compared(whole, found) == text


# --- training on a device


def event(name, category, begin, duration, tid=7, **args):
    """An event of a trace of torch.profiler, in microseconds."""
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": duration, "tid": tid, "pid": 0, "args": args}


def a_trace(*more):
    """Ten steps of 100 us: a kernel from 10 to 90 on stream 7, and a copy of 1000 bytes from 50 to 70 on stream 13."""
    found = list(more)
    for begin in range(0, 1000, 100):
        found += [
            event("next", "user_annotation", begin, 5, tid=1),
            event("step", "user_annotation", begin + 5, 90, tid=1),
            event("step", "gpu_user_annotation", begin + 10, 80),
            event("gemm", "kernel", begin + 10, 80),
            event("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", begin + 50, 20, tid=13, bytes=1000),
        ]
    return found


def test_a_trace_tells_what_overlaps_and_what_waits_for_the_stream_of_the_kernels():
    found = device_trace.summary(a_trace())
    assert found["steps"] == 6 and found["kernels"] == 6 and found["copied_bytes"] == 6000
    assert (found["overlap"], found["idle"]) == (1.0, pytest.approx(100 / 580, abs=1e-4))
    assert found["blocking"] == {} and found["elsewhere"] == {}
    waits = [
        event("cudaStreamSynchronize", "cuda_runtime", 50, 9, tid=1, correlation=1),  # before the steps that count
        event("cudaStreamSynchronize", "cuda_runtime", 550, 9, tid=1, correlation=2),
        event("Stream Sync", "cuda_sync", 550, 9, correlation=2, stream=7),
        event("cudaStreamSynchronize", "cuda_runtime", 650, 9, tid=2, correlation=3),
        event("Stream Sync", "cuda_sync", 650, 9, tid=13, correlation=3, stream=13),
        event("cudaDeviceSynchronize", "cuda_runtime", 750, 9, tid=1, correlation=4),
        event("cudaEventSynchronize", "cuda_runtime", 760, 9, tid=1, correlation=5),
        event("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 780, 20, bytes=1000),  # beside its own stream alone
    ]
    waits.append(event("cudaEventSynchronize", "cuda_runtime", 801, 2, tid=1, correlation=6))  # in next()
    waits.append(event("cudaEventSynchronize", "cuda_runtime", 802, 2, tid=2, correlation=7))  # of another thread
    found = device_trace.summary(a_trace(*waits))
    assert found["event_waits"] == 1
    assert found["blocking"] == {"cudaStreamSynchronize": 1, "cudaDeviceSynchronize": 1}
    assert found["elsewhere"] == {"cudaStreamSynchronize": 1} and found["copied_bytes"] == 7000
    assert found["overlap"] == pytest.approx(120 / 140, abs=1e-4)
    rows = device_trace.timeline(a_trace(*waits))
    assert set(rows) == {"next()", "stream 7, kernels", "stream 13, copies", "stream 7, copies"}
    assert rows["stream 7, kernels"] == [(0, 0.08), (0.1, 0.18), (0.2, 0.28)]
    with pytest.raises(ValueError, match="the trace has 0 steps; 5 are needed"):
        device_trace.summary([])


def trained(model, feed, rate, **more):
    """A line of the bench of devices: 10 steps a second, 1000 images/s with the data on the device."""
    bound = {"steps": 10, "seconds": 1.0, "next_seconds": 0.0, "cpu_seconds": 0.9, "other_threads_seconds": 0.5}
    bound |= {"next_cpu_seconds": 0.0, "peak_bytes": 1000, "outside_bytes": 50}
    fed = {**bound, "next_seconds": 0.02, "cpu_seconds": 0.95, "next_cpu_seconds": 0.01, "peak_bytes": 1150}
    trace = {"steps": 6, "kernels": 9, "streams": 2, "idle": 0.01, "blocking": {}, "elsewhere": {}, "copies": 6}
    trace |= {"copied_bytes": 6e6, "overlap": 0.9, "file": "x.json.gz"}
    line = {"run": "2", "time": "2026-12-01", "kind": "train", "model": model, "feed": feed, "unit": "images"}
    line |= {"rate": rate, "bound_rate": 1000.0, "batch_bytes": 100, "ahead": 2, "bound": bound, "fed": fed}
    line |= {"stats": {"device_wait_seconds": 0.04}, "trace": trace, **describe()}
    return {**line, "server": "nginx", "device": {"name": "NVIDIA X"}, "small": False, **more}


def test_targets_are_met_missed_or_not_measured():
    def verdicts(lines):
        return [one.verdict for one in device_page.targets(lines)]

    good = [trained(model, feed, 980) for model in ("resnet50", "resnet18") for feed in ("raw", "jpeg", "nvjpeg")]
    assert verdicts(good) == ["met"] * 8
    assert verdicts([{**one, "device": {"name": "cpu"}} for one in good]) == ["not measured"] * 8
    assert verdicts([{**one, "small": True} for one in good]) == ["not measured"] * 8
    waits = {**good[0]["trace"], "blocking": {"cudaStreamSynchronize": 2}}
    fed = {**good[0]["fed"], "peak_bytes": 1301, "other_threads_seconds": 0.6}  # 0.01 s of a core and 4.01 batches
    bad = trained("resnet50", "raw", 960, trace=waits, fed=fed, bound_trace={"blocking": {"cudaMemcpy": 1}, "idle": 0})
    assert verdicts([bad]) == ["missed", *["not measured"] * 4, "missed", "missed", "missed"]
    values = {one.figure: one.value for one in device_page.targets([bad])}
    assert list(values.values())[-3:] == pytest.approx([0.11, 1, 4.01])
    beside = {**good[0]["fed"], "outside_bytes": 250}  # what nvJPEG allocates counts
    assert device_page.memory_batches(trained("resnet50", "nvjpeg", 980, fed=beside)) == pytest.approx(4.5)


def test_the_page_of_devices_has_every_run_newest_first_and_what_failed(tmp_path):
    lines = [json.loads(text) for text in (ROOT / "bench/results/device.jsonl").read_text().splitlines()]
    lines = [one for one in lines if one["time"].startswith("2026-11-26")]
    failed = {"kind": "train", "model": "resnet18", "feed": "nvjpeg", "failed": "RuntimeError: no"}
    lines += [trained("resnet50", "raw", 980), trained("resnet50", "jpeg", 900, trace={"failed": "x", "file": "y"})]
    (tmp_path / "x-traces").mkdir()
    (tmp_path / "x-traces" / "y").write_bytes(b"no trace")
    lines += [{**trained("", "", 0), "kind": "nvjpeg", "failed": "no | decoder"}]
    rates = {"torchcodec": 31_000.0, "torchvision": 30_000.0}
    lines += [{**trained("", "", 0), "kind": "nvjpeg", "rates": rates, "batch": 256}]
    lines = [{**one, "run": "3" if one["time"] == "2026-12-01" else one["run"]} for one in lines]
    (tmp_path / "x.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in [*lines, {**lines[-1], **failed}]))
    page = device_page.write("x", tmp_path).read_text()
    assert page.index("## 2026-12-01") < page.index("## 2026-11-26")
    assert "| ResNet-50 raw, share of the bound | >= 0.97 | 0.98 | met |" in page
    assert "| **raw** | 980 | 0.980 | 2.0% | 4.0% | 1.0% | 5.00 | 5.0% | 2.50 |" in page
    assert "| resnet50 raw | 6 | 2 | 1.0 | 90.0% | none | none |" in page
    assert "- resnet18 nvjpeg not measured: RuntimeError: no" in page
    for package, rate in {"torchcodec": "31,000", "torchvision": "30,000"}.items():
        assert f"- nvJPEG through {package}: {rate} images/s, batches of 256." in page
    assert "| raw .to(device) | 3,710 | 0.79 |" in page and "16.5 GB/s from ordinary memory, 54.1 GB/s" in page
    assert (tmp_path / "x.png").stat().st_size > 5000 and "![x.png](x.png)" in page


def test_only_the_loader_on_a_gpu_tells_for_how_long_the_device_waited():
    titles = device_page.of_model([trained("resnet50", "raw", 980)]).splitlines()[2].split(" | ")
    column = titles.index("waited on the device")
    for feed, name, told in (("raw", "NVIDIA X", "4.0%"), ("raw", "cpu", ""), ("raw .to(device)", "NVIDIA X", "")):
        assert device_page.row(trained("resnet50", feed, 980, device={"name": name}))[column] == told
    assert device_page.row(trained("resnet50", "raw", 980, batch_bytes=2e8))[-2:] == ["1.00", "200.0"]
    assert len(titles) == len(device_page.row(trained("resnet50", "raw", 980)))


def test_the_page_says_that_no_run_of_the_loader_is_there_until_one_is():
    by_hand, small = trained("resnet50", "raw .to(device)", 980), trained("resnet50", "raw", 980, small=True)
    assert device_page.NONE_YET in " ".join(device_page.markdown([[by_hand, small]]).split())
    assert device_page.NONE_YET not in " ".join(device_page.markdown([[by_hand], [trained("", "raw", 9)]]).split())


def test_the_data_of_devices_is_written_within_the_limit(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(device, "photographs", lambda _: None)
    monkeypatch.setattr(device, "ProcessPoolExecutor", lambda **_: ThreadPoolExecutor())
    monkeypatch.setattr(cores, "make", lambda *_: None)
    monkeypatch.setattr(cores, "store", lambda *_, timeout: given.append(timeout) or "")
    options = device.parser().parse_args(["--data", str(tmp_path)])
    options.counts = {"images": 1}
    for left in (100, -1):
        device.make_all(options, time.monotonic() + left)
    assert given == [pytest.approx(100, abs=5), 1]


def test_what_the_loader_feeds_comes_first_and_nothing_begins_near_the_end(tmp_path):
    ours = [run.feed in device_page.OURS for run in device.RUNS]
    assert ours == sorted(ours, reverse=True) and sum(ours) == 7
    stream, server = io.StringIO(), Endpoint("files", "")
    bench = Bench(Settings(True, "x"), Place(server, server), Show(stream, 60.0), results=tmp_path)
    assert device.measure(bench, {"extra": {}}, device.RUNS[:2], time.monotonic() + 5, together=False)
    assert stream.getvalue().count("no time left") == 2 and not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_quick_run_trains_on_the_cpu_from_data_to_page(tmp_path, photos):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "photos").symlink_to(photos)
    command = ["-m", "bench.device", "--device", "cpu", "--quick", "--seconds", "0.01", "--results", str(tmp_path)]
    runs = ["resnet50 raw", "transformer tokens", "copies", "nvjpeg", "resnet50 nvjpeg", "resnet18 raw .to(device)"]
    done = run_python(*command, "--data", str(tmp_path / "data"), "--only", *runs, cwd=ROOT)
    lines = [json.loads(text) for text in (tmp_path / "device.jsonl").read_text().splitlines()]
    found = {f"{one['model']} {one['feed']}".strip() or one["kind"]: one for one in lines}
    assert set(found) == set(runs) and not any("failed" in one for one in lines), done.stderr
    for name in (runs[0], runs[1], *runs[4:]):
        one = found[name]
        assert one["rate"] > 0 and one["bound_rate"] > 0 and one["device"] == {"name": "cpu"} and one["small"]
        assert one["fed"]["steps"] >= 5 and one["fed"]["next_seconds"] > 0 and one["fed"]["cpu_seconds"] > 0
    assert found["resnet50 raw"]["bound_trace"]["steps"] == found["resnet50 raw"]["trace"]["steps"] == 6
    assert found["resnet50 raw"]["stats"]["batches"] >= 5
    assert found["nvjpeg"]["unsupported"] == "nvJPEG needs CUDA"
    page = (tmp_path / "device.md").read_text()
    assert "### resnet50 (a small model instead)" in page and "| >= 0.97 |  | not measured |" in page
    assert (tmp_path / "device-streams.png").stat().st_size > 5000
