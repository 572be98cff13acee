"""Gradients of weights that are some updates old: who may run ahead, and what mends it."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.forecast.worker_sampling import PLAYED
from labkit.programs import (
    Code,
    Drop,
    Mark,
    Message,
    Program,
    Receive,
    Roles,
    Send,
    Snapshot,
    Update,
)
from labkit.programs.actions import Vector
from labkit.strategies.servers import Servers, aggregate, mean
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell
from labkit.strategies.work_quota import Quota


class Stale(Servers):
    r"""What asynchronous servers can do about a gradient that is τ updates old.

    Args:
        remedy: "per_gradient": its learning rate is \(\alpha / \max(1, \tau)\); "mean":
            \(\alpha / \bar\tau\) with the staleness that gradients have on average, whatever
            the machines; "momentum": gradients that come late act as momentum does, so the
            optimizer has less of it: \(\mu'\) with \(\mu'/(1-\mu') = \max(0, \mu/(1-\mu) -
            \bar\tau)\), at \((1-\mu')/(1-\mu)\) times the rate; "delay_compensated":
            \(g + \lambda\, g \odot g \odot (w - w_{then})\), a Taylor term with the diagonal of the
            gradients' outer product in place of the Hessian.
        compensation: λ of the last one.

    Source: the rates: W. Zhang et al., Staleness-aware async-SGD, 2016, arXiv 1511.05950, and
    S. Gupta et al., Model accuracy and runtime tradeoff, 2015, arXiv 1509.04210; that asynchrony
    begets momentum: I. Mitliagkas et al., 2016, arXiv 1605.09774 (the formula is our own: it keeps
    the mean age of what a step is made of, and the size of the steps); S. Zheng et al.,
    Asynchronous SGD with delay compensation, 2017, arXiv 1609.08326, with a constant λ.
    """

    remedy: Literal["per_gradient", "mean", "momentum", "delay_compensated"] | None = None
    compensation: NonNegativeFloat = 0.04

    def staleness_of(self, workers: int) -> float:
        """How many updates old gradients are on average."""
        raise NotImplementedError(f"{type(self).__name__} does not say how old gradients are")

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what servers cannot do, before any rank starts."""
        super().check(experiment)
        optimizer = self.optimizer_of(experiment)
        if self.remedy == "momentum" and not (optimizer == "sgd" and _momentum(experiment)):
            raise InvalidInput(
                "remedy='momentum' takes some of the optimizer's momentum away; "
                f"optimizer={optimizer!r} has {_momentum(experiment):g}: use optimizer='sgd' with "
                "optimizer_options={'momentum': 0.9}"
            )

    def optimizer_options_of(self, experiment: ExperimentSpec) -> Mapping[str, JSON]:
        """Those of the experiment, with what is left of the momentum."""
        options = super().optimizer_options_of(experiment)
        if self.remedy != "momentum":
            return options
        return {**options, "momentum": self._left(experiment)}

    def rate_of(self, experiment: ExperimentSpec) -> float:
        """As large as makes up for the momentum that is gone."""
        if self.remedy != "momentum":
            return 1.0
        return (1 - self._left(experiment)) / (1 - _momentum(experiment))

    def _left(self, experiment: ExperimentSpec) -> float:
        momentum = _momentum(experiment)
        age = max(0.0, momentum / (1 - momentum) - self.staleness_of(experiment.workers))
        return age / (1 + age)

    def rate(self, staleness: int, workers: int) -> float:
        """The factor on the learning rate of a gradient so old; 1 where nothing is mended."""
        if self.remedy == "per_gradient":
            return 1.0 / max(1, staleness)
        if self.remedy == "mean":
            return 1.0 / max(1.0, self.staleness_of(workers))
        return 1.0

    def update(
        self,
        roles: Roles,
        pushes: Sequence[Message],
        version: int,
        weights: Vector,
        then: Sequence[Vector],
    ) -> Update:
        """What a server does with gradients, each by its rows and its rate.

        Args:
            roles: who there is.
            pushes: the gradients.
            version: updates that this server's weights have had.
            weights: these.
            then: the weights that each gradient is of, as its worker has them.
        """
        if self.remedy == "delay_compensated":
            old = zip(pushes, then, strict=True)
            pushes = [self._compensated(push, weights - own) for push, own in old]
        rates = [self.rate(version - push.version, roles.workers) for push in pushes]
        shares = [push.rows * rate for push, rate in zip(pushes, rates, strict=True)]
        rows = sum(push.rows for push in pushes)
        return Update(mean(pushes, shares), tuple(pushes), sum(shares) / rows)

    def _compensated(self, push: Message, moved: Vector) -> Message:
        assert push.values is not None  # for the type checker: it brings a gradient
        term = push.values.dtype.type(self.compensation) * push.values * push.values * moved
        return replace(push, values=push.values + term)


class StaleSynchronous(Stale):
    r"""Workers run ahead of the slowest by at most s clocks, with weights that may lack updates.

    A worker's clock is the number of its gradients. One at clock c goes on when all others have
    come to c - s; what it gets then has all updates of the clocks before c - s, and whatever else
    has come. A gradient is applied when it comes, at \(\alpha / n\), its part of a clock; a remedy
    that sets rates does so in place of that. With s = 0 nobody is ahead: the gradients of a clock
    are one update, of their mean, and training is synchronous.

    Args:
        staleness: s.

    The other fields are those of all servers and remedies.

    Source: Q. Ho et al., More effective distributed ML via a stale synchronous parallel parameter
    server, NIPS 2013. Differs from it: servers hold an answer back, where there a worker's cache
    does; updates are those of any optimizer.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("stale synchronous", "synchronous")
    paper: ClassVar[str] = "Ho 2013, NIPS"

    staleness: NonNegativeInt = Field(1, kw_only=False)

    def cell(self, workers: int) -> Cell:
        """With s = 0 nobody is ahead."""
        cell = super().cell(workers)
        return cell if self.staleness else cell._replace(synchronization="synchronous")

    @property
    def exact(self) -> bool:
        """Where nobody may be ahead, and nothing is left out."""
        return self.staleness == 0 and self.compressor is None

    def tolerated_failures(self, workers: int) -> int:
        """None, where each clock waits for all."""
        return super().tolerated_failures(workers) if self.staleness else 0

    def staleness_of(self, workers: int) -> float:
        """Each update by another worker is missed once, however fast workers are."""
        return workers - 1.0

    def rate(self, staleness: int, workers: int) -> float:
        """A gradient's part of a clock, or what the remedy says."""
        if self.remedy in ("per_gradient", "mean"):
            return super().rate(staleness, workers)
        return 1.0 / workers

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what servers cannot do, before any rank starts."""
        super().check(experiment)
        if self.staleness == 0 and self.remedy is not None:
            raise InvalidInput(
                f"remedy={self.remedy!r} with staleness=0: no gradient is old there; leave it out, "
                "or give staleness=1 or more"
            )

    def serve(self, roles: Roles, number: int, mark: Any) -> Program:
        """What a server does."""
        if self.staleness == 0:
            return aggregate(roles, number, mark, self.talks(roles, number))
        return self._holds_back(roles, number, mark)

    def _holds_back(self, roles: Roles, number: int, mark: Any) -> Program:
        weights, version = roles.part(number).take(roles.weights), 0
        talks, total = self.talks(roles, number), roles.steps * roles.epochs
        clocks = dict.fromkeys(range(roles.workers), 0)
        had, lost = dict.fromkeys(clocks, weights), set[int]()
        waiting: list[Message] = []
        kept = 0  # epochs
        gone = 0
        if mark is not None:
            weights, version, talks, total, clocks, had, lost, waiting, kept, gone = mark
        while gone < roles.workers:
            known = weights, version, talks, total, clocks, had, lost, waiting, kept, gone
            yield Mark(known)
            push = yield Receive()
            if push.values is None:
                gone += 1
                lost |= {push.source} if push.ends else set()
            elif push.rows:
                gradient = yield Code(partial(talks[push.source].pushed, push.values))
                pushes, then = [replace(push, values=gradient)], [had[push.source]]
                weights = yield self.update(roles, pushes, version, weights, then)
                version += 1
            else:
                yield Drop(push)
            if push.values is not None:
                clocks[push.source] += 1
                waiting.append(push)
                total = max(clocks.values()) if push.ends else total
            slowest = min((clocks[worker] for worker in clocks if worker not in lost), default=0)
            free = [m for m in waiting if clocks[m.source] - slowest <= self.staleness]
            waiting = [m for m in waiting if m not in free]
            for each in free:
                ends = number == roles.lead and clocks[each.source] >= total
                said = yield Code(partial(talks[each.source].answer, weights))
                had[each.source] = talks[each.source].has(weights)
                yield Send(each.source, Message(number, said, version, ends=ends), answers=each)
            while kept < roles.epochs and _come_to((kept + 1) * roles.steps, clocks, lost):
                yield Snapshot(kept, weights)
                kept += 1


def _come_to(clock: int, clocks: Mapping[int, int], lost: Container[int]) -> bool:
    """Whether workers have as many gradients together as if all, but those lost, were there."""
    goal = sum(min(own, clock) if worker in lost else clock for worker, own in clocks.items())
    return sum(clocks.values()) >= goal


class SoftSync(Stale):
    r"""An update for each ⌊λ/n⌋ gradients of λ workers, who wait for nobody.

    A gradient is answered at once, with the weights as they are then, and counts in the update
    that comes when ⌊λ/n⌋ are there: their mean, by rows and rates. Gradients are n updates old on
    average. SoftSync(1) with equal workers is synchronous training, one update late.

    Args:
        splits: n, from 1 to λ, the number of workers.

    The other fields are those of all servers and remedies. Gradients that are left over at the end
    are not applied.

    Source: W. Zhang et al., Staleness-aware async-SGD for distributed deep learning, 2016,
    arXiv 1511.05950.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("asynchronous",)
    paper: ClassVar[str] = "Zhang 2016, arXiv 1511.05950"

    splits: PositiveInt = Field(1, kw_only=False)

    def staleness_of(self, workers: int) -> float:
        """n, where it divides the workers."""
        return workers / self._group(workers)

    def _group(self, workers: int) -> int:
        return workers // self.splits

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what servers cannot do, before any rank starts."""
        super().check(experiment)
        if self.splits > experiment.workers:
            raise InvalidInput(
                f"splits={self.splits} are more updates than workers={experiment.workers} have "
                f"gradients; allowed: 1 to {experiment.workers}"
            )

    def _fewer(self, scale: float) -> dict[str, Any]:
        return {"splits": min(self.splits, PLAYED)}

    def serve(self, roles: Roles, number: int, mark: Any) -> Program:
        """A server that answers first, and updates when enough have come."""
        weights, version = roles.part(number).take(roles.weights), 0
        talks, quota, gone = self.talks(roles, number), Quota(roles, number), 0
        had = dict.fromkeys(range(roles.workers), weights)
        here: list[tuple[Message, Vector]] = []
        if mark is not None:
            weights, version, talks, quota, gone, had, here = mark
        while gone < roles.workers:
            yield Mark((weights, version, talks, quota, gone, had, here))
            push = yield Receive()
            if push.values is None:
                quota.leaves(push)
                gone += 1
                continue
            ends, talk = quota.ends(push), talks[push.source]
            if push.rows:
                gradient = yield Code(partial(talk.pushed, push.values))
                here.append((replace(push, values=gradient), had[push.source]))
            else:
                yield Drop(push)
            said = yield Code(partial(talk.answer, weights))
            had[push.source] = talk.has(weights)
            yield Send(push.source, Message(number, said, version, ends=ends), answers=push)
            if len(here) == self._group(roles.workers):
                pushes, then = zip(*here, strict=True)
                weights = yield self.update(roles, pushes, version, weights, then)
                version, here = version + 1, []
            for epoch in quota.epochs():
                yield Snapshot(epoch, weights)
        for epoch in quota.epochs(last=True):
            yield Snapshot(epoch, weights)
        for push, _ in here:
            yield Drop(push)


def _momentum(experiment: ExperimentSpec) -> float:
    value = experiment.optimizer_options.get("momentum", 0.0)
    return float(value) if isinstance(value, int | float) else 0.0
