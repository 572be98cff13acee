"""List scheduling: the task with the longest way to the end first, where it ends earliest."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from labkit.common.errors import InvalidInput
from labkit.common.units import bytes_text
from labkit.simulate.placement.plan import Copy, Plan
from labkit.simulate.placement.task_graph import Machine, Need, Task, TaskGraph

Spans = list[tuple[float, float]]


def list_schedule(
    graph: TaskGraph,
    machine: Machine,
    name: str = "list scheduling",
    allowed: Mapping[str, Collection[int]] | None = None,
) -> Plan:
    r"""Place and schedule one task after the other, the one with the longest way to the end first.

    Of the tasks whose needs are scheduled, the next one is that of the greatest
    \(r_i = w_i + \max_j (\bar c_{ij} + r_j)\), where \(\bar c\) is what a copy takes on average
    over all pairs of devices. It goes to the device on which it ends earliest, into the first gap
    that is long enough, once what it needs has been copied there; links are filled in the same way.
    A group follows its first task, and a device takes no group that its memory has no room for.

    Where copies are dear a plan may be longer than all on one device: the first tasks are placed by
    their own ends, before it is known what their results will cost whoever reads them.

    Args:
        graph: what is to be done.
        machine: by what.
        name: of the plan.
        allowed: devices of a group, by `Task.together`; a placement that is given leaves each one
            only, and is so given its schedule. Default: all.

    Raises:
        InvalidInput: a task is bound to a device that is not there or not allowed, or no device has
            room for a group; being greedy, it may miss a placement that fits.

    Source: H. Topcuoglu, S. Hariri, M.-Y. Wu 2002, *Performance-effective and low-complexity task
    scheduling for heterogeneous computing* (HEFT). U. U. Hafeez, X. Sun, A. Gandhi, Z. Liu 2021,
    *Towards optimal placement and scheduling of DNN operations with Pesto* (Middleware), has the
    same question: placement and order together, with copies that queue on links and limits of
    memory. It solves an integer program over a graph made coarser; this is a heuristic over all
    operations, without a bound on what it misses.
    """
    world = _World(graph, machine, dict(allowed or {}))
    share = (len(machine.devices) - 1) / len(machine.devices)
    urgent = graph.to_the_end(share, machine)
    waits = {task.name: len({n.source for n in graph.before[task.name]}) for task in graph.tasks}
    place = {task: number for number, task in enumerate(graph.order)}
    ready = [(-urgent[task], place[task], task) for task, count in waits.items() if count == 0]
    heapq.heapify(ready)
    while ready:
        *_, task = heapq.heappop(ready)
        world.settle(graph.by_name[task])
        for target in dict.fromkeys(need.target for need in graph.after[task]):
            waits[target] -= 1
            if waits[target] == 0:
                heapq.heappush(ready, (-urgent[target], place[target], target))
    copies = tuple(sorted(world.copies.values(), key=lambda copy: (copy.start, copy.stop)))
    return Plan(name, graph, machine, world.devices, world.spans, copies)


@dataclass
class _World:
    """What has been settled so far."""

    graph: TaskGraph
    machine: Machine
    allowed: dict[str, Collection[int]]
    devices: dict[str, int] = field(default_factory=dict)
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    copies: dict[tuple[str, int, int], Copy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.machine.devices)
        self.busy: list[Spans] = [[] for _ in range(count)]
        self.links: dict[tuple[int, int], Spans] = {}
        self.left = [self.machine.memory] * count
        self.groups: dict[str, int] = {}
        self.sizes: dict[str, float] = {}
        for task in self.graph.tasks:
            self.sizes[task.together] = self.sizes.get(task.together, 0.0) + task.bytes
            if task.device is not None:
                self._bind(task, task.device)

    def settle(self, task: Task) -> None:
        """Place a task, whose needs are placed, and give it its time."""
        tried = [(*self._ends(task, device), device) for device in self._possible(task)]
        stop, start, copies, device = min(tried, key=lambda each: (each[0], each[3]))
        if task.together not in self.groups:
            self.groups[task.together] = device
            self.left[device] -= self.sizes[task.together]
        self.devices[task.name], self.spans[task.name] = device, (start, stop)
        insort(self.busy[device], (start, stop))
        for copy in copies:
            self.copies[copy.task, copy.output, copy.receiver] = copy
            insort(self.links.setdefault((copy.sender, device), []), (copy.start, copy.stop))

    def _bind(self, task: Task, device: int) -> None:
        count = len(self.machine.devices)
        allowed = self.allowed.get(task.together, range(count))
        if device not in allowed or not 0 <= device < count:
            raise InvalidInput(
                f"{task.name!r} is bound to device {device}; allowed for its group: "
                f"{', '.join(map(str, allowed))}"
            )
        self.allowed[task.together] = (device,)

    def _possible(self, task: Task) -> list[int]:
        if (settled := self.groups.get(task.together)) is not None:
            return [settled]
        size = self.sizes[task.together]
        allowed = self.allowed.get(task.together, range(len(self.machine.devices)))
        found = [device for device in allowed if self.left[device] >= size]
        if not found:
            most = max((self.left[device] for device in allowed), default=0.0)
            raise InvalidInput(
                f"the group of {task.name!r} keeps {bytes_text(size)}, and of the devices allowed "
                f"to it none has more than {bytes_text(most)} left; give more memory or devices"
            )
        return found

    def _ends(self, task: Task, device: int) -> tuple[float, float, list[Copy]]:
        """Stop and start of the task on this device, and the copies that it then takes."""
        copies: dict[tuple[str, int], Copy] = {}
        arrived = 0.0
        links: dict[int, Spans] = {}
        for need in sorted(self.graph.before[task.name], key=lambda n: self.spans[n.source][1]):
            sender, made = self.devices[need.source], (need.source, need.output)
            if sender == device:
                arrived = max(arrived, self.spans[need.source][1])
                continue
            copy = self.copies.get((*made, device)) or copies.get(made)
            if copy is None:
                spans = links.setdefault(sender, [*self.links.get((sender, device), [])])
                copy = copies[made] = self._copy(need, sender, device, spans)
            arrived = max(arrived, copy.stop)
        length = task.seconds + self.machine.dispatch
        start = first_gap(self.busy[device], arrived, length)
        return start + length, start, list(copies.values())

    def _copy(self, need: Need, sender: int, device: int, spans: Spans) -> Copy:
        """The first gap of the link after the source has ended."""
        seconds = self.machine.copy_seconds(need.bytes)
        start = first_gap(spans, self.spans[need.source][1], seconds)
        insort(spans, (start, start + seconds))
        stop = start + seconds
        return Copy(need.source, need.output, sender, device, need.bytes, start, stop)


def first_gap(busy: Spans, ready: float, length: float) -> float:
    """The earliest moment from `ready` on, from which on nothing is busy for so long."""
    for start, stop in busy:
        if ready + length <= start:
            break
        ready = max(ready, stop)
    return ready
