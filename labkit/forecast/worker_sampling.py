"""The workers that a forecast simulates: all workers, or a sample that represents all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from labkit.forecast.meta_vector import MetaVector
from labkit.forecast.query import Query
from labkit.network import Network, Slowdown, relative_compute_times
from labkit.programs import Program, Roles, ServerPieces

PLAYED = 16  # maximum number of simulated workers with point-to-point communication
MEET = 512  # maximum number of simulated workers with collective communication


class ProgramWorkers(Protocol):
    """A strategy that is a program; see `labkit.strategies.ProgramStrategy`."""

    @property
    def replica_cut(self) -> int | tuple[int, int]:
        """The number of stages of a worker's model, or its grid; 1: the model is not divided."""

    def copies(self, workers: int) -> Sequence[int]:
        """Return the numbers of programs that hold their own weights."""

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[ServerPieces]:
        """Return the part of the weights that each server holds."""

    def hosts(self, workers: int) -> Sequence[int]:
        """Return the rank of each program: workers first, then servers, then other programs."""

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Create the program with this number."""

    def recurs(self, experiment: Any) -> bool:
        """Return whether all communication cycles are equal if all steps take the same time."""


class Crowd(NamedTuple):
    """A sample of workers that represents a larger number of workers.

    Attributes:
        strategy: Strategy that the sample runs.
        workers: Number of simulated workers.
        servers: Ratio of a server's real traffic to its simulated traffic.
        everyone: Ratio of a worker's real traffic to its simulated traffic; also for predictions.
    """

    strategy: ProgramWorkers
    workers: int
    servers: float = 1.0
    everyone: float = 1.0


def shapes_of(query: Query) -> list[tuple[int, ...]]:
    """Return the shapes of all trainable weights, in the order of the model."""
    return [shape for layer in query.model.layers for shape in layer.weights]


def slowdowns_of(query: Query, workers: int) -> dict[int, Slowdown]:
    """Return the slowdowns by worker; in a sample, the first workers get the slowdowns."""
    slow = query.slowdowns
    if workers == query.workers:
        return slow
    return dict(enumerate(slowdown for _, slowdown in sorted(slow.items())[:workers]))


def meta_roles(query: Query, strategy: ProgramWorkers, workers: int) -> Roles:
    """Return the roles for a run in which the weights have a size but no values."""
    experiment, shapes = query.experiment, shapes_of(query)
    weights: Any = MetaVector(sum(map(math.prod, shapes)), query.dtype)
    sizes = [sum(map(math.prod, layer.weights)) for layer in query.model.layers if layer.weights]
    return Roles(
        workers,
        list(strategy.parts(shapes)),
        experiment.epoch_steps or 10**6,
        10**6,
        weights,
        list(strategy.hosts(workers)),
        experiment.seed,
        slower=relative_compute_times(slowdowns_of(query, workers), workers),
        layers=sizes,
        rate=experiment.learning_rate or 0.01,
    )


def sample_network(
    query: Query, roles: Roles, crowd: Crowd
) -> tuple[Network | None, dict[int, float]]:
    """Return a network on which few simulated ranks are as slow as with the traffic of all ranks.

    Returns:
        The network, with slower transfers, and each simulated rank's factor on transfer times.
    """
    network = query.network
    if network is None:
        return None, {}
    places = range(1 + max(roles.hosts))
    factors = dict.fromkeys(places, crowd.everyone) if crowd.everyone > 1 else {}
    if crowd.servers != 1:
        factors |= {roles.hosts[n]: crowd.servers for n in range(roles.workers, len(roles.hosts))}
    slow = {
        rank: slowdown
        for rank, slowdown in slowdowns_of(query, crowd.workers).items()
        if rank in places
    }
    for place, factor in factors.items():
        slowdown = slow.get(place, Slowdown())
        slow[place] = slowdown.model_copy(update={"transfer": slowdown.transfer * factor})
    return network.model_copy(update={"stragglers": slow}), factors
