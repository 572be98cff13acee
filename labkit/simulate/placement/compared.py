"""The same tasks placed by every rule, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from labkit.common.errors import InvalidInput
from labkit.simulate.placement.list_scheduling import list_schedule
from labkit.simulate.placement.plan import Plan
from labkit.simulate.placement.policies import all_on_one, at_random, round_robin
from labkit.simulate.placement.task_graph import Machine, TaskGraph


def compared(graph: TaskGraph, machine: Machine, seeds: Sequence[int] = (0, 1, 2)) -> list[Plan]:
    """All on one, round robin, a random plan a seed, list scheduling: those that fit the memory.

    Raises:
        InvalidInput: none fits.
    """
    makers: list[Callable[[], Plan]] = [
        partial(all_on_one, graph, machine),
        partial(round_robin, graph, machine),
        *(partial(at_random, graph, machine, seed) for seed in seeds),
        partial(list_schedule, graph, machine),
    ]
    found, refused = [], []
    for make in makers:
        try:
            found.append(make())
        except InvalidInput as error:
            refused.append(error)
    if not found:
        raise refused[-1]
    return found
