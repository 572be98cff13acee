"""Test that the ready queue replayed from a trace follows the rules of TensorFlow's executor."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from labkit.bench.step_process import gated
from labkit.bench.steps import BenchModel, ModelCase
from labkit.common.errors import LabkitError
from labkit.records.step_graph import Flow, Operation, StepGraph, ready_queue
from labkit.worker.executed_step import step_graph

#   ms    0    1    2    3    4    5    6
#   a     ■■■■■■                              x (an argument) is there from the start
#   b          ■■■■■■■■■■                     b needs a and x
#   c                    ■■■■■                c needs a: it waits, for there is one thread
#   d                         ■■■■■           d needs b and, as a control dependency, c
ONE_THREAD = StepGraph(
    (
        Operation("x", "_Arg", "CPU:0", 8.0),
        Operation("a", "MatMul", "CPU:0", 8.0, 0.001, 0.000, 0.001),
        Operation("b", "MatMul", "CPU:0", 8.0, 0.002, 0.001, 0.003),
        Operation("c", "Mul", "CPU:0", 8.0, 0.001, 0.003, 0.004),
        Operation("d", "Add", "CPU:0", 8.0, 0.001, 0.004, 0.005),
    ),
    (
        *(Flow("a", "b", 8.0), Flow("x", "b", 8.0), Flow("a", "c", 8.0)),
        *(Flow("b", "d", 8.0), Flow("c", "d", 0.0, control=True)),
    ),
    0.006,
)


def test_counts_fall_to_zero_in_the_order_of_the_trace() -> None:
    counts = [each.unresolved for each in ready_queue(ONE_THREAD).moments()]
    assert [tuple(each[name] for name in "abcd") for each in counts] == [
        (0, 1, 1, 2),
        (0, 0, 0, 2),
        (0, 0, 0, 1),
        (0, 0, 0, 0),
        (0, 0, 0, 0),
    ]


def test_who_is_ready_and_has_no_thread_is_in_the_queue() -> None:
    queue = ready_queue(ONE_THREAD)
    states = [(each.queued, each.running) for each in queue.moments()]
    assert states == [
        ((), ("a",)),
        (("c",), ("b",)),
        ((), ("c",)),
        ((), ("d",)),
        ((), ()),
    ]
    waits = {each.operation.name: (each.needs, each.wait) for each in queue.waited}
    assert waits["c"] == (1, pytest.approx(0.002))
    assert [waits[name] for name in "abd"] == [(0, 0), (2, 0), (2, 0)]


def test_an_operation_that_begins_too_early_is_found() -> None:
    early = Operation("d", "Add", "CPU:0", 8.0, 0.001, 0.0035, 0.0045)
    graph = StepGraph((*ONE_THREAD.operations[:-1], early), ONE_THREAD.flows)
    assert ready_queue(graph).started_early() == ["d"]
    assert ready_queue(graph).started_early(resolution=0.001) == []
    assert ready_queue(ONE_THREAD).started_early() == []


def test_a_step_without_times_is_refused() -> None:
    with pytest.raises(LabkitError, match="no operation of this step has times"):
        ready_queue(StepGraph(ONE_THREAD.operations[:1], ()))


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_in_a_real_step_nothing_begins_before_what_it_needs_has_ended(kind: str) -> None:
    model = BenchModel(ModelCase("small", (32, 16), 16), rank=0)
    between = gated if kind == "gated" else list
    graph = step_graph(lambda x, y: model.train(x, y, between), model.x, model.y, repeats=2)
    queue = ready_queue(graph)
    assert queue.started_early() == []
    assert {each.operation.op for each in queue.waited} >= {"_FusedMatMul", "MatMul", "ReluGrad"}
    moments = queue.moments()
    assert max(moments[0].unresolved.values()) > 1
    assert set(moments[-1].unresolved.values()) == {0}
    # No count of unresolved inputs ever rises, and running operations have none left.
    for before, after in pairwise(moments):
        assert all(after.unresolved[name] <= count for name, count in before.unresolved.items())
        assert not any(after.unresolved[name] for name in (*after.running, *after.queued))
    updates = [each for each in graph.operations if each.op == "ResourceApplyKerasMomentum"]
    assert len(updates) == 6
    if kind == "gated":
        made = {flow.source for flow in graph.flows if flow.target == updates[0].name}
        ends = [each.stop for each in graph.operations if each.name in made]
        last = max(end for end in ends if not math.isnan(end))
        assert min(each.start for each in updates) >= last
