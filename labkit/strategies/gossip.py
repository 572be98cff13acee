"""Gossip: each worker averages its weights with a few neighbours, in rounds or asynchronously.

Asynchronous gossip: active workers average weights with the server processes of passive workers.

    worker     0 (active)   1 (passive)   2 (active)   3 (passive)
    server                  4                          5              on the ranks of 1 and 3
    counter    6                                                      on the rank of 0

If all workers had the same role, two workers that wait for each other's weights could deadlock.
Active workers never receive requests, so active and passive workers cannot deadlock while they wait
for weights. The server process of a passive worker holds this worker's weights and answers requests
while the worker computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from labkit.common.errors import InvalidInput
from labkit.forecast.programs import STEPS, WARM
from labkit.forecast.workers import PLAYED, Crowd
from labkit.programs import (
    Adopt,
    AllReduceAction,
    Compute,
    Gradient,
    Message,
    Program,
    Receive,
    RestartPoint,
    Roles,
    Send,
    Snapshot,
    Update,
)
from labkit.strategies.replicas import Replicas
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell


def passive_servers(workers: int) -> dict[int, int]:
    """Return a mapping from each passive worker to the number of its server process."""
    return {worker: workers + worker // 2 for worker in range(1, workers, 2)}


def places(workers: int) -> list[int]:
    """Return the rank on which each worker, each server process and the counter process runs."""
    return [*range(workers), *passive_servers(workers), 0]


def holders(workers: int) -> list[int]:
    """Return the processes that hold weights: active workers and server processes."""
    return [*range(0, workers, 2), *passive_servers(workers).values()]


def program(roles: Roles, number: int, on_ring: bool, mark: Any = None) -> Program:
    """Return the program of one process.

    Args:
        roles: The roles of all processes of the training.
        number: The number of this process.
        on_ring: Whether active workers average only with their two neighbours on the ring.
        mark: The state from which the program resumes, or None.
    """
    servers = passive_servers(roles.workers)
    if number in servers:
        return _passive(roles, number, servers[number], mark)
    if number < roles.workers:
        neighbours = {(number - 1) % roles.workers, (number + 1) % roles.workers}
        partners = [
            server for worker, server in servers.items() if not on_ring or worker in neighbours
        ]
        return _active(roles, number, partners, mark)
    return (_serve if number < _counter(roles) else _count)(roles, number, mark)


def _active(roles: Roles, number: int, partners: Sequence[int], mark: Any) -> Program:
    """Run an active worker: send weights to a random server, compute, average with the reply."""
    counter, half, ends = _counter(roles), roles.weights.dtype.type(0.5), False
    weights, epochs, step, wants = mark or (roles.weights, 0, 0, False)
    while not ends:
        yield RestartPoint((weights, epochs, step, wants))
        server = int(np.random.default_rng([roles.seed, number, step]).choice(partners))
        yield Send(counter, Message(number, step=step, ends=wants))
        yield Send(server, Message(number, weights, step=step))
        gradient = yield Compute(weights)
        answer = yield Receive(server)
        weights = yield Adopt(half * (weights + answer.values))
        weights = (yield Update(gradient.values)) if gradient.rows else weights
        count = yield Receive(counter)
        for epoch in range(epochs, count.version):
            yield Snapshot(epoch, weights)
        epochs, ends, wants, step = count.version, count.ends, wants or gradient.last, step + 1
    for server in passive_servers(roles.workers).values():
        yield Send(server, Message(number, wants=False))


def _passive(roles: Roles, number: int, server: int, mark: Any) -> Program:
    """Run a passive worker: compute gradients at the server's weights; send it the results."""
    counter, ends = _counter(roles), False
    weights, step, wants = mark or (roles.weights, 0, False)
    while not ends:
        yield RestartPoint((weights, step, wants))
        yield Send(counter, Message(number, step=step, ends=wants))
        gradient = yield Compute(weights)
        count = yield Receive(counter)
        metadata = count.version, gradient.rows, step
        yield Send(server, Message(number, gradient.values, *metadata))
        weights = (yield Receive(server)).values
        ends, wants, step = count.ends, wants or gradient.last, step + 1
    yield Send(server, Message(number, wants=False))


def _serve(roles: Roles, number: int, mark: Any) -> Program:
    """Run a server: average with active workers' weights; apply the passive worker's gradients."""
    weights, epochs, senders = mark or (roles.weights, 0, 1 + (roles.workers + 1) // 2)
    half = weights.dtype.type(0.5)
    while senders:
        yield RestartPoint((weights, epochs, senders))
        message = yield Receive()
        if not message.wants:
            senders -= 1
        elif message.source % 2:
            weights = (yield Update(message.values)) if message.rows else weights
            yield Send(message.source, Message(number, weights), answers=message)
            for epoch in range(epochs, message.version):
                yield Snapshot(epoch, weights)
            epochs = message.version
        else:
            yield Send(message.source, Message(number, weights), answers=message)
            weights = yield Adopt(half * (weights + message.values))


def _count(roles: Roles, number: int, mark: Any) -> Program:
    """Run the counter, which assigns the training steps of all epochs to workers on request."""
    epoch = roles.workers * roles.steps
    total = epoch * roles.epochs
    granted, requests, workers, wants = mark or (roles.workers, 0, roles.workers, False)
    while workers:
        yield RestartPoint((granted, requests, workers, wants))
        request = yield Receive()
        wants, requests = wants or request.ends, requests + 1
        ends = wants or granted >= total
        granted, workers = granted + (not ends), workers - ends
        # The counter treats each worker's most recently requested step as not yet complete. The
        # step counter's last message to a worker reports the end of training.
        epochs = (requests - roles.workers) // epoch if not ends or wants else roles.epochs
        yield Send(
            request.source, Message(number, version=max(epochs, 0), ends=ends), answers=request
        )


def _counter(roles: Roles) -> int:
    return roles.workers + len(passive_servers(roles.workers))


Matrix = tuple[tuple[float, ...], ...]


class Gossip(Replicas):
    r"""Workers average weights with neighbours in each step, while they compute gradients.

    Let \(P\) be the mixing matrix of the step, whose columns each sum to 1; worker i computes

    \[x_i \leftarrow \sum_j P_{ij} x_j - \eta\, g_i(z_i), \qquad
    \omega_i \leftarrow \sum_j P_{ij} \omega_j, \qquad z_i = x_i / \omega_i,\]

    In the formula, \(\eta\, g_i(z_i)\) is the optimizer's update for the gradient of worker i. If
    the rows of P also sum to 1, ω remains 1 and the method is D-PSGD. If the rows of P do not sum
    to 1, the method is stochastic gradient push. In stochastic gradient push, a worker need not
    know how many workers receive its messages. Mixing does not change the mean of all workers'
    \(x_i\); only gradients change the mean. The evaluated model is the mean of all workers'
    \(z_i\), in which every worker counts equally.

    Args:
        topology: How the mixing matrix P is defined. "ring": a worker mixes its own weights and
            those of its two neighbours, with factor 1/3 for each. "exponential": a worker mixes its
            own weights and those of another worker, with factor 1/2 for each. With "exponential",
            worker i mixes in turn with workers i - 1, i - 2, i - 4 and so on. "random_pairs": a
            worker mixes its own weights and those of a partner, with factor 1/2 for each. With
            "random_pairs", partners are drawn at random in each step. Instead of a name, `topology`
            may be the matrix P itself, as a list of rows.
        asynchronous: Whether workers continue without waiting for slower workers (AD-PSGD). Workers
            with even numbers are active, and workers with odd numbers are passive. In each step, an
            active worker averages its weights with a random passive worker. With "ring", the
            passive worker is a neighbour of the active worker. With "random_pairs", an active
            worker averages with any passive worker. A faster worker takes more steps than a slower
            worker. Rank 0 counts the steps of all workers until an epoch is complete.

    Messages are never compressed. At the end of each epoch, synchronous workers decide by an
    allreduce of one number whether training ends.

    Source: X. Lian et al., 2017, arXiv 1705.09056 (D-PSGD). M. Assran et al., 2019, arXiv
    1811.10792 (stochastic gradient push, on directed graphs). X. Lian et al., 2018, arXiv
    1710.06952 (AD-PSGD). Differs from Assran et al.: the gradient is added after mixing, not
    before, so that messages are sent during computation.
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
            raise ValueError("topology must be a square matrix of numbers of at least 0")
        sums = matrix.sum(0)
        if not np.allclose(sums, 1.0, rtol=0, atol=1e-9) or not (np.diag(matrix) > 0).all():
            raise ValueError(
                "a column of a topology has the shares of a worker's weights that each worker "
                "receives; each column must sum to 1, and have a positive share on the diagonal; "
                f"these columns sum to {', '.join(f'{total:g}' for total in sums)}"
            )
        return value

    def cell(self, workers: int) -> Cell:
        """Return the place in the taxonomy, synchronous if neighbours wait for each other."""
        waits = "asynchronous" if self.asynchronous else "synchronous"
        return super().cell(workers)._replace(synchronization=waits)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for conflicting options, before any rank starts."""
        super().check(experiment)
        if not isinstance(self.topology, str) and len(self.topology) != experiment.workers:
            raise InvalidInput(
                f"topology has {len(self.topology)} rows, but workers={experiment.workers}; "
                "give one row and one column per worker"
            )
        if self.asynchronous and (
            self.topology not in ("ring", "random_pairs") or experiment.workers == 1
        ):
            raise InvalidInput(
                "asynchronous=True needs pairs of active and passive workers, but "
                f"topology={self.topology!r} of workers={experiment.workers} has no such "
                "pairs; use topology='ring' or 'random_pairs', and 2 workers or more"
            )

    @property
    def serves_concurrently(self) -> bool:
        """Whether a server process answers while the worker on the same rank computes."""
        return self.asynchronous

    def hosts(self, workers: int) -> list[int]:
        """Return the rank of each worker; if asynchronous, also of each server and the counter."""
        return places(workers) if self.asynchronous else super().hosts(workers)

    def copies(self, workers: int) -> Sequence[int]:
        """Return the processes with weights; if asynchronous, active workers and servers."""
        return holders(workers) if self.asynchronous else super().copies(workers)

    def mixing(self, workers: int, step: int, seed: int = 0) -> NDArray[np.float64]:
        """Return the mixing matrix P of a step; row i has the factors for weights of worker i."""
        if not isinstance(self.topology, str):
            return np.array(self.topology)
        matrix = np.zeros((workers, workers))
        if self.topology == "ring":
            for receiver in range(workers):
                neighbours = {(receiver - 1) % workers, receiver, (receiver + 1) % workers}
                matrix[receiver, list(neighbours)] = 1 / len(neighbours)
            return matrix
        matrix[np.diag_indices(workers)] = 1.0
        for receiver, source in self._pairs(workers, step, seed):
            matrix[receiver, [receiver, source]] = 0.5
        return matrix

    def _pairs(self, workers: int, step: int, seed: int) -> list[tuple[int, int]]:
        """Return pairs (receiver, sender); each receiver averages its weights with the sender's."""
        if self.topology == "exponential":
            rounds = max(1, math.ceil(math.log2(workers))) if workers > 1 else 0
            distance = 2 ** (step % rounds) if rounds else 0
            return [
                (receiver, (receiver - distance) % workers)
                for receiver in range(workers)
                if distance % workers
            ]
        order = np.random.default_rng([seed, step]).permutation(workers).tolist()
        pairs = list(zip(order[::2], order[1::2], strict=False))
        return [*pairs, *(pair[::-1] for pair in pairs)]

    def spectral_gap(self, workers: int) -> float:
        r"""Return the spectral gap of the matrix by which workers mix their weights.

        A larger gap means that weights become equal faster. The mixing matrix P may change from
        step to step. The gap of an average step is then \(1 - \sqrt{\lambda_2(\mathrm{E} P^\top
        P)}\).
        """
        if workers == 1:
            return 1.0
        if self.topology == "random_pairs":
            # With the topology of random pairs, each mixing matrix P satisfies PᵀP = P. Two given
            # workers of n form a random pair with probability 1/(n-1), or 1/n if n is odd.
            return float(1 - math.sqrt((1 - (workers % 2 == 0) / (workers - 1)) / 2))
        if self.topology == "exponential":
            matrices = [self.mixing(workers, step) for step in range(math.ceil(math.log2(workers)))]
            squares = np.mean([matrix.T @ matrix for matrix in matrices], axis=0)
            return float(1 - math.sqrt(np.linalg.eigvalsh(squares)[-2]))
        return float(1 - np.sort(np.abs(np.linalg.eigvals(self.mixing(workers, 0))))[-2])

    def cycle(self, experiment: ExperimentSpec) -> int:
        """Return the number of steps after which the sequence of mixing matrices repeats."""
        turns = self.topology == "exponential" and experiment.workers > 1
        return math.ceil(math.log2(experiment.workers)) if turns else 1

    def recurs(self, experiment: ExperimentSpec) -> bool:
        """Return whether communication repeats; it does not with random pairs or short epochs."""
        steps, ahead = experiment.epoch_steps, 2 * self.cycle(experiment) + experiment.workers
        even = steps in (None, 1) or steps > WARM + STEPS + ahead
        return self.topology != "random_pairs" and even and super().recurs(experiment)

    def crowd(self, workers: int) -> Crowd | None:
        """Return a sample of workers for a forecast, or None if it simulates all workers."""
        needs_sample = isinstance(self.topology, str) and workers > PLAYED
        return Crowd(self, PLAYED) if needs_sample else None

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Return the program of one process, from its start or from the restart point `mark`."""
        if self.asynchronous:
            return program(roles, number, self.topology == "ring", mark)
        return self._synchronous_program(roles, number, mark)

    def _synchronous_program(self, roles: Roles, number: int, mark: Any) -> Program:
        """In each step, send weights, compute, receive weights of neighbours, and mix them."""
        first, weights, share, wants = mark or (0, roles.weights, 1.0, False)
        kind = weights.dtype.type
        for step in range(first, roles.steps * roles.epochs):
            yield RestartPoint((step, weights, share, wants))
            mixing = self.mixing(roles.workers, step, roles.seed)
            payload = np.append(weights, kind(share))
            for receiver in np.flatnonzero(mixing[:, number]).tolist():
                if receiver != number:
                    yield Send(receiver, Message(number, payload, step=step))
            debiased = weights / kind(share)
            gradient = yield Compute(debiased)
            updated = (yield Update(gradient.values)) if gradient.rows else debiased
            mixed = kind(mixing[number, number]) * payload
            for source in np.flatnonzero(mixing[number]).tolist():
                if source != number:
                    message = yield Receive(source)
                    mixed = mixed + kind(mixing[number, source]) * message.values
            share = float(mixed[-1])
            weights = mixed[:-1] + (updated - debiased)
            yield Adopt(weights / kind(share))
            wants = wants or gradient.last
            if (step + 1) % roles.steps == 0:
                yield Snapshot((step + 1) // roles.steps - 1, weights / kind(share))
                # A worker's neighbours do not report a distant worker's request to end training, so
                # an allreduce does.
                stop_request = Gradient(np.zeros(1, weights.dtype), 1, gradient.loss, step, wants)
                if (yield AllReduceAction(stop_request, "ring")).last:
                    return
