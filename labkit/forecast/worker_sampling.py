"""Who is played where a program is: all workers, or a few in the place of many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from labkit.forecast.meta_vector import MetaVector
from labkit.forecast.query import Query
from labkit.network import Network, Slowdown, slower_than_fastest
from labkit.programs import Parts, Program, Roles

PLAYED = 16  # workers that are played, where these speak to each other one by one
MEET = 512  # likewise, where all meet


class ProgramWorkers(Protocol):
    """What is asked of a strategy that is a program; see `labkit.strategies.Played`."""

    @property
    def replica_cut(self) -> int | tuple[int, int]:
        """Into how many stages a worker is cut, or over which grid; 1: it is whole."""

    def copies(self, workers: int) -> Sequence[int]:
        """Who holds weights of its own."""

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[Parts]:
        """What each server holds."""

    def hosts(self, workers: int) -> Sequence[int]:
        """The place of each worker, of each server, then of others."""

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """What this one does."""

    def recurs(self, experiment: Any) -> bool:
        """Whether all go on alike, cycle after cycle, where none of their steps is longer."""


class Crowd(NamedTuple):
    """A few workers that are played in the place of many.

    Attributes:
        strategy: as the few have it.
        workers: how many they are.
        servers: how many times as much comes to each server as the few send.
        everyone: likewise to each worker, and what it predicts.
    """

    strategy: ProgramWorkers
    workers: int
    servers: float = 1.0
    everyone: float = 1.0


def shapes_of(asked: Query) -> list[tuple[int, ...]]:
    """Of all weights that are trained, in the order of the model."""
    return [shape for layer in asked.model.layers for shape in layer.weights]


def slowed_of(asked: Query, workers: int) -> dict[int, Slowdown]:
    """Who is slow; where few are played in the place of many, the first ones."""
    slow = asked.slow
    if workers == asked.workers:
        return slow
    return dict(enumerate(law for _, law in sorted(slow.items())[:workers]))


def roles_of(asked: Query, strategy: ProgramWorkers, workers: int) -> Roles:
    """Who is there, with hollow weights."""
    experiment, shapes = asked.experiment, shapes_of(asked)
    weights: Any = MetaVector(sum(map(math.prod, shapes)), asked.dtype)
    sizes = [sum(map(math.prod, layer.weights)) for layer in asked.model.layers if layer.weights]
    return Roles(
        workers,
        list(strategy.parts(shapes)),
        experiment.epoch_steps or 10**6,
        10**6,
        weights,
        list(strategy.hosts(workers)),
        experiment.seed,
        slower=slower_than_fastest(slowed_of(asked, workers), workers),
        layers=sizes,
        rate=experiment.learning_rate or 0.01,
    )


def crowded_network(
    asked: Query, roles: Roles, crowd: Crowd
) -> tuple[Network | None, dict[int, float]]:
    """The network on which few have the traffic of many, and whose it is."""
    network = asked.network
    if network is None:
        return None, {}
    places = range(1 + max(roles.hosts))
    crowded = dict.fromkeys(places, crowd.everyone) if crowd.everyone > 1 else {}
    if crowd.servers != 1:
        crowded |= {roles.hosts[n]: crowd.servers for n in range(roles.workers, len(roles.hosts))}
    slow = {rank: law for rank, law in slowed_of(asked, crowd.workers).items() if rank in places}
    for place, factor in crowded.items():
        law = slow.get(place, Slowdown())
        slow[place] = law.model_copy(update={"transfer": law.transfer * factor})
    return network.model_copy(update={"slow": slow}), crowded
