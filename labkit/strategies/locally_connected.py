"""Locally connected layers over a grid of machines, as in DistBelief."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveInt, field_validator

from labkit.forecast import Query, StepForecast, of_grid
from labkit.schedules.grid import Grid, check_fit, squarest
from labkit.strategies.intra_layer import IntraLayer, Objective
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.validation import Given, rows_and_columns

if TYPE_CHECKING:
    import keras

    from labkit.communicator import Communicator
    from labkit.model_parallel.grid import Part
    from labkit.model_parallel.losses import Losses


class LocallyConnected(IntraLayer):
    r"""A grid of machines has a model's layers in tiles: what crosses between tiles travels.

    Machine (i, j) computes tile (i, j) of every locally connected, convolution and pooling layer,
    of what lies under its kernels. A value that another machine reads travels to it once, however
    many of its kernels read it, and the gradients of its readers return and add up. A Dense layer
    is cut by units, each of which reads all values. Its scores meet on machine 0, which computes
    the loss and returns their gradients. Unshared kernels and units are trained where they are
    used and never travel; kernels of a Conv2D are whole on all machines, and the gradients of
    their tiles are summed. Several replicas share a batch and average their gradients.

    `run.layers` says for each machine what it has of each layer, and what it sends before it.

    Args:
        grid: rows and columns of machines of one replica; None: all workers, as square as can be.
            Workers are a multiple of r c, and each machine has a place or unit of every layer.

    Allowed: LocallyConnected2D, Conv2D, MaxPooling2D and AveragePooling2D without padding,
    Flatten, Dense behind it, activations by element. All machines of a replica read its rows by
    themselves, so the input does not travel. Every rank builds the whole model first, and gathers
    it at the end, and after each epoch where callbacks of the user's own may look at it; weights
    that they set count from the next step on. In between it holds its tiles alone: weights,
    gradients and optimizer state.

    Source: J. Dean et al.: Large scale distributed deep networks, NIPS 2012. Differs from it:
    synchronous, without its parameter server; a machine waits for what it reads and overlaps
    nothing; the input is on all machines.
    """

    called: ClassVar[str] = "machine"
    whole: ClassVar[str] = "grid"
    architecture: ClassVar[tuple[str, ...]] = ("neighbours",)
    parallelism: ClassVar[tuple[str, ...]] = ("model by tiles", "hybrid")
    paper: ClassVar[str] = "Dean 2012"

    grid: tuple[PositiveInt, PositiveInt] | None = Field(None, kw_only=False)

    @field_validator("grid", mode="before")
    @classmethod
    def _grid(cls, value: Given) -> Given:
        return rows_and_columns(value)

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what does not fit together, before any rank starts."""
        super().check(experiment)
        check_fit(self.of(experiment.workers), experiment.workers, experiment.planes or ())

    def forecast(self, asked: Query) -> StepForecast:
        """By what crosses between tiles."""
        return of_grid(asked, self.of(asked.workers))

    def of(self, workers: int) -> Grid:
        """The grid of one replica."""
        return self.grid or squarest(workers)

    def ranks(self, workers: int) -> int:
        """Of one replica."""
        rows, columns = self.of(workers)
        return rows * columns

    def share(self, model: keras.Model, replica: Communicator) -> Part:
        """This machine's tiles and units."""
        from labkit.model_parallel.grid import Part

        return Part(model, replica, self.of(replica.size), self.resolved(replica))

    def objective(self, model: keras.Model, share: Part, losses: Losses) -> Objective:
        """The loss on machine 0, elsewhere nothing, whose gradient is what machine 0 returns."""
        return partial(share.objective, losses=losses)

    def a_row(self, share: Part) -> int:
        """By the tiles."""
        return share.model.a_row()
