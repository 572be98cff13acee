"""Placement of a training step's operations on logical devices of one TensorFlow process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, TypeAlias, cast

from pydantic import Field

from labkit.common.validated import Checked
from labkit.communicator import Communicator
from labkit.frameworks.child import Child
from labkit.records.step_graph import PlacementMeasurements, PlanMeasurement, Row
from labkit.simulate.placement import PlacementPlan

Positive: TypeAlias = Annotated[int, Field(gt=0)]


class DeviceRequest(Checked):
    """A model with parallel towers, the logical devices for it, and the numbers of repetitions.

    Args:
        devices: Number of logical CPU devices, from 2 to 8; they share the cores of this machine.
        widths: For each tower, the number of units per layer.
        depth: Number of layers of each tower.
        features: Number of input features per sample.
        classes: Number of classes of the softmax output.
        batch: Number of samples per training step.
        threads: Maximum number of threads that one operation uses.
        repeats: Number of times that each measurement is repeated.
        sizes: Row counts n of the n × n matrices whose products are timed.
        seed: Seed of the random weights and samples.
    """

    devices: Annotated[int, Field(ge=2, le=8)] = 2
    widths: tuple[Positive, ...] = (512, 512, 256, 256)
    depth: Positive = 2
    features: Positive = 256
    classes: Positive = 10
    batch: Positive = 256
    threads: Positive = 1
    repeats: Positive = 15
    sizes: tuple[Positive, ...] = (64, 256, 1024)
    seed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """TensorFlow's names of the logical devices."""
        return tuple(f"CPU:{number}" for number in range(self.devices))


PROCESS = "labkit.worker.device_placement"


def examine(communicator: Communicator, request: DeviceRequest) -> PlacementMeasurements:
    """Measure how TensorFlow places operations, and time a step, copies and matrix products."""
    return cast(PlacementMeasurements, _ask(communicator, request, True, "examine"))


def carry_out(
    communicator: Communicator,
    request: DeviceRequest,
    plans: Sequence[PlacementPlan],
    rounds: int | None = None,
) -> list[PlanMeasurement]:
    """Run and time one training step under each placement plan, in each of `rounds` rounds.

    Args:
        communicator: Communicator of the rank that starts the child process.
        request: The request with which `examine` measured the tasks that the plans place.
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


__all__ = ["DeviceRequest", "carry_out", "examine"]
