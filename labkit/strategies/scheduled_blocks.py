"""Scheduled blocks: each round changes a few blocks of the weights, which are chosen on purpose."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import prod
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveInt

from labkit.common.errors import InvalidInput
from labkit.forecast import Query, StepForecast, of_program
from labkit.forecast.programs import STEPS
from labkit.forecast.worker_sampling import shapes_of
from labkit.programs import (
    Adopt,
    AllReduce,
    Compute,
    Curve,
    Gradient,
    Mark,
    Program,
    Roles,
    Snapshot,
    Update,
)
from labkit.programs.actions import Action, Vector
from labkit.schedules.blocks import BlockRounds, couplings
from labkit.strategies.replicas import Meeting
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell

_MOST = 50_000_000  # numbers, in 400 MB


class ScheduledBlocks(Meeting):
    r"""Model parallel rounds: a few blocks of the weights are chosen, and only those change.

    In each round all workers choose the same blocks B, of which no two depend on each other;
    each computes the gradient of its rows, and what is summed is the part of B alone:

    \[w_B \leftarrow S_{\eta \lambda}\bigl(w_B - \eta\, \tfrac1n \sum_i g_{i,B}\bigr), \qquad
    S_t(v) = \mathrm{sign}(v) \max(|v| - t, 0).\]

    With all rows in a batch, blocks of one weight, columns of unit variance and the rate 0.5 of the
    mean squared error, a round is exact coordinate descent on |B| coordinates of the lasso.

    Args:
        select: which blocks: "priority": where the last change was large; "round_robin": who has
            waited longest; "random". See `labkit.schedules.blocks`.
        block: weights of a block, a stretch of the flat weights; "layer": those of a layer.
        parallel: blocks of a round, the most. Of one nobody asks on whom it depends.
        dependency: two blocks whose coupling is at least this are not changed in one round, see
            `labkit.schedules.blocks.couplings`; None: nobody looks. Couplings are those of the
            first weights on the first batch, and cost each worker two gradients a block and one
            allreduce of blocks times weights numbers, before the first round.
        l1: λ, the weight of the absolute values of all weights in what is minimized; history's
            loss has it in.
        floor: η of priorities.

    Source: S. Lee, J. K. Kim, X. Zheng, Q. Ho, G. Gibson, E. Xing: On model parallelization and
    scheduling strategies for distributed machine learning, NIPS 2014 (STRADS). Differs from it: a
    worker computes its whole gradient, of which it says the part; and dependency is looked at once,
    by curvature, for any model.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("synchronous",)
    parallelism: ClassVar[tuple[str, ...]] = ("model by blocks",)
    scheduling: ClassVar[tuple[str, ...]] = ("priority", "sequential")
    paper: ClassVar[str] = "Lee 2014, NIPS (STRADS)"

    select: Literal["priority", "round_robin", "random"] = Field("priority", kw_only=False)
    block: PositiveInt | Literal["layer"] = "layer"
    parallel: PositiveInt = 1
    dependency: NonNegativeFloat | None = Field(0.1, le=1.0)
    l1: NonNegativeFloat = 0.0
    floor: NonNegativeFloat = 0.01

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what does not fit together, before any rank starts."""
        super().check(experiment)
        options = experiment.optimizer_options
        if experiment.optimizer != "sgd" or options:
            raise InvalidInput(
                f"optimizer={experiment.optimizer!r} with {dict(options)} changes weights that "
                "have no gradient in a round, too; use optimizer='sgd' without options"
            )

    def cell(self, workers: int) -> Cell:
        """Whether blocks have a priority."""
        order = "priority" if self.select == "priority" else "sequential"
        return super().cell(workers)._replace(scheduling=order)

    def copies(self, workers: int) -> Sequence[int]:
        """All hold the same weights; those of the first one count."""
        return [0]

    def recurs(self, experiment: ExperimentSpec) -> bool:
        """Where one block comes after the other; else they are drawn."""
        return self.select == "round_robin" and self.parallel == 1

    def forecast(self, asked: Query) -> StepForecast:
        """By playing its rounds; which blocks depend on each other only their curvature tells."""
        layers = sum(bool(layer.weights) for layer in asked.model.layers)
        size = sum(map(prod, shapes_of(asked)))
        count = layers if self.block == "layer" else -(-size // self.block)
        plain = self.model_copy(update={"dependency": None})
        cycle = min(STEPS, -(-count // self.parallel))
        return of_program(asked, plain, cycle, plain.crowd(asked.workers))

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Every worker does the same."""
        ends = self._ends(roles)
        first, own, wants, rounds = mark or (0, roles.weights, False, None)
        if rounds is None:
            rounds = yield from self._rounds(roles, ends)
        for step in range(first, roles.steps * roles.epochs):
            yield Mark((step, own, wants, rounds))
            chosen = rounds.next()
            pieces = [slice(ends[block], ends[block + 1]) for block in chosen]
            found = yield Compute(own, penalty=self.l1 * float(np.abs(own).sum()))
            wants = wants or found.last
            said = np.concatenate([found.values[piece] for piece in pieces])
            given = Gradient(said, found.rows, found.loss, step, wants)
            mean = yield AllReduce(given, self.scheduled)
            own, before = (yield from self._changed(roles, own, mean.values, pieces)), own
            rounds.learn(chosen, [float(np.linalg.norm(own[p] - before[p])) for p in pieces])
            over = mean.last
            if (step + 1) % roles.steps == 0:
                yield Snapshot(step // roles.steps, own)
            if over:
                return

    def _ends(self, roles: Roles) -> list[int]:
        """Where blocks begin and end in the flat weights."""
        size = roles.weights.size
        if self.block == "layer":
            return [0, *np.cumsum(roles.layers).tolist()]
        return [*range(0, size, self.block), size]

    def _rounds(self, roles: Roles, ends: Sequence[int]) -> Generator[Action, Any, BlockRounds]:
        """What chooses; before the first round all agree on who depends on whom."""
        depends, count = None, len(ends) - 1
        if self.dependency is not None and self.parallel > 1:
            if count * roles.weights.size > _MOST:
                raise InvalidInput(
                    f"couplings of {count:,} blocks (block={self.block!r}) with "
                    f"{roles.weights.size:,} weights are more than {_MOST:,} numbers; give larger "
                    "blocks, or dependency=None"
                )
            curved = yield Curve(roles.weights, tuple(ends))
            mean = yield AllReduce(curved, self.scheduled)
            products = np.asarray(mean.values, np.float64).reshape(count, -1)
            depends = couplings(products, ends) >= self.dependency
            np.fill_diagonal(depends, False)
        return BlockRounds(count, self.parallel, self.select, depends, self.floor, roles.seed)

    def _changed(
        self, roles: Roles, own: Vector, mean: Vector, pieces: Sequence[slice]
    ) -> Generator[Action, Any, Vector]:
        """The weights after a step on these pieces alone."""
        gradient, at = np.zeros_like(own), 0
        for piece in pieces:
            length = piece.stop - piece.start
            gradient[piece] = mean[at : at + length]
            at += length
        stepped: Vector = yield Update(gradient)
        if not self.l1:
            return stepped
        found, threshold = stepped.copy(), roles.rate * self.l1
        for piece in pieces:
            part = found[piece]
            found[piece] = np.sign(part) * np.maximum(np.abs(part) - threshold, 0.0)
        adopted: Vector = yield Adopt(found)
        return adopted
