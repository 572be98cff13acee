"""Measurements of device placement: the device of each operation, and its duration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from labkit.records.step_graph import StepGraph
from labkit.simulate.placement import TaskGraph

Row: TypeAlias = dict[str, str | int | float | bool]  # one row of a table
WAY = "product, with the copies"  # label of matrix products timed with their copies


@dataclass(frozen=True)
class PlacementMeasurements:
    """Measurements of devices and operations, which labkit makes before it tries placement plans.

    Attributes:
        listed: Names of all logical devices that TensorFlow lists.
        kernels: Rows of TensorFlow's kernel registry: op, device, types.
        rules: Rows of tests of TensorFlow's placer: requested device and resulting device.
        scoped: Executed graph of a step with one device scope per tower (parallel branch of the
            model).
        log: Device of each graph node, from TensorFlow's placement log of the step in `scoped`.
        tasks: Graph of a step without device scopes, with the seconds and bytes of each operation.
        links: Rows of timed copies between two logical devices: bytes, seconds.
        latency, bandwidth: Fixed seconds per copy, and bytes/s of a copy, between two logical
            devices.
        dispatch: Seconds of overhead for each operation in addition to its computation.
        speeds: Rows of timed matrix products and copies by size; empty without a GPU.
    """

    listed: Sequence[str]
    kernels: Sequence[Row]
    rules: Sequence[Row]
    scoped: StepGraph
    log: Mapping[str, str]
    tasks: TaskGraph
    links: Sequence[Row]
    latency: float
    bandwidth: float
    dispatch: float
    speeds: Sequence[Row]


@dataclass(frozen=True)
class PlanMeasurement:
    """The measurement of an executed placement plan.

    Attributes:
        name: Name of the plan.
        seconds: Duration of each step.
        losses: Training losses of the first steps, to compare plans.
        copies: Number of tensors and signals that TensorFlow sends between devices in a step.
        graph: Graph that TensorFlow executed under the plan.
    """

    name: str
    seconds: Sequence[float]
    losses: Sequence[float]
    copies: int
    graph: StepGraph
