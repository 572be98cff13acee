"""Programs: update strategies whose order of updates depends on timing, with two runtimes."""

from labkit.programs.actions import (
    Action,
    Adopt,
    AllReduceAction,
    Begin,
    Code,
    Compute,
    Curvature,
    Drop,
    Forget,
    Gradient,
    Join,
    Message,
    Predict,
    Program,
    Receive,
    RestartPoint,
    Send,
    Snapshot,
    States,
    Update,
    Wait,
)
from labkit.programs.codec_channel import CodecChannel
from labkit.programs.cut_program import passing, whole_replica_program
from labkit.programs.event_log import Backend, EventLog
from labkit.programs.passes import Pass, staged
from labkit.programs.placement import PLACEMENTS, ServerPieces, placed
from labkit.programs.roles import Roles

__all__ = [
    "PLACEMENTS",
    "Action",
    "Adopt",
    "AllReduceAction",
    "Backend",
    "Begin",
    "Code",
    "CodecChannel",
    "Compute",
    "Curvature",
    "Drop",
    "EventLog",
    "Forget",
    "Gradient",
    "Join",
    "Message",
    "Pass",
    "Predict",
    "Program",
    "Receive",
    "RestartPoint",
    "Roles",
    "Send",
    "ServerPieces",
    "Snapshot",
    "States",
    "Update",
    "Wait",
    "passing",
    "placed",
    "staged",
    "whole_replica_program",
]
