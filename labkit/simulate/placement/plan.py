"""A plan: where each task runs, from when to when, and what is copied for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from labkit.simulate.placement.task_graph import Machine, TaskGraph


class Copy(NamedTuple):
    """A tensor on a link: once for each receiving device, however many tasks read it there.

    output: which one of the task's tensors, or that it is done (`task_graph.SIGNAL`).
    """

    task: str
    output: int
    sender: int
    receiver: int
    bytes: float
    start: float
    stop: float


@dataclass(frozen=True)
class Plan:
    """Rows of a schedule, as data; nothing in it is measured.

    Attributes:
        name: of the rule that made it.
        graph, machine: for which it was made.
        devices: the number of the device of each task.
        spans: start and stop of each task, s.
        copies: between devices, in the order of their starts.
    """

    name: str
    graph: TaskGraph
    machine: Machine
    devices: Mapping[str, int]
    spans: Mapping[str, tuple[float, float]]
    copies: tuple[Copy, ...]

    @property
    def makespan(self) -> float:
        """When the last task ends, s."""
        return max(stop for _, stop in self.spans.values())

    @property
    def copied_bytes(self) -> float:
        """Over all links together."""
        return sum(copy.bytes for copy in self.copies)

    @cached_property
    def kept_bytes(self) -> tuple[float, ...]:
        """What the tasks of each device keep."""
        kept = [0.0] * len(self.machine.devices)
        for task in self.graph.tasks:
            kept[self.devices[task.name]] += task.bytes
        return tuple(kept)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The share of the makespan for which each device computes."""
        seconds = [0.0] * len(self.machine.devices)
        for name, (start, stop) in self.spans.items():
            seconds[self.devices[name]] += stop - start
        return tuple(each / self.makespan if self.makespan else 0.0 for each in seconds)

    def on(self, device: int) -> list[str]:
        """The tasks of a device in the order in which it computes them.

        Of tasks that take no time at the same moment, those come first that others need.
        """
        place = {name: number for number, name in enumerate(self.graph.order)}
        own = [name for name, number in self.devices.items() if number == device]
        return sorted(own, key=lambda name: (*self.spans[name], place[name]))
