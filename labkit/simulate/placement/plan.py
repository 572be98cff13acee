"""A plan: the device and the time of each task, and the copies between devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from labkit.simulate.placement.task_graph import DeviceGroup, TaskGraph


class Copy(NamedTuple):
    """The copy of a tensor to another device, made once even if several tasks read it there.

    output: Index of the task's output tensor, or `task_graph.SIGNAL` for a completion signal.
    """

    task: str
    output: int
    sender: int
    receiver: int
    bytes: float
    start: float
    stop: float


@dataclass(frozen=True)
class PlacementPlan:
    """A placement and schedule of a task graph as data; its times are predicted, not measured.

    Attributes:
        name: Name of the policy that computed the plan.
        graph, machine: The tasks and the devices.
        devices: Device number of each task.
        spans: Start and stop of each task, in s.
        copies: Copies between devices, sorted by start.
    """

    name: str
    graph: TaskGraph
    machine: DeviceGroup
    devices: Mapping[str, int]
    spans: Mapping[str, tuple[float, float]]
    copies: tuple[Copy, ...]

    @property
    def makespan(self) -> float:
        """Time at which the last task ends, in s."""
        return max(stop for _, stop in self.spans.values())

    @property
    def copied_bytes(self) -> float:
        """Total number of bytes on all links."""
        return sum(copy.bytes for copy in self.copies)

    @cached_property
    def kept_bytes(self) -> tuple[float, ...]:
        """Bytes that the tasks on each device store in the device's memory."""
        totals = [0.0] * len(self.machine.devices)
        for task in self.graph.tasks:
            totals[self.devices[task.name]] += task.bytes
        return tuple(totals)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Fraction of the makespan in which each device computes."""
        seconds = [0.0] * len(self.machine.devices)
        for name, (start, stop) in self.spans.items():
            seconds[self.devices[name]] += stop - start
        return tuple(time / self.makespan if self.makespan else 0.0 for time in seconds)

    def on(self, device: int) -> list[str]:
        """Return the tasks of a device in execution order.

        Tasks without duration at the same time are sorted so that predecessors come first.
        """
        position = {name: number for number, name in enumerate(self.graph.order)}
        names = [name for name, number in self.devices.items() if number == device]
        return sorted(names, key=lambda name: (*self.spans[name], position[name]))
