"""Programs: strategies whose order depends on timing, as actions that two worlds carry out."""

from labkit.programs.actions import (
    Action,
    AllReduce,
    Code,
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
from labkit.programs.in_stages import passing, whole
from labkit.programs.placement import PLACEMENTS, Parts, placed
from labkit.programs.roles import Roles
from labkit.programs.talk import Talk

__all__ = [
    "PLACEMENTS",
    "Action",
    "AllReduce",
    "Code",
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
    "Talk",
    "Update",
    "Wait",
    "passing",
    "placed",
    "whole",
]
