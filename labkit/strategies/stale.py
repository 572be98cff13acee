"""Asynchronous training whose gradients have a bounded or corrected staleness."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.forecast.workers import PLAYED
from labkit.programs import (
    Code,
    Drop,
    Message,
    Program,
    Receive,
    RestartPoint,
    Roles,
    Send,
    Snapshot,
    Update,
)
from labkit.programs.actions import Vector
from labkit.strategies.servers import Quota, Servers, aggregate, mean
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell


class Stale(Servers):
    r"""A base class of asynchronous servers that can correct gradients that are τ updates old.

    Args:
        staleness_correction: How stale gradients are corrected, or None. "per_gradient": the
            learning rate of a gradient is \(\alpha / \max(1, \tau)\). "mean": the learning rate is
            \(\alpha / \bar\tau\). The mean staleness \(\bar\tau\) of gradients does not depend on
            the speeds of machines. "momentum" reduces the optimizer's momentum, because stale
            gradients already act like momentum. For "momentum", the optimizer's momentum μ is
            reduced to \(\mu'\), where \(\mu'/(1-\mu') = \max(0, \mu/(1-\mu) - \bar\tau)\). For
            "momentum", the learning rate is multiplied by \((1-\mu')/(1-\mu)\).
            "delay_compensated": the gradient g becomes \(g + \lambda\, g \odot g \odot (w -
            w_{then})\). The gradient g was computed at the weights \(w_{then}\).
            "delay_compensated" adds a first-order Taylor term to the gradient. The elementwise
            square of the gradient approximates the Hessian.
        delay_compensation: The factor λ of "delay_compensated".

    Source: W. Zhang et al., Staleness-aware async-SGD, 2016, arXiv 1511.05950 (learning rates). S.
    Gupta et al., Model accuracy and runtime tradeoff, 2015, arXiv 1509.04210 (learning rates). I.
    Mitliagkas et al., 2016, arXiv 1605.09774 (asynchrony begets momentum). The formula for
    "momentum" is labkit's own. The formula preserves the step size and the mean age of gradients.
    S. Zheng et al., Asynchronous SGD with delay compensation, 2017, arXiv 1609.08326, with a
    constant λ.
    """

    staleness_correction: (
        Literal["per_gradient", "mean", "momentum", "delay_compensated"] | None
    ) = None
    delay_compensation: NonNegativeFloat = 0.04

    def staleness_of(self, workers: int) -> float:
        """Return the mean staleness of gradients, in numbers of updates."""
        raise NotImplementedError(f"{type(self).__name__} must define staleness_of")

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for options that servers do not support, before any rank starts."""
        super().check(experiment)
        optimizer = self.optimizer_of(experiment)
        if self.staleness_correction == "momentum" and not (
            optimizer == "sgd" and _momentum(experiment)
        ):
            raise InvalidInput(
                "staleness_correction='momentum' reduces the optimizer's momentum, but "
                f"optimizer={optimizer!r} has {_momentum(experiment):g}; use optimizer='sgd' "
                "with optimizer_options={'momentum': 0.9}"
            )

    def optimizer_options_of(self, experiment: ExperimentSpec) -> Mapping[str, JSON]:
        """Return the experiment's optimizer options, with the reduced momentum."""
        options = super().optimizer_options_of(experiment)
        if self.staleness_correction != "momentum":
            return options
        return {**options, "momentum": self._reduced_momentum(experiment)}

    def rate_of(self, experiment: ExperimentSpec) -> float:
        """Return the factor by which the learning rate compensates for reduced momentum."""
        if self.staleness_correction != "momentum":
            return 1.0
        return (1 - self._reduced_momentum(experiment)) / (1 - _momentum(experiment))

    def _reduced_momentum(self, experiment: ExperimentSpec) -> float:
        momentum = _momentum(experiment)
        age = max(0.0, momentum / (1 - momentum) - self.staleness_of(experiment.workers))
        return age / (1 + age)

    def rate(self, staleness: int, workers: int) -> float:
        """Return the learning-rate factor for a gradient that is `staleness` updates old."""
        if self.staleness_correction == "per_gradient":
            return 1.0 / max(1, staleness)
        if self.staleness_correction == "mean":
            return 1.0 / max(1.0, self.staleness_of(workers))
        return 1.0

    def update(
        self,
        roles: Roles,
        pushes: Sequence[Message],
        version: int,
        weights: Vector,
        gradient_weights: Sequence[Vector],
    ) -> Update:
        """Return a server's update from gradients, weighted by row counts and learning rates.

        Args:
            roles: The roles of all processes.
            pushes: The messages with the gradients.
            version: The number of updates that this server's weights have had so far.
            weights: The current weights of this server.
            gradient_weights: For each gradient, the weights at which the worker computed it.
        """
        if self.staleness_correction == "delay_compensated":
            pairs = zip(pushes, gradient_weights, strict=True)
            pushes = [
                self._compensate(push, weights - worker_weights) for push, worker_weights in pairs
            ]
        rates = [self.rate(version - push.version, roles.workers) for push in pushes]
        shares = [push.rows * rate for push, rate in zip(pushes, rates, strict=True)]
        rows = sum(push.rows for push in pushes)
        return Update(mean(pushes, shares), tuple(pushes), sum(shares) / rows)

    def _compensate(self, push: Message, weight_change: Vector) -> Message:
        assert push.values is not None
        term = (
            push.values.dtype.type(self.delay_compensation)
            * push.values
            * push.values
            * weight_change
        )
        return replace(push, values=push.values + term)


class StaleSynchronous(Stale):
    r"""Workers may be up to s clocks ahead of the slowest worker, and may use stale weights.

    A worker's clock is the number of gradients that it has sent. A worker at clock c waits until
    all other workers have reached clock c - s. A worker at clock c receives all updates from clocks
    before c - s. The received weights may also contain later updates. A gradient is applied as soon
    as it arrives. With n workers, the learning rate of a gradient is \(\alpha / n\). If a staleness
    correction sets learning rates, it replaces the rate \(\alpha / n\). With s = 0, no worker can
    be ahead of another. Training with s = 0 is synchronous; each update is the mean of all
    gradients of one clock.

    Args:
        staleness: The bound s, as a number of clocks.

    The other fields are those of the base class `Stale`.

    Source: Q. Ho et al., More effective distributed ML via a stale synchronous parallel parameter
    server, NIPS 2013. Difference from the paper: labkit's servers delay their replies to fast
    workers; the paper's fast workers wait for fresh values in their cache. Updates may use any
    optimizer.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("stale synchronous", "synchronous")
    paper: ClassVar[str] = "Ho 2013, NIPS"

    staleness: NonNegativeInt = Field(1, kw_only=False)

    def cell(self, workers: int) -> Cell:
        """Return the strategy's place in the taxonomy, synchronous if s = 0."""
        cell = super().cell(workers)
        return cell if self.staleness else cell._replace(synchronization="synchronous")

    @property
    def exact(self) -> bool:
        """Whether the staleness is 0 and no compressor is used."""
        return self.staleness == 0 and self.compressor is None

    def tolerated_failures(self, workers: int) -> int:
        """Return how many workers may fail: 0 if s = 0, as each clock then needs all workers."""
        return super().tolerated_failures(workers) if self.staleness else 0

    def staleness_of(self, workers: int) -> float:
        """Return n - 1: a gradient misses one update per other worker, whatever their speeds."""
        return workers - 1.0

    def rate(self, staleness: int, workers: int) -> float:
        """Return 1/n for n workers, or the factor that the staleness correction sets."""
        if self.staleness_correction in ("per_gradient", "mean"):
            return super().rate(staleness, workers)
        return 1.0 / workers

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for options that servers do not support, before any rank starts."""
        super().check(experiment)
        if self.staleness == 0 and self.staleness_correction is not None:
            raise InvalidInput(
                f"staleness_correction={self.staleness_correction!r} has no effect with "
                "staleness=0, because no gradient is stale; remove "
                "staleness_correction, or give staleness=1 or more"
            )

    def serve(self, roles: Roles, number: int, mark: Any) -> Program:
        """Return a server's program."""
        if self.staleness == 0:
            return aggregate(roles, number, mark, self.server_channels(roles, number))
        return self._serve_bounded(roles, number, mark)

    def _serve_bounded(self, roles: Roles, number: int, mark: Any) -> Program:
        weights, version = roles.part(number).take(roles.weights), 0
        channels, total = self.server_channels(roles, number), roles.steps * roles.epochs
        clocks = dict.fromkeys(range(roles.workers), 0)
        copies, failed = dict.fromkeys(clocks, weights), set[int]()
        waiting: list[Message] = []
        epoch = 0
        finished = 0
        if mark is not None:
            weights, version, channels, total, clocks, copies, failed, waiting, epoch, finished = (
                mark
            )
        while finished < roles.workers:
            state = (
                weights,
                version,
                channels,
                total,
                clocks,
                copies,
                failed,
                waiting,
                epoch,
                finished,
            )
            yield RestartPoint(state)
            push = yield Receive()
            if push.values is None:
                finished += 1
                failed |= {push.source} if push.ends else set()
            elif push.rows:
                gradient = yield Code(partial(channels[push.source].pushed, push.values))
                pushes, gradient_weights = [replace(push, values=gradient)], [copies[push.source]]
                weights = yield self.update(roles, pushes, version, weights, gradient_weights)
                version += 1
            else:
                yield Drop(push)
            if push.values is not None:
                clocks[push.source] += 1
                waiting.append(push)
                total = max(clocks.values()) if push.ends else total
            slowest = min((clocks[worker] for worker in clocks if worker not in failed), default=0)
            ready = [
                message for message in waiting if clocks[message.source] - slowest <= self.staleness
            ]
            waiting = [message for message in waiting if message not in ready]
            for message in ready:
                ends = number == roles.lead and clocks[message.source] >= total
                payload = yield Code(partial(channels[message.source].answer, weights))
                copies[message.source] = channels[message.source].has(weights)
                yield Send(
                    message.source, Message(number, payload, version, ends=ends), answers=message
                )
            while epoch < roles.epochs and _has_reached((epoch + 1) * roles.steps, clocks, failed):
                yield Snapshot(epoch, weights)
                epoch += 1


def _has_reached(clock: int, clocks: Mapping[int, int], failed: Container[int]) -> bool:
    """Return whether the number of gradients shows that no running worker is below the clock."""
    goal = sum(min(count, clock) if worker in failed else clock for worker, count in clocks.items())
    return sum(clocks.values()) >= goal


class SoftSync(Stale):
    """Each update combines ⌊λ/n⌋ gradients of λ workers, which do not wait for each other.

    A server replies to each gradient at once with its current weights. When ⌊λ/n⌋ gradients have
    arrived, the server applies their mean, weighted by row counts and learning rates. The mean
    staleness of gradients is n updates. With equally fast workers, SoftSync(1) is synchronous
    training whose updates are delayed by one.

    Args:
        n: The number of updates per λ gradients, from 1 to the number λ of workers.

    The other fields are those of the base class `Stale`. When training ends, gradients that are not
    yet part of an update are discarded.

    Source: W. Zhang et al., Staleness-aware async-SGD for distributed deep learning, 2016, arXiv
    1511.05950.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("asynchronous",)
    paper: ClassVar[str] = "Zhang 2016, arXiv 1511.05950"

    n: PositiveInt = Field(1, kw_only=False)

    def staleness_of(self, workers: int) -> float:
        """Return the mean staleness in updates; it is n if n divides the number of workers."""
        return workers / self._group(workers)

    def _group(self, workers: int) -> int:
        return workers // self.n

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for options that servers do not support, before any rank starts."""
        super().check(experiment)
        if self.n > experiment.workers:
            raise InvalidInput(
                f"n={self.n} exceeds the number of gradients of "
                f"workers={experiment.workers}; allowed: 1 to {experiment.workers}"
            )

    def _scaled_fields(self, scale: float) -> dict[str, Any]:
        return {"n": min(self.n, PLAYED)}

    def serve(self, roles: Roles, number: int, mark: Any) -> Program:
        """Return the program of a server that replies at once and updates after ⌊λ/n⌋ gradients."""
        weights, version = roles.part(number).take(roles.weights), 0
        channels, quota, finished = self.server_channels(roles, number), Quota(roles, number), 0
        worker_weights = dict.fromkeys(range(roles.workers), weights)
        pending: list[tuple[Message, Vector]] = []
        if mark is not None:
            weights, version, channels, quota, finished, worker_weights, pending = mark
        while finished < roles.workers:
            yield RestartPoint(
                (weights, version, channels, quota, finished, worker_weights, pending)
            )
            push = yield Receive()
            if push.values is None:
                quota.leaves(push)
                finished += 1
                continue
            ends, channel = quota.ends(push), channels[push.source]
            if push.rows:
                gradient = yield Code(partial(channel.pushed, push.values))
                pending.append((replace(push, values=gradient), worker_weights[push.source]))
            else:
                yield Drop(push)
            payload = yield Code(partial(channel.answer, weights))
            worker_weights[push.source] = channel.has(weights)
            yield Send(push.source, Message(number, payload, version, ends=ends), answers=push)
            if len(pending) == self._group(roles.workers):
                pushes, gradient_weights = zip(*pending, strict=True)
                weights = yield self.update(roles, pushes, version, weights, gradient_weights)
                version, pending = version + 1, []
            for epoch in quota.epochs():
                yield Snapshot(epoch, weights)
        for epoch in quota.epochs(last=True):
            yield Snapshot(epoch, weights)
        for push, _ in pending:
            yield Drop(push)


def _momentum(experiment: ExperimentSpec) -> float:
    value = experiment.optimizer_options.get("momentum", 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
