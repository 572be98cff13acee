"""Baseline placements that ignore costs; list scheduling then orders the tasks of a placement."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from labkit.common.errors import InvalidInput
from labkit.simulate.placement.list_scheduling import list_schedule
from labkit.simulate.placement.plan import PlacementPlan
from labkit.simulate.placement.task_graph import DeviceGroup, TaskGraph


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
