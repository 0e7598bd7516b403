"""`streamloader view`: its pages show what training got, escape everything, and answer only who has the link."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPException
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from aiohttp.test_utils import make_mocked_request
from commands import COMMAND, run
from datasets import SMALL, encoded, our_threads, picture
from folder_server import folder_server
from viewing import FIELDS, HOSTILE, Client, serving, value

import streamloader as sl
from streamloader.cli.view import view, view_options
from streamloader.errors import StateError, UsageError
from streamloader.loader.dataset import NumpyMixture
from streamloader.options import Sampling
from streamloader.view import overview as view_overview
from streamloader.view import viewer as viewer_module
from streamloader.view.facts import histogram, statistics
from streamloader.view.losses import read_losses
from streamloader.view.run import Run, RunOptions, read_json
from streamloader.view.server import Guard, Server
from streamloader.view.viewer import Viewer, ViewOptions, load_tokenizer

COUNT = 200
STORED = re.compile(r'href="/sample\?number=(\d+)')


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The URL of a dataset with fields of every kind, and class names that a page must escape."""
    path = tmp_path_factory.mktemp("viewed") / "d"
    with sl.Writer(path, FIELDS, layout=SMALL, provenance={"classes": {"label": ["ant", "bee", HOSTILE]}}) as writer:
        for i in range(COUNT):
            writer.write(value(i))
    return str(path)


@pytest.fixture(scope="module")
def client(url):
    """A client of a viewer of it, whose run has two ranks."""
    decode = {"image": sl.Decode(size=(32, 48), crop="random", normalize="imagenet", boxes="boxes")}
    given = {"batch_size": 6, "seed": 3, "decode": decode}
    options = ViewOptions(RunOptions(url, given=given, world_size=2), tokens=load_tokenizer("bytes"))
    with serving(options) as client:
        yield client


def shown(page):
    """The numbers of the samples that a page shows."""
    assert page.status == 200, page.text
    return [int(number) for number in STORED.findall(page.text)]


PAGES = ["/step", "/samples", "/sample?number=7", "/fields", "/statistics", "/order", "/plan"]
PAGES += [f"/statistics?field={name}" for name in FIELDS]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_html_that_loads_nothing_from_elsewhere_and_has_no_tag_of_the_data(page, client):
    answer = client.get(page)
    assert answer.status == 200, answer.text
    assert answer.headers["Content-Type"].startswith("text/html")
    assert all(address.startswith("/") and not address.startswith("//") for address in answer.addresses)
    assert "<script>" not in answer.text
    assert "<img src=x" not in answer.text
    for address in {each for each in answer.addresses if not each.startswith("/media/")}:
        assert client.get(address).status == 200, address
    for address in answer.media[:12]:
        kind = client.get(address).headers["Content-Type"]
        assert kind in ("image/png", "image/jpeg", "audio/wav"), kind


def test_a_step_shows_the_samples_and_the_crops_that_training_got(client, url):
    decode = {"image": sl.Decode(size=(32, 48), crop="random", normalize="imagenet", boxes="boxes", with_crop=True)}
    trained = sl.NumpyDataset(url, batch_size=6, seed=3, decode=decode, with_index=True, world=(1, 2), num_workers=0)
    for epoch, step in [(0, 0), (0, 5), (2, 3)]:
        page = client.get(f"/step?epoch={epoch}&step={step}&rank=1")
        (batch,) = trained.replay(epoch, [step])
        assert shown(page) == batch["index"].tolist() == trained.samples(epoch, step, rank=1).tolist()
        crops = re.findall(r"number=\d+&amp;crop=([\d%C]+)", page.text)
        assert [crop.split("%2C") for crop in crops] == batch["image_crop"][:, :4].astype(str).tolist()


def test_a_step_without_its_epoch_counts_from_the_beginning_of_epoch_0(client):
    steps = int(re.search(r"of (\d+)</label>", client.get("/step").text)[1])
    assert steps == -(-COUNT // 12)
    assert shown(client.get(f"/step?step={2 * steps + 3}&rank=1")) == shown(client.get("/step?epoch=2&step=3&rank=1"))


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("/step?epoch=0&step=999", "step 999 of epoch 0, which has 17 steps"),
        ("/step?rank=2", "rank 2 of 2"),
        ("/step?step=-1", "give a whole number"),
        ("/step?step=1e9", "give a whole number"),
        ("/samples?page=99", "epoch 0, which has 4 steps"),
        ("/samples?where=" + quote("lable == 1"), "label"),
        ("/samples?where=" + quote("__import__('os')"), "SL106"),
        ("/samples?where=0:" + "9" * 5000, "SL106"),
        ("/samples?split=train", "split"),
        ("/sample?number=200", "SL106"),
        ("/statistics?field=nothing", "nothing"),
        ("/losses", "--losses"),
        ("/live", "--live"),
    ],
)
def test_what_is_not_there_is_said(page, problem, client):
    answer = client.get(page)
    assert answer.status == 400, answer.text
    assert problem in answer.text


def test_samples_are_paged_in_stored_order_and_chosen_by_conditions(client):
    assert shown(client.get("/samples")) == list(range(60))
    assert shown(client.get("/samples?page=3")) == list(range(180, 200))
    assert shown(client.get("/samples?where=" + quote("label == 1 and flag"))) == list(range(4, 200, 6))[:60]
    assert shown(client.get("/samples?where=20:30")) == list(range(20, 30))
    name = HOSTILE.replace('"', '\\"')
    chosen = client.get("/samples?where=" + quote(f'label == "{name}"'))
    assert shown(chosen) == list(range(2, 200, 3))[:60]
    assert "<script>" not in chosen.text


def test_a_sample_has_the_stored_bytes_and_its_crop(client):
    page = client.get("/sample?number=7&crop=1,2,30,40")
    assert value(7)["image"] in [client.get(each).body for each in page.media]
    assert '<rect x="2" y="1" width="40" height="30">' in page.text
    assert "<rect" not in client.get("/sample?number=0&crop=1,2,x,4").text
    assert "&lt;script&gt;" in page.text


def test_samples_of_another_split_lead_to_theirs(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(100))
    sl.convert(tmp_path / "x.npy", tmp_path / "d", split={"train": 0.7, "val": 0.3}, workers=0)
    values = sl.open(tmp_path / "d", split="val").read("x", 0, 5).tolist()
    with serving(ViewOptions(RunOptions(str(tmp_path / "d"), given={"split": "train"}))) as client:
        assert "<option selected>train</option>" in client.get("/samples").text
        page = client.get("/samples?split=val")
        link = next(each for each in page.addresses if each.startswith("/sample?number=4"))
        text = client.get(link).text
        assert "Sample 4 of val" in text
        assert f">{values[4]}</span>" in text
        assert client.get("/sample?number=4").text != text


def test_players_get_the_ranges_that_they_ask_for(client):
    sound = next(
        each for each in client.get("/samples").media if client.get(each).headers["Content-Type"] == "audio/wav"
    )
    whole = client.get(sound).body
    part = client.get(sound, Range="bytes=10-19")
    assert (part.status, part.body, part.headers["Content-Range"]) == (206, whole[10:20], f"bytes 10-19/{len(whole)}")
    assert client.get(sound, Range="bytes=-5").body == whole[-5:]
    assert client.get(sound, Range=f"bytes={len(whole)}-").status == 416
    assert client.get(sound, Range="bytes=9-3").status == 416


def test_statistics_are_those_of_all_values_or_say_that_they_are_sampled(client, url, monkeypatch):
    text = client.get("/statistics?field=plane").text
    values = np.stack([value(i)["plane"] for i in range(COUNT)])
    assert f"all {values.size:,} values (exact)" in text
    assert f"<dd>{values.mean():.6g}</dd>" in text
    lengths = client.get("/statistics?field=tokens").text
    assert "lengths in elements, of all 200 samples (exact)" in lengths
    assert "<dt>max</dt><dd>89</dd>" in lengths
    classes = client.get("/statistics?field=label").text
    assert '<td>ant</td><td class="number">67</td>' in classes
    assert "<details open>" in classes
    assert not re.search("<dt>(min|max|mean|std|median)</dt>", classes)
    monkeypatch.setattr("streamloader.view.facts.EXACT_BYTES", 0)
    monkeypatch.setattr("streamloader.view.facts.EXACT_LENGTHS", 0)
    with serving(ViewOptions(RunOptions(url))) as other:
        assert "(sampled)" in other.get("/statistics?field=plane").text
        assert "(sampled)" in other.get("/statistics?field=tokens").text


def test_statistics_that_were_saved_in_the_dataset_are_shown_too(tmp_path, capsys):
    values = np.random.default_rng(0).normal(3, 2, (500, 4)).astype(np.float32)
    np.save(tmp_path / "x.npy", values)
    sl.convert(tmp_path / "x.npy", tmp_path / "d", workers=0)
    assert run(capsys, "stats", tmp_path / "d", "--save")[0] == 0
    with serving(ViewOptions(RunOptions(str(tmp_path / "d")))) as client:
        (field,) = sl.open(tmp_path / "d").fields
        text = client.get(f"/statistics?field={field}").text
    assert re.search(rf"<dt>saved mean</dt><dd>{values.astype(np.float64).mean():.6g}<", text)


def test_the_order_names_the_blocks_of_each_step(client, url):
    loader = sl.NumpyDataset(url, batch_size=6, seed=3, world=(0, 2), num_workers=0)
    block = loader._start.sources[0].params.block
    text = client.get("/order?epoch=1&step=4").text
    for step in range(4, 10):
        blocks = sorted(set((loader.samples(1, step) // block).tolist()))
        assert f"<td>{step}</td>" in text
        assert ", ".join(map(str, blocks[:24])) in text


def test_the_plan_follows_lanes_window_ranks_and_memory(client):
    run_of = client.get("/plan").text
    more = client.get("/plan?lanes=8&window=64&world_size=8").text
    assert "by 8 ranks" in more
    assert "8 lanes, window 64" in more
    assert "USD" in run_of
    assert "the variance of its mean is at most" in run_of
    assert "design effect" not in run_of
    assert "SL103" in client.get("/plan?memory=1&window=200&lanes=64&batch_size=64").text  # too little memory
    assert "whole number" in client.get("/plan?memory=x").text
    assert "give at most 16,777,216" in client.get("/plan?batch_size=99999999999&world_size=7").text


def test_only_who_has_the_link_is_answered(client):
    link = f"/step?token={client.cookie.partition('=')[2]}"
    assert client.get("/step").status == 200
    assert client.get("/step", Cookie="").status == 403
    assert client.get("/step", Cookie=client.cookie[:-1] + "_").status == 403
    assert client.get("/step", Cookie=client.cookie.partition("=")[0] + "=\xff").status == 403
    assert client.get("/step?token=x", Cookie="").status == 403
    assert client.get(link, Cookie="").headers["Location"] == "/step"
    assert client.get("/media/abc", Cookie="").status == client.get("/static/page.js", Cookie="").status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},  # a name that DNS was rebound to this machine
        {"Host": "evil.example:80"},
        {"Host": "127.0.0.1:80:80"},
        {"Host": "127.0.0.1:99999"},
        {"Host": "xn--"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors", "Sec_Fetch_Dest": "image"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "iframe"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"},
    ],
    ids=str,
)
def test_requests_of_other_origins_are_refused(headers, client):
    answer = client.get("/step", **headers)
    assert answer.status == 403
    assert "sample" not in answer.text


def test_a_host_name_may_have_capital_letters():
    request = make_mocked_request("GET", "/?token=t", headers={"Host": "Desktop-1:80"})
    assert Guard("Desktop-1", "t").problem(request, "") == ""


@pytest.mark.parametrize(
    "path", ["/?path=x", "//evil.example/x?token=", "/\\evil.example?token=", "/%0d%0aX:%20y?token="]
)
def test_a_redirect_stays_on_this_server(path, client):
    answer = client.get(path)
    assert answer.status == 303
    assert re.match(r"/[\w%]", answer.headers["Location"])
    assert "X" not in answer.headers


def test_every_answer_forbids_frames_foreign_files_and_guesses_of_its_type(client):
    for page in ("/step", "/nothing", "/static/style.css", client.get("/samples").media[0]):
        headers = client.get(page).headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert not {"Access-Control-Allow-Origin"} & set(headers)


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/static/x"]
)
def test_no_other_file_is_served(path, client):
    assert client.get(path).status == 404


def rows(page):
    """(loss, epoch, step, rank, row) of each sample that a page of losses shows."""
    found = re.findall(r"<h2>([\w. +-]+)</h2>\s*<p><a[^>]*>epoch (\d+), step (\d+), rank (\d+), row (\d+)<", page.text)
    return [(loss, *map(int, place)) for loss, *place in found]


@pytest.mark.parametrize("folder", [False, True])
def test_a_log_of_losses_leads_from_a_spike_to_its_samples(folder, url, tmp_path):
    where = f"{tmp_path}/losses/" if folder else str(tmp_path / "losses.jsonl")
    given = {"batch_size": 6, "seed": 8, "with_index": True, "num_workers": 0, "shuffle": sl.Shuffle(lanes=2)}
    loaders = [sl.NumpyDataset(url, world=(rank, 2), **given) for rank in (0, 1)]
    spike = None
    for rank, loader in enumerate(loaders):
        with sl.LossLog(loader, where) as log:
            for epoch in range(2):
                for step, batch in enumerate(loader):
                    losses = np.linspace(1, 2, 6) / (1 + epoch)
                    if (epoch, step, rank) == (1, 4, 1):
                        losses[2], losses[3], spike = 50, np.nan, batch["index"]
                    log(batch, losses)
    options = ViewOptions(RunOptions(None), losses=where)
    with serving(options) as client:
        page = client.get("/losses")
        assert rows(page)[:2] == [("not finite", 1, 4, 1, 3), ("50", 1, 4, 1, 2)]
        assert [row[0] for row in rows(page)[2:4]] == ["2", "2"]
        assert int(STORED.findall(page.text)[0]) == spike[3]
        link = next(each for each in page.addresses if each.startswith("/step?epoch=1&step=4&rank=1&row=2"))
        step = client.get(link)
        assert shown(step) == spike.tolist()
        assert step.text.count("sample chosen") == 1
        pages = [rows(client.get(f"/losses?page={n}")) for n in range(-(-2 * COUNT // 60))]
        assert sum(map(len, pages)) == 2 * COUNT  # of two epochs, without padding
        assert "<title>epoch 1, step 4: not finite</title>" in page.text
        assert page.text.count("<circle") == 2 * -(-COUNT // 12) - 1


def test_steps_of_a_mixture_are_those_of_the_log_also_after_its_weights_changed(tmp_path):
    urls = [written(tmp_path / f"{n}", {"x": "int64"}, [{"x": i} for i in range(n)]) for n in (500, 400)]
    mixture = NumpyMixture(dict.fromkeys(urls, 0.5), batch_size=8, with_index=True, num_workers=0)
    trained = []
    with sl.LossLog(mixture, tmp_path / "l.jsonl") as log:
        for batch in islice(mixture, 30):
            log(batch, np.ones(8))
            trained.append([*zip(batch["source"].tolist(), batch["index"].tolist(), strict=True)])
            if len(trained) == 10:
                mixture.set_weights({urls[0]: 0.9, urls[1]: 0.1})
    mixture.close()
    found = read_losses(str(tmp_path / "l.jsonl"), {})
    assert (found.others, len(found.means)) == (0, 30)
    viewer = Viewer(ViewOptions(RunOptions(None), losses=str(tmp_path / "l.jsonl")))
    for step in (0, 9, 10, 15, 29):
        rows = viewer.step(viewer.run.place(step, 0, 0))["rows"]
        assert [(row.index["source"], row.index["index"]) for row in rows] == trained[step]
    viewer.close()


def logged(url, where, size, seed, first, steps, loss):
    """Log the losses of some steps of a run that begins at a step."""
    loader = sl.NumpyDataset(url, batch_size=size, seed=seed, with_index=True, num_workers=0)
    batches = iter(loader)
    for _ in range(first):
        next(batches)
    with sl.LossLog(loader, where) as log:
        for _ in range(steps):
            log(next(batches), np.full(size, loss))


def test_steps_that_are_logged_again_have_their_last_losses_and_other_runs_are_left_out(url, tmp_path):
    where = tmp_path / "losses.jsonl"
    logged(url, where, 8, 1, 0, 6, 1.0)
    logged(url, where, 8, 1, 4, 3, 9.0)  # resumed at step 4
    with serving(ViewOptions(RunOptions(None), losses=str(where))) as client:
        page = client.get("/losses")
        assert {(row[2], row[0]) for row in rows(page)} == {(s, "9" if s > 3 else "1") for s in range(7)}
        assert "other runs" not in page.text
        assert client.get("/step?epoch=0&step=5").text.count(", loss 9<") == 8
    logged(url, where, 4, 2, 0, 2, 3.0)  # another run
    with serving(ViewOptions(RunOptions(None), losses=str(where))) as client:
        page = client.get("/losses")
        assert [row[0] for row in rows(page)] == ["3"] * 8
        assert "The log has 7 lines of other runs" in page.text
        assert "batches of 4" in client.get("/step").text


OTHERS = [{"world_size": "x"}, {"world_size": None}, {"arguments": {}}, {"arguments": {"a": 1}}]
OTHERS += [{"sources": []}, {"sources": [{}]}, {"sources": [{"url": 3}]}, {"left_out": 3}]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_a_description_of_anything_else_is_an_error(change, url):
    description = sl.NumpyDataset(url, batch_size=6, num_workers=0).describe() | change
    with pytest.raises(UsageError):
        Run(RunOptions(None, description=description))


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "3", "\xff"], ids=lambda text: text[:9])
def test_a_state_that_is_no_object_of_json_is_an_error(text, tmp_path):
    (tmp_path / "state.json").write_text(text, encoding="latin-1")
    with pytest.raises(StateError):
        read_json(str(tmp_path / "state.json"), {})


@pytest.mark.parametrize("first", [{"run": 3, "state": {}}, {"run": {}, "state": [3]}])
def test_a_log_that_begins_with_no_description_is_an_error(first, tmp_path):
    (tmp_path / "losses.jsonl").write_text(json.dumps(first) + "\n")
    with pytest.raises(StateError):
        read_losses(str(tmp_path / "losses.jsonl"), {})


def test_a_log_of_losses_refuses_other_shapes_and_other_files(url, tmp_path):
    loader = sl.NumpyDataset(url, batch_size=6, num_workers=0)
    log = sl.LossLog(loader, tmp_path / "l.jsonl")
    batch = next(iter(loader))
    with pytest.raises(UsageError, match=r"losses of shape \(\) for a batch of 6 samples"):
        log(batch, np.float32(3))
    for count in (5, 7, 12):
        with pytest.raises(UsageError, match=rf"losses of shape \({count},\) for a batch of 6 samples"):
            log(batch, np.zeros(count))
    (tmp_path / "other.jsonl").write_text('{"loss": [1]}\n')
    with pytest.raises(StateError, match=r"lacks 'epoch'"):
        serving(ViewOptions(RunOptions(url), losses=str(tmp_path / "other.jsonl"))).__enter__()


def test_a_running_training_is_shown_by_its_file_and_by_its_port(url, tmp_path):
    loader = sl.NumpyDataset(url, batch_size=6, num_workers=0, world=(1, 2))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with sl.metrics.StatsFile(loader, tmp_path, seconds=0.05), sl.metrics.serve(loader, port=0) as server:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob("rank-*.json")) and time.monotonic() < deadline:
            next(batches)
        for where in (str(tmp_path), server.url):
            with serving(ViewOptions(RunOptions(url), live=where)) as client:
                text = client.get("/live").text
                assert re.search(r"<td>1</td><td class=\"number\">0</td>", text)
                assert "samples/s" in text
                assert "Steps count from the beginning of epoch 0" in text
                assert "<section data-part>" in client.get("/live?part=1").text


def test_windows_of_arrays_in_place_are_frames_and_patches_are_drawn_on_their_array(tmp_path):
    import zarr

    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=3)
    values = np.arange(40 * 32 * 48, dtype=np.float32).reshape(40, 32, 48)
    for name in ("t", "<b>u"):
        array = group.create_array(
            name, shape=values.shape, chunks=(4, 32, 48), dtype="f4", dimension_names=("time", "y", "x")
        )
        array[:] = values
    windows = sl.Window(history=3, lead=1)
    options = {"batch_size": 4}
    run_of = RunOptions(str(tmp_path / "a.zarr"), given=options, sampling=Sampling(sample_axis="time", windows=windows))
    with serving(ViewOptions(run_of)) as client:
        page = client.get("/step?step=2")
        assert "&lt;b&gt;u" in page.text
        assert "<b>u" not in page.text
        assert page.text.count('class="cell frames"') == 8
        assert re.findall(r'class="about">(t[-+\d]*)<', page.text)[:8] == [*["t-2", "t-1", "t"] * 2, *["t+1"] * 2]
        assert "<h2>index " in page.text
        for other in ("/samples", "/fields", "/statistics", "/statistics?field=t", "/order", "/plan"):
            assert client.get(other).status == 200, other
    patches = sl.Patch({"y": 16, "x": 16})
    run_of = RunOptions(str(tmp_path / "a.zarr"), given=options, sampling=Sampling(sample_axis="time", patches=patches))
    with serving(ViewOptions(run_of)) as client:
        page = client.get("/step")
        places = re.findall(r'<rect x="(\d+)" y="(\d+)" width="16" height="16"><title>row', page.text)
        loader = sl.NumpyDataset(
            str(tmp_path / "a.zarr"), batch_size=4, sample_axis="time", patches=patches, with_index=True
        )
        (batch,) = loader.replay(0, [0])
        expected = zip(batch["index_x"].tolist(), batch["index_y"].tolist(), strict=True)
        assert [tuple(map(int, place)) for place in places] == list(expected)
        assert "32 x 48" in page.text


def test_packed_rows_mixtures_and_clips_are_shown(url, tmp_path):
    packed = sl.NumpyDataset(
        url, batch_size=2, fields=["tokens"], pack={"tokens": sl.Pack(65, fit="best")}, num_workers=0
    )
    with serving(
        ViewOptions(RunOptions(None, description=packed.describe()), tokens=load_tokenizer("bytes"))
    ) as client:
        text = client.get("/step").text
        assert text.count('class="document"') > 4
        assert "tokens_documents" not in text
        assert "tokens_positions" not in text
    a, b = sl.Source(url, where=slice(0, 90)), sl.Source(url, where=slice(90, 200))
    mixture = NumpyMixture({a: 0.5, b: 0.5}, batch_size=8, fields=["label"], num_workers=0, with_index=True)
    with serving(ViewOptions(RunOptions(None, description=mixture.describe()))) as client:
        (batch,) = mixture.replay(0, [1])
        found = re.findall(r"<h2>source (\d+) index (\d+)", client.get("/step?step=1").text)
        assert [int(source) for source, _ in found] == batch["source"].tolist()
        assert [int(index) for _, index in found] == batch["index"].tolist()
        assert "streamloader plan" in client.get("/order").text


def test_pack_means_the_same_to_view_and_to_plan(url):
    context = view.make_context("view", [url, "--fields", "tokens", "--pack", "tokens=65"])
    left_out = "step", "epoch", "rank", "host", "port", "no_browser", "as_json"
    given = {name: value for name, value in context.params.items() if name not in left_out}
    given["step"] = given.pop("window_step")
    opened = Run(view_options(given).run)
    (rows,) = opened.loader.replay(0, [0])
    opened.close()
    assert rows["tokens"].shape == (32, 65)
    assert "tokens_documents" in rows
    assert opened.loader._fields == ("tokens",)


def test_numbers_that_are_no_tokens_are_shown_as_numbers():
    assert load_tokenizer("bytes")([97, 0, 255, 256, -100, 2**40]) == ["a", "\0", "ÿ", "<256>", "<-100>", f"<{2**40}>"]


def test_a_private_bucket_is_shown_since_the_process_has_the_keys(url, moto):
    target = moto.url("viewed")
    client = moto.client()
    bucket, _, key = target.removeprefix("s3://").partition("/")
    for path in Path(url).rglob("*"):
        if path.is_file():
            client.put_object(Bucket=bucket, Key=f"{key}/{path.relative_to(url)}", Body=path.read_bytes())
    client.close()
    with serving(ViewOptions(RunOptions(target, storage_options=moto.storage_options))) as viewer:
        assert len(shown(viewer.get("/step"))) == 32
        pages = "".join(viewer.get(page).text for page in PAGES)
        assert moto.secret not in pages
        assert target in pages


def test_the_command_prints_its_link_and_ends_by_ctrl_c(url, tmp_path, ctrl_c):
    state = tmp_path / "state.json"
    loader = sl.NumpyDataset(url, batch_size=4, seed=6, num_workers=0, world=(0, 4))
    state.write_text(json.dumps(loader.state_dict()))
    place = ["--state", state, "--step", "21", "--rank", "2", "--batch-size", "4", "--world-size", "4"]
    command = [*COMMAND, "view", url, *place, "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed = json.loads(process.stdout.readline())
            assert printed["url"] == url
            client = Client(printed["link"])
            assert client.first == "/step?step=21&rank=2"
            steps = -(-COUNT // 16)
            assert shown(client.get(client.first)) == loader.samples(1, 21 - steps, rank=2).tolist()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_the_command_says_what_is_wrong(url, tmp_path, capsys):
    assert "no dataset; give its URL" in run(capsys, "view")[2]
    assert "--host is empty; give an address" in run(capsys, "view", url, "--host", "", "--no-browser")[2]
    assert "without --image-size" in run(capsys, "view", url, "--crop", "random", "--no-browser")[2]
    (tmp_path / "x.json").write_text("{")
    assert "is not JSON" in run(capsys, "view", url, "--state", tmp_path / "x.json")[2]
    assert "there is no log of losses at" in run(capsys, "view", url, "--losses", tmp_path / "none.jsonl")[2]
    wrong = run(capsys, "view", url, "--epoch", 0, "--step", 9999, "--no-browser")[2]
    assert re.search(r"step 9999 of epoch 0, which has \d+ steps; give 0 to \d+", wrong)
    assert "write it as module:function" in run(capsys, "view", url, "--transform", "nothing:here")[2]
    assert "SL101" in run(capsys, "view", url, "--pack", "tokens=65", "--no-browser")[2]
    with serving(ViewOptions(RunOptions(url))) as client:
        assert "give another --port" in run(capsys, "view", url, "--port", client.port, "--no-browser")[2]


@pytest.mark.alone
def test_a_page_of_60_images_with_its_images_takes_half_a_second(tmp_path):
    with sl.Writer(tmp_path / "d", {"image": "bytes:jpeg", "label": "int64"}) as writer:
        for i in range(300):
            writer.write({"image": encoded(picture(i, 375, 500), "jpeg"), "label": i})
    with serving(ViewOptions(RunOptions(str(tmp_path / "d")))) as client:
        client.get("/samples")  # opens the dataset
        begin = time.perf_counter()
        page = client.get("/samples?page=2")
        images = [client.get(each) for each in page.media]
        seconds = time.perf_counter() - begin
    assert [image.body for image in images] == [encoded(picture(i, 375, 500), "jpeg") for i in range(120, 180)]
    assert seconds < 0.5


@pytest.mark.long
def test_a_dataset_of_a_billion_samples_opens_in_two_seconds(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(10**9, np.uint8))
    sl.convert(tmp_path / "x.npy", tmp_path / "d")
    command = [*COMMAND, "view", tmp_path / "d", "--no-browser", "--json"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            client = Client(json.loads(process.stdout.readline())["link"])
            assert len(shown(client.get("/step"))) == 32
            seconds = time.perf_counter() - begin
        finally:
            process.kill()
    assert seconds < 2


IMPORTS = "import sys, streamloader.view.server; print(sorted({'torch', 'matplotlib', 'pyarrow'} & set(sys.modules)))"


def test_the_viewer_does_without_torch():
    assert subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_state_opens_where_it_goes_on_unless_a_step_is_named(url, tmp_path):
    given = {"batch_size": 4, "seed": 6, "num_workers": 0, "world": (0, 2)}
    loader = sl.NumpyDataset(url, **given)
    for _ in range(2):
        for _ in loader:
            pass
    batches = iter(loader)
    for _ in range(7):
        next(batches)
    run_of = RunOptions(url, state=loader.state_dict(), given={"batch_size": 4}, world_size=2)
    with serving(ViewOptions(run_of)) as client:
        assert "Epoch 2, step 7, rank 0" in client.get("/step").text
        assert "Epoch 2, step 7, rank 1" in client.get("/step?rank=1").text
        assert "Epoch 0, step 7, rank 0" in client.get("/step?step=7").text
        assert shown(client.get("/step")) == loader.samples(2, 7, rank=0).tolist()


def test_numbers_beyond_all_epochs_are_errors_and_take_no_time(url):
    a, b = sl.Source(url, where=slice(0, 90)), sl.Source(url, where=slice(90, 200))
    mixture = NumpyMixture({a: 0.5, b: 0.5}, batch_size=8, fields=["label"], num_workers=0)
    with serving(ViewOptions(RunOptions(None, description=mixture.describe()))) as client:
        begin = time.monotonic()
        assert client.get(f"/step?step={10**17}").status == 400
        assert client.get(f"/step?epoch={10**15}&step=1").status == 200
        assert client.get(f"/step?epoch={10**15}&step={10**17}").status == 400
        assert client.get(f"/samples?page={10**17}").status == 400
        assert client.get(f"/plan?window={10**17}&lanes=64").status in (200, 400)
        assert time.monotonic() - begin < 30


def test_an_unforeseen_error_is_a_page_too_with_all_its_headers(client, monkeypatch):
    def fails(*_):
        raise RuntimeError(f"unforeseen {HOSTILE}")

    monkeypatch.setattr("streamloader.view.viewer.Viewer.fields", fails)
    answer = client.get("/fields")
    assert (answer.status, answer.headers["X-Content-Type-Options"]) == (500, "nosniff")
    assert "RuntimeError: unforeseen &lt;script&gt;" in answer.text


def test_all_addresses_of_this_machine_are_listened_on_if_it_is_said_so(url):
    server = Server(Viewer(ViewOptions(RunOptions(url))), "0.0.0.0", 1)
    assert server.address().startswith(f"http://{socket.gethostname()}:1/")
    for host, problem in [("10.1.2.3", False), (socket.gethostname(), False), ("evil.example", True)]:
        request = make_mocked_request("GET", f"/?token={server.guard.token}", headers={"Host": f"{host}:1"})
        assert bool(server.guard.problem(request, "c")) is problem


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_command_while_a_store_does_not_answer(url):
    with folder_server(Path(url)) as server, ThreadPoolExecutor(1) as pool:
        server.behave = "stall"
        command = [*COMMAND, "view", server.url, "--no-browser", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                client = Client(json.loads(process.stdout.readline())["link"])
                waiting = pool.submit(client.get, "/step")
                assert server.met.wait(30)
            finally:
                process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        assert isinstance(waiting.exception(30), OSError | HTTPException)


def written(path, fields, values, **options):
    """The URL of a dataset with these values."""
    with sl.Writer(path, fields, layout=SMALL, **options) as writer:
        for each in values:
            writer.write(each)
    return str(path)


def test_fields_may_have_the_names_of_what_batches_have_besides(tmp_path):
    fields = {"index": "float32", "source": "text", "error": "float32"}
    values = [{"index": 0.5, "source": "wiki", "error": 0.25} for _ in range(5)]
    with serving(ViewOptions(RunOptions(written(tmp_path / "d", fields, values)))) as client:
        for page in ("/step", "/samples", "/sample?number=4"):
            answer = client.get(page)
            assert answer.status == 200, answer.text
            assert all(f">{each}<" in answer.text for each in ("0.5", "wiki", "0.25"))
            assert answer.text.count('"mark"') == answer.text.count("padding")


def test_no_name_imitates_another_one_by_characters_that_are_not_seen(tmp_path):
    names = ["ant", "an\u200bt", "\u202etna", "a\u2066nt\ufeff"]
    for name in names:
        (tmp_path / "files" / name).mkdir(parents=True)
        (tmp_path / "files" / name / "0.png").write_bytes(encoded(picture(0), "png"))
    url = str(tmp_path / "da\u200dta")
    sl.convert(tmp_path / "files", url, workers=0)
    with serving(ViewOptions(RunOptions(url))) as client:
        for page in ("/step", "/samples", "/fields"):
            text = client.get(page).text
            assert all(name.encode("unicode_escape").decode() in text for name in (*names, "da\u200dta")), page
            assert not set("\u200b\u200d\u202e\u2066\ufeff") & set(text), page


def test_what_has_no_samples_says_so(tmp_path):
    with serving(ViewOptions(RunOptions(written(tmp_path / "d", {"x": "int64"}, [])))) as client:
        assert "epoch 0 has no steps" in client.get("/step").text
        assert "0 samples" in client.get("/samples").text
        assert client.get("/statistics?field=x").status == 200


def test_the_order_counts_blocks_through_the_sources_of_a_mixture_and_among_selected_samples(tmp_path):
    url = written(tmp_path / "d", {"x": "int64[300]"}, [{"x": np.full(300, i)} for i in range(300)])
    a, b = sl.Source(url, where=slice(0, 40)), sl.Source(url, where=slice(40, 300))
    mixture = NumpyMixture({a: 0.5, b: 0.5}, batch_size=8, num_workers=0, with_index=True, seed=1)
    sizes = [source.params.block for source in mixture._start.sources]
    first = -(-40 // sizes[0])
    with serving(ViewOptions(RunOptions(None, description=mixture.describe()))) as client:
        (batch,) = mixture.replay(0, [3])
        numbers = batch["index"] - np.where(batch["source"], 40, 0)
        blocks = np.where(batch["source"], first + numbers // sizes[1], numbers // sizes[0])
        text = client.get("/order?step=3").text
        assert f"<td>{', '.join(map(str, np.unique(blocks)))}</td>" in text
        assert f"Source 1: Block {sizes[1]} samples" in text
    with serving(ViewOptions(RunOptions(url, given={"where": slice(290, 300), "batch_size": 5}))) as client:
        places = [float(x) for x in re.findall(r'cx="([\d.]+)"', client.get("/order").text)]
        assert 0 < min(places) < max(places) < 596


def test_numbers_of_packed_rows_lead_to_no_sample(url, tmp_path):
    packed = sl.NumpyDataset(url, batch_size=2, fields=["tokens"], pack={"tokens": 65}, num_workers=0, with_index=True)
    with sl.LossLog(packed, tmp_path / "losses.jsonl") as log:
        log(next(iter(packed)), np.ones(2))
    with serving(ViewOptions(RunOptions(None), losses=str(tmp_path / "losses.jsonl"))) as client:
        for page in ("/step", "/losses"):
            assert shown(client.get(page)) == []
        assert "batches of 2 documents" in client.get("/step").text
        assert "loss 1" not in client.get("/step").text
        assert len(shown(client.get("/samples"))) == 60


def test_stored_samples_have_their_boxes_as_the_run_reads_them_and_each_image_its_crop(tmp_path):
    fields = {"left": "bytes:jpeg", "right": "bytes:jpeg", "boxes": "ragged:float32[4]"}
    image, boxes = encoded(picture(1, 40, 60), "jpeg"), np.array([[10, 20, 50, 30]], np.float32)
    url = written(tmp_path / "d", fields, [{"left": image, "right": image, "boxes": boxes}] * 3)
    decode = {
        "left": sl.Decode(size=(16, 16), crop="random", boxes="boxes", box_format="xyxy"),
        "right": sl.Decode(size=(16, 16), crop="center"),
    }
    with serving(ViewOptions(RunOptions(url, given={"decode": decode, "batch_size": 3}))) as client:
        assert '<rect x="10.0" y="20.0" width="40.0" height="10.0">' in client.get("/samples").text
        link = next(each for each in client.get("/step").addresses if each.startswith("/sample?"))
        (batch,) = sl.NumpyDataset(
            url,
            batch_size=3,
            num_workers=0,
            with_index=True,
            decode={name: replace(each, with_crop=True) for name, each in decode.items()},
        ).replay(0, [0])
        for name in ("left", "right"):
            y, x, height, width = batch[f"{name}_crop"][0][:4].tolist()
            assert f'<rect x="{x}" y="{y}" width="{width}" height="{height}"><title>the crop' in client.get(link).text


def test_samples_keep_their_numbers_while_the_viewer_runs(tmp_path):
    url = written(tmp_path / "d", {"x": "int64"}, [{"x": 1000 + i} for i in range(50)])
    with serving(ViewOptions(RunOptions(url))) as client:
        sl.delete(url, where="x < 1010")
        assert ">1003<" in client.get("/sample?number=3").text
        assert ">1000<" in client.get("/samples").text


@pytest.mark.parametrize(
    "values",
    [
        np.array([-1.7e308, 1.7e308, 0, 1]),  # whose difference is infinite
        np.array([1, 1 + 2**-52, 1 + 2**-51] * 5),  # between which there are not 40 numbers
        2**60 + np.arange(0, 400, 7),
        np.array([np.nan, np.inf]),
    ],
)
def test_values_that_are_far_apart_or_close_have_a_histogram(values):
    found = histogram("x", values, "")
    assert sum(count for _, count in found.bars) == np.isfinite(values).sum()


def test_a_histogram_says_what_it_is_of(url, monkeypatch):
    assert histogram("z", np.array([3 + 4j, 0]), "all").of == "all, magnitudes"
    assert dict(histogram("t", np.array(["a", "b"]), "all").numbers) == {"values": "2"}
    assert "the 60 most frequent values are drawn" in histogram("c", np.arange(99), "", [str(i) for i in range(99)]).of
    monkeypatch.setattr("streamloader.view.facts.EXACT_LENGTHS", 0)
    sampled = statistics(sl.open(url), "caption")
    lengths = [len(value(i)["caption"].encode()) for i in range(COUNT)]
    assert dict(sampled.numbers)["max"] == str(max(lengths))


def test_headers_that_cannot_be_read_are_refused(client):
    for headers in ({"Host": "127.0.0.1:x"}, {"Host": "127.0.0.1:99999999"}, {"Cookie": client.cookie + "\xff"}):
        answer = client.get("/step", **headers)
        assert (answer.status, answer.headers["X-Frame-Options"]) == (403, "DENY")
    assert client.get("/?path=x&step=3").headers["Location"] == "/step?path=x&step=3"


def test_a_page_opens_the_dataset_and_computes_statistics_once(url, monkeypatch):
    opened = []
    for name in ("open_dataset", "NumpyDataset"):
        of = getattr(viewer_module, name)
        monkeypatch.setattr(viewer_module, name, lambda *a, of=of, **b: opened.append(of) or of(*a, **b))
    counted = viewer_module.facts.statistics
    monkeypatch.setattr("streamloader.view.facts.statistics", lambda *a: opened.append(counted) or counted(*a))
    before = set(our_threads())  # of other servers
    with serving(ViewOptions(RunOptions(url))) as client:
        pages = [f"/sample?number={number}" for number in range(9)] + ["/samples", "/statistics?field=label"]
        for page in pages * 2:
            assert client.get(page).status == 200
    assert len(opened) == 3
    deadline = time.monotonic() + 30
    for thread in set(our_threads()) - before:
        thread.join(max(0, deadline - time.monotonic()))
    assert set(our_threads()) <= before


def test_an_overview_is_read_once_and_is_of_the_array_itself_or_of_a_smaller_level(tmp_path, monkeypatch):
    import zarr

    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=3)
    for name, height, width in [("z", 40, 60), ("b", 80, 120), ("c", 20, 30)]:  # a larger one may be another variable
        array = group.create_array(name, shape=(3, height, width), chunks=(1, 20, 30), dtype="f4",
                                   dimension_names=("time", "y", "x"))  # fmt: skip
        array[:] = np.ones((3, height, width))
    sampling = Sampling(sample_axis="time", patches=sl.Patch({"y": 10, "x": 10}))
    given = {"batch_size": 4, "fields": ["z"]}
    reads, of = [], view_overview.read
    monkeypatch.setattr(view_overview, "read", lambda loader: reads.append(loader) or of(loader))
    with serving(ViewOptions(RunOptions(str(tmp_path / "a.zarr"), given=given, sampling=sampling))) as client:
        assert "z: 40 x 60, the first of time" in client.get("/step").text
        assert client.get("/step?step=1").status == 200
    assert len(reads) == 1
    monkeypatch.setattr(view_overview, "MOST_BYTES", 4000)
    with serving(ViewOptions(RunOptions(str(tmp_path / "a.zarr"), given=given, sampling=sampling))) as client:
        assert "c: 20 x 30, the first of time" in client.get("/step").text
    array = view_overview.Overview(None, (60, 40), ("y", "x"), (10, 10), "")
    batch = {"index_y": np.array([1, 2, 3]), "index_x": np.array([4, 5, 6]), "source": np.array([0, 1, 0])}
    assert view_overview.patches(array, batch) == [(4, 1, 0), (6, 3, 2)]


def test_live_ranks_have_the_names_of_their_datasets(url):
    train, val = (sl.NumpyDataset(url, batch_size=6, num_workers=0, seed=seed) for seed in (1, 2))
    server = sl.metrics.serve({"train": train, "val": val}, port=0)
    with server, serving(ViewOptions(RunOptions(url), live=server.url)) as client:
        assert re.findall(r"<tr><td>([^<]+)<", client.get("/live").text) == ["0 of train", "0 of val"]


def test_negative_losses_are_drawn_within_the_plot(url, tmp_path):
    logged(url, tmp_path / "losses.jsonl", 4, 1, 0, 2, -3.0)
    logged(url, tmp_path / "losses.jsonl", 4, 1, 2, 2, -1.0)
    with serving(ViewOptions(RunOptions(None), losses=str(tmp_path / "losses.jsonl"))) as client:
        heights = [float(y) for y in re.findall(r'cy="([-\d.]+)"', client.get("/losses").text)]
    assert heights == [144.0, 144.0, 52.0, 52.0]


def test_the_fields_of_a_join_have_statistics(tmp_path):
    left = written(tmp_path / "a", {"id": "int64"}, [{"id": i} for i in range(20)])
    right = written(tmp_path / "b", {"id": "int64", "y": "text"}, [{"id": i, "y": "\u00e4" * i} for i in range(20)])
    loader = sl.NumpyDataset(sl.Join(left, right, on="id"), batch_size=4, num_workers=0)
    with serving(ViewOptions(RunOptions(None, description=loader.describe()))) as client:
        text = client.get("/statistics?field=y").text
        assert "lengths in bytes, of 20 samples (sampled)" in text
        assert "<dt>max</dt><dd>38</dd>" in text


def test_a_run_that_decoded_on_a_device_is_decoded_here_also_with_its_transform(url):
    given = {"batch_size": 4, "fields": ["image"], "decode": {"image": sl.Decode(size=(16, 16), device="cuda")}}
    for transform in (None, "copy:copy"):
        with serving(ViewOptions(RunOptions(url, given=given, transform=transform))) as client:
            assert client.get("/step").text.count("16 x 16") >= 4


def test_a_long_history_is_not_read_but_its_length_is_shown(url, monkeypatch):
    with serving(ViewOptions(RunOptions(url))) as client:
        assert "<h2>Versions</h2>" in client.get("/fields").text
        monkeypatch.setattr(viewer_module, "VERSIONS", 0)
        assert "1 versions: <code>streamloader log</code>" in client.get("/fields").text


def test_an_overview_is_of_an_array_that_the_run_reads(tmp_path):
    import zarr

    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=3)
    for name, dtype in (("a", "complex64"), ("b", "float32")):  # no tensors hold complex numbers of arrays in place
        options = {"shape": (3, 8, 8), "chunks": (1, 8, 8), "dtype": dtype, "dimension_names": ("time", "y", "x")}
        group.create_array(name, **options)[:] = np.ones((3, 8, 8))
    sampling = Sampling(sample_axis="time", patches=sl.Patch({"y": 4, "x": 4}))
    with serving(ViewOptions(RunOptions(str(tmp_path / "a.zarr"), sampling=sampling))) as client:
        assert "b: 8 x 8" in client.get("/step").text
