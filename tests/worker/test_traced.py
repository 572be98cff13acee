"""Test that a traced step computes the same, operation by operation, under every placement."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from labkit.common.errors import InvalidInput
from labkit.simulate.placement import SIGNAL, DeviceGroup, all_on_one
from labkit.worker.device_graph import TowerStep, Traced, towers, trace
from labkit.worker.devices import DeviceRequest

ASKED = DeviceRequest(widths=(8, 4), depth=2, features=6, classes=3, batch=5)
LONE = DeviceGroup(("CPU:0",))


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[TowerStep, Traced]]:
    import tensorflow as tf

    step = towers(ASKED)
    traced = trace(step)
    # As in the process with devices, TensorFlow must run the operations as placed.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield step, traced
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def test_tasks_are_what_computes_bound_where_the_batch_and_the_loss_are(
    made: tuple[TowerStep, Traced],
) -> None:
    graph = made[1].tasks()
    on = graph.by_name
    assert not any(task.kind in ("Const", "_Retval") for task in graph.tasks)
    assert [(on[name].bytes, on[name].device) for name in "xy"] == [(5 * 6 * 4, 0), (5 * 4, 0)]
    writers = [task for task in graph.tasks if task.kind == "AssignSubVariableOp"]
    assert len(writers) == 2 * (2 * 2 + 1)  # a kernel and a bias for each layer and for the head
    for writer in writers:
        kinds = {task.kind for task in graph.tasks if task.group == writer.group}
        assert {"ReadVariableOp", "AssignSubVariableOp"} <= kinds
    assert {need.bytes for need in graph.needs if need.output == SIGNAL} == {0.0}


def test_a_placed_step_gives_the_same_losses_as_the_step_itself(
    made: tuple[TowerStep, Traced],
) -> None:
    step, traced = made
    placed = traced.placed(all_on_one(traced.tasks(), LONE))
    told = [float(placed(*step.batch)) for _ in range(4)]
    fresh = towers(ASKED)  # this step starts from the initial weights
    assert told == pytest.approx([float(fresh.run(*fresh.batch)) for _ in range(4)], rel=1e-6)
    assert told == sorted(told, reverse=True)


def test_times_are_measured_operation_by_operation(made: tuple[TowerStep, Traced]) -> None:
    step, traced = made
    plan = all_on_one(traced.tasks(), LONE)
    timed = traced.timed(plan, step.batch, 3)
    graph = traced.tasks(timed)
    assert 0 < graph.seconds <= timed.seconds
    assert [task.name for task in graph.tasks] == [task.name for task in traced.tasks().tasks]
    starts = [
        operation.start
        for name in plan.on(0)
        for operation in timed.operations
        if operation.name == name
    ]
    known = [start for start in starts if start == start]
    assert known == sorted(known)  # the plan has the same order


@pytest.mark.parametrize(("field", "value"), [("devices", 1), ("widths", (0,)), ("batch", 0)])
def test_what_cannot_be_asked_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=field):
        DeviceRequest(**{field: value})
