"""A plan: the device and the time of each task, and the copies between devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from labkit.simulate.placement.task_graph import DeviceGroup, TaskGraph


class Copy(NamedTuple):
    """A copy of a tensor to another device; one copy serves all tasks that read the tensor there.

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
    """The placement and the times of all tasks of a graph; the times are predicted, not measured.

    Attributes:
        name: Name of the policy that computed the plan.
        graph, machine: The task graph, and the devices with their links.
        devices: For each task, the number of its device.
        spans: Start and stop times of each task, in s.
        copies: Copies between devices, sorted by start time.
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
        """Bytes of memory that the tasks on each device occupy there."""
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

        Among tasks that take no time and run at the same time, predecessors come first.
        """
        position = {name: number for number, name in enumerate(self.graph.order)}
        names = [name for name, number in self.devices.items() if number == device]
        return sorted(names, key=lambda name: (*self.spans[name], position[name]))
