"""Test figures of a step's graph, queue, threads and input against the measured values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from labkit.common.errors import InvalidInput
from labkit.figures import (
    control_order,
    control_timeline,
    drawn_step,
    input_overhead,
    input_timeline,
    partitioned_step,
    queue_table,
    ready_animation,
    summarize_control,
    summarize_input,
    summarize_queue,
    summarize_thread,
    summarize_transfers,
    thread_sweep,
    transfers_table,
)
from labkit.figures.graphs.step import UPDATE
from labkit.records.step_costs import StepTime, ThreadSweep
from labkit.records.step_graph import Flow, Operation, StepGraph, Transfer
from labkit.records.timed_steps import SYNTHETIC, FedStep, InputTrace

NAN = float("nan")


def ran(name: str, op: str, start: float, stop: float, device: str = "CPU:0") -> Operation:
    """Return an operation that starts and stops at these times (ms)."""
    return Operation(name, op, device, 8.0, (stop - start) / 1e3, start / 1e3, stop / 1e3)


# One gradient follows the other, and each is followed by an update; w is an input of the step.
GRADIENTS = (ran("g1", "MatMul", 0, 2), ran("g2", "MatMul", 2, 4))
DATA = (Flow("w", "g1", 8.0), Flow("g1", "g2", 8.0), Flow("g1", "u1", 8.0), Flow("g2", "u2", 8.0))
GIVEN = Operation("w", "_Arg", "CPU:0", 8.0)
FREE = StepGraph(
    (GIVEN, *GRADIENTS, ran("u1", UPDATE, 2.5, 3), ran("u2", UPDATE, 4, 5)), DATA, 0.005
)
GATED = StepGraph(
    (GIVEN, *GRADIENTS, ran("u1", UPDATE, 4, 4.5), ran("u2", UPDATE, 4.5, 5)),
    (*DATA, Flow("g2", "u1", 0.0, True), Flow("g1", "u2", 0.0, True)),
    0.005,
)
SPLIT = StepGraph(
    (
        *(ran("a", "MatMul", 0, 1), ran("b", "MatMul", 1.5, 2, "CPU:1")),
        *(ran("c", "Relu", 2, 3, "CPU:1"), Operation("end", "NoOp", "CPU:0", 0.0)),
    ),
    (Flow("a", "b", 4096.0), Flow("a", "c", 4096.0), Flow("b", "c", 8.0), Flow("c", "end", 0.0)),
    0.003,
    (
        Transfer("edge_1_c", "c", "c/_3", "CPU:1", "c/_4", "CPU:0", 0.0),
        Transfer("edge_2_a", "a", "a/_1", "CPU:0", "a/_2", "CPU:1", 4096.0),
    ),
)
BOTH = {"free": FREE, "gated": GATED}


def test_the_graph_is_drawn_without_what_was_there_before() -> None:
    figure = drawn_step(FREE, "Step")
    drawn = [text for trace in figure.data for text in trace.text or () if text]
    assert sorted(drawn) == ["MatMul", "MatMul", "update", "update"]
    assert "1 arguments and constants are not drawn" in figure.alt


def test_the_animation_has_a_frame_for_each_time_that_something_begins_or_ends() -> None:
    figure = ready_animation(FREE)
    assert len(figure.frames) == 6  # frames at 0, 2, 2.5, 3, 4 and 5 ms
    texts = [list(frame.data[0].text) for frame in figure.frames]
    counts = [dict(zip(("g1", "g2", "u1", "u2"), text, strict=True)) for text in texts]
    assert counts[0] == {"g1": "", "g2": "1", "u1": "1", "u2": "1"}
    assert counts[1] == {"g1": "", "g2": "", "u1": "", "u2": "1"}
    assert set(counts[-1].values()) == {""}
    symbols = list(figure.frames[1].data[0].marker.symbol)
    assert symbols == ["circle", "diamond", "square", "circle-open"]  # ended, runs, queued, waits
    lengths = next(trace for trace in figure.data if trace.xaxis == "x2" and trace.mode == "lines")
    assert list(lengths.y) == [0, 1, 0, 0, 0, 0]


def test_the_queue_is_told_as_it_is_drawn() -> None:
    assert list(queue_table(FREE)["wait_ms"]) == pytest.approx([0, 0, 0.5, 0])
    said = summarize_queue(FREE)
    assert "0 of 4 operations started before" in said
    assert "**u1** waited longest in the ready queue, 0.5 ms" in said


def test_a_step_of_too_many_operations_is_refused() -> None:
    many = tuple(ran(f"m{n}", "MatMul", n, n + 1) for n in range(61))
    with pytest.raises(InvalidInput, match="61 operations are too many"):
        ready_animation(StepGraph(many, ()))


def test_control_dependencies_hold_updates_back() -> None:
    order = control_order(BOTH)
    assert list(order["early"]) == [1, 0]
    assert list(order["control_edges"]) == [0, 2]
    assert list(order["last_gradient_ms"]) == pytest.approx([4, 4])
    free, gated = summarize_control(BOTH).splitlines()
    assert "1 of 2 updates started before" in free
    assert gated.endswith("updates before the last gradient are not allowed, and none occurred.")
    early = replace(GATED, operations=(*GATED.operations[:3], *FREE.operations[3:]))
    assert str(summarize_control({"early": early})).endswith(
        "updates before the last gradient are not allowed, but 1 occurred."
    )
    lanes = {lane for trace in control_timeline(BOTH).data for lane in trace.y or () if lane}
    assert lanes == {"other operations", "gradients", "updates"}


def test_a_step_that_changes_nothing_has_no_order_to_show() -> None:
    with pytest.raises(InvalidInput, match="updates no variable"):
        control_order({"split": SPLIT})


def test_a_send_and_a_receive_stand_where_an_edge_leaves_its_device() -> None:
    figure = partitioned_step(SPLIT, "Split")
    on = {
        trace.name: sorted(text for text in trace.text if text in ("send", "receive"))
        for trace in figure.data
        if trace.name in ("CPU:0", "CPU:1") and trace.text
    }
    assert on == {"CPU:0": ["receive", "send"], "CPU:1": ["receive", "send"]}
    assert "2 edges between devices" in figure.alt  # one edge per tensor, with one or more readers


def test_pairs_are_in_the_order_in_which_what_they_carry_was_made() -> None:
    table = transfers_table(SPLIT)
    assert list(table["tensor"]) == ["edge_2_a", "edge_1_c"]
    assert list(table["between_ms"][:1]) == pytest.approx([0.5])  # until its first reader starts
    assert math.isnan(table["between_ms"][1])
    said = summarize_transfers(SPLIT)
    assert "The largest tensor is **edge_2_a**, 4 KiB from CPU:0 to CPU:1" in said
    assert "1 of 2 pairs carries no data" in said
    assert "sends and receives nothing" in summarize_transfers(FREE)


def fed(way: str, repeat: int, idle: float, compute: float, made: float) -> list[FedStep]:
    """Return six steps; each batch is made in the `made` ms before its step (0: made earlier)."""
    found, now = [], 0.0
    for step in range(6):
        got, stop = now + idle / 1e3, now + (idle + compute) / 1e3
        began = (got - made / 1e3, got) if made else (NAN, NAN)
        found.append(FedStep(way, repeat, step, now, got, stop, *began))
        now = stop
    return found


INPUT = InputTrace(
    [
        each
        for repeat in range(3)
        for each in (
            *fed(SYNTHETIC, repeat, 0, 2, 0),
            *fed("map", repeat, 3, 2, 3),
            *fed("parallel calls", repeat, 1 + repeat, 2, 5),
        )
    ],
    nbytes=2048,
    filled=0.25,
)


def test_idle_time_and_batches_that_are_made_are_drawn_where_they_were() -> None:
    figure = input_timeline(INPUT, steps=2)
    bars = [trace for trace in figure.data if trace.type == "bar"]
    idle = [list(trace.x) for trace in bars if trace.name == "training waits for its batch"]
    assert idle == [pytest.approx([3, 3]), pytest.approx([2, 2])]  # no idle time for synthetic
    made = [trace for trace in bars if trace.name == "input prepares a batch"]
    assert set(made[0].y) == {"input 1"}
    assert set(made[1].y) == {"input 1", "input 2"}  # two batches are made at the same time
    assert "map: training is idle in 60% of the time" in figure.alt
    with pytest.raises(InvalidInput, match="steps=0 cannot be drawn: give a number of at least 1"):
        input_timeline(INPUT, steps=0)


def test_the_overhead_is_drawn_with_its_spread_and_said() -> None:
    figure = input_overhead(INPUT)
    (points,) = (t for t in figure.data if t.yaxis == "y2" and t.mode == "markers")
    assert list(points.y) == pytest.approx([1.5, 1.0])
    assert list(points.error_y.array) == pytest.approx([0, 0.5])
    said = summarize_input(INPUT)
    assert "I/O overhead 100% (repeats 50% to 150%)" in said
    assert "took 0.25 s; the cache file has 2 KiB" in said
    assert said.endswith(
        "**parallel calls** is the input whose step time is nearest to that of tensors in "
        "memory; its overhead is 100% of a step with synthetic input."
    )


def test_a_cross_stands_where_more_is_less() -> None:
    ms = {(1, 1): 10.0, (2, 1): 6.0, (4, 1): 8.0, (1, 2): 9.0, (2, 2): 7.0, (4, 2): 9.0}
    timed = [StepTime(64, *pair, repeat, each) for pair, each in ms.items() for repeat in (0, 1)]
    sweep = ThreadSweep(timed, cores=2)
    crosses = [t for t in thread_sweep(sweep).data if t.text and "slower" in t.text[0]]
    assert [(each.x[0], each.y[0], each.text[0]) for each in crosses] == [
        (4, 8.0, "4 intra-op: slower"),
        (2, 7.0, "2 inter-op: slower"),
    ]
    assert (
        "4 and more threads are slower: 1.33x the time (repeats 1.33 to 1.33)"
        in summarize_thread(sweep)
    )
