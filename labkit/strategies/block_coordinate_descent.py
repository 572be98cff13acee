"""Block coordinate descent: each round updates a few selected blocks of the weights."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt

from labkit.common.errors import InvalidInput
from labkit.forecast import Query, StepForecast, of_program
from labkit.forecast.programs import STEPS
from labkit.forecast.workers import shapes_of
from labkit.programs import (
    Adopt,
    AllReduceAction,
    Compute,
    Curvature,
    Gradient,
    Program,
    RestartPoint,
    Roles,
    Snapshot,
    Update,
)
from labkit.programs.actions import Action, Vector
from labkit.schedules.blocks import BlockRounds, couplings
from labkit.strategies.replicas import SynchronousReplicas
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell

# Couplings between weights may occupy at most `_MAX_PAIRS` float64 values (400 MB).
_MAX_PAIRS = 50_000_000


class BlockCoordinateDescent(SynchronousReplicas):
    r"""As in STRADS, each model-parallel round updates only a few selected blocks of the weights.

    In each round, all workers select the same set B of mutually independent blocks. Each worker
    computes the gradient of its own rows. The allreduce sums only the part of the gradient for B:

    \[w_B \leftarrow S_{\eta \lambda}\bigl(w_B - \eta\, \tfrac1n \sum_i g_{i,B}\bigr), \qquad
    S_t(v) = \mathrm{sign}(v) \max(|v| - t, 0).\]

    Under three conditions, a round is exact coordinate descent of the lasso on |B| coordinates. The
    first condition is that each batch contains all rows. The second condition is that each block is
    a single weight. The third condition is that all columns have unit variance. For exact
    coordinate descent with the mean squared error as the loss, the learning rate must be 0.5.

    Args:
        selection: How each round selects blocks. "priority": mostly the blocks that changed most in
            their last update. "round_robin": the blocks whose last selection was the longest ago.
            "random": blocks chosen at random. `labkit.schedules.blocks` implements the three
            selections.
        block: The number of weights in a block, which is a contiguous range of the flat weights.
            "layer": one block per layer.
        blocks_per_round: The largest number of blocks that a round updates. If a round updates only
            one block, labkit does not compute dependencies between blocks.
        dependency: Two blocks whose coupling (`labkit.schedules.blocks.couplings`) is at least
            `dependency` are not updated in the same round. With `dependency=None`, a round may
            update any blocks together. Couplings are measured once, for the initial weights and the
            first batch. Before the first round, each worker computes two gradients per block. One
            allreduce then sums (blocks × weights) numbers.
        l1: The factor λ of the L1 penalty. The L1 penalty is the sum of the absolute values of all
            weights. The loss in the history includes the penalty.
        floor: The constant η in the priority of each block (`labkit.schedules.blocks`).

    Source: S. Lee, J. K. Kim, X. Zheng, Q. Ho, G. Gibson, E. Xing: On model parallelization and
    scheduling strategies for distributed machine learning, NIPS 2014 (STRADS). Difference from the
    paper: a worker computes its whole gradient, and sends only the part for the selected blocks.
    Unlike the paper, labkit computes dependencies only once, from the curvature of the loss of any
    neural network.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("synchronous",)
    parallelism: ClassVar[tuple[str, ...]] = ("model by blocks",)
    scheduling: ClassVar[tuple[str, ...]] = ("priority", "sequential")
    paper: ClassVar[str] = "Lee 2014, NIPS (STRADS)"

    selection: Literal["priority", "round_robin", "random"] = Field("priority", kw_only=False)
    block: PositiveInt | Literal["layer"] = "layer"
    blocks_per_round: PositiveInt = 1
    dependency: NonNegativeFloat | None = Field(0.1, le=1.0)
    l1: NonNegativeFloat = 0.0
    floor: NonNegativeFloat = 0.01

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for conflicting options, before any rank starts."""
        super().check(experiment)
        options = experiment.optimizer_options
        if experiment.optimizer != "sgd" or options:
            raise InvalidInput(
                f"optimizer={experiment.optimizer!r} with {dict(options)} also changes weights "
                "that have no gradient in a round; use optimizer='sgd' without options"
            )

    def cell(self, workers: int) -> Cell:
        """Return the place in the taxonomy; its scheduling is "priority" or "sequential"."""
        order = "priority" if self.selection == "priority" else "sequential"
        return super().cell(workers)._replace(scheduling=order)

    def copies(self, workers: int) -> Sequence[int]:
        """Return [0]: worker 0 stands for all workers, because their weights are equal."""
        return [0]

    def recurs(self, experiment: ExperimentSpec) -> bool:
        """Return True for "round_robin" with one block per round, as its messages repeat."""
        return self.selection == "round_robin" and self.blocks_per_round == 1

    def forecast(self, query: Query) -> StepForecast:
        """Forecast a training step by simulation of rounds, without dependencies between blocks."""
        layers = sum(bool(layer.weights) for layer in query.model.layers)
        size = sum(map(prod, shapes_of(query)))
        count = layers if self.block == "layer" else -(-size // self.block)
        plain = self.model_copy(update={"dependency": None})
        cycle = min(STEPS, -(-count // self.blocks_per_round))
        return of_program(query, plain, cycle, plain.crowd(query.workers))

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Return the program of a worker; all workers run the same program."""
        edges = self._edges(roles)
        first, weights, wants, rounds = mark or (0, roles.weights, False, None)
        if rounds is None:
            rounds = yield from self._rounds(roles, edges)
        for step in range(first, roles.steps * roles.epochs):
            yield RestartPoint((step, weights, wants, rounds))
            blocks = rounds.next()
            pieces = [slice(edges[block], edges[block + 1]) for block in blocks]
            gradient = yield Compute(weights, penalty=self.l1 * float(np.abs(weights).sum()))
            wants = wants or gradient.last
            payload = np.concatenate([gradient.values[piece] for piece in pieces])
            message = Gradient(payload, gradient.rows, gradient.loss, step, wants)
            mean = yield AllReduceAction(message, self.scheduled)
            weights, previous = (
                (yield from self._update_blocks(roles, weights, mean.values, pieces)),
                weights,
            )
            rounds.learn(blocks, [float(np.linalg.norm(weights[p] - previous[p])) for p in pieces])
            stops = mean.last
            if (step + 1) % roles.steps == 0:
                yield Snapshot(step // roles.steps, weights)
            if stops:
                return

    def _edges(self, roles: Roles) -> list[int]:
        """Return the start of each block in the flat weights, then the total number of weights."""
        size = roles.weights.size
        if self.block == "layer":
            return [0, *np.cumsum(roles.layers).tolist()]
        return [*range(0, size, self.block), size]

    def _rounds(self, roles: Roles, edges: Sequence[int]) -> Generator[Action, Any, BlockRounds]:
        """Return the selector of blocks, after an allreduce of their couplings if necessary."""
        depends, count = None, len(edges) - 1
        if self.dependency is not None and self.blocks_per_round > 1:
            if count * roles.weights.size > _MAX_PAIRS:
                raise InvalidInput(
                    f"a table of {count:,} blocks (block={self.block!r}) and "
                    f"{roles.weights.size:,} weights has more than {_MAX_PAIRS:,} numbers; give "
                    "larger blocks, or dependency=None"
                )
            curvature = yield Curvature(roles.weights, tuple(edges))
            mean = yield AllReduceAction(curvature, self.scheduled)
            products = np.asarray(mean.values, np.float64).reshape(count, -1)
            depends = couplings(products, edges) >= self.dependency
            np.fill_diagonal(depends, False)
        return BlockRounds(
            count, self.blocks_per_round, self.selection, depends, self.floor, roles.seed
        )

    def _update_blocks(
        self, roles: Roles, weights: Vector, mean: Vector, pieces: Sequence[slice]
    ) -> Generator[Action, Any, Vector]:
        """Return the weights after an update that changes only the selected ranges."""
        gradient, offset = np.zeros_like(weights), 0
        for piece in pieces:
            length = piece.stop - piece.start
            gradient[piece] = mean[offset : offset + length]
            offset += length
        updated: Vector = yield Update(gradient)
        if not self.l1:
            return updated
        result, threshold = updated.copy(), roles.rate * self.l1
        for piece in pieces:
            part = result[piece]
            result[piece] = np.sign(part) * np.maximum(np.abs(part) - threshold, 0.0)
        adopted: Vector = yield Adopt(result)
        return adopted
