"""The request to a child process that runs a training step on logical TensorFlow devices."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from labkit.common.validated import Checked

Positive: TypeAlias = Annotated[int, Field(gt=0)]


class DeviceRequest(Checked):
    """A model with parallel towers, the logical devices for it, and the numbers of repetitions.

    Args:
        devices: Number of logical CPU devices, from 2 to 8; they share the cores of this machine.
        widths: For each tower, the number of units of every one of its layers.
        depth: Number of layers of each tower.
        features: Number of input features per sample.
        classes: Number of classes of the softmax output.
        batch: Number of samples per training step.
        threads: Maximum number of threads that one operation uses.
        repeats: Number of times that each measurement is repeated.
        sizes: Sizes n of the n × n matrices in measurements of matrix products.
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
