"""One machine's part of a model: its weights beside the whole ones, and its side of the loss."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.grid.tiles import Tiles
from labkit.model_parallel.losses import Losses, Weighted
from labkit.model_parallel.meter import LayerRow, Meter, layer_row
from labkit.model_parallel.stages.footprint import weights
from labkit.model_parallel.weights import Pair, Share
from labkit.schedules.grid import Grid


class Part(Share):
    """What machine `communicator.rank` of a grid has of a model, with the weights of the whole.

    The first machine holds the outputs.

    Args:
        model, communicator, grid, algorithm: see `Tiles`.

    Attributes:
        model: what computes this machine's part.
    """

    model: Tiles

    def __init__(
        self, model: keras.Model, communicator: Communicator, grid: Grid, algorithm: str
    ) -> None:
        super().__init__(communicator)
        self._whole = model
        self.model = Tiles(model, communicator, grid, algorithm)
        for pair in self.pairs():
            pair.take()

    def predict(self, x: tf.Tensor) -> tf.Tensor:
        """The outputs of the whole model for x on the first machine."""
        return self.model(x)

    def objective(
        self,
        x: tf.Tensor,
        y: tf.Tensor,
        weight: Weighted,
        losses: Losses,
    ) -> tf.Tensor:
        """The loss of a batch, on the first machine.

        Args:
            x, y, weight: the batch, with weights as `losses` takes them.
            losses: what is minimised.
        """
        found = self.model(x)
        if self.first:
            return losses(y, found, weight)
        return tf.reduce_sum(found)  # of nothing: its gradient is what the first machine sends

    def meters(self) -> list[Meter]:
        """What counts before each layer, and the sums of each layer's gradients."""
        return [*self.model.halos, *self.model.links]

    def pairs(self) -> Iterator[Pair]:
        """Of all layers."""
        return self.model.pairs()

    def describe(self, steps: int = 1) -> list[LayerRow]:
        """A row a layer: what this machine has of it, bytes that it sends before it, of weights.

        Bytes are those of a step: values forward, gradients back, sums of shared kernels apart.

        Args:
            steps: taken so far.
        """
        tiles = self.model
        layers = zip(tiles.planes[1:], [None, *tiles.halos], strict=True)  # a halo behind the first
        rows = [layer_row(plane.name, plane.kind, "", halo, steps) for plane, halo in layers]
        for row, piece, own, link in zip(rows, tiles.pieces, tiles.own, tiles.links, strict=False):
            row["weights_bytes"] = weights([own])["weights"]
            row["whole_weights_bytes"] = weights([piece.layer])["weights"]
            row["kernels_bytes"] = link.payload["backward"] / steps
        rows[-1]["kernels_bytes"] = 0.0  # the loss has no weights
        return rows
