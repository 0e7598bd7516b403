"""The measures of how well an order mixes, and the orders of other loaders that they are taken of."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import venvs
from bench.shuffles import page
from bench.shuffles.learning import Task
from bench.shuffles.orders import Mixer, OrderError, Setting, mixers, order, ours
from bench.shuffles.quality import _variance_ratio, quality, resident
from streamloader.format.writer import Writer
from streamloader.options import Layout
from streamloader.order.epoch_order import EpochOrder, OrderParams
from streamloader.pytorch.dataset import StreamingDataset

SETTING = Setting(samples=4096, batch=32, block=8, lanes=8, window=32, shard=64, classes=16)
MEASURES = {"batch": 32, "run": 64, "classes": 16}


def test_an_order_as_stored_has_one_run_in_a_batch_and_holds_one_unit():
    found = quality(np.arange(4096), unit=64, **MEASURES)
    assert (found.resident, found.units, found.runs, found.formula) == (64, 1, 1, 32)
    assert found.correlation == pytest.approx(1)
    assert found.measured == pytest.approx(32, rel=0.1)  # a batch is of one class: as good as one sample


def test_a_full_permutation_is_as_good_as_independent_draws():
    found = quality(np.random.default_rng(0).permutation(4096), unit=64, **MEASURES)
    assert found.runs == pytest.approx(64 * (1 - (1 - 1 / 64) ** 32), rel=0.03)
    assert found.formula == pytest.approx(1 + 31 / 64, rel=0.05)
    assert found.measured == pytest.approx(1, abs=0.15)
    assert abs(found.correlation) < 0.1


@given(st.integers(1, 40), st.integers(1, 9), st.randoms(use_true_random=False))
def test_resident_samples_are_those_of_a_count_step_by_step(count, unit, random):
    ids = np.random.default_rng(random.randrange(1000)).permutation(count * unit)  # type: ignore[attr-defined]
    units = (ids // unit).tolist()
    held = [len(set(units[: at + 1]) & set(units[at:])) for at in range(len(units))]
    assert resident(ids, unit) == max(held) * unit


def test_streamloader_holds_less_than_its_slots_and_mixes_nearly_as_a_permutation():
    ids = ours(SETTING, 0)
    assert sorted(ids.tolist()) == list(range(4096))
    found = quality(ids, unit=SETTING.block, **MEASURES)
    assert found.resident <= SETTING.lanes * (SETTING.window + 2 * SETTING.block)
    assert found.measured < 2


def test_each_mixer_holds_what_streamloader_does_where_an_option_sets_it():
    memory = resident(ours(SETTING, 0), SETTING.block)
    options = {name: value for mixer in mixers(SETTING) for name, value in mixer.options}
    assert options["buffer"] == memory
    assert memory - 2 * SETTING.shard < 2 * int(options["chunk"]) <= memory


@pytest.mark.long
def test_a_peer_gives_its_own_order_and_each_sample_once(monkeypatch):
    monkeypatch.setattr(venvs, "make", lambda peer, say: "")  # the development environment has this one
    monkeypatch.setattr(venvs, "python_of", lambda peer: Path(sys.executable))
    mixer = Mixer("WebDataset", 0, "webdataset", (("buffer", 512),), held=512)
    first, again = (order(mixer, SETTING, 0) for _ in range(2))
    assert first.tolist() == again.tolist()
    assert 1.1 < quality(first, unit=1, **MEASURES).measured < 32
    with pytest.raises(OrderError, match="buffer"):
        order(replace(mixer, options=()), SETTING, 0)


@pytest.mark.long
def test_the_curve_falls_faster_the_better_the_order_mixes(tmp_path):
    rng = np.random.default_rng(0)
    photos = [rng.integers(0, 120 + 15 * i, (40, 40, 3), np.uint8) for i in range(10)]
    task = Task(photos, SETTING.samples)
    lines = []
    for mixer in (one for one in mixers(SETTING) if not one.peer):
        orders = [order(mixer, SETTING, seed) for seed in range(2)]
        measured = vars(quality(orders[0], unit=mixer.unit or 1, **MEASURES))
        line = {"name": mixer.name, "version": "", "setting": vars(SETTING), "seeds": 2, "time": "2026-11-22"}
        lines.append({**line, **measured, "held": 1, "errors": task.curve(orders, SETTING.batch)})
    errors = {line["name"]: line["errors"] for line in lines}
    assert errors["streamloader"][-1] < errors["as stored"][-1] - 0.2
    assert abs(errors["streamloader"][-1] - errors["full permutation"][-1]) < 0.15
    text = page.write(lines, tmp_path).read_text()
    assert all(name in text for name in errors)
    assert (tmp_path / "shuffles.png").stat().st_size > 10_000


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("fields", "held"),
    [({"x": "uint8[512]", "label": "int64"}, True), ({"x": "uint8[2048]", "label": "int64"}, False)],
    ids=["all held whole", "streamed"],
)
def test_a_small_dataset_in_class_order_mixes_as_independent_draws(tmp_path, fields, held):
    """Also at the beginning of an epoch, where windows are not full yet."""
    n, batch, classes = 6400, 32, 16
    labels = np.arange(n) * classes // n
    with Writer(str(tmp_path / "d"), fields, num_samples=n, layout=Layout(codec="none", chunk_size=1 << 15)) as writer:
        width = int(fields["x"].split("[")[1][:-1])
        for i in range(n):
            writer.write({"x": np.full(width, i % 256, np.uint8), "label": labels[i]})
    ds = StreamingDataset(tmp_path / "d", batch_size=batch, world=(0, 1), with_index=True, fields=["x", "label"])
    pin = ds.state_dict()["order"]
    assert (pin["block"] == 1) is held
    assert held or pin["window"] >= n // pin["lanes"]
    assert sorted(np.concatenate([one["index"].numpy() for one in ds]).tolist()) == list(range(n))
    assert ds.stats().requests < 100
    steps = n // batch
    epochs = [EpochOrder(n, OrderParams(**pin), seed, 0).samples_at(0, n) for seed in range(60)]
    begin = np.concatenate([ids[: steps // 20 * batch] for ids in epochs]) * classes // n
    assert _variance_ratio(begin.reshape(-1, batch), classes) <= 1.2
    assert np.mean([quality(ids, unit=1, batch=batch, run=64, classes=classes).measured for ids in epochs]) <= 1.1
