"""Parameter averaging: replicas take steps of their own, and now and then become their mean."""

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
from labkit.network import slower_than_fastest
from labkit.programs import (
    Adopt,
    AllReduce,
    Begin,
    Compute,
    Forget,
    Gradient,
    Join,
    Mark,
    Parts,
    Program,
    Roles,
    Snapshot,
    States,
    Update,
    placed,
)
from labkit.programs.actions import Action, Vector
from labkit.strategies.replicas import Meeting
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell

_LINEAR = {"momentum", "nesterov", "weight_decay"}  # options of "sgd"; clipping is not


class ParameterAveraging(Meeting):
    r"""Replicas take H steps of their own, then become their mean: local SGD, DiLoCo, streaming.

    After H local steps the pseudo-gradient of worker i is what its steps have changed,
    \(\Delta_i = \theta - w_i\), and all take the mean's step from the weights θ that they met at:

    \[\theta \leftarrow \theta - \mathrm{outer}\bigl(\tfrac1n\sum_i \Delta_i\bigr), \qquad
    w_i \leftarrow \theta.\]

    Without an outer optimizer that is the mean of the weights. Pseudo-gradients are weighted by
    the rows behind them.

    Args:
        period: H, in steps; "epoch": once an epoch.
        adaptive: let the period fall with the loss, \(H_j = \lceil\sqrt{F_j/F_0}\,H\rceil\), where
            F_j is the mean loss of all steps since the meeting before; it never grows beyond H,
            and with steps by speed leaves each worker one.
        outer: None, "sgd", or "nesterov", \(v \leftarrow \mu v + \Delta\),
            \(\theta \leftarrow \theta - \eta(\Delta + \mu v)\).
        outer_learning_rate: η of the outer optimizer.
        outer_momentum: μ of "nesterov".
        warmup: synchronous steps before the first local one (post-local SGD).
        state: what becomes of the optimizer's slots at a meeting: each worker's go on ("keep");
            they are averaged by rows, as the weights are, and moving statistics are, too
            ("average"); or each optimizer begins anew, slots and count of steps ("reset").
        local_steps: "equal", or "by_speed": a worker that is c times slower than the fastest takes
            ⌊H/c⌋ steps while that one takes H, so that nobody waits long. How slow each is, the
            experiment says (`slow`), as the mean where its law is random. As pseudo-gradients are
            weighted by the rows behind them, who takes fewer steps counts for less, and a slower
            worker gets less far through its samples.
        fragments: stretches of the weights, which meet in turn, evenly through the period.
        delay: steps that a worker goes on computing while a meeting is under way. What it has
            learned meanwhile is added to what they have agreed on.
        compressor: how pseudo-gradients are said in fewer bytes; one of
            `labkit.compression.COMPRESSORS`, its name, or None.

    After the last step all fragments meet once more.

    Source: periodic averaging after A. Vishnu et al., 2016, arXiv 1603.02339 (once an epoch) and
    S. Stich, 2019, arXiv 1805.09767; `warmup` after T. Lin et al., 2020, arXiv 1808.07217;
    `adaptive` after J. Wang and G. Joshi, 2019, arXiv 1810.08313; steps by speed after B. Liu et
    al., 2024, arXiv 2401.09135 (dynamic local updates), who do not wait for each other at all; the
    outer optimizer after A. Douillard et al., 2023, arXiv 2311.08105; fragments and delay after A.
    Douillard et al., 2025, arXiv 2501.18512. Differs from the last: fragments are equal stretches
    of the flat weights, not layers, and local progress is kept whole, not mixed.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("periodic", "synchronous")
    scheduling: ClassVar[tuple[str, ...]] = ("sequential", "overlap")
    paper: ClassVar[str] = "Stich 2019, arXiv 1805.09767; Douillard 2023, arXiv 2311.08105"

    period: PositiveInt | Literal["epoch"] = Field(8, kw_only=False)
    adaptive: bool = False
    outer: Literal["sgd", "nesterov"] | None = None
    outer_learning_rate: PositiveFloat = 0.7
    outer_momentum: NonNegativeFloat = Field(0.9, lt=1.0)
    warmup: NonNegativeInt = 0
    state: Literal["keep", "average", "reset"] = "keep"
    local_steps: Literal["equal", "by_speed"] = "equal"
    fragments: PositiveInt = 1
    delay: NonNegativeInt = 0
    compressor: Nested | None = None

    @classmethod
    def combines(cls, cell: Cell) -> bool:
        """Who computes on while a meeting is under way does not step together."""
        return cell.synchronization == "periodic" or cell.scheduling == "sequential"

    def cell(self, workers: int) -> Cell:
        """Whether they meet after each step, and go on meanwhile."""
        cell = super().cell(workers)
        if self._together:
            return cell._replace(synchronization="synchronous")
        return cell._replace(scheduling="overlap") if self.delay else cell

    @property
    def _together(self) -> bool:
        """Whether all weights meet after each step."""
        alike = self.fragments == 1 and self.local_steps == "equal"
        return self.period == 1 and not self.delay and alike

    def exact_of(self, experiment: ExperimentSpec) -> bool:
        """Where replicas meet after each step, and all that it leaves is linear in its gradient."""
        options = experiment.optimizer_options
        linear = experiment.optimizer == "sgd" and options.keys() <= _LINEAR
        shared = self.state == "average" or not options.get("momentum")
        whole = self.outer is None and self.compressor is None
        return self._together and linear and shared and whole

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what does not fit together, before any rank starts."""
        super().check(experiment)
        if self.local_steps == "by_speed":
            self._check_speeds(experiment)
        streams = self.fragments > 1 or self.delay > 0
        if streams and self.state != "keep":
            raise InvalidInput(
                f"state={self.state!r} is of a whole model, but fragments={self.fragments} and "
                f"delay={self.delay} meet in turn, or late; use state='keep'"
            )
        if streams and (self.adaptive or self.period == "epoch"):
            raise InvalidInput(
                f"fragments={self.fragments}, delay={self.delay} want a period that is known; give "
                "a number of steps, and adaptive=False"
            )
        if isinstance(self.period, int) and self.period // self.fragments <= self.delay:
            raise InvalidInput(
                f"period={self.period} with fragments={self.fragments} is a meeting every "
                f"{self.period // self.fragments} steps, but delay={self.delay} lets it last as "
                "long; use a longer period, fewer fragments, or a shorter delay"
            )
        if self.compressor is not None:
            self.compressor.check("sgd", {})  # what is said is added to weights as it is
        if self.fragments > 1 and self.compressor is not None and self.compressor.by_layer:
            raise InvalidInput(
                f"compressor={type(self.compressor).__name__} works layer by layer, but fragments "
                "are stretches of all weights; use fragments=1, or another compressor"
            )

    def _check_speeds(self, experiment: ExperimentSpec) -> None:
        """Refuse steps by speed where all are equally fast, or where somebody would have none."""
        slower = slower_than_fastest(experiment.slowed, experiment.workers)
        if max(slower) == 1.0:
            raise InvalidInput(
                "local_steps='by_speed' gives slower workers fewer steps, but nobody is slower "
                "here; say who is, slow={worker: factor}, or use local_steps='equal'"
            )
        period = experiment.epoch_steps if self.period == "epoch" else self.period
        if period is not None and period < max(slower):
            raise InvalidInput(
                f"period={self.period!r} with local_steps='by_speed' is of {period} steps, which "
                f"leaves none to a worker that is {max(slower):g} times slower; use a period of "
                f"{math.ceil(max(slower))} or more"
            )

    def cycle(self, experiment: ExperimentSpec) -> int:
        """A period, which is never longer."""
        if self.period == "epoch":
            return experiment.epoch_steps or 1
        return self.period

    def forecast(self, asked: Query) -> StepForecast:
        """By playing its programs, behind what warms up."""
        steady = self.model_copy(update={"warmup": 0})
        return of_program(asked, steady, self.cycle(asked.experiment), steady.crowd(asked.workers))

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """A replica: steps of its own, and meetings when they are due."""
        slower = roles.slower[number] if self.local_steps == "by_speed" else 1.0
        replica, last = mark or (_Replica(self, roles, slower), False)
        total = roles.steps * roles.epochs
        while replica.step < total and not last:
            yield Mark((replica, last))
            if replica.step < self.warmup:
                found = yield Compute(replica.weights)
                found = yield AllReduce(replace(found, step=replica.step), self.scheduled)
                replica.takes((yield Update(found.values)), found)
                replica.begins_here()
                last = found.last
            else:
                if replica.is_ready:
                    found = yield Compute(replica.weights)
                    own = (yield Update(found.values)) if found.rows else replica.weights
                    replica.takes(own, found)
                    del found  # the next gradient may lie where this one did
                else:
                    replica.waits()
                last = yield from replica.meets(replica.step == total)
                if last:  # someone wants to stop: whoever has not met now does so
                    yield from replica.meets(True)
            if replica.step % roles.steps == 0:
                yield Snapshot(replica.step // roles.steps - 1, replica.weights)


@record()
@dataclass
class _UnderWay:
    """An allreduce under way: of which fragment, from which weights and rows, due at which step."""

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
    """The weights of a worker, and what it met at last, fragment by fragment."""

    def __init__(self, strategy: ParameterAveraging, roles: Roles, slower: float = 1.0) -> None:
        self.weights, self.step = roles.weights, 0
        self._slower = slower
        self._strategy, self._roles = strategy, roles
        self._parts: list[Parts] = placed([(roles.weights.size,)], strategy.fragments, "sharded")
        self._shared = [part.take(roles.weights) for part in self._parts]
        self._velocity = [np.zeros_like(each) for each in self._shared]
        self._rows = [0] * len(self._parts)  # since each fragment has met
        self._met = [0] * len(self._parts)  # at which step
        self._since, self._losses = 0, list[float]()  # since the begin of a period
        self._first: float | None = None  # the loss of the first period
        self._longest = roles.steps if strategy.period == "epoch" else strategy.period
        self._least = math.ceil(max(roles.slower)) if strategy.local_steps == "by_speed" else 1
        self._period = self._longest
        self._last = False
        self._under_way: _UnderWay | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it takes the next step of the fastest one, too."""
        place = self._since % self._period
        return (place + 1) // self._slower > place // self._slower

    def takes(self, weights: Vector, found: Gradient) -> None:
        """A step of its own."""
        self.weights = weights
        self._rows = [rows + found.rows for rows in self._rows]
        self._losses.append(found.loss)
        self._last = self._last or found.last
        self.waits()

    def waits(self) -> None:
        """Others have taken a step; this one, too, or it is in the middle of a longer one."""
        self.step, self._since = self.step + 1, self._since + 1

    def begins_here(self) -> None:
        """All have the same weights: local steps count from these."""
        self._shared = [part.take(self.weights) for part in self._parts]
        self._rows, self._since, self._losses = [0] * len(self._parts), 0, []
        self._met = [self.step] * len(self._parts)

    def meets(self, ends: bool) -> Generator[Action, Any, bool]:
        """Begin and end the meetings that are due; whether someone wants training to end.

        Args:
            ends: all that have not met at this step do so now.
        """
        over = False
        if self._under_way is not None and (ends or self._under_way.due <= self.step):
            over = yield from self._joins()
        for fragment in range(len(self._parts)):
            if self._met[fragment] == self.step or not (ends or self._is_due(fragment)):
                continue
            yield from self._begins(fragment)
            if ends or not self._strategy.delay:
                over = (yield from self._joins()) or over
        return over

    def _is_due(self, fragment: int) -> bool:
        """Fragments divide the period evenly."""
        return (
            self._since % self._period
            == (fragment + 1) * self._period // len(self._parts) % self._period
        )

    def _begins(self, fragment: int) -> Generator[Action, Any, None]:
        sent = self._parts[fragment].take(self.weights).copy()
        loss = sum(self._losses) / max(len(self._losses), 1)
        rows, self._rows[fragment] = self._rows[fragment], 0
        self._met[fragment] = self.step
        brought = Gradient(self._shared[fragment] - sent, rows, loss, self.step, self._last)
        strategy = self._strategy
        yield Begin(AllReduce(brought, strategy.scheduled, strategy.compressor, fragment))
        self._under_way = _UnderWay(fragment, sent, rows, self.step + strategy.delay)

    def _joins(self) -> Generator[Action, Any, bool]:
        """Take what was agreed on."""
        meeting, self._under_way = self._under_way, None
        assert meeting is not None  # for the type checker
        mean: Gradient = yield Join()
        fragment, part = meeting.fragment, self._parts[meeting.fragment]
        self._shared[fragment] = self._outer(fragment, mean.values)
        agreed = self._shared[fragment]
        if self.step > meeting.due - self._strategy.delay:  # it has learned meanwhile
            agreed = agreed + (part.take(self.weights) - meeting.sent)
        weights = self.weights.copy()
        part.put(agreed, weights)
        states = None
        if self._strategy.state == "average":
            own = yield States()
            told = replace(mean, values=own, rows=meeting.rows)
            states = (yield AllReduce(told, self._strategy.scheduled, fragment=-1)).values
        self.weights = yield Adopt(weights, states)
        if self._strategy.state == "reset":
            yield Forget()
        if fragment == len(self._parts) - 1:
            self._next_period(mean.loss)
        return mean.last

    def _outer(self, fragment: int, delta: Vector) -> Vector:
        """The weights after the outer step."""
        strategy, shared = self._strategy, self._shared[fragment]
        if strategy.outer is None:
            return shared - delta
        if strategy.outer == "nesterov":
            momentum = delta.dtype.type(strategy.outer_momentum)
            self._velocity[fragment] = momentum * self._velocity[fragment] + delta
            delta = delta + momentum * self._velocity[fragment]
        found: Vector = shared - delta.dtype.type(strategy.outer_learning_rate) * delta
        return found

    def _next_period(self, loss: float) -> None:
        strategy = self._strategy
        if not strategy.adaptive:
            return
        self._since, self._losses = 0, []
        if self._first is None and 0 < loss < math.inf:
            self._first = loss
        if self._first and math.isfinite(loss):
            found = math.ceil(self._longest * math.sqrt(max(loss, 0.0) / self._first))
            self._period = min(max(found, self._least), self._longest)
