"""What a process with devices of its own is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

from pydantic import Field

from labkit.common.checked import Checked
from labkit.simulate.placement import TaskGraph
from labkit.worker.step_graph import StepGraph

Positive: TypeAlias = Annotated[int, Field(gt=0)]
Row: TypeAlias = dict[str, str | int | float | bool]  # of a table


class Asked(Checked):
    """A model with towers side by side, logical devices to place it on, and how often to measure.

    Args:
        devices: logical CPU devices, 2 to 8; they share the cores of this machine.
        widths: of the towers, one each; every layer of a tower is so wide.
        depth: layers of each tower.
        features: of a sample.
        classes: that are told apart.
        batch: samples of a step.
        threads: that one operation may compute with.
        repeats: of each measurement.
        sizes: n of the n × n matrices that are multiplied.
        seed: of weights and samples.
    """

    devices: Annotated[int, Field(ge=2, le=8)] = 2
    widths: tuple[Positive, ...] = (512, 512, 256, 256)
    depth: Positive = 2
    features: Positive = 256
    classes: Positive = 10
    batch: Positive = 256
    threads: Positive = 1
    repeats: Positive = 15
    sizes: tuple[Positive, ...] = (64, 256, 1024)
    seed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the logical devices, as TensorFlow calls them."""
        return tuple(f"CPU:{number}" for number in range(self.devices))


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
