"""Which operation runs on which device, and when: plans as data, made and timed without devices."""

from labkit.simulate.placement.compared import compared
from labkit.simulate.placement.list_scheduling import list_schedule
from labkit.simulate.placement.plan import Copy, Plan
from labkit.simulate.placement.policies import all_on_one, at_random, round_robin
from labkit.simulate.placement.task_graph import SIGNAL, Machine, Need, Task, TaskGraph

__all__ = [
    "SIGNAL",
    "Copy",
    "Machine",
    "Need",
    "Plan",
    "Task",
    "TaskGraph",
    "all_on_one",
    "at_random",
    "compared",
    "list_schedule",
    "round_robin",
]
