"""Locally connected layers over a grid of machines, as in DistBelief."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import PositiveInt, field_validator

from labkit.errors import InvalidInput
from labkit.schedules.grid import Grid, check_fit, squarest
from labkit.strategies.base import Question, Session, Strategy
from labkit.strategies.parts import AROUND, refuse_around, refuse_in_parts
from labkit.strategies.tensor_parallel import WHOLE

if TYPE_CHECKING:
    from labkit.communicator import Communicator
    from labkit.grid import Part


class LocallyConnected(Strategy):
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
    themselves, so the input does not travel. Every rank builds the whole model first and gathers
    its weights after each epoch, for callbacks, validation and the record.

    Source: J. Dean et al.: Large scale distributed deep networks, NIPS 2012. Differs from it:
    synchronous, without its parameter server; a machine waits for what it reads and overlaps
    nothing; the input is on all machines.
    """

    grid: tuple[PositiveInt, PositiveInt] | None = None

    @field_validator("grid", mode="before")
    @classmethod
    def _grid(cls, value: Any) -> Any:
        if value is not None and (not isinstance(value, tuple | list) or len(value) != 2):
            raise ValueError(
                f"grid={value!r} is not rows and columns of machines; give two numbers, such as "
                "(2, 2)"
            )
        return value

    @property
    def exact(self) -> bool:
        """Sums are only taken in another order."""
        return True

    def check(self, experiment: Question) -> None:
        """Refuse what does not fit together, before any rank starts."""
        refuse_in_parts(experiment)
        if experiment.capacities is not None or experiment.feed == "scatter":
            raise InvalidInput(
                "capacities and feed='scatter' divide a batch among all workers, but the machines "
                "of a grid work on the same rows; leave both out"
            )
        _refuse_norms(experiment.optimizer, experiment.optimizer_options)
        check_fit(self.of(experiment.workers), experiment.workers, experiment.planes or ())

    def of(self, workers: int) -> Grid:
        """The grid of one replica."""
        return self.grid or squarest(workers)

    def machines(self, workers: int) -> int:
        """Ranks of one replica."""
        rows, columns = self.of(workers)
        return rows * columns

    def readers(self, communicator: Communicator) -> Communicator:
        """The ranks of one place in all replicas: they divide the batch among them."""
        return communicator.split(communicator.rank % self.machines(communicator.size))

    def train(self, session: Session) -> None:
        """Steps on parts, an optimizer a rank."""
        part, step = self.start(session)
        steps = count()

        def counted(x: Any, y: Any, weight: Any) -> float | None:
            next(steps)
            return step(x, y, weight)

        session.loop(counted, lambda: collect(session, part))
        session.layers = part.describe(max(1, next(steps)))
        session.memory = part.memory(session.model.optimizer, session.optimizer())

    def start(self, session: Session) -> tuple[Part, Callable[[Any, Any, Any], float | None]]:
        """This rank's part of the session's model, and the step that trains it."""
        import tensorflow as tf

        from labkit.exchange import Exchange
        from labkit.grid import Part

        optimizer = session.optimizer()
        given = {name: getattr(optimizer, name, None) for name in ("clipnorm", "global_clipnorm")}
        _refuse_norms(type(optimizer).__name__.lower(), given)
        refuse_around({name: getattr(optimizer, name, None) for name in AROUND})
        session.compile(optimizer)
        workers = session.communicator.size
        replica = session.part(session.communicator.rank // self.machines(workers))
        algorithm = "mpi" if replica.network is None else "ring"
        part = Part(session.model, replica, self.of(workers), algorithm)
        exchange = Exchange(session.readers, algorithm)
        variables, gradients = part.variables, part.gradients()
        names = [variable.path for variable in variables]

        def step(x: Any, y: Any, weight: Any) -> float | None:
            rows = len(x)
            loss, found = None, [tf.zeros_like(variable.value) for variable in variables]
            if rows:  # as many on all machines of a replica
                batch = [None if v is None else tf.convert_to_tensor(v) for v in (x, y, weight)]
                loss, found = gradients(*batch)
            if session.readers.total(rows, "the rows of a step") > 0:
                optimizer.apply(exchange.mean(found, np.int64(rows), names), variables)
            return float(loss) if loss is not None and replica.rank == 0 else None

        return part, step


def collect(session: Session, part: Part) -> None:
    """Give all ranks the weights of all parts."""
    part.collect()
    for variable in session.model.variables:
        value = np.array(variable.numpy(), order="C")
        session.communicator.broadcast(value, what="the weights of the grid")
        variable.assign(value)


def _refuse_norms(optimizer: str, options: Any) -> None:
    if optimizer in WHOLE:
        raise InvalidInput(
            f"optimizer={optimizer!r} looks at whole variables, but a machine has a part of each; "
            "use one that works by element, such as 'sgd' or 'adam'"
        )
    for name in ("clipnorm", "global_clipnorm"):
        if options.get(name) is not None:
            raise InvalidInput(
                f"{name}={options[name]} needs the norm of whole gradients, but a machine has a "
                "part of each; use clipvalue"
            )
