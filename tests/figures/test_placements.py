"""Compare device placements: test their table, their figures and their summary."""

from __future__ import annotations

import math

import pytest

from labkit.figures import (
    break_even,
    break_even_table,
    makespans,
    placement_gantt,
    placement_table,
    step_picture,
    summarize_placement,
    summarize_placer,
)
from labkit.records.step_graph import (
    WAY,
    Flow,
    Operation,
    PlacementMeasurements,
    PlanMeasurement,
    Row,
    StepGraph,
)
from labkit.simulate.placement import DeviceGroup, GraphTask, Need, TaskGraph, compare_policies

STEP = StepGraph(
    (
        Operation("w", "_Arg", "CPU:1", 0.0),
        Operation("tower0/Relu", "Relu", "CPU:0", 64.0, 1e-3),
        Operation("tower1/read", "ReadVariableOp", "CPU:1", 64.0, 1e-3),
        Operation("tower1/Relu", "Relu", "CPU:1", 64.0, 1e-3),
        Operation("gradient_tape/tower1/MatMul", "MatMul", "CPU:0", 64.0, 1e-3),
    ),
    (
        Flow("w", "tower1/read", 0.0),
        Flow("tower1/read", "tower1/Relu", 64.0),
        Flow("tower1/Relu", "gradient_tape/tower1/MatMul", 64.0),
    ),
)
TASKS = TaskGraph(
    (
        GraphTask("tower0/MatMul", 4e-3, 64.0),
        GraphTask("gradient_tape/tower1/MatMul", 4e-3, 64.0),
        GraphTask("descent/mul", 1e-3, 8.0),
    ),
    (
        Need("tower0/MatMul", "descent/mul", 8.0),
        Need("gradient_tape/tower1/MatMul", "descent/mul", 8.0),
    ),
)
QUICK, SLOW = (DeviceGroup(("CPU:0", "CPU:1"), latency=each) for each in (1e-4, 1.0))
SMALL = DeviceGroup(QUICK.devices, latency=1e-4, memory=0.6 * TASKS.bytes)
PLANS = {"quick": compare_policies(TASKS, QUICK), "slow": compare_policies(TASKS, SLOW)}
PLANS |= {"small": compare_policies(TASKS, SMALL)}
RULES: list[Row] = [
    {"question": "a scope", "op": "Relu", "asked": "CPU:1", "soft": soft} | outcome
    for soft, outcome in (
        (True, {"ran_on": "CPU:1", "error": ""}),
        (False, {"ran_on": "nowhere", "error": "Unable [Op:__inference_1]"}),
    )
]


def found(speeds: list[Row] | None = None) -> PlacementMeasurements:
    kernels: list[Row] = [
        {"op": "MatMul", "device": "CPU", "types": "float32, int32"},
        {"op": "MatMul", "device": "GPU", "types": "float32"},
    ]
    log = {"tower0/Relu": "CPU:0", "elsewhere": "CPU:1"}
    linked: list[Row] = []
    told = (kernels, RULES, STEP, log, TASKS, linked, 1e-4, math.inf, 0.0, speeds or [])
    return PlacementMeasurements(["CPU:0", "CPU:1"], *told)


def measured(seconds: float = 5e-3, loss: float = 1.0) -> list[PlanMeasurement]:
    return [
        PlanMeasurement(
            plan.name,
            [9e-3 if "one" in plan.name else seconds],
            [1.0, loss],
            len(plan.copies),
            STEP,
        )
        for plan in PLANS["quick"]
    ]


def speeds(device: float) -> list[Row]:
    rows: list[Row] = []
    for n in (8, 16, 32):
        times = {
            "CPU:0": 1e-6 * n**3,
            "GPU:0": device,
            "CPU:0 to GPU:0": 1e-3,
            "GPU:0 to CPU:0": 1e-3,
            "CPU:0 to GPU:0 and back": device + 3e-3,
        }
        for name, seconds in times.items():
            ends = {"seconds": seconds, "seconds_low": seconds, "seconds_high": seconds}
            what = WAY if "back" in name else "copy" if " to " in name else "product"
            told: Row = {"what": what, "n": n, "device": name, "bytes": 4 * n * n, "threads": 1}
            rows.append(told | ends)
    return rows


def test_a_row_a_link_and_rule_with_steps_of_the_first_link_alone() -> None:
    table = placement_table(PLANS, measured()).set_index(["link", "rule"])
    assert table.loc[("quick", "all on one"), "predicted_ms"] == pytest.approx(9.0)
    assert table.loc[("quick", "list scheduling"), "predicted_ms"] == pytest.approx(5.1)
    # The greedy rule puts each product on the device where it ends first, before it places their
    # sum.
    assert table.loc[("slow", "list scheduling"), "predicted_ms"] == pytest.approx(1005.0)
    assert table.loc[("quick", "list scheduling"), "copies"] == 1
    assert table.loc[("quick", "random"), "plans"] == 3
    assert table.loc["quick", "measured_ms"].tolist() == pytest.approx([9.0, 5.0, 5.0, 5.0])
    assert table.loc["slow", "measured_ms"].isna().all()
    assert set(table["bound_ms"]) == {5.0}


def test_predictions_and_steps_are_drawn_in_panels_of_their_own() -> None:
    figure = makespans(PLANS, measured())
    assert [trace.y[0] for trace in figure.data if trace.type == "bar"][:1] == [pytest.approx(9)]
    titles = " ".join(note.text for note in figure.layout.annotations)
    for part in ("predicted, quick", "measured, quick", "predicted, slow"):
        assert part in titles
    assert "measured, slow" not in titles
    assert "simulation and wall clock" in figure.layout.title.text
    assert "simulation · network" in makespans(PLANS).layout.title.text


def test_a_gantt_has_a_lane_a_device_and_a_line_a_copy() -> None:
    plan = PLANS["quick"][-1]
    figure = placement_gantt([plan])
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert {trace.name for trace in bars} == {"forward", "gradient", "update of a variable"}
    (copies,) = (t for t in figure.data if t.type == "scatter" and t.hoverinfo == "skip" and t.y)
    (copy,) = plan.copies
    assert list(copies.x[:2]) == [1e3 * copy.start, 1e3 * copy.stop]


def test_the_step_is_drawn_without_what_only_holds_a_value() -> None:
    figure = step_picture(STEP, "A step")
    shown = [text for t in figure.data if t.mode == "markers+text" and t.text for text in t.text]
    assert sorted(shown) == ["MatMul", "Read", "Relu", "Relu"]
    assert "1 edge between devices, 64 B in all" in figure.alt


def test_the_pointer_is_told_what_the_placement_log_says() -> None:
    log = {"tower0/Relu": "CPU:0"}
    drawn = step_picture(STEP, "A step", log=log).data
    told = [text for t in drawn if t.mode == "markers+text" for text in t.hovertext or ()]
    assert [
        text for text in told if "placed on CPU:0 according to TensorFlow's placement log" in text
    ] == [text for text in told if text.startswith("tower0/Relu")]
    assert sum("not in TensorFlow's placement log" in text for text in told) == len(told) - 1


def test_the_placer_is_read_from_what_ran() -> None:
    said = summarize_placer(found())
    assert "1 of 1 gradient operations ran on a different device" in said
    assert "names 1 of the 5 operations that ran, and each ran on the logged device" in said
    assert "MatMul of int32: TensorFlow's registry has a kernel for CPU, but none for GPU" in said
    assert "with soft placement ran on CPU:1; with strict placement refused (Unable)" in said


def test_the_answer_holds_the_promise_against_what_was_measured() -> None:
    said = summarize_placement(found(), PLANS, measured())
    assert (
        "quick: **list scheduling 5.1 ms** with 1 copies of tensors or control signals between "
        "devices, 8 B in"
    ) in said
    assert "memory exceeded: all on one; lower bound 5 ms" in said
    assert "losses are bitwise equal" in said
    assert (
        "measured steps are shorter than with all operations on one device, beyond the spread"
        in said
    )
    assert "but a longer step than all on one with slow" in said
    assert "TensorFlow finds no GPU on this machine" in said
    assert "do not differ beyond" in summarize_placement(found(), PLANS, measured(9e-3))
    assert "are longer than with all operations on one device" in summarize_placement(
        found(), PLANS, measured(1.0)
    )


def test_another_step_and_other_copies_are_told() -> None:
    wrong = [
        PlanMeasurement(m.name, m.seconds, [float(at)], 99, STEP) for at, m in enumerate(measured())
    ]
    said = summarize_placement(found(), PLANS, wrong)
    assert "The placements do not train the same step" in said
    assert "The number of copies that TensorFlow made differs from the planned number" in said


def test_the_way_to_a_gpu_pays_from_a_size_on_or_not_at_all() -> None:
    table = break_even_table(speeds(1e-4))
    assert table["there_ms"].tolist() == pytest.approx([3.1] * 3)
    assert table["pays"].tolist() == [False, True, True]
    said = summarize_placement(found(speeds(1e-4)), PLANS, measured())
    assert (
        "From n = 16 on, a matrix product on GPU:0 with its copies takes less time (3.1 ms)" in said
    )
    never = summarize_placement(found(speeds(1.0)), PLANS, measured())
    assert (
        "Up to n = 32, a matrix product on GPU:0 with its copies is not faster than a matrix "
        "product"
    ) in never
    assert "finds no GPU" in break_even([])
