"""Programs: strategies whose order depends on timing, as actions that two worlds carry out."""

from labkit.programs.actions import (
    Action,
    AllReduce,
    Compute,
    Drop,
    Gradient,
    Message,
    Program,
    Receive,
    Send,
    Snapshot,
    Update,
    Wait,
)
from labkit.programs.diary import Diary, Scenes
from labkit.programs.placement import PLACEMENTS, Parts, placed
from labkit.programs.roles import Roles

__all__ = [
    "PLACEMENTS",
    "Action",
    "AllReduce",
    "Compute",
    "Diary",
    "Drop",
    "Gradient",
    "Message",
    "Parts",
    "Program",
    "Receive",
    "Roles",
    "Scenes",
    "Send",
    "Snapshot",
    "Update",
    "Wait",
    "placed",
]
