"""Gossip: each worker mixes its weights with those of a few others, and nobody with all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from labkit.common.errors import InvalidInput
from labkit.forecast.programs import STEPS, WARM
from labkit.forecast.worker_sampling import PLAYED, Crowd
from labkit.programs import (
    Adopt,
    AllReduce,
    Compute,
    Gradient,
    Mark,
    Message,
    Program,
    Receive,
    Roles,
    Send,
    Snapshot,
    Update,
)
from labkit.strategies.asynchronous_gossip import holders, places, program
from labkit.strategies.replicas import Replicas
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell

Matrix = tuple[tuple[float, ...], ...]


class Gossip(Replicas):
    r"""Workers mix their weights with those of neighbours, once a step, while they compute.

    With \(P\) of the step, of which each column adds up to 1, worker i takes

    \[x_i \leftarrow \sum_j P_{ij} x_j - \eta\, g_i(z_i), \qquad
    \omega_i \leftarrow \sum_j P_{ij} \omega_j, \qquad z_i = x_i / \omega_i,\]

    where the last term is whatever the optimizer makes of the gradient. Where rows of P add up to
    1, too, ω stays 1 and this is D-PSGD; elsewhere it is stochastic gradient push, which needs no
    neighbour to know how many others listen. The mean of all x changes by the gradients alone; what
    is evaluated is the mean of all z, in which whoever is told less counts for as much.

    Args:
        topology: "ring": a third each of itself and both neighbours; "exponential": half of itself
            and half of the worker 1, 2, 4, … places before, in turn; "random_pairs": half of
            another one, new in each step; or P itself, row by row.
        asynchronous: nobody waits for a slower one (AD-PSGD). Workers of even numbers are active:
            in each step they take the mean with one of odd number, passive, drawn at random from
            their neighbours on the "ring", or of all by "random_pairs". Whoever is faster takes
            more steps; an epoch is as many as the workers have together, which rank 0 counts.

    What is sent is never compressed. Where all are synchronous, they agree at the end of an epoch,
    by one number, whether to go on.

    Source: X. Lian et al., 2017, arXiv 1705.09056 (D-PSGD); on directed graphs M. Assran et al.,
    2019, arXiv 1811.10792 (stochastic gradient push); asynchronous X. Lian et al., 2018, arXiv
    1710.06952 (AD-PSGD). Differs from the second: the gradient is added after mixing, not before,
    so that messages travel while a worker computes.
    """

    architecture: ClassVar[tuple[str, ...]] = ("neighbours",)
    synchronization: ClassVar[tuple[str, ...]] = ("synchronous", "asynchronous")
    scheduling: ClassVar[tuple[str, ...]] = ("overlap",)
    paper: ClassVar[str] = (
        "Lian 2017, arXiv 1705.09056; Assran 2019, arXiv 1811.10792; Lian 2018, arXiv 1710.06952"
    )

    topology: Literal["ring", "exponential", "random_pairs"] | Matrix = Field("ring", kw_only=False)
    asynchronous: bool = False

    @field_validator("topology")
    @classmethod
    def _topology(cls, value: str | Matrix) -> str | Matrix:
        if isinstance(value, str):
            return value
        matrix = np.array([row for row in value if len(row) == len(value)])
        if matrix.shape != (len(value), len(value)) or (matrix < 0).any():
            raise ValueError("a topology is as many rows as columns, of numbers from 0 on")
        sums = matrix.sum(0)
        if not np.allclose(sums, 1.0, rtol=0, atol=1e-9) or not (np.diag(matrix) > 0).all():
            raise ValueError(
                f"columns of a topology say who gets which share of a worker's weights, itself "
                f"included: they add up to 1, not to {', '.join(f'{each:g}' for each in sums)}"
            )
        return value

    def cell(self, workers: int) -> Cell:
        """Whether neighbours wait for each other."""
        waits = "asynchronous" if self.asynchronous else "synchronous"
        return super().cell(workers)._replace(synchronization=waits)

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what does not fit together, before any rank starts."""
        super().check(experiment)
        if not isinstance(self.topology, str) and len(self.topology) != experiment.workers:
            raise InvalidInput(
                f"topology has {len(self.topology)} rows, but workers={experiment.workers}; give "
                "a row and a column a worker"
            )
        if self.asynchronous and (
            self.topology not in ("ring", "random_pairs") or experiment.workers == 1
        ):
            raise InvalidInput(
                f"asynchronous=True pairs active workers with passive ones, but topology="
                f"{self.topology!r} of workers={experiment.workers} is no graph between two such "
                "kinds; use topology='ring' or 'random_pairs', and 2 workers or more"
            )

    @property
    def serves_concurrently(self) -> bool:
        """Whether somebody answers while the worker beside computes."""
        return self.asynchronous

    def hosts(self, workers: int) -> list[int]:
        """Each worker has a place of its own, where others may stand beside it."""
        return places(workers) if self.asynchronous else super().hosts(workers)

    def copies(self, workers: int) -> Sequence[int]:
        """Each worker, or whoever holds its weights."""
        return holders(workers) if self.asynchronous else super().copies(workers)

    def mixing(self, workers: int, step: int, seed: int = 0) -> NDArray[np.float64]:
        """P of a step: row i says what of whom worker i takes."""
        if not isinstance(self.topology, str):
            return np.array(self.topology)
        found = np.zeros((workers, workers))
        if self.topology == "ring":
            for to in range(workers):
                around = {(to - 1) % workers, to, (to + 1) % workers}
                found[to, list(around)] = 1 / len(around)
            return found
        found[np.diag_indices(workers)] = 1.0
        for to, source in self._pairs(workers, step, seed):
            found[to, [to, source]] = 0.5
        return found

    def _pairs(self, workers: int, step: int, seed: int) -> list[tuple[int, int]]:
        """Who takes half of whom."""
        if self.topology == "exponential":
            rounds = max(1, math.ceil(math.log2(workers))) if workers > 1 else 0
            away = 2 ** (step % rounds) if rounds else 0
            return [(to, (to - away) % workers) for to in range(workers) if away % workers]
        order = np.random.default_rng([seed, step]).permutation(workers).tolist()
        halves = list(zip(order[::2], order[1::2], strict=False))
        return [*halves, *(pair[::-1] for pair in halves)]

    def spectral_gap(self, workers: int) -> float:
        r"""What a step takes off the distance of weights: 1 - |λ₂|; nearer to 1 mixes faster.

        Where graphs change from step to step it is that of a step on average,
        \(1 - \sqrt{\lambda_2(\mathrm{E} P^\top P)}\).
        """
        if workers == 1:
            return 1.0
        if self.topology == "random_pairs":
            # PᵀP = P; two are a pair with chance 1/(n-1), or 1/n where one is left over.
            return float(1 - math.sqrt((1 - (workers % 2 == 0) / (workers - 1)) / 2))
        if self.topology == "exponential":
            turn = [self.mixing(workers, step) for step in range(math.ceil(math.log2(workers)))]
            squares = np.mean([each.T @ each for each in turn], axis=0)
            return float(1 - math.sqrt(np.linalg.eigvalsh(squares)[-2]))
        return float(1 - np.sort(np.abs(np.linalg.eigvals(self.mixing(workers, 0))))[-2])

    def cycle(self, experiment: ExperimentSpec) -> int:
        """Until graphs begin anew."""
        turns = self.topology == "exponential" and experiment.workers > 1
        return math.ceil(math.log2(experiment.workers)) if turns else 1

    def recurs(self, experiment: ExperimentSpec) -> bool:
        """Unless pairs are drawn anew, or an epoch ends in some of the steps that are played."""
        steps, ahead = experiment.epoch_steps, 2 * self.cycle(experiment) + experiment.workers
        even = steps in (None, 1) or steps > WARM + STEPS + ahead
        return self.topology != "random_pairs" and even and super().recurs(experiment)

    def crowd(self, workers: int) -> Crowd | None:
        """Neighbours are as many, however many there are."""
        many = isinstance(self.topology, str) and workers > PLAYED
        return Crowd(self, PLAYED) if many else None

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """What this one does, from its begin or from a mark that it has set."""
        if self.asynchronous:
            return program(roles, number, self.topology == "ring", mark)
        return self._in_step(roles, number, mark)

    def _in_step(self, roles: Roles, number: int, mark: Any) -> Program:
        """A worker: send, compute, receive, mix."""
        first, own, share, wants = mark or (0, roles.weights, 1.0, False)
        kind = own.dtype.type
        for step in range(first, roles.steps * roles.epochs):
            yield Mark((step, own, share, wants))
            mixing = self.mixing(roles.workers, step, roles.seed)
            said = np.append(own, kind(share))
            for to in np.flatnonzero(mixing[:, number]).tolist():
                if to != number:
                    yield Send(to, Message(number, said, step=step))
            debiased = own / kind(share)
            found = yield Compute(debiased)
            stepped = (yield Update(found.values)) if found.rows else debiased
            mixed = kind(mixing[number, number]) * said
            for source in np.flatnonzero(mixing[number]).tolist():
                if source != number:
                    heard = yield Receive(source)
                    mixed = mixed + kind(mixing[number, source]) * heard.values
            share = float(mixed[-1])
            own = mixed[:-1] + (stepped - debiased)
            yield Adopt(own / kind(share))
            wants = wants or found.last
            if (step + 1) % roles.steps == 0:
                yield Snapshot((step + 1) // roles.steps - 1, own / kind(share))
                # Neighbours alone cannot know whether anybody wants to stop.
                asked = Gradient(np.zeros(1, own.dtype), 1, found.loss, step, wants)
                if (yield AllReduce(asked, "ring")).last:
                    return
