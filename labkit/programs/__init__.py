"""Programs: strategies whose order depends on timing, as actions that two worlds carry out."""

from labkit.programs.actions import (
    Action,
    Adopt,
    AllReduce,
    Begin,
    Code,
    Compute,
    Curve,
    Drop,
    Forget,
    Gradient,
    Join,
    Mark,
    Message,
    Predict,
    Program,
    Receive,
    Send,
    Snapshot,
    States,
    Update,
    Wait,
)
from labkit.programs.codec_channel import CodecChannel
from labkit.programs.cut_program import passing, whole
from labkit.programs.event_log import Backend, EventLog
from labkit.programs.passes import Pass, staged
from labkit.programs.placement import PLACEMENTS, Parts, placed
from labkit.programs.roles import Roles

__all__ = [
    "PLACEMENTS",
    "Action",
    "Adopt",
    "AllReduce",
    "Backend",
    "Begin",
    "Code",
    "CodecChannel",
    "Compute",
    "Curve",
    "Drop",
    "EventLog",
    "Forget",
    "Gradient",
    "Join",
    "Mark",
    "Message",
    "Parts",
    "Pass",
    "Predict",
    "Program",
    "Receive",
    "Roles",
    "Send",
    "Snapshot",
    "States",
    "Update",
    "Wait",
    "passing",
    "placed",
    "staged",
    "whole",
]
