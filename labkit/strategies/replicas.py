"""Base classes of strategies in which each worker trains a separate model between exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import field_validator, model_validator

from labkit.common.errors import InvalidInput
from labkit.communicator import Transport
from labkit.forecast import Query, StepForecast, of_program
from labkit.forecast.workers import MEET, PLAYED, Crowd
from labkit.programs import Program, Roles, ServerPieces
from labkit.schedules import ALLREDUCE
from labkit.strategies.strategy import ExperimentSpec, Session, Strategy
from labkit.strategies.validation import one_of, refuse_keras_step_options


class Replicas(Strategy):
    """Each worker has its own weights and optimizer; subclasses define what workers exchange.

    The mean over all workers is the result of training, and the result is evaluated. The mean is
    computed for weights and for moving statistics of layers. All workers have the same number of
    steps.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("periodic",)

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_runs(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Remove fields that occur only in records of earlier versions of the strategy."""
        unused = {"compressor": None, "algorithm": "auto"}.items()
        known = cls.model_fields
        return {name: v for name, v in values.items() if name in known or (name, v) not in unused}

    @property
    def uses_programs(self) -> bool:
        """True: workers run as programs, on the wall clock and on the virtual clock."""
        return True

    @property
    def replays(self) -> bool:
        """False: training cannot be replayed, because no server receives all gradients."""
        return False

    @property
    def central(self) -> bool:
        """Whether a server on a separate rank holds the weights that result from training."""
        return False

    def extra_ranks(self, workers: int) -> int:
        """Return 1 if the strategy has a server, and 0 if it has none."""
        return int(self.central)

    def copies(self, workers: int) -> Sequence[int]:
        """Return the server's number, or the numbers of all workers if there is no server."""
        return [workers] if self.central else range(workers)

    @property
    def transport(self) -> Transport:
        """The transport of all messages: a send with a matching receive."""
        return "two_sided"

    @property
    def serves_concurrently(self) -> bool:
        """False: no server shares a rank with a worker."""
        return False

    def rows(self, batch_size: int, workers: int) -> int:
        """Return the largest number of rows of a batch that one worker processes."""
        return -(-batch_size // workers)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for options that need a common model, before any rank starts."""
        refuse_keras_step_options(experiment)
        if experiment.input_mode == "scatter":
            raise InvalidInput(
                "input_mode='scatter' does not support separate models; use input_mode='shard'"
            )

    def train(self, session: Session) -> None:
        """Train by running the programs of all workers."""
        session.play(self)

    def cycle(self, experiment: ExperimentSpec) -> int:
        """Return after how many training steps the pattern of exchanges repeats."""
        return 1

    def recurs(self, experiment: ExperimentSpec) -> bool:
        """Return whether replicas wait for each other, so that communication repeats in cycles."""
        return self.cell(experiment.workers).synchronization in ("synchronous", "periodic")

    def crowd(self, workers: int) -> Crowd | None:
        """Return a sample of workers for a forecast, or None if it simulates all workers."""
        needs_sample = self.central and workers > PLAYED
        return Crowd(self, PLAYED, workers / PLAYED) if needs_sample else None

    def forecast(self, query: Query) -> StepForecast:
        """Forecast a training step by simulation of the programs."""
        return of_program(query, self, self.cycle(query.experiment), self.crowd(query.workers))

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> list[ServerPieces]:
        """Return [], because no server stores a part of the weights."""
        return []

    def hosts(self, workers: int) -> list[int]:
        """Return the rank of each process; each process has a rank of its own."""
        return list(range(workers + self.extra_ranks(workers)))

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Return the program of one process, from its start or from the restart point `mark`."""
        raise NotImplementedError(f"{type(self).__name__} must define program")


class SynchronousReplicas(Replicas):
    """The base class of strategies whose replicas exchange values by an allreduce.

    Args:
        algorithm: The allreduce algorithm, a name in `labkit.schedules.ALLREDUCE` or "auto", which
            selects the ring.
    """

    algorithm: str = "auto"

    @field_validator("algorithm")
    @classmethod
    def _algorithm(cls, value: str) -> str:
        return one_of("algorithm", value, ("auto", *ALLREDUCE))

    def crowd(self, workers: int) -> Crowd | None:
        """Return a sample of workers with stragglers, or None if all workers are simulated."""
        central = super().crowd(workers)
        return central or (Crowd(self, MEET) if workers > MEET and not self.central else None)

    @property
    def scheduled(self) -> str:
        """The allreduce algorithm; for "auto" it is "ring"."""
        return "ring" if self.algorithm == "auto" else self.algorithm
