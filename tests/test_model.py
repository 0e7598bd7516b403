"""The model of the engine: its laws, and its predictions of rates that were measured."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader.errors import UsageError
from streamloader.format.manifest import Field, FieldLayout
from streamloader.measure.model import Costs, Load, Machine, bounds, load_of, predict, simulate

RESULTS = Path(__file__).parent.parent / "bench" / "results" / "model.jsonl"
MEASURED = {row["case"]: row for row in map(json.loads, RESULTS.read_text().splitlines())}
SERVER = 0.25  # CPU seconds of nginx per GB, which had the same cores
WITHIN = dict.fromkeys(MEASURED, 0.15) | {"mixed": 0.2}  # docs/observability.md says so

seconds = st.floats(1e-5, 0.05)
loads = st.builds(
    Load, st.floats(1e3, 16e6), st.just(32.0), seconds, seconds, in_flight=st.integers(1, 64), ahead=st.integers(1, 200)
)
machines = st.builds(
    Machine, st.floats(0.5, 100), st.integers(1, 96), st.integers(1, 8), st.floats(0.001, 0.2), st.floats(1, 5)
)


@settings(max_examples=40, deadline=None)
@given(loads, machines)
def test_no_rate_exceeds_what_a_resource_allows(load, machine):
    rate, limits = predict(load, machine), bounds(load, machine)
    for name in ("network", "cores", "gather"):
        assert rate.samples_per_second <= 32 * limits[name] * (1 + 1e-9)
    assert 1 <= rate.in_flight <= load.in_flight
    assert rate.limit in limits
    assert predict(load, machine) == rate  # the seed is fixed


@settings(max_examples=30, deadline=None)
@given(loads, machines)
def test_more_of_a_resource_is_never_slower(load, machine):
    rate = simulate(load, machine)
    for more in (replace(machine, network=2 * machine.network), replace(machine, cores=2 * machine.cores)):
        assert simulate(load, more) >= 0.9 * rate
    # up to `ahead` of the 768 requests that count may fall out of them at the start, or into them
    assert simulate(replace(load, in_flight=2 * load.in_flight), machine) >= 0.9 * rate


@pytest.mark.parametrize("in_flight", [1, 8, 64])
def test_littles_law_holds_where_latency_is_the_limit(in_flight):
    load = Load(1e6, 1.0, 1e-6, 1e-6, in_flight, 2000)
    machine = Machine(1e4, 64, 1, 0.1, 1.0, 1e9)
    assert simulate(load, machine) == pytest.approx(in_flight / (0.1 + 1e-3), rel=0.1)
    assert predict(load, machine).limit == "connections"


def test_ranks_of_a_machine_share_its_network_and_cores():
    load = Load(4e6, 32.0, 3e-3, 1e-3)
    alone, shared = (bounds(load, Machine(100, 96, ranks)) for ranks in (1, 8))
    assert [alone[name] / shared[name] for name in ("network", "cores", "gather")] == pytest.approx([8, 8, 1])


@pytest.mark.parametrize("case", MEASURED)
def test_predictions_are_near_the_measured_rates(case):
    row = MEASURED[case]
    layouts = [
        FieldLayout(Field(f["kind"], f["dtype"], tuple(f["shape"])), 1, 1, f["codec"], False, f["nbytes"])
        for f in row["fields"]
    ]
    costs = replace(Costs(), fetch=Costs().fetch + SERVER)
    load = load_of(layouts, (row["samples"], row["batch"]), (row["requests"], row["bytes"]), costs)
    rate = predict(load, Machine(400, 2, 1, row["latency"], 1.0, row["connection"]))
    assert rate.samples_per_second == pytest.approx(median(row["samples_per_second"]), rel=WITHIN[case])


@pytest.mark.parametrize("wrong", [{"network": 0}, {"cores": -1}, {"latency": -1}, {"latency": float("nan")}])
def test_invalid_machines_are_errors(wrong):
    with pytest.raises(UsageError, match="numbers above 0"):
        Machine(**wrong)
