"""List scheduling: tasks with a long path to the end come first, where they end earliest."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from labkit.common.errors import InvalidInput
from labkit.common.units import bytes_text
from labkit.simulate.placement.plan import Copy, PlacementPlan
from labkit.simulate.placement.task_graph import DeviceGroup, GraphTask, Need, TaskGraph

Spans = list[tuple[float, float]]


def list_schedule(
    graph: TaskGraph,
    machine: DeviceGroup,
    name: str = "list scheduling",
    allowed: Mapping[str, Collection[int]] | None = None,
) -> PlacementPlan:
    r"""Place and schedule the tasks one by one, the task with the longest path to the end first.

    Among tasks whose predecessors are scheduled, the one with the greatest upward rank \(r_i = w_i
    + \max_j (\bar c_{ij} + r_j)\) is next. Here \(w_i\) is the time of task i. \(\bar c_{ij}\) is
    the mean time of a copy from task i to task j over all pairs of devices. The scheduler chooses
    the device on which the task ends earliest. On this device, the task takes the first
    sufficiently long idle interval after its inputs arrive. A copy takes the first sufficiently
    long idle interval of its link in the same way. All tasks of a group go to one device, which
    must have enough free memory for the group.

    If copies are expensive, the plan may take longer than one device would take. The scheduler
    places the first tasks by when they end, before the cost of copying their results is known.

    Args:
        graph: The tasks.
        machine: The devices and links.
        name: Name of the plan.
        allowed: For each group name, the devices that the group may use. With a single allowed
            device per group, the placement is fixed, and only the schedule is computed. Default:
            every group may use all devices.

    Raises:
        InvalidInput: If a task is bound to a missing or forbidden device, or if no device has room
            for a group. The greedy algorithm may raise this error even if a placement that fits
            exists.

    Source: H. Topcuoglu, S. Hariri, M.-Y. Wu 2002, *Performance-effective and low-complexity task
    scheduling for heterogeneous computing* (HEFT). U. U. Hafeez, X. Sun, A. Gandhi, Z. Liu 2021,
    *Towards optimal placement and scheduling of DNN operations with Pesto* (Middleware), also
    optimizes placement and order together, with copies that queue on links and limited memory.
    Pesto solves an integer program over a simplified graph with merged operations. labkit's
    heuristic places each operation separately, and does not guarantee how close it comes to the
    optimum.
    """
    scheduler = _Scheduler(graph, machine, dict(allowed or {}))
    share = (len(machine.devices) - 1) / len(machine.devices)
    upward_rank = graph.path_lengths(share, machine)
    unmet = {task.name: len({n.source for n in graph.before[task.name]}) for task in graph.tasks}
    position = {task: number for number, task in enumerate(graph.order)}
    ready = [
        (-upward_rank[task], position[task], task) for task, count in unmet.items() if count == 0
    ]
    heapq.heapify(ready)
    while ready:
        *_, task = heapq.heappop(ready)
        scheduler.place_task(graph.by_name[task])
        for target in dict.fromkeys(need.target for need in graph.after[task]):
            unmet[target] -= 1
            if unmet[target] == 0:
                heapq.heappush(ready, (-upward_rank[target], position[target], target))
    copies = tuple(sorted(scheduler.copies.values(), key=lambda copy: (copy.start, copy.stop)))
    return PlacementPlan(name, graph, machine, scheduler.devices, scheduler.spans, copies)


@dataclass
class _Scheduler:
    """The partial plan: placed tasks, their times, and the copies so far."""

    graph: TaskGraph
    machine: DeviceGroup
    allowed: dict[str, Collection[int]]
    devices: dict[str, int] = field(default_factory=dict)
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    copies: dict[tuple[str, int, int], Copy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.machine.devices)
        self.busy: list[Spans] = [[] for _ in range(count)]
        self.links: dict[tuple[int, int], Spans] = {}
        self.free_memory = [self.machine.memory] * count
        self.groups: dict[str, int] = {}
        self.sizes: dict[str, float] = {}
        for task in self.graph.tasks:
            self.sizes[task.group_name] = self.sizes.get(task.group_name, 0.0) + task.bytes
            if task.device is not None:
                self._bind(task, task.device)

    def place_task(self, task: GraphTask) -> None:
        """Place a task whose predecessors are already placed, and set its start and end times."""
        candidates = [(*self._ends(task, device), device) for device in self._possible(task)]
        stop, start, copies, device = min(candidates, key=lambda option: (option[0], option[3]))
        if task.group_name not in self.groups:
            self.groups[task.group_name] = device
            self.free_memory[device] -= self.sizes[task.group_name]
        self.devices[task.name], self.spans[task.name] = device, (start, stop)
        insort(self.busy[device], (start, stop))
        for copy in copies:
            self.copies[copy.task, copy.output, copy.receiver] = copy
            insort(self.links.setdefault((copy.sender, device), []), (copy.start, copy.stop))

    def _bind(self, task: GraphTask, device: int) -> None:
        count = len(self.machine.devices)
        allowed = self.allowed.get(task.group_name, range(count))
        if device not in allowed or not 0 <= device < count:
            raise InvalidInput(
                f"{task.name!r} is bound to device {device}; devices allowed for its group: "
                f"{', '.join(map(str, allowed))}"
            )
        self.allowed[task.group_name] = (device,)

    def _possible(self, task: GraphTask) -> list[int]:
        if (device_of_group := self.groups.get(task.group_name)) is not None:
            return [device_of_group]
        size = self.sizes[task.group_name]
        allowed = self.allowed.get(task.group_name, range(len(self.machine.devices)))
        candidates = [device for device in allowed if self.free_memory[device] >= size]
        if not candidates:
            largest = max((self.free_memory[device] for device in allowed), default=0.0)
            raise InvalidInput(
                f"the group of {task.name!r} needs {bytes_text(size)}, but no allowed device has "
                f"more than {bytes_text(largest)} free; give more memory or devices"
            )
        return candidates

    def _ends(self, task: GraphTask, device: int) -> tuple[float, float, list[Copy]]:
        """Return the task's stop and start on this device, and the copies that it needs there."""
        copies: dict[tuple[str, int], Copy] = {}
        arrived = 0.0
        links: dict[int, Spans] = {}
        for need in sorted(self.graph.before[task.name], key=lambda n: self.spans[n.source][1]):
            sender, tensor = self.devices[need.source], (need.source, need.output)
            if sender == device:
                arrived = max(arrived, self.spans[need.source][1])
                continue
            copy = self.copies.get((*tensor, device)) or copies.get(tensor)
            if copy is None:
                spans = links.setdefault(sender, [*self.links.get((sender, device), [])])
                copy = copies[tensor] = self._copy(need, sender, device, spans)
            arrived = max(arrived, copy.stop)
        length = task.seconds + self.machine.dispatch
        start = first_gap(self.busy[device], arrived, length)
        return start + length, start, list(copies.values())

    def _copy(self, need: Need, sender: int, device: int, spans: Spans) -> Copy:
        """Return the copy, in the link's first sufficient idle time after the source task ends."""
        seconds = self.machine.copy_seconds(need.bytes)
        start = first_gap(spans, self.spans[need.source][1], seconds)
        insort(spans, (start, start + seconds))
        stop = start + seconds
        return Copy(need.source, need.output, sender, device, need.bytes, start, stop)


def first_gap(busy: Spans, ready: float, length: float) -> float:
    """Return the earliest start, not before `ready`, of a free interval with this length."""
    for start, stop in busy:
        if ready + length <= start:
            break
        ready = max(ready, stop)
    return ready
