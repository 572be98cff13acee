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
    """A strategy that consists of programs; see `labkit.strategies.ProgramStrategy`."""

    @property
    def replica_cut(self) -> int | tuple[int, int]:
        """The number of stages, or the grid, that divides a worker's model; 1 if undivided."""

    def copies(self, workers: int) -> Sequence[int]:
        """Return the numbers of the programs that store their own copy of the weights."""

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[ServerPieces]:
        """Return the slices of the weights that each server stores."""

    def hosts(self, workers: int) -> Sequence[int]:
        """Return the rank of each program: workers first, then servers, then other programs."""

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Create the program with the number `number`."""

    def recurs(self, experiment: Any) -> bool:
        """Return whether communication repeats in equal cycles if all steps take equal time."""


class Crowd(NamedTuple):
    """A sample of workers that represents a larger number of workers.

    Attributes:
        strategy: Strategy with which the sample trains.
        workers: Number of simulated workers.
        servers: Factor by which a server's real traffic exceeds its simulated traffic.
        everyone: Factor by which a worker's real traffic, or number of predictions, exceeds the
            simulated one.
    """

    strategy: ProgramWorkers
    workers: int
    servers: float = 1.0
    everyone: float = 1.0


def shapes_of(query: Query) -> list[tuple[int, ...]]:
    """Return the shapes of all trainable weights, in the order of the model."""
    return [shape for layer in query.model.layers for shape in layer.weights]


def slowdowns_of(query: Query, workers: int) -> dict[int, Slowdown]:
    """Return the slowdowns by worker; in a sample, the first workers have the slowdowns."""
    slow = query.slowdowns
    if workers == query.workers:
        return slow
    return dict(enumerate(slowdown for _, slowdown in sorted(slow.items())[:workers]))


def meta_roles(query: Query, strategy: ProgramWorkers, workers: int) -> Roles:
    """Return the programs' roles, with weights that have a size but no values."""
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
    """Return a network that slows few simulated ranks as much as the traffic of all real ranks.

    Returns:
        The network with slower transfers, and for each simulated rank the factor by which its
        transfer times are multiplied.
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
