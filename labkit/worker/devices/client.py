"""Starts child processes with logical devices, because TensorFlow fixes its devices at start."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import cast

from labkit.communicator import Communicator
from labkit.frameworks.child import Child
from labkit.records.placed import PlacementMeasurements, PlanMeasurement, Row
from labkit.simulate.placement import PlacementPlan
from labkit.worker.devices.request import DeviceRequest

PROCESS = "labkit.worker.devices.server"


def examine(communicator: Communicator, request: DeviceRequest) -> PlacementMeasurements:
    """Measure TensorFlow's placements, tasks of a step, and times of copies and matrix products."""
    return cast(PlacementMeasurements, _ask(communicator, request, True, "examine"))


def carry_out(
    communicator: Communicator,
    request: DeviceRequest,
    plans: Sequence[PlacementPlan],
    rounds: int | None = None,
) -> list[PlanMeasurement]:
    """Run and time a training step by each placement plan, alternating between the plans.

    Args:
        communicator: Communicator of the rank that starts the child process.
        request: The same request as for `examine`, which returned the tasks of the plans.
        plans: Placement plans for the devices of one machine.
        rounds: Number of rounds, each with one step of each plan; default: `request.repeats`.
    """
    answer = _ask(communicator, request, False, "carry_out", list(plans), rounds or request.repeats)
    return cast("list[PlanMeasurement]", answer)


def speeds_of(
    communicator: Communicator, request: DeviceRequest, pair: tuple[str, str]
) -> list[Row]:
    """Measure matrix products of several sizes on two devices, and copies in both directions."""
    return cast("list[Row]", _ask(communicator, request, False, "speeds", pair))


def _ask(
    communicator: Communicator, request: DeviceRequest, log: bool, what: str, *arguments: object
) -> object:
    task = (request, log)
    child = Child(PROCESS, "devices", task, communicator, request.threads, gpus=True)
    with closing(child):
        child.answer()
        return child.ask(what, *arguments)
