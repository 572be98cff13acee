"""A graph of tasks with dependencies, and the machine that executes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from labkit.common.errors import InvalidInput


@dataclass(frozen=True)
class GraphTask:
    """An operation that must be placed on a device.

    Attributes:
        name: Unique name.
        seconds: Compute time in s.
        bytes: Memory in bytes that the task needs on its device. The memory holds the task's
            outputs and the variable that the task reads.
        group: Name of a set of tasks that must share a device. For example, the readers and writers
            of a variable form a group. If `group` is empty, the task forms a group of its own.
        device: Number of the device to which the task is bound. If None, the task may use any
            device.
        kind: Type of the operation, which figures show.
    """

    name: str
    seconds: float
    bytes: float = 0.0
    group: str = ""
    device: int | None = None
    kind: str = ""

    @property
    def group_name(self) -> str:
        """Name of the task's group, or the name of the task if it has no group."""
        return self.group or self.name


# The output index `SIGNAL` stands for the completion of a task, not for an output tensor.
SIGNAL = -1


@dataclass(frozen=True)
class Need:
    """A dependency: the target task reads `bytes` bytes from the source task.

    output: Index of the source's output tensor that the target reads. If the index is `SIGNAL`, the
        target only waits until the source ends.
    """

    source: str
    target: str
    bytes: float = 0.0
    output: int = 0


@dataclass(frozen=True)
class DeviceGroup:
    r"""Equal devices; a link leads from each device to every other device.

    A device computes one task at a time. A link carries one tensor at a time. A tensor takes
    \(\text{latency} + \text{bytes} / \text{bandwidth}\) on a link. Each direction between two
    devices has its own link.

    Attributes:
        devices: Names of the devices.
        latency: Latency in s of a copy between two devices.
        bandwidth: Bandwidth of a link in bytes/s.
        memory: Maximum number of bytes that tasks may store on a device.
        dispatch: Time in s that a device needs to start a task.
    """

    devices: tuple[str, ...]
    latency: float = 0.0
    bandwidth: float = math.inf
    memory: float = math.inf
    dispatch: float = 0.0

    def __post_init__(self) -> None:
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise InvalidInput(
                f"devices={self.devices} is impossible; give one or more unique names"
            )
        for name in ("latency", "dispatch"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidInput(
                    f"{name}={getattr(self, name)} is impossible; give seconds, at least 0"
                )
        for name in ("bandwidth", "memory"):
            if not getattr(self, name) > 0:
                raise InvalidInput(
                    f"{name}={getattr(self, name)} is impossible; give a number above 0"
                )

    def copy_seconds(self, nbytes: float) -> float:
        """Return the time in s that a link needs to copy a tensor of `nbytes` bytes."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class TaskGraph:
    """Tasks and their dependencies.

    Raises:
        InvalidInput: If there are no tasks, or if the graph has a cycle. An unknown name or a
            negative number also raises the error.
    """

    tasks: tuple[GraphTask, ...]
    needs: tuple[Need, ...] = ()

    def __post_init__(self) -> None:
        names = {task.name for task in self.tasks}
        if not self.tasks or len(names) < len(self.tasks):
            raise InvalidInput("give at least one task, and a unique name to each task")
        for task in self.tasks:
            if not (0 <= task.seconds < math.inf and 0 <= task.bytes < math.inf):
                raise InvalidInput(
                    f"{task} is impossible; give finite seconds and bytes, at least 0"
                )
        for need in self.needs:
            if unknown := {need.source, need.target} - names:
                raise InvalidInput(
                    f"{need} names {sorted(unknown)[0]!r}, which is not a task; name a task"
                )
            if not 0 <= need.bytes < math.inf:
                raise InvalidInput(
                    f"{need} has impossible bytes; give a finite number of at least 0"
                )
        if len(self.order) < len(self.tasks):
            members = ", ".join(sorted(names - set(self.order))[:5])
            raise InvalidInput(
                f"the dependencies form a cycle among {members}; give a graph without cycles"
            )

    @cached_property
    def by_name(self) -> Mapping[str, GraphTask]:
        """A mapping from task names to tasks."""
        return {task.name: task for task in self.tasks}

    @cached_property
    def before(self) -> Mapping[str, Sequence[Need]]:
        """For each task, the dependencies of this task on other tasks."""
        return self._ends("target")

    @cached_property
    def after(self) -> Mapping[str, Sequence[Need]]:
        """For each task, the dependencies of other tasks on this task."""
        return self._ends("source")

    @cached_property
    def order(self) -> Sequence[str]:
        """Task names in topological order; tasks on cycles are missing."""
        missing = {name: len({n.source for n in needs}) for name, needs in self.before.items()}
        names = [name for name, count in missing.items() if count == 0]
        for name in names:  # The loop also visits the names that it appends to the list.
            for target in dict.fromkeys(need.target for need in self.after[name]):
                missing[target] -= 1
                if missing[target] == 0:
                    names.append(target)
        return names

    @property
    def seconds(self) -> float:
        """Total compute time of all tasks, in s."""
        return sum(task.seconds for task in self.tasks)

    @property
    def bytes(self) -> float:
        """Total memory of all tasks, in bytes."""
        return sum(task.bytes for task in self.tasks)

    def path_lengths(
        self, copy: float = 0.0, machine: DeviceGroup | None = None
    ) -> dict[str, float]:
        r"""Return the length of the longest path from each task to the end, in s.

        The longest path from task i has length \(r_i = w_i + \max_j (c_{ij} + r_j)\). Task i takes
        the time \(w_i\). A copy from task i to task j takes the time \(c_{ij}\).

        Args:
            copy: Fraction of dependencies that are assumed to connect two devices. The copy times c
                are multiplied by `copy`.
            machine: The devices, which define the times of copies and of task starts. If None, both
                times are 0.
        """
        dispatch = machine.dispatch if machine else 0.0
        lengths: dict[str, float] = {}
        for name in reversed(self.order):
            rest = (
                lengths[need.target] + (copy * machine.copy_seconds(need.bytes) if machine else 0.0)
                for need in self.after[name]
            )
            lengths[name] = self.by_name[name].seconds + dispatch + max(rest, default=0.0)
        return lengths

    def shortest(self, machine: DeviceGroup) -> float:
        """Return a lower bound in s for every plan: the longer of critical path and mean load."""
        work = self.seconds + machine.dispatch * len(self.tasks)
        free = DeviceGroup(machine.devices, dispatch=machine.dispatch)
        return max(max(self.path_lengths(0.0, free).values()), work / len(machine.devices))

    def _ends(self, end: str) -> dict[str, list[Need]]:
        needs: dict[str, list[Need]] = {task.name: [] for task in self.tasks}
        for need in self.needs:
            needs[getattr(need, end)].append(need)
        return needs
