"""Measurements for device placement: the device and the duration of each operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from labkit.records.step_graph import StepGraph
from labkit.simulate.placement import TaskGraph

Row: TypeAlias = dict[str, str | int | float | bool]  # one row of a table
WAY = "product, with the copies"  # label of rows that time matrix products with their copies


@dataclass(frozen=True)
class PlacementMeasurements:
    """Measurements of devices and operations, made before placement plans are executed.

    Attributes:
        listed: Names of all logical devices, as TensorFlow lists them.
        kernels: Rows of TensorFlow's kernel registry, each with op, device and types.
        rules: Rows of tests of TensorFlow's placer, each with the requested and the resulting
            device.
        scoped: Executed graph of a training step in which each tower (parallel branch of the model)
            has its own device scope.
        log: For each graph node of the step in `scoped`, its device, from TensorFlow's placement
            log.
        tasks: Graph of a training step without device scopes, with the seconds and output bytes of
            each operation.
        links: Rows of timed copies between two logical devices, each with bytes and seconds.
        latency, bandwidth: Fixed seconds per copy between two logical devices, and bytes/s of the
            copy.
        dispatch: Seconds that TensorFlow needs per operation in addition to the computation.
        speeds: Rows of timed matrix products and copies of different sizes; empty without a GPU.
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
    """The measurement of a placement plan that TensorFlow has executed.

    Attributes:
        name: Name of the plan.
        seconds: Duration of each training step.
        losses: Training losses of the first steps, which should be the same for all plans.
        copies: Number of tensors and signals that TensorFlow sends between devices in a training
            step.
        graph: Graph that TensorFlow executed with this plan.
    """

    name: str
    seconds: Sequence[float]
    losses: Sequence[float]
    copies: int
    graph: StepGraph
