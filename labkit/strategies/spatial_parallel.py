"""Spatial parallelism: a grid of machines divides layers into tiles, as in DistBelief."""

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
    """A grid of machines divides a model's layers into tiles; the machines exchange border values.

    In every locally connected, convolution and pooling layer, machine (i, j) computes tile (i, j)
    from the values under the tile's kernels. A value is sent only once to each other machine that
    reads it, even if several kernels there read it. All machines that read a value send their
    gradients of it back, and these gradients are summed. A Dense layer is divided by units; each
    unit reads all values of the previous layer. Machine 0 gathers the final scores, computes the
    loss and returns the gradients of the scores. Kernels that are not shared, and units, are
    trained on the machine that uses them, and are never sent. Every machine stores all kernels of a
    Conv2D layer; the kernels' gradients from all tiles are summed. Several replicas divide each
    batch and average their gradients.

    For each machine, `run.layers` lists its part of each layer, and the values that it sends before
    the layer.

    Args:
        grid: The rows and columns (r, c) of the grid of machines of one replica. None: all workers
            form one grid, as square as possible. The number of workers must be a multiple of r c,
            and each machine must have at least one position or unit of every layer.

    Allowed layers are LocallyConnected2D, Conv2D, MaxPooling2D and AveragePooling2D without
    padding, Flatten, Dense after Flatten, and element-wise activations. Each machine of a replica
    reads the replica's rows itself, so machines send no input data. Every rank builds the whole
    model first, and gathers the trained model at the end. If there are callbacks of the user, ranks
    also gather the model after each epoch. If callbacks set weights, the next step uses them.
    During training, a machine stores weights, gradients and optimizer state only of its own tiles.

    Source: J. Dean et al.: Large scale distributed deep networks, NIPS 2012. Differs from it:
        training is synchronous, without the paper's parameter server. A machine waits for the
        values that it reads; communication does not overlap computation. Every machine reads the
        complete input.
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
        """Forecast a training step from the computation of tiles and their messages."""
        return of_grid(query, self.grid_of(query.workers))

    def grid_of(self, workers: int) -> Grid:
        """Return the rows and columns of the grid of one replica."""
        return self.grid or squarest_grid(workers)

    def ranks(self, workers: int) -> int:
        """Return the number of ranks of one replica."""
        rows, columns = self.grid_of(workers)
        return rows * columns

    def share(self, model: keras.Model, replica: Communicator) -> GridPart:
        """Return the tiles and units of this machine."""
        from labkit.model_parallel.grid import GridPart

        return GridPart(model, replica, self.grid_of(replica.size), self.resolved(replica))

    def objective(self, model: keras.Model, share: GridPart, losses: Losses) -> Objective:
        """Return the function that computes the loss on machine 0; elsewhere it returns zero."""
        return partial(share.objective, losses=losses)

    def bytes_per_row(self, share: GridPart) -> int:
        """Return the predicted bytes of activations per row, summed over this machine's tiles."""
        return share.model.bytes_per_row()
