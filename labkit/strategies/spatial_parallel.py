"""Spatial parallelism: layers are cut into tiles over a grid of machines, as in DistBelief."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveInt, field_validator

from labkit.forecast import Query, StepForecast, of_grid
from labkit.schedules.grid import Grid, squarest_grid, validate_grid
from labkit.strategies.intra_layer import IntraLayer, Objective
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.validation import GridValue, rows_and_columns

if TYPE_CHECKING:
    import keras

    from labkit.communicator import Communicator
    from labkit.model_parallel.grid import GridPart
    from labkit.model_parallel.losses import Losses


class SpatialParallel(IntraLayer):
    """A grid of machines divides a model's layers into tiles, and exchanges values between tiles.

    Machine (i, j) computes tile (i, j) of every locally connected, convolution and pooling layer
    from the values under the tile's kernels. A value is sent once to each other machine that reads
    it, even if several kernels on that machine read the value. All machines that read a value
    return their gradients of it, and the gradients are summed. A Dense layer is cut by units, each
    of which reads all values of the previous layer. Machine 0 gathers the final scores, computes
    the loss and returns the gradients of the scores. Unshared kernels and units are trained on the
    machine that uses them and are never sent. All machines store all kernels of a Conv2D, and the
    gradients of their tiles are summed. Several replicas divide each batch and average their
    gradients.

    `run.layers` lists for each machine its part of each layer, and the values that it sends before
    the layer.

    Args:
        grid: The rows and columns (r, c) of machines of one replica; None: all workers, as square
            as possible. The number of workers is a multiple of r c, and each machine has at least
            one position or unit of every layer.

    Allowed layers are LocallyConnected2D, Conv2D, MaxPooling2D and AveragePooling2D without
    padding, Flatten, Dense after Flatten, and element-wise activations. Each machine of a replica
    reads the replica's rows itself, so that no machine sends input. Every rank builds the whole
    model first, and gathers the trained model at the end. With the user's callbacks, ranks also
    gather the model after each epoch; weights that callbacks set take effect from the next step.
    During training a machine stores only its tiles: weights, gradients and optimizer state.

    Source: J. Dean et al.: Large scale distributed deep networks, NIPS 2012. Differs from it:
        training is synchronous, without the paper's parameter server. A machine waits for the
        values that it reads, without overlap. All machines read the whole input.
    """

    part_name: ClassVar[str] = "machine"
    whole_name: ClassVar[str] = "grid"
    architecture: ClassVar[tuple[str, ...]] = ("neighbours",)
    parallelism: ClassVar[tuple[str, ...]] = ("model by tiles", "hybrid")
    paper: ClassVar[str] = "Dean 2012"

    grid: tuple[PositiveInt, PositiveInt] | None = Field(None, kw_only=False)

    @field_validator("grid", mode="before")
    @classmethod
    def _grid(cls, value: GridValue) -> GridValue:
        return rows_and_columns(value)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput, before any rank starts, for conflicting options."""
        super().check(experiment)
        validate_grid(
            self.grid_of(experiment.workers), experiment.workers, experiment.grid_layers or ()
        )

    def forecast(self, query: Query) -> StepForecast:
        """Forecast a step from the computation of tiles and the messages between tiles."""
        return of_grid(query, self.grid_of(query.workers))

    def grid_of(self, workers: int) -> Grid:
        """Return the grid of one replica."""
        return self.grid or squarest_grid(workers)

    def ranks(self, workers: int) -> int:
        """Return the number of ranks of one replica."""
        rows, columns = self.grid_of(workers)
        return rows * columns

    def share(self, model: keras.Model, replica: Communicator) -> GridPart:
        """Return this machine's tiles and units."""
        from labkit.model_parallel.grid import GridPart

        return GridPart(model, replica, self.grid_of(replica.size), self.resolved(replica))

    def objective(self, model: keras.Model, share: GridPart, losses: Losses) -> Objective:
        """Return the function that computes the loss on machine 0, and zero on other machines."""
        return partial(share.objective, losses=losses)

    def bytes_per_row(self, share: GridPart) -> int:
        """Return the predicted bytes of activations per row, summed over this machine's tiles."""
        return share.model.bytes_per_row()
