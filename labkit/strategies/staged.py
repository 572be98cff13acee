"""What strategies that cut a model into stages have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import PositiveInt, field_validator

from labkit.errors import InvalidInput
from labkit.strategies.base import Question, Session, Strategy

if TYPE_CHECKING:
    from labkit.communicator import Communicator


class Cut(NamedTuple):
    """One rank's side of a model in stages: the ranks of its replica, and its stages by number.

    Inputs and outputs are the tensors at the ends of all stages.
    """

    communicator: Communicator
    own: dict[int, Any]
    inputs: list[Any]
    outputs: list[Any]


class Staged(Strategy):
    """Contiguous layers on each rank; replicas of them share a batch."""

    partition: str | tuple[PositiveInt, ...] = "parameters"

    @field_validator("partition")
    @classmethod
    def _partition(cls, value: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if isinstance(value, str) and value != "parameters":
            raise ValueError(
                f"partition={value!r} is not known; allowed: 'parameters', or a number of blocks "
                "for each stage"
            )
        return value

    def ranks(self, workers: int) -> int:
        """Of one replica."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many ranks it has")

    def readers(self, communicator: Communicator) -> Communicator:
        """The ranks of one place in all replicas: they divide the batch among them."""
        return communicator.split(communicator.rank % self.ranks(communicator.size))

    def check_stages(self, experiment: Question, field: str, stages: int) -> None:
        """Refuse what no model in stages can do.

        Args:
            experiment: the question.
            field: what the strategy calls the ranks of a replica.
            stages: of a replica, on all of its ranks.
        """
        workers = experiment.workers
        ranks = self.ranks(workers)
        if experiment.capacities is not None or experiment.feed == "scatter":
            raise InvalidInput(
                "capacities and feed='scatter' divide a batch among all workers, but the stages of "
                "a pipeline work on the same rows; leave both out"
            )
        if workers % ranks:
            raise InvalidInput(
                f"{field}={ranks} does not divide workers={workers}; "
                f"allowed: {', '.join(str(n) for n in range(1, workers + 1) if workers % n == 0)}"
            )
        if not isinstance(self.partition, str) and len(self.partition) != stages:
            raise InvalidInput(
                f"partition={list(self.partition)} is of {len(self.partition)} stages; give "
                f"{stages} numbers, one a stage"
            )
        _refuse_global_norm(experiment.optimizer_options.get("global_clipnorm"))

    def cut(self, session: Session, stages: int, optimizer: Any, recompute: bool = False) -> Cut:
        """This rank's stages of the session's model, which is compiled with the optimizer."""
        from labkit.stages import Chain, Stage, by_hand, by_parameters, split_model

        _refuse_global_norm(getattr(optimizer, "global_clipnorm", None))
        session.compile(optimizer)
        ranks = self.ranks(session.communicator.size)
        replica = session.communicator.split(session.communicator.rank // ranks)
        chain = Chain(session.model)
        if isinstance(self.partition, str):
            counts = [chain.part(n, n + 1).count_params() for n in range(len(chain))]
            edges = by_parameters(counts, stages)
        else:
            edges = by_hand(self.partition, len(chain))
        models = split_model(session.model, edges)
        # Whose each variable is, so that all ranks can have all of them at the end.
        session.owners = {
            id(variable): number % ranks
            for number, model in enumerate(models)
            for variable in model.variables
        }

        def loss(y: Any, predicted: Any, weight: Any) -> Any:
            return session.model._compile_loss(y, predicted, weight)

        own = {
            number: Stage(model, loss if number == stages - 1 else None, number == 0, recompute)
            for number, model in enumerate(models)
            if number % ranks == replica.rank
        }
        inputs, outputs = [m.inputs[0] for m in models], [m.outputs[0] for m in models]
        return Cut(replica, own, inputs, outputs)


def mean_and_apply(session: Session, own: dict[int, Any], optimizer: Any) -> Callable[[Any], None]:
    """A function of the rows behind this rank's gradients that changes the weights of its stages.

    Replicas average; one optimizer serves all stages of a rank, so that callbacks that change its
    rate find it in the model.
    """
    from labkit.exchange import Exchange

    exchange = Exchange(session.readers)
    variables = [variable for stage in own.values() for variable in stage.variables]
    names = [variable.path for variable in variables]

    def update(rows: int) -> None:
        gradients = [each for stage in own.values() for each in stage.take_gradients()]
        if variables and session.readers.total(rows, "the rows of an update") > 0:
            optimizer.apply(exchange.mean(gradients, np.int64(rows), names), variables)

    return update


def collect(session: Session) -> None:
    """Give all ranks the weights of all stages."""
    for variable in session.model.variables:
        value = np.array(variable.numpy(), order="C")
        owner = session.owners.get(id(variable), 0)
        session.communicator.broadcast(value, owner, "the weights of the stages")
        variable.assign(value)


def recorder(timeline: Any) -> Any:
    """Stands around each row of a schedule and writes it down."""

    @contextmanager
    def record(action: str, stage: int, number: int) -> Iterator[None]:
        start = time.monotonic()
        yield
        timeline.add(f"{action} {stage}", number, start)

    return record


def _refuse_global_norm(given: float | None) -> None:
    if given is not None:
        raise InvalidInput(
            f"global_clipnorm={given} needs the gradients of all layers on one rank, but each rank "
            "has those of its own; use clipnorm (by variable) or clipvalue"
        )
