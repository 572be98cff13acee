"""What all strategies share whose workers train models of their own, and meet now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import field_validator, model_validator

from labkit.common.errors import InvalidInput
from labkit.communicator import Transport
from labkit.forecast import Query, StepForecast, of_program
from labkit.forecast.worker_sampling import MEET, PLAYED, Crowd
from labkit.programs import Parts, Program, Roles
from labkit.schedules import ALLREDUCE
from labkit.strategies.strategy import ExperimentSpec, Session, Strategy
from labkit.strategies.validation import one_of, refuse_in_parts


class Replicas(Strategy):
    """Each worker has weights and an optimizer of its own; how they meet, those say that derive.

    What is evaluated, and what training leaves, is the mean of the workers' weights, and of what
    their layers keep beside these (moving statistics). All of them have the same number of steps.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("periodic",)

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_runs(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Leave out what records once said of all replicas, and what only some have."""
        unused = {"compressor": None, "algorithm": "auto"}.items()
        own = cls.model_fields
        return {name: v for name, v in given.items() if name in own or (name, v) not in unused}

    @property
    def plays(self) -> bool:
        """It is a program."""
        return True

    @property
    def replays(self) -> bool:
        """No server knows all steps."""
        return False

    @property
    def central(self) -> bool:
        """Whether one more, on a rank of its own, holds the weights that count."""
        return False

    def extra_ranks(self, workers: int) -> int:
        """Its rank."""
        return int(self.central)

    def copies(self, workers: int) -> Sequence[int]:
        """Each worker has weights of its own."""
        return [workers] if self.central else range(workers)

    @property
    def transport(self) -> Transport:
        """They send and receive."""
        return "two_sided"

    @property
    def serves_concurrently(self) -> bool:
        """There is no server."""
        return False

    def rows(self, batch_size: int, workers: int) -> int:
        """Rows of a worker's part of the batch."""
        return -(-batch_size // workers)

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what models that are trained apart cannot do, before any rank starts."""
        refuse_in_parts(experiment)
        if experiment.feed == "scatter":
            raise InvalidInput("feed='scatter' does not know workers apart; use feed='shard'")

    def train(self, session: Session) -> None:
        """Play the programs of all workers."""
        session.play(self)

    def cycle(self, experiment: ExperimentSpec) -> int:
        """Steps after which what workers exchange begins anew."""
        return 1

    def recurs(self, experiment: ExperimentSpec) -> bool:
        """Where replicas wait for each other."""
        return self.cell(experiment.workers).synchronization in ("synchronous", "periodic")

    def crowd(self, workers: int) -> Crowd | None:
        """A few in the place of so many, in a forecast; None: all."""
        many = self.central and workers > PLAYED
        return Crowd(self, PLAYED, workers / PLAYED) if many else None

    def forecast(self, asked: Query) -> StepForecast:
        """By playing its programs."""
        return of_program(asked, self, self.cycle(asked.experiment), self.crowd(asked.workers))

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> list[Parts]:
        """No server holds anything."""
        return []

    def hosts(self, workers: int) -> list[int]:
        """Each has a place of its own."""
        return list(range(workers + self.extra_ranks(workers)))

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """What a worker does, from its begin or from a mark that it has set."""
        raise NotImplementedError(f"{type(self).__name__} does not say what a worker does")


class Meeting(Replicas):
    """Replicas that meet all at once, by an allreduce.

    Args:
        algorithm: of the allreduce, a name of `labkit.schedules.ALLREDUCE`; "auto": the ring.
    """

    algorithm: str = "auto"

    @field_validator("algorithm")
    @classmethod
    def _algorithm(cls, value: str) -> str:
        return one_of("algorithm", value, ("auto", *ALLREDUCE))

    def crowd(self, workers: int) -> Crowd | None:
        """As many as bring one that is late."""
        central = super().crowd(workers)
        return central or (Crowd(self, MEET) if workers > MEET and not self.central else None)

    @property
    def scheduled(self) -> str:
        """The algorithm of the allreduce."""
        return "ring" if self.algorithm == "auto" else self.algorithm
