"""One machine's part of a neural network on a grid of machines, with its loss and byte counters."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.grid.tiles import Tiles
from labkit.model_parallel.losses import Losses, Weighted
from labkit.model_parallel.meter import LayerRow, Meter, layer_row
from labkit.model_parallel.stages.footprint import weights
from labkit.model_parallel.weights import Share, WeightShard
from labkit.schedules.grid import Grid


class GridPart(Share):
    """The part of a model that machine `communicator.rank` trains, with the whole model's weights.

    Machine 0 computes the outputs of the whole model.

    Args:
        model, communicator, grid, algorithm: Same arguments as those of `Tiles`.

    Attributes:
        model: Callable that computes this machine's part of the model (`Tiles`).
    """

    model: Tiles

    def __init__(
        self, model: keras.Model, communicator: Communicator, grid: Grid, algorithm: str
    ) -> None:
        super().__init__(communicator)
        self._whole = model
        self.model = Tiles(model, communicator, grid, algorithm)
        for pair in self.pairs():
            pair.copy_from_whole()

    def predict(self, x: tf.Tensor) -> tf.Tensor:
        """Return the whole model's outputs for x on machine 0, and an empty tensor elsewhere."""
        return self.model(x)

    def objective(
        self,
        x: tf.Tensor,
        y: tf.Tensor,
        weight: Weighted,
        losses: Losses,
    ) -> tf.Tensor:
        """Return the loss of a batch on machine 0, and 0 on the other machines.

        Args:
            x, y, weight: Inputs, targets, and the (sample weights, counts) pair that `losses`
                expects.
            losses: `Losses` object that computes the loss to minimize.
        """
        outputs = self.model(x)
        if self.first:
            return losses(y, outputs, weight)
        # An empty tensor sums to 0; its gradient comes from machine 0.
        return tf.reduce_sum(outputs)

    def meters(self) -> list[Meter]:
        """Return the byte counters of this machine's messages, both halos and gradient sums."""
        return [*self.model.halos, *self.model.links]

    def pairs(self) -> Iterator[WeightShard]:
        """Yield each weight of this machine together with the whole model's weight."""
        return self.model.pairs()

    def describe(self, steps: int = 1) -> list[LayerRow]:
        """Return one row per layer, with the bytes of this machine's weights and messages.

        Message bytes are means per training step, listed separately for forward values, backward
        gradients, and gradient sums of shared kernels.

        Args:
            steps: Number of training steps since the start, by which the byte counters are divided.
        """
        tiles = self.model
        # All machines have the whole input, so the first layer needs no halo exchange.
        layers = zip(tiles.planes[1:], [None, *tiles.halos], strict=True)
        rows = [layer_row(plane.name, plane.kind, "", halo, steps) for plane, halo in layers]
        for row, piece, layer, link in zip(
            rows, tiles.pieces, tiles.local_layers, tiles.links, strict=False
        ):
            row["weights_bytes"] = weights([layer])["weights"]
            row["whole_weights_bytes"] = weights([piece.layer])["weights"]
            row["kernels_bytes"] = link.payload["backward"] / steps
        rows[-1]["kernels_bytes"] = 0.0  # the loss has no weights
        return rows
