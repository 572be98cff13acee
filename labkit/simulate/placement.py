"""Plans that place operations on devices and predict their times, without real devices."""

from __future__ import annotations

import heapq
import random
from bisect import insort
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

from labkit.common.errors import InvalidInput
from labkit.common.units import bytes_text
from labkit.simulate.task_graph import SIGNAL, DeviceGroup, GraphTask, Need, TaskGraph


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


Spans = list[tuple[float, float]]


def list_schedule(
    graph: TaskGraph,
    machine: DeviceGroup,
    name: str = "list scheduling",
    allowed: Mapping[str, Collection[int]] | None = None,
) -> PlacementPlan:
    r"""Place and schedule the tasks one by one, the task with the longest path to the end first.

    The next task has the greatest upward rank \(r_i = w_i + \max_j (\bar c_{ij} + r_j)\). All
    predecessors of the next task are already scheduled. In the upward rank, \(w_i\) is the time of
    task i. The mean copy time from task i to task j is \(\bar c_{ij}\). The mean copy time is over
    all pairs of devices. The scheduler chooses the device on which the task ends earliest. On the
    chosen device, the task takes the first sufficiently long idle interval after its inputs arrive.
    A copy takes the first sufficiently long idle interval of its link. All tasks of a group go to
    one device, which must have enough free memory for the group.

    If copies are expensive, the plan may take longer than one device would take. The scheduler
    places the first tasks where they end earliest. At the time of placement, the cost of copies of
    the results is unknown.

    Args:
        graph: The tasks.
        machine: The devices and links.
        name: Name of the plan.
        allowed: Mapping from the name of each group of tasks to the devices that the group may use.
            With a single allowed device per group, the placement is fixed, and only the schedule is
            computed. Default: every group may use all devices.

    Raises:
        InvalidInput: If a task is bound to a missing or forbidden device. The error also occurs if
            no device has room for a group. The greedy algorithm may raise `InvalidInput` even if a
            placement that fits exists.

    Source: H. Topcuoglu, S. Hariri, M.-Y. Wu 2002, *Performance-effective and low-complexity task
    scheduling for heterogeneous computing* (HEFT). U. U. Hafeez, X. Sun, A. Gandhi, Z. Liu 2021,
    *Towards optimal placement and scheduling of DNN operations with Pesto* (Middleware). Pesto, a
    published planner, optimizes the placement and the order of operations. Pesto models the limited
    memory of devices, and the waiting time before busy links. Pesto solves an integer program over
    a simplified graph with merged operations. labkit's heuristic places each operation separately.
    The heuristic does not guarantee how close its plan is to the optimum.
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
        """Return the times of a task on a device, and the copies that the task needs."""
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
        """Return the copy; it takes the first long enough gap on its link after the source task."""
        seconds = self.machine.copy_seconds(need.bytes)
        start = first_gap(spans, self.spans[need.source][1], seconds)
        insort(spans, (start, start + seconds))
        stop = start + seconds
        return Copy(need.source, need.output, sender, device, need.bytes, start, stop)


def first_gap(busy: Spans, ready: float, length: float) -> float:
    """Return the earliest start, not before `ready`, of a free interval of the given length."""
    for start, stop in busy:
        if ready + length <= start:
            break
        ready = max(ready, stop)
    return ready


def all_on_one(graph: TaskGraph, machine: DeviceGroup, device: int = 0) -> PlacementPlan:
    """Place all tasks on one device, except those that are bound to another device.

    Raises:
        InvalidInput: If the tasks exceed the device's memory.
    """
    return _placed("all on one", graph, machine, lambda free, _: device)


def round_robin(graph: TaskGraph, machine: DeviceGroup) -> PlacementPlan:
    """Place each group of tasks on the next device with free memory, in execution order.

    Raises:
        InvalidInput: If no device has enough free memory for a group of tasks.
    """
    count = len(machine.devices)

    def choose(free: Sequence[int], number: int) -> int:
        return min(free, key=lambda device: (device - number) % count)

    return _placed("round robin", graph, machine, choose)


def at_random(graph: TaskGraph, machine: DeviceGroup, seed: int) -> PlacementPlan:
    """Place each group of tasks on a random device with enough free memory.

    Raises:
        InvalidInput: If no device has enough free memory for a group of tasks.
    """
    generator = random.Random(seed)
    return _placed(f"random, seed {seed}", graph, machine, lambda free, _: generator.choice(free))


def _placed(
    name: str, graph: TaskGraph, machine: DeviceGroup, choose: Callable[[Sequence[int], int], int]
) -> PlacementPlan:
    bound = {task.group_name: task.device for task in graph.tasks if task.device is not None}
    sizes: dict[str, float] = {}
    for task in (graph.by_name[task_name] for task_name in graph.order):
        sizes[task.group_name] = sizes.get(task.group_name, 0.0) + task.bytes
    free_memory = [machine.memory] * len(machine.devices)
    for group, device in bound.items():
        free_memory[device] -= sizes[group]
    placement: dict[str, int] = dict(bound)
    for number, group in enumerate(group for group in sizes if group not in bound):
        free = [device for device, room in enumerate(free_memory) if room >= sizes[group]]
        if not free:
            raise InvalidInput(f"{name}: no device has room for {group!r}; give more memory")
        placement[group] = choose(free, number)
        free_memory[placement[group]] -= sizes[group]
    return list_schedule(
        graph, machine, name, {group: (device,) for group, device in placement.items()}
    )


def compare_policies(
    graph: TaskGraph, machine: DeviceGroup, seeds: Sequence[int] = (0, 1, 2)
) -> list[PlacementPlan]:
    """Return the plans that fit into memory, first of the simple policies, then of list scheduling.

    The simple policies are: all tasks on one device, round robin, and a random placement for each
    seed.

    Raises:
        InvalidInput: If no plan fits into memory.
    """
    makers: list[Callable[[], PlacementPlan]] = [
        partial(all_on_one, graph, machine),
        partial(round_robin, graph, machine),
        *(partial(at_random, graph, machine, seed) for seed in seeds),
        partial(list_schedule, graph, machine),
    ]
    plans, errors = [], []
    for make in makers:
        try:
            plans.append(make())
        except InvalidInput as error:
            errors.append(error)
    if not plans:
        raise errors[-1]
    return plans


__all__ = [
    "SIGNAL",
    "Copy",
    "DeviceGroup",
    "GraphTask",
    "Need",
    "PlacementPlan",
    "TaskGraph",
    "all_on_one",
    "at_random",
    "compare_policies",
    "list_schedule",
    "round_robin",
]
