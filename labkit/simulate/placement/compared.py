"""Plans for the same task graph, one by each placement policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from labkit.common.errors import InvalidInput
from labkit.simulate.placement.list_scheduling import list_schedule
from labkit.simulate.placement.plan import PlacementPlan
from labkit.simulate.placement.policies import all_on_one, at_random, round_robin
from labkit.simulate.placement.task_graph import DeviceGroup, TaskGraph


def compare_policies(
    graph: TaskGraph, machine: DeviceGroup, seeds: Sequence[int] = (0, 1, 2)
) -> list[PlacementPlan]:
    """Return one plan per policy if it fits into memory: simple policies, then list scheduling.

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
