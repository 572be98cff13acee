"""Parameter averaging: replicas train separately and periodically average their weights."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from labkit.common.errors import InvalidInput
from labkit.common.state import record
from labkit.compression import Nested
from labkit.forecast import Query, StepForecast, of_program
from labkit.network import relative_compute_times
from labkit.programs import (
    Adopt,
    AllReduceAction,
    Begin,
    Compute,
    Forget,
    Gradient,
    Join,
    Program,
    RestartPoint,
    Roles,
    ServerPieces,
    Snapshot,
    States,
    Update,
    placed,
)
from labkit.programs.actions import Action, Vector
from labkit.strategies.replicas import SynchronousReplicas
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell

# With only the options in `_LINEAR`, an SGD update is linear in the gradient.
_LINEAR = {"momentum", "nesterov", "weight_decay"}


class ParameterAveraging(SynchronousReplicas):
    r"""Replicas average weights after every H local steps: local SGD, DiLoCo, Streaming DiLoCo.

    A worker's pseudo-gradient is the change of its weights in H local steps. The pseudo-gradient of
    worker i is \(\Delta_i = \theta - w_i\). All workers apply the mean pseudo-gradient to θ, the
    weights after the previous averaging:

    \[\theta \leftarrow \theta - \mathrm{outer}\bigl(\tfrac1n\sum_i \Delta_i\bigr), \qquad
    w_i \leftarrow \theta.\]

    Without an outer optimizer, the new weights are the mean of the workers' weights. A worker's
    share in the mean is proportional to the number of samples in its local steps.

    Args:
        period: The number H of local steps between two averagings, or "epoch" for one averaging per
            epoch.
        adaptive: Whether the period becomes shorter as the loss decreases. The adaptive period j
            has \(H_j = \lceil\sqrt{F_j/F_0}\,H\rceil\) steps. The loss \(F_j\) is the mean over all
            steps since the previous averaging. An adaptive period never exceeds H. With
            `local_steps="by_speed"`, each worker still takes at least one step per period.
        outer_optimizer: The optimizer that applies the mean pseudo-gradient: None, "sgd" or
            "nesterov". The update of "nesterov" is \(v \leftarrow \mu v + \Delta\), \(\theta
            \leftarrow \theta - \eta(\Delta + \mu v)\).
        outer_learning_rate: The learning rate η of the outer optimizer.
        outer_momentum: The momentum μ of "nesterov".
        warmup_steps: The number of synchronous steps before the first local step (post-local SGD).
        optimizer_state: What an averaging does with the optimizer's slot variables (such as
            momentum). "keep": each worker keeps its own slot variables. "average": slot variables
            and moving statistics are averaged like the weights, in proportion to rows. "reset":
            slot variables and the step count of the optimizer are reset.
        local_steps: "equal": all workers take H steps per period. "by_speed": slower workers take
            fewer steps, which shortens the wait. While the fastest worker takes H steps, a c times
            slower worker takes ⌊H/c⌋. The experiment defines the slowdown of each worker
            (`stragglers`); for a random slowdown, its mean is used. A slower worker counts less in
            the mean, because it processes fewer rows.
        fragments: The number of equal parts into which the flat weights are divided. The fragments
            are averaged one after another, at evenly spaced steps of the period.
        overlap_steps: The number of local steps that a worker takes while an averaging is in
            progress. When an averaging is complete, the worker adds its own weight changes. An
            averaging thus loses no local steps of a worker.
        compressor: The compressor of pseudo-gradients, its name in
            `labkit.compression.COMPRESSORS`, or None.

    After the last step of training, all fragments are averaged once more.

    Source: periodic averaging after A. Vishnu et al., 2016, arXiv 1603.02339 (once an epoch) and S.
    Stich, 2019, arXiv 1805.09767; `warmup_steps` after T. Lin et al., 2020, arXiv 1808.07217;
    `adaptive` after J. Wang and G. Joshi, 2019, arXiv 1810.08313; steps by speed after B. Liu et
    al., 2024, arXiv 2401.09135 (dynamic local updates), where workers do not wait for each other at
    all; the outer optimizer after A. Douillard et al., 2023, arXiv 2311.08105; fragments and
    overlap after A. Douillard et al., 2025, arXiv 2501.18512. Differs from Douillard et al. 2025:
    fragments are equal ranges of the flat weights, not layers. labkit adds the changes by local
    steps in full; the paper mixes local and averaged weights.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("periodic", "synchronous")
    scheduling: ClassVar[tuple[str, ...]] = ("sequential", "overlap")
    paper: ClassVar[str] = "Stich 2019, arXiv 1805.09767; Douillard 2023, arXiv 2311.08105"

    period: PositiveInt | Literal["epoch"] = Field(8, kw_only=False)
    adaptive: bool = False
    outer_optimizer: Literal["sgd", "nesterov"] | None = None
    outer_learning_rate: PositiveFloat = 0.7
    outer_momentum: NonNegativeFloat = Field(0.9, lt=1.0)
    warmup_steps: NonNegativeInt = 0
    optimizer_state: Literal["keep", "average", "reset"] = "keep"
    local_steps: Literal["equal", "by_speed"] = "equal"
    fragments: PositiveInt = 1
    overlap_steps: NonNegativeInt = 0
    compressor: Nested | None = None

    @classmethod
    def supports(cls, cell: Cell) -> bool:
        """Return whether a place in the taxonomy is periodic, or synchronous and sequential."""
        return cell.synchronization == "periodic" or cell.scheduling == "sequential"

    def cell(self, workers: int) -> Cell:
        """Return the place in the taxonomy, which depends on `period` and `overlap_steps`."""
        cell = super().cell(workers)
        if self._averages_each_step:
            return cell._replace(synchronization="synchronous")
        return cell._replace(scheduling="overlap") if self.overlap_steps else cell

    @property
    def _averages_each_step(self) -> bool:
        """Whether all weights are averaged after each step."""
        is_uniform = self.fragments == 1 and self.local_steps == "equal"
        return self.period == 1 and not self.overlap_steps and is_uniform

    def is_exact_in(self, experiment: ExperimentSpec) -> bool:
        """Return whether weights are averaged after each step and each update is linear."""
        options = experiment.optimizer_options
        linear = experiment.optimizer == "sgd" and options.keys() <= _LINEAR
        shared = self.optimizer_state == "average" or not options.get("momentum")
        whole = self.outer_optimizer is None and self.compressor is None
        return self._averages_each_step and linear and shared and whole

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for conflicting options, before any rank starts."""
        super().check(experiment)
        if self.local_steps == "by_speed":
            self._check_speeds(experiment)
        streams = self.fragments > 1 or self.overlap_steps > 0
        if streams and self.optimizer_state != "keep":
            raise InvalidInput(
                f"optimizer_state={self.optimizer_state!r} applies to whole models, but "
                f"fragments={self.fragments} "
                f"and overlap_steps={self.overlap_steps} average a model in parts, or with a "
                "delay; use "
                "optimizer_state='keep'"
            )
        if streams and (self.adaptive or self.period == "epoch"):
            raise InvalidInput(
                f"fragments={self.fragments}, overlap_steps={self.overlap_steps} need a fixed "
                "period; give a "
                "number of steps, and adaptive=False"
            )
        if isinstance(self.period, int) and self.period // self.fragments <= self.overlap_steps:
            raise InvalidInput(
                f"period={self.period} with fragments={self.fragments} averages a fragment every "
                f"{self.period // self.fragments} steps, but with "
                f"overlap_steps={self.overlap_steps} an "
                "averaging takes at least as long; use a longer period, fewer fragments, or a "
                "smaller overlap_steps"
            )
        if self.compressor is not None:
            # Compressed values change the weights directly, as in plain SGD, so the compressor is
            # checked for plain SGD.
            self.compressor.check("sgd", {})
        if self.fragments > 1 and self.compressor is not None and self.compressor.by_layer:
            raise InvalidInput(
                f"compressor={type(self.compressor).__name__} compresses single layers, but "
                "fragments are ranges of all weights; use fragments=1, or another compressor"
            )

    def _check_speeds(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput if all workers are equally fast, or if a worker would take no step."""
        slower = relative_compute_times(experiment.slowdowns, experiment.workers)
        if max(slower) == 1.0:
            raise InvalidInput(
                "local_steps='by_speed' gives slower workers fewer steps, but all workers are "
                "equally fast; give stragglers={worker: factor}, or use local_steps='equal'"
            )
        period = experiment.epoch_steps if self.period == "epoch" else self.period
        if period is not None and period < max(slower):
            raise InvalidInput(
                f"period={self.period!r} with local_steps='by_speed' has {period} steps, which "
                f"leave no step for a worker that is {max(slower):g} times slower; use a "
                f"period of {math.ceil(max(slower))} or more"
            )

    def cycle(self, experiment: ExperimentSpec) -> int:
        """Return the longest possible period, in steps."""
        if self.period == "epoch":
            return experiment.epoch_steps or 1
        return self.period

    def forecast(self, query: Query) -> StepForecast:
        """Forecast a training step by simulation of the programs, without the warm-up steps."""
        steady = self.model_copy(update={"warmup_steps": 0})
        return of_program(query, steady, self.cycle(query.experiment), steady.crowd(query.workers))

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Return the program of a replica: local steps, and averagings at the due steps."""
        slower = roles.slower[number] if self.local_steps == "by_speed" else 1.0
        replica, last = mark or (_Replica(self, roles, slower), False)
        total = roles.steps * roles.epochs
        while replica.step < total and not last:
            yield RestartPoint((replica, last))
            if replica.step < self.warmup_steps:
                gradient = yield Compute(replica.weights)
                gradient = yield AllReduceAction(
                    replace(gradient, step=replica.step), self.scheduled
                )
                replica.record_step((yield Update(gradient.values)), gradient)
                replica.start_period()
                last = gradient.last
            else:
                if replica.is_ready:
                    gradient = yield Compute(replica.weights)
                    weights = (yield Update(gradient.values)) if gradient.rows else replica.weights
                    replica.record_step(weights, gradient)
                    del gradient  # The deletion frees memory for the next gradient.
                else:
                    replica.advance()
                last = yield from replica.average_due(replica.step == total)
                # If a worker ends training, the remaining fragments of the weights are averaged at
                # once.
                if last:
                    yield from replica.average_due(True)
            if replica.step % roles.steps == 0:
                yield Snapshot(replica.step // roles.steps - 1, replica.weights)


@record()
@dataclass
class _UnderWay:
    """An averaging in progress: its fragment, sent weights, row count, and step of completion."""

    fragment: int
    sent: Vector
    rows: int
    due: int


@record(
    *("weights", "step", "_slower", "_strategy", "_roles", "_parts", "_shared", "_velocity"),
    *("_rows", "_met", "_since", "_losses", "_first", "_longest", "_least", "_period"),
    *("_last", "_under_way"),
)
class _Replica:
    """A worker's weights, and the state of each fragment since its last averaging."""

    def __init__(self, strategy: ParameterAveraging, roles: Roles, slower: float = 1.0) -> None:
        self.weights, self.step = roles.weights, 0
        self._slower = slower
        self._strategy, self._roles = strategy, roles
        self._parts: list[ServerPieces] = placed(
            [(roles.weights.size,)], strategy.fragments, "sharded"
        )
        self._shared = [part.take(roles.weights) for part in self._parts]
        self._velocity = [np.zeros_like(shared) for shared in self._shared]
        # For each fragment of the weights, `_rows` counts the training rows since its last
        # averaging.
        self._rows = [0] * len(self._parts)
        # For each fragment of the weights, `_met` holds the step of its last averaging.
        self._met = [0] * len(self._parts)
        # The attributes `_since` and `_losses` hold the step count and the losses of the current
        # period.
        self._since, self._losses = 0, list[float]()
        # The attribute `_first` is the mean loss of the first averaging period.
        self._first: float | None = None
        self._longest = roles.steps if strategy.period == "epoch" else strategy.period
        self._least = math.ceil(max(roles.slower)) if strategy.local_steps == "by_speed" else 1
        self._period = self._longest
        self._last = False
        self._under_way: _UnderWay | None = None

    @property
    def is_ready(self) -> bool:
        """Whether this worker takes a step during the next step of the fastest worker."""
        place = self._since % self._period
        return (place + 1) // self._slower > place // self._slower

    def record_step(self, weights: Vector, gradient: Gradient) -> None:
        """Record a local step."""
        self.weights = weights
        self._rows = [rows + gradient.rows for rows in self._rows]
        self._losses.append(gradient.loss)
        self._last = self._last or gradient.last
        self.advance()

    def advance(self) -> None:
        """Count one step of the fastest worker, which is the unit of time for all workers."""
        self.step, self._since = self.step + 1, self._since + 1

    def start_period(self) -> None:
        """Start a period from the current weights, which are equal on all workers."""
        self._shared = [part.take(self.weights) for part in self._parts]
        self._rows, self._since, self._losses = [0] * len(self._parts), 0, []
        self._met = [self.step] * len(self._parts)

    def average_due(self, ends: bool) -> Generator[Action, Any, bool]:
        """Start and complete the due averagings; return whether a worker asks to end training.

        Args:
            ends: Whether to average all parts of the weights now.
        """
        stops = False
        if self._under_way is not None and (ends or self._under_way.due <= self.step):
            stops = yield from self._complete_averaging()
        for fragment in range(len(self._parts)):
            if self._met[fragment] == self.step or not (ends or self._is_due(fragment)):
                continue
            yield from self._start_averaging(fragment)
            if ends or not self._strategy.overlap_steps:
                stops = (yield from self._complete_averaging()) or stops
        return stops

    def _is_due(self, fragment: int) -> bool:
        """Return whether a fragment must be averaged now; its due steps are evenly spaced."""
        return (
            self._since % self._period
            == (fragment + 1) * self._period // len(self._parts) % self._period
        )

    def _start_averaging(self, fragment: int) -> Generator[Action, Any, None]:
        sent = self._parts[fragment].take(self.weights).copy()
        loss = sum(self._losses) / max(len(self._losses), 1)
        rows, self._rows[fragment] = self._rows[fragment], 0
        self._met[fragment] = self.step
        delta = Gradient(self._shared[fragment] - sent, rows, loss, self.step, self._last)
        strategy = self._strategy
        yield Begin(AllReduceAction(delta, strategy.scheduled, strategy.compressor, fragment))
        self._under_way = _UnderWay(fragment, sent, rows, self.step + strategy.overlap_steps)

    def _complete_averaging(self) -> Generator[Action, Any, bool]:
        """Complete the averaging in progress and adopt the averaged weights."""
        averaging, self._under_way = self._under_way, None
        assert averaging is not None
        mean: Gradient = yield Join()
        fragment, part = averaging.fragment, self._parts[averaging.fragment]
        self._shared[fragment] = self._outer_step(fragment, mean.values)
        averaged = self._shared[fragment]
        # The worker adds the changes of its local steps during the averaging to the averaged
        # weights.
        if self.step > averaging.due - self._strategy.overlap_steps:
            averaged = averaged + (part.take(self.weights) - averaging.sent)
        weights = self.weights.copy()
        part.put(averaged, weights)
        states = None
        if self._strategy.optimizer_state == "average":
            slots = yield States()
            states_message = replace(mean, values=slots, rows=averaging.rows)
            states = (
                yield AllReduceAction(states_message, self._strategy.scheduled, fragment=-1)
            ).values
        self.weights = yield Adopt(weights, states)
        if self._strategy.optimizer_state == "reset":
            yield Forget()
        if fragment == len(self._parts) - 1:
            self._next_period(mean.loss)
        return mean.last

    def _outer_step(self, fragment: int, delta: Vector) -> Vector:
        """Return the weights of a fragment after a step of the outer optimizer."""
        strategy, shared = self._strategy, self._shared[fragment]
        if strategy.outer_optimizer is None:
            return shared - delta
        if strategy.outer_optimizer == "nesterov":
            momentum = delta.dtype.type(strategy.outer_momentum)
            self._velocity[fragment] = momentum * self._velocity[fragment] + delta
            delta = delta + momentum * self._velocity[fragment]
        updated: Vector = shared - delta.dtype.type(strategy.outer_learning_rate) * delta
        return updated

    def _next_period(self, loss: float) -> None:
        strategy = self._strategy
        if not strategy.adaptive:
            return
        self._since, self._losses = 0, []
        if self._first is None and 0 < loss < math.inf:
            self._first = loss
        if self._first and math.isfinite(loss):
            period = math.ceil(self._longest * math.sqrt(max(loss, 0.0) / self._first))
            self._period = min(max(period, self._least), self._longest)
