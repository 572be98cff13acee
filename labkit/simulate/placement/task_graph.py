"""What has to be computed, of what, and on which devices it may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from labkit.common.errors import InvalidInput


@dataclass(frozen=True)
class Task:
    """An operation to be placed.

    Attributes:
        name: its own.
        seconds: that it computes.
        bytes: that it keeps on its device: its outputs, and the variable that it reads.
        group: tasks of one group are placed together, as a variable's readers and writers have to
            be; empty: it is alone.
        device: the number of the one that it is bound to; None: it may be anywhere.
        kind: what it does, for a figure.
    """

    name: str
    seconds: float
    bytes: float = 0.0
    group: str = ""
    device: int | None = None
    kind: str = ""

    @property
    def together(self) -> str:
        """What names its group, also where it is alone."""
        return self.group or self.name


SIGNAL = -1  # no output, but that a task is done


@dataclass(frozen=True)
class Need:
    """That a task needs so many bytes of another one.

    output: the number of the tensor that it reads, of those that the source makes; `SIGNAL`: it
    only waits for the source.
    """

    source: str
    target: str
    bytes: float = 0.0
    output: int = 0


@dataclass(frozen=True)
class Machine:
    r"""Devices that are alike, and a link from each to each.

    A device computes one task at a time. A link carries one tensor at a time, for
    \(\text{latency} + \text{bytes} / \text{bandwidth}\); each direction is a link of its own.

    Attributes:
        devices: their names.
        latency: s, of a copy between two devices.
        bandwidth: bytes/s.
        memory: bytes that the tasks of a device may keep.
        dispatch: s that a device needs for a task beside its computation.
    """

    devices: tuple[str, ...]
    latency: float = 0.0
    bandwidth: float = math.inf
    memory: float = math.inf
    dispatch: float = 0.0

    def __post_init__(self) -> None:
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise InvalidInput(f"devices={self.devices} is impossible: give names, each once")
        for name in ("latency", "dispatch"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidInput(
                    f"{name}={getattr(self, name)} is impossible: give s, at least 0"
                )
        for name in ("bandwidth", "memory"):
            if not getattr(self, name) > 0:
                raise InvalidInput(f"{name}={getattr(self, name)} is impossible: give more than 0")

    def copy_seconds(self, nbytes: float) -> float:
        """What a link needs for a tensor."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class TaskGraph:
    """Tasks, and what each needs; refuses circles, unknown names and negative numbers.

    Raises:
        InvalidInput: one of these, or no task at all.
    """

    tasks: tuple[Task, ...]
    needs: tuple[Need, ...] = ()

    def __post_init__(self) -> None:
        names = {task.name for task in self.tasks}
        if not self.tasks or len(names) < len(self.tasks):
            raise InvalidInput("give at least one task, and each a name of its own")
        for task in self.tasks:
            if not (0 <= task.seconds < math.inf and 0 <= task.bytes < math.inf):
                raise InvalidInput(f"{task} is impossible: seconds and bytes are finite, from 0 on")
        for need in self.needs:
            if lost := {need.source, need.target} - names:
                raise InvalidInput(f"{need} names {sorted(lost)[0]!r}, which is no task")
            if not 0 <= need.bytes < math.inf:
                raise InvalidInput(f"{need} is impossible: bytes are finite, from 0 on")
        if len(self.order) < len(self.tasks):
            left = ", ".join(sorted(names - set(self.order))[:5])
            raise InvalidInput(f"needs form a circle among {left}: give a graph without one")

    @cached_property
    def by_name(self) -> Mapping[str, Task]:
        """The tasks."""
        return {task.name: task for task in self.tasks}

    @cached_property
    def before(self) -> Mapping[str, Sequence[Need]]:
        """What each task needs."""
        return self._ends("target")

    @cached_property
    def after(self) -> Mapping[str, Sequence[Need]]:
        """Who needs each task."""
        return self._ends("source")

    @cached_property
    def order(self) -> Sequence[str]:
        """The tasks' names, each after all that it needs; those on a circle are missing."""
        waits = {name: len({n.source for n in needs}) for name, needs in self.before.items()}
        found = [name for name, count in waits.items() if count == 0]
        for name in found:  # grows while it is read
            for target in dict.fromkeys(need.target for need in self.after[name]):
                waits[target] -= 1
                if waits[target] == 0:
                    found.append(target)
        return found

    @property
    def seconds(self) -> float:
        """Of all tasks, one after the other."""
        return sum(task.seconds for task in self.tasks)

    @property
    def bytes(self) -> float:
        """That all tasks keep together."""
        return sum(task.bytes for task in self.tasks)

    def to_the_end(self, copy: float = 0.0, machine: Machine | None = None) -> dict[str, float]:
        r"""The longest way from each task to the end, s: \(r_i = w_i + \max_j (c_{ij} + r_j)\).

        Args:
            copy: the share of needs that are taken to cross between devices.
            machine: whose copies and dispatches are counted; None: neither.
        """
        dispatch = machine.dispatch if machine else 0.0
        found: dict[str, float] = {}
        for name in reversed(self.order):
            rest = (
                found[need.target] + (copy * machine.copy_seconds(need.bytes) if machine else 0.0)
                for need in self.after[name]
            )
            found[name] = self.by_name[name].seconds + dispatch + max(rest, default=0.0)
        return found

    def shortest(self, machine: Machine) -> float:
        """No plan is shorter: the longest way without copies, or the work over all devices, s."""
        work = self.seconds + machine.dispatch * len(self.tasks)
        free = Machine(machine.devices, dispatch=machine.dispatch)
        return max(max(self.to_the_end(0.0, free).values()), work / len(machine.devices))

    def _ends(self, end: str) -> dict[str, list[Need]]:
        found: dict[str, list[Need]] = {task.name: [] for task in self.tasks}
        for need in self.needs:
            found[getattr(need, end)].append(need)
        return found
