"""Test tables and summaries of models that are divided into pipeline stages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from sample_runs import FAILED_GATE, write_run

from labkit.cli.app import app
from labkit.common.errors import InvalidInput, LabkitError
from labkit.figures import (
    measured_pipeline,
    pipeline_gantt,
    pipeline_speedup,
    pipeline_table,
    predicted_pipeline,
    rank_table,
)
from labkit.figures.schedules import stages
from labkit.figures.schedules.pipeline import ACTIONS, MESSAGE
from labkit.figures.schedules.stages import summarize_cut, summarize_pipeline
from labkit.network import Network
from labkit.records.run import Run
from labkit.records.staged_steps import predicted_rows
from labkit.records.store import write_table
from labkit.schedules import PIPELINE
from labkit.schedules.pipeline import delayed
from labkit.simulate.pipeline import PipelineSimulation, simulate_pipeline

MS = 1e-3
STEPS, PERIOD = 24, 0.1  # the last 14 steps are steady
A_ROW = [400, 40]  # bytes per sample that leave each stage
PART = {
    "stages": [0],
    "whole": 9000,
    "measured": {
        "weights": 4000,
        "gradients": 4000,
        "optimizer": 8012,
        "activations": 1100,
        "versions": 0,
    },
    "predicted": {
        "weights": 4000,
        "gradients": 4000,
        "optimizer": 8012,
        "activations": 1000,
        "versions": 0,
    },
}


def events(one: PipelineSimulation, begin: float, step: int) -> list[dict[str, Any]]:
    return [
        {
            "rank": stage % one.table.ranks,
            "kind": f"{action} {stage}",
            "step": step,
            "bucket": number,
            "start": begin + start,
            # A sender continues at once; only the receiver knows when the message arrives.
            "stop": begin + (start if action == "send" else stop),
        }
        for (_, stage, action, number, _), start, stop in zip(
            one.table.rows(), one.start, one.stop, strict=True
        )
    ]


def whole_steps(ranks: int, workers: int) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "kind": "step",
            "step": step,
            "bucket": -1,
            "start": PERIOD * step,
            "stop": PERIOD * step + 0.05,
        }
        for step in range(STEPS)
        for rank in range(workers)
    ]


def pipeline(
    root: Path,
    schedule: str = "1f1b",
    microbatches: int = 4,
    network: str | Network | None = None,
    workers: int = 2,
    tensor_parallel_size: int = 1,
    seen: Network | None = None,
    **changes: Any,
) -> tuple[Run, PipelineSimulation]:
    """Return a run whose steps equal a simulation on the network `seen`, and the simulation."""
    rows = 256 * 2 * tensor_parallel_size // workers // microbatches
    one = simulate_pipeline(
        PIPELINE[schedule](2, microbatches),
        [MS, 2 * MS],
        [2 * MS, 3 * MS],
        network=seen or network,
        nbytes=[rows * each for each in A_ROW],
    )
    measured = changes.pop("measured", {})
    memory = [{"rank": rank} | PART | {"stages": [rank]} for rank in range(2)]
    given = network.model_dump(mode="json") if isinstance(network, Network) else network
    run = write_run(
        root,
        workers=workers,
        network=given,
        strategy={"name": "Pipeline", "schedule": schedule, "microbatches": microbatches}
        | {"tensor_parallel_size": tensor_parallel_size}
        | {"stages": 2, "virtual_stages_per_rank": 1, "partition": [1, 1], "recompute": False},
        measured={"memory": memory, "partition": {"bytes_a_row": A_ROW}, "network": given}
        | measured,
        **changes,
    )
    timeline = [row for step in range(STEPS) for row in events(one, PERIOD * step + 0.001, step)]
    for row in timeline:
        row["rank"] *= tensor_parallel_size
    timeline += whole_steps(2, workers)
    write_table(run.path / "timeline.parquet", timeline)
    return run, one


def late(root: Path) -> Run:
    """Return a run of delayed gradients whose iterations follow each other without a pause."""
    one = simulate_pipeline(delayed(2, STEPS), MS, 2 * MS)
    run = write_run(
        root,
        strategy={"name": "DelayedGradients", "modules": None, "partition": "parameters"},
        measured={"partition": {"bytes_a_row": A_ROW}},
    )
    # The column "step" is the iteration in which a rank acts, not the iteration of the batch.
    rows = events(one, 0.0, 0)
    for row, (_, stage, action, number, peer) in zip(rows, one.table.rows(), strict=True):
        from_behind = peer == stage + (1 if action == "receive" else -1)
        back = action == "backward" or (peer >= 0 and from_behind)
        row["step"] = number + (1 - stage if back else 0)
    write_table(run.path / "timeline.parquet", rows)
    return run


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble", "layerwise"])
@pytest.mark.parametrize("network", [None, "100Mb"])
def test_a_measured_step_is_as_it_was_and_so_is_its_prediction(
    tmp_path: Path, schedule: str, network: str | None
) -> None:
    run, one = pipeline(tmp_path, schedule, network=network)
    found = measured_pipeline(run)
    assert found.measured
    assert found.table.rows() == one.table.rows()
    computes = one.table.computes
    np.testing.assert_allclose(found.start[computes], one.start[computes], atol=1e-9)
    np.testing.assert_allclose(found.stop[computes], one.stop[computes], atol=1e-9)
    predicted = predicted_pipeline(run)
    assert not predicted.measured
    np.testing.assert_allclose(predicted.stop, one.stop, atol=1e-9)


@pytest.mark.parametrize(("slices", "hosts"), [(2, ((0,), (1,))), (1, ((0, 1),))])
def test_a_prediction_is_by_the_hosts_of_the_stages(
    tmp_path: Path, slices: int, hosts: tuple[tuple[int, ...], ...]
) -> None:
    """Ranks 0 and 1 share a host: they are slices of a stage, or the stages of a replica."""
    slow: dict[str, Any] = {"latency": MS, "bandwidth": 1e6}
    fast: dict[str, Any] = {"host_latency": 0.0, "host_bandwidth": 1e9}
    network = Network(**slow, **fast, hosts=((0, 1), (2, 3)), stragglers={3: 2.0})
    seen = Network(**slow, **fast, hosts=hosts)
    run, one = pipeline(
        tmp_path, network=network, workers=4, tensor_parallel_size=slices, seen=seen
    )
    predicted = predicted_pipeline(run)
    np.testing.assert_allclose(predicted.stop, one.stop, atol=1e-9)
    assert predicted.network is not None
    assert predicted.network.hosts == hosts
    assert predicted.network.stragglers == {}


def test_both_stand_on_one_scale_and_the_title_says_which_clock(tmp_path: Path) -> None:
    run, _ = pipeline(tmp_path, network="100Mb")
    figure = pipeline_gantt([run, predicted_pipeline(run)])
    assert figure.layout.title.text == "Pipeline · wall clock and simulation · network 100Mb"
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range
    assert figure.layout.xaxis2.matches == "x"
    bars = [t for t in figure.data if t.type == "bar" and t.name == ACTIONS["forward"][0]]
    assert [float(each) for each in bars[0].base] == pytest.approx([*map(float, bars[1].base)])
    assert list(bars[0].text) == list(bars[1].text)
    assert len([t for t in figure.data if t.name == MESSAGE[0] and t.y[0]]) == 2
    assert "measured, 1f1b, 2 stages, 4 micro-batches" in figure.alt


def test_without_an_emulated_network_no_messages_are_drawn(tmp_path: Path) -> None:
    run, _ = pipeline(tmp_path)
    figure = pipeline_gantt([run, predicted_pipeline(run)])
    assert "not emulated (in the simulation, messages take no time)" in str(
        figure.layout.title.text
    )
    assert not [t for t in figure.data if t.name == MESSAGE[0]]


def test_a_step_that_is_not_there_is_refused(tmp_path: Path) -> None:
    run, _ = pipeline(tmp_path)
    assert measured_pipeline(run, 3).seconds == pytest.approx(measured_pipeline(run).seconds)
    with pytest.raises(InvalidInput, match="no complete step 99"):
        pipeline_gantt(run, step=99)
    with pytest.raises(LabkitError, match="has no timeline of stages"):
        measured_pipeline(write_run(tmp_path))


def test_delayed_gradients_show_three_iterations_without_a_begin_or_an_end(tmp_path: Path) -> None:
    run = late(tmp_path)
    measured, predicted = measured_pipeline(run), predicted_pipeline(run)
    for found in (measured, predicted):
        computing = found.table.take(found.table.computes)
        assert sorted(computing.action.tolist()) == 6 * ["backward"] + 6 * ["forward"]
    assert measured.seconds == pytest.approx(predicted.seconds)
    assert "delayed gradients, 2 stages, 3 micro-batches" in pipeline_gantt([run, predicted]).alt
    row = pipeline_table(run).iloc[0]
    assert row["bound"] == pytest.approx(1.5)
    assert row["bubble_formula"] != row["bubble_formula"]
    assert row["bubble_measured"] == pytest.approx(row["bubble_simulated"])


def test_the_table_of_ranks_has_time_traffic_and_memory_beside_its_prediction(
    tmp_path: Path,
) -> None:
    run, one = pipeline(tmp_path)
    alone = write_run(tmp_path, workers=1, measured={"memory": [{"rank": 0} | PART]})
    table = rank_table([run, alone])
    assert [rank for _, rank in table.index] == [0, 1, 0]
    first = table.iloc[0]
    assert first["utilisation"] == pytest.approx(one.busy[0] / 0.05)
    assert first["activations_error"] == pytest.approx(0.1)
    assert first["bytes"] == 4000 + 4000 + 8012 + 1100
    assert (first["whole_bytes"], first["payload_bytes"], first["messages"]) == (9000, 40_000, 2)
    assert table.iloc[1]["stages"] == [1]
    # The record of a single process contains only the share of a step that is communication.
    history = alone.history
    share = history["compute_seconds"].iloc[0] / history["seconds"].median()
    assert table.iloc[2]["utilisation"] == pytest.approx(share, rel=0.3)


def test_bubbles_and_speedups_stand_beside_theory(tmp_path: Path) -> None:
    alone = write_run(tmp_path, workers=1, step_ms=40.0)
    runs = [pipeline(tmp_path, "gpipe", m, step_ms=25.0)[0] for m in (1, 4)]
    _, one = pipeline(tmp_path / "other", "gpipe", 4)
    table = pipeline_table([alone, *runs])
    assert table["microbatches"].tolist() == [1, 4]
    last = table.iloc[1]
    assert last["bubble_formula"] == pytest.approx(1 / 5)
    assert last["bound"] == pytest.approx(4 * 2 / 5)
    assert last["bubble_measured"] == pytest.approx(one.bubble_share)
    assert last["bubble_simulated"] == pytest.approx(one.bubble_share)
    assert last["schedule_ms"] == pytest.approx(last["simulated_ms"])
    assert last["speedup"] == pytest.approx(40 / 25)
    assert last["speedup_low"] < last["speedup"] < last["speedup_high"]
    figure = pipeline_speedup([alone, *runs])
    (points,) = [t for t in figure.data if t.mode == "markers"]
    assert list(points.x) == [1, 4]
    assert list(points.y) == pytest.approx([1.6, 1.6])
    (ideal,) = [t for t in figure.data if t.mode == "lines" and t.x[0] is not None]
    assert (ideal.y[0], ideal.y[-1]) == pytest.approx((1, 1.6))
    assert "gpipe, 2 ranks, m = 4: speed-up 1.60, at most 1.60" in figure.alt


def test_a_run_that_failed_its_gate_has_no_speed(tmp_path: Path) -> None:
    run, _ = pipeline(tmp_path, measured={"equivalence": FAILED_GATE})
    row = pipeline_table(run).iloc[0]
    assert np.isnan([row["speedup"], row["bubble_measured"]]).all()
    assert rank_table(run)["utilisation"].isna().all()
    assert "no speed is shown, because the equivalence check failed" in pipeline_gantt(run).alt


def test_runs_of_other_strategies_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LabkitError, match=r"no run of lk\.Pipeline"):
        pipeline_table(write_run(tmp_path))


@pytest.mark.parametrize("network", [None, "100Mb"])
def test_a_trace_has_the_prediction_beside_each_step(tmp_path: Path, network: str | None) -> None:
    run, _ = pipeline(tmp_path, "gpipe", 2, network=network, tensor_parallel_size=2, workers=4)
    done = CliRunner().invoke(app, ["trace", str(run.path), "-o", str(tmp_path / "trace.json")])
    assert done.exit_code == 0, done.output
    assert "simulator's prediction" in done.output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    told = {
        (event["pid"], event["name"].removeprefix("predicted "), event["args"]["step"]): event
        for event in drawn
        if event["cat"].startswith("predicted ")
    }
    work = [e for e in drawn if e["cat"].startswith(("forward ", "backward "))]
    assert len(work) == 2 * 2 * 2 * STEPS  # ranks with events, micro-batches, forward and backward
    for event in work:  # each step takes the simulated times
        beside = told[event["pid"], event["name"], event["args"]["step"]]
        assert beside["ts"] == pytest.approx(event["ts"], abs=0.1)  # µs
        assert beside["dur"] == pytest.approx(event["dur"], abs=0.1)
        assert beside["tid"] == 3 + event["args"]["step"] % 2


def test_of_delayed_gradients_only_steady_steps_are_predicted_and_of_others_none(
    tmp_path: Path,
) -> None:
    rows = predicted_rows(late(tmp_path / "late"))
    assert len({row["step"] for row in rows}) == 1
    assert {row["kind"].split()[0] for row in rows} == {"predicted"}
    assert predicted_rows(write_run(tmp_path / "plain")) == []


NAN = math.nan


class OneOf:
    """A substitute for a run, with a number of workers and what summaries need."""

    def __init__(self, workers: int) -> None:
        self.experiment, self.path = {"workers": workers}, object()


def pipelines(**columns: list[Any]) -> pd.DataFrame:
    rows = len(columns["microbatches"])
    usual: dict[str, list[Any]] = {
        "schedule": ["1f1b"] * rows,
        "ranks": [2] * rows,
        "bubble_measured": [0.5] * rows,
        "bubble_low": [0.4] * rows,
        "bubble_high": [0.6] * rows,
        "bubble_simulated": [0.45] * rows,
        "bubble_formula": [0.5] * rows,
        "bound": [2.0] * rows,
    }
    return pd.DataFrame(usual | columns, index=[f"run {n}" for n in range(rows)])


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ([0.9, 1.9], "no speed-up, because stages wait for each other; the last speed-up is 95%"),
        ([1.2, 1.9], "from 1.20 to 1.90; the last speed-up is 95% of the pipeline bubble's limit"),
        ([1.2, 1.0], "the last speed-up is 50% of the pipeline bubble's limit: unequal stages"),
    ],
)
def test_more_micro_batches_are_judged_by_their_speed_up(
    monkeypatch: pytest.MonkeyPatch, speedups: list[float], said: str
) -> None:
    table = pipelines(microbatches=[1, 8], speedup=speedups)
    monkeypatch.setattr(stages, "pipeline_table", lambda runs, baseline: table)
    text = str(summarize_pipeline([]))
    assert "**run 0**: measured bubble 50% of a step (40% to 60%)" in text
    assert said in text


def test_without_a_baseline_no_speed_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pipelines(microbatches=[1, 8], speedup=[NAN, NAN], bubble_measured=[NAN, NAN])
    monkeypatch.setattr(stages, "pipeline_table", lambda runs, baseline: table)
    text = str(summarize_pipeline([]))
    assert "speed-up" not in text
    assert "measured bubble" not in text


def test_cuts_are_compared_with_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    index = pd.MultiIndex.from_tuples(
        [("one", 0), ("cut", 0), ("cut", 1), ("copies", 0)], names=["run", "rank"]
    )
    table = pd.DataFrame(
        {
            "bytes": [2048.0, 1024.0, 512.0, NAN],
            "bytes_predicted": [2048.0, 1000.0, 500.0, 4096.0],
            "payload_bytes": [0.0, 100.0, 300.0, 200.0],
            "utilisation": [1.0, 0.5, 0.7, NAN],
            "step_ms": [10.0, 6.0, 8.0, NAN],
        },
        index=index,
    )
    monkeypatch.setattr(stages, "rank_table", lambda runs: table)
    runs: list[Any] = [OneOf(1), OneOf(2), OneOf(2)]
    text = str(summarize_cut(runs))
    assert (
        "**cut**: the rank with the most memory keeps 1 KiB (0.50 of one process), the busiest "
        "rank sends 300 B per step, ranks compute 60% of the time, a step takes 8 ms, 0.80 of one "
        "process." in text
    )
    assert "keeps 4 KiB (2.00 of one process), as predicted" in text
    assert (
        "Least memory on a rank: **cut**; shortest step: **cut**; least traffic of the runs that "
        "send: **copies**." in text
    )
