"""What a process with devices of its own answers: what was placed where, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from labkit.records.step_graph import StepGraph
from labkit.simulate.placement import TaskGraph

Row: TypeAlias = dict[str, str | int | float | bool]  # of a table
WAY = "product, with the copies"  # there and back, as rows of speeds call it


@dataclass(frozen=True)
class Examined:
    """What was found before anything is placed by a rule of ours.

    Attributes:
        listed: all logical devices.
        kernels: rows of TensorFlow's registry: op, device, types.
        rules: rows of what was asked of the placer, and what it did.
        scoped: the step with a device scope a tower, as it ran.
        log: device by node, as TensorFlow's placement log says it of the same step.
        tasks: the step without scopes, with the time and bytes of each operation.
        links: rows of copies between two logical devices: bytes, seconds.
        latency, bandwidth: of such a copy, s and bytes/s.
        dispatch: s that an operation takes beside its computation.
        speeds: rows of products and copies by size, where there is a GPU.
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
class Measured:
    """A plan that was carried out.

    Attributes:
        name: of the plan.
        seconds: of each step.
        losses: of the first steps.
        copies: tensors and signals that TensorFlow sent between devices in a step.
        graph: what ran.
    """

    name: str
    seconds: Sequence[float]
    losses: Sequence[float]
    copies: int
    graph: StepGraph
