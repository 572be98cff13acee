"""What a process with devices of its own is asked."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from labkit.common.validated import Checked

Positive: TypeAlias = Annotated[int, Field(gt=0)]


class DeviceRequest(Checked):
    """A model with towers side by side, logical devices to place it on, and how often to measure.

    Args:
        devices: logical CPU devices, 2 to 8; they share the cores of this machine.
        widths: of the towers, one each; every layer of a tower is so wide.
        depth: layers of each tower.
        features: of a sample.
        classes: that are told apart.
        batch: samples of a step.
        threads: that one operation may compute with.
        repeats: of each measurement.
        sizes: n of the n × n matrices that are multiplied.
        seed: of weights and samples.
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
        """Of the logical devices, as TensorFlow calls them."""
        return tuple(f"CPU:{number}" for number in range(self.devices))
