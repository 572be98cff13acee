"""Questions to fresh processes with devices of their own: TensorFlow fixes these when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import cast

from labkit.communicator import Communicator
from labkit.frameworks.child import Child
from labkit.records.placed import Examined, Measured, Row
from labkit.simulate.placement import Plan
from labkit.worker.devices.request import DeviceRequest

PROCESS = "labkit.worker.devices.server"


def examine(communicator: Communicator, asked: DeviceRequest) -> Examined:
    """What TensorFlow's placer does, what the step consists of, what copies and products cost."""
    return cast(Examined, _ask(communicator, asked, True, "examine"))


def carry_out(
    communicator: Communicator,
    asked: DeviceRequest,
    plans: Sequence[Plan],
    rounds: int | None = None,
) -> list[Measured]:
    """Each plan's step on the logical devices, all in turns, so many rounds.

    Args:
        communicator: of the rank that starts the process.
        asked: the same of which the plans' tasks were examined.
        plans: of one machine.
        rounds: in each of which every plan makes a step; default: `asked.repeats`.
    """
    answer = _ask(communicator, asked, False, "carry_out", list(plans), rounds or asked.repeats)
    return cast("list[Measured]", answer)


def speeds_of(communicator: Communicator, asked: DeviceRequest, pair: tuple[str, str]) -> list[Row]:
    """Products by size on both devices, and copies from the first to the second and back."""
    return cast("list[Row]", _ask(communicator, asked, False, "speeds", pair))


def _ask(
    communicator: Communicator, asked: DeviceRequest, log: bool, what: str, *told: object
) -> object:
    task = (asked, log)
    child = Child(PROCESS, "devices", task, communicator, asked.threads, gpus=True)
    with closing(child):
        child.answer()
        return child.ask(what, *told)
