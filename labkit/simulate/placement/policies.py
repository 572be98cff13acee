"""Placements that ask for no cost, to hold a better one against; each is given its best order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from labkit.common.errors import InvalidInput
from labkit.simulate.placement.list_scheduling import list_schedule
from labkit.simulate.placement.plan import Plan
from labkit.simulate.placement.task_graph import Machine, TaskGraph


def all_on_one(graph: TaskGraph, machine: Machine, device: int = 0) -> Plan:
    """Everything on one device, but what is bound to another.

    Raises:
        InvalidInput: its memory has no room for that.
    """
    return _placed("all on one", graph, machine, lambda free, _: device)


def round_robin(graph: TaskGraph, machine: Machine) -> Plan:
    """Each group on the next device that has room, in the order in which the step needs them.

    Raises:
        InvalidInput: none has.
    """
    count = len(machine.devices)

    def choose(free: Sequence[int], number: int) -> int:
        return min(free, key=lambda device: (device - number) % count)

    return _placed("round robin", graph, machine, choose)


def at_random(graph: TaskGraph, machine: Machine, seed: int) -> Plan:
    """Each group on any device that has room.

    Raises:
        InvalidInput: none has.
    """
    draw = random.Random(seed)
    return _placed(f"random, seed {seed}", graph, machine, lambda free, _: draw.choice(free))


def _placed(
    name: str, graph: TaskGraph, machine: Machine, choose: Callable[[Sequence[int], int], int]
) -> Plan:
    bound = {task.together: task.device for task in graph.tasks if task.device is not None}
    sizes: dict[str, float] = {}
    for task in (graph.by_name[each] for each in graph.order):
        sizes[task.together] = sizes.get(task.together, 0.0) + task.bytes
    left = [machine.memory] * len(machine.devices)
    for group, device in bound.items():
        left[device] -= sizes[group]
    chosen: dict[str, int] = dict(bound)
    for number, group in enumerate(group for group in sizes if group not in bound):
        free = [device for device, room in enumerate(left) if room >= sizes[group]]
        if not free:
            raise InvalidInput(f"{name}: no device has room for {group!r}; give more memory")
        chosen[group] = choose(free, number)
        left[chosen[group]] -= sizes[group]
    return list_schedule(graph, machine, name, {group: (at,) for group, at in chosen.items()})
