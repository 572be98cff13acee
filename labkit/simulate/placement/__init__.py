"""Placement of operations on devices: plans with devices and times, computed without devices."""

from labkit.simulate.placement.compared import compare_policies
from labkit.simulate.placement.list_scheduling import list_schedule
from labkit.simulate.placement.plan import Copy, PlacementPlan
from labkit.simulate.placement.policies import all_on_one, at_random, round_robin
from labkit.simulate.placement.task_graph import SIGNAL, DeviceGroup, GraphTask, Need, TaskGraph

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
