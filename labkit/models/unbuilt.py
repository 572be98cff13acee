"""What is known of a named model before Keras has built it: the facts that its options tell."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar

from labkit.common.options import Options
from labkit.datasets import Shapes
from labkit.schedules.grid import Layer, Shape, window


class ModelOptions(Options):
    """Options of a model, and what they say of it; each model overrides what it knows.

    Attributes:
        sequences: whether the model can answer every step of a sequence.
        codes: whether it can do nothing else.
        recurrent: whether its layers go from step to step.
    """

    sequences: ClassVar[bool] = False
    codes: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False

    @property
    def smallest(self) -> int:
        """Height and width, in pixels, of the smallest image; 0: examples need not be images."""
        return 0

    @property
    def blocks(self) -> int | None:
        """How many blocks `stages.Chain` finds in the built model."""
        return None

    def widest(self, shapes: Shapes) -> int | None:
        """The most units, filters, words or heads that a layer of the model has."""
        return None

    def hidden(self, layers: list[Layer]) -> list[Layer] | None:
        """Its layers as machines in a grid see them, input given, before the scores.

        None, where a layer cannot be cut over a grid.
        """
        return None


def first_plane(shapes: Shapes) -> Layer:
    """The input as machines in a grid see it."""
    own = shapes.input_shape
    shape: Shape = (own[0], own[1], own[2]) if len(own) == 3 else (1, 1, prod(own))
    return Layer("input", "input", shape, trains=False)


def window_plane(
    kind: str, layers: Sequence[Layer], channels: int, k: int, s: int, trains: bool = True
) -> Layer:
    """A layer of square kernels k, moved by strides s, behind these layers."""
    return window(_named(kind, layers), layers[-1].shape, channels, (k, k), (s, s), trains)


def dense_plane(layers: Sequence[Layer], units: int) -> Layer:
    """A Dense layer behind these."""
    return Layer(_named("dense", layers), "units", (1, 1, units))


def _named(kind: str, layers: Sequence[Layer]) -> str:
    """The name that Keras gives in the first model of a process: dense, dense_1, …"""
    before = sum(layer.name.startswith(kind) for layer in layers)
    return f"{kind}_{before}" if before else kind
