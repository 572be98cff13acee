"""Test that operations executed by TensorFlow are read as run: fused, placed, timed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.records.step_graph import Flow, Operation, StepGraph
from labkit.worker.executed_step import step_graph


def test_a_step_is_read_as_the_optimizer_left_it() -> None:
    import tensorflow as tf

    weights = tf.Variable(tf.ones((20, 30)))
    bias = tf.Variable(tf.zeros((30,)))

    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.nn.relu(tf.nn.bias_add(tf.matmul(x, weights), bias)))

    graph = step_graph(step, tf.ones((8, 20)), repeats=3)
    on = {operation.name: operation for operation in graph.operations}
    (fused,) = (operation for operation in graph.operations if operation.op == "_FusedMatMul")
    assert (fused.bytes, fused.device) == (8 * 30 * 4, "CPU:0")
    assert 0 < fused.seconds <= graph.seconds
    assert 0 <= fused.start < fused.stop <= graph.seconds
    reads = [flow for flow in graph.flows if flow.target == fused.name and not flow.control]
    sizes = sorted(flow.bytes for flow in reads)
    assert sizes == [30 * 4, 8 * 20 * 4, 20 * 30 * 4]
    assert {on[flow.source].op for flow in reads} == {"_Arg", "ReadVariableOp"}
    assert (graph.devices, graph.copies) == (["CPU:0"], [])


def test_a_loop_has_no_circle_and_its_seconds_add_up() -> None:
    import tensorflow as tf

    from labkit.figures.graphs.layered import Edge, layers

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(7):
            x = tf.matmul(x, x) / 64.0
        return x

    graph = step_graph(step, tf.ones((64, 64)), repeats=1)
    (product,) = (operation for operation in graph.operations if operation.op == "MatMul")
    assert product.seconds < product.stop - product.start  # between runs, it waits for others
    edges = [Edge(flow.source, flow.target) for flow in graph.flows]
    layers([operation.name for operation in graph.operations], edges)  # layers() refuses a cycle


def test_a_tensor_goes_once_to_a_device_however_many_read_it_there() -> None:
    made = [
        Operation(name, "MatMul", place, 8.0) for name, place in zip("abcd", "0112", strict=True)
    ]
    flows = [Flow("a", "b", 8.0), Flow("a", "c", 8.0), Flow("a", "d", 8.0), Flow("b", "d", 0, True)]
    flows += [Flow("a", "c", 8.0, output=1), Flow("b", "c", 8.0)]
    graph = StepGraph(tuple(made), tuple(flows))
    assert graph.copies == [flows[0], flows[2], flows[4]]
    assert math.isnan(graph.seconds)


def test_no_step_at_all_is_refused() -> None:
    with pytest.raises(InvalidInput, match="repeats=0 is impossible"):
        step_graph(lambda: np.zeros(1), repeats=0)
