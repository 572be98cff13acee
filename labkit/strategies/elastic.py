"""Elastic averaging: replicas explore, and a spring ties each of them to a centre."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from labkit.common.errors import InvalidInput
from labkit.programs import (
    Adopt,
    AllReduce,
    Begin,
    Compute,
    Gradient,
    Join,
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
from labkit.strategies.replicas import Meeting
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON


class ElasticAveraging(Meeting):
    r"""Replicas never become their mean: each is pulled to a centre, which is pulled to it.

    At every `period`-th step worker i pulls and takes a step at the same weights,

    \[x_i \leftarrow x_i - \alpha (x_i - \tilde x) - \eta g_i(x_i), \qquad
    \tilde x \leftarrow \tilde x + \alpha (x_i - \tilde x),\]

    and what travels does so while it computes the gradient. The centre is what is evaluated.

    Args:
        alpha: α, the strength of the spring.
        period: steps from one pull to the next.
        momentum: of Nesterov in each worker's own steps (EAMSGD).
        center: "server" holds it and answers whoever comes, on a rank of its own; with
            "allreduce" all workers hold it and pull at the same steps, which is the synchronous
            method.

    After its last step a worker pulls the centre once more. What is said is never compressed. The
    model keeps moving statistics of worker 0.

    Source: S. Zhang, A. Choromanska, Y. LeCun, Deep learning with elastic averaging SGD, 2015,
    arXiv 1412.6651. Differs from it: the spring pulls at the weights at which Nesterov's gradient
    is taken, as Keras holds those.
    """

    architecture: ClassVar[tuple[str, ...]] = ("parameter servers", "collective")
    synchronization: ClassVar[tuple[str, ...]] = (
        *("asynchronous periodic", "asynchronous"),
        *("periodic", "synchronous"),
    )
    scheduling: ClassVar[tuple[str, ...]] = ("overlap",)
    paper: ClassVar[str] = "Zhang 2015, arXiv 1412.6651"

    alpha: PositiveFloat = Field(0.1, lt=1.0, kw_only=False)
    period: PositiveInt = 8
    momentum: NonNegativeFloat = Field(0.0, lt=1.0)
    center: Literal["server", "allreduce"] = "server"

    @classmethod
    def combines(cls, cell: Cell) -> bool:
        """A server answers whoever comes; without one all pull at the same steps."""
        alone = cell.synchronization in ("asynchronous periodic", "asynchronous")
        return alone == (cell.architecture == "parameter servers")

    def cell(self, workers: int) -> Cell:
        """Who holds the centre, and how often it pulls."""
        cell = super().cell(workers)
        if self.central:
            often = "asynchronous" if self.period == 1 else "asynchronous periodic"
            return cell._replace(synchronization=often)
        often = "synchronous" if self.period == 1 else "periodic"
        return cell._replace(architecture="collective", synchronization=often)

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what does not fit together, before any rank starts."""
        super().check(experiment)
        workers = experiment.workers
        if self.center == "allreduce" and self.alpha * workers > 1:
            raise InvalidInput(
                f"alpha={self.alpha:g} of workers={workers} together pulls the centre by "
                f"{self.alpha * workers:g} of the way, beyond their mean; use alpha up to "
                f"{1 / workers:.3g}, such as 0.9 / workers"
            )
        if self.central and self.algorithm != "auto":
            raise InvalidInput(
                f"algorithm={self.algorithm!r} is of an allreduce, but center='server' has none; "
                "leave it out, or use center='allreduce'"
            )
        if self.momentum and (
            experiment.optimizer != "sgd" or "momentum" in experiment.optimizer_options
        ):
            raise InvalidInput(
                f"momentum={self.momentum:g} is that of SGD, but optimizer="
                f"{experiment.optimizer!r} with {dict(experiment.optimizer_options)} has its own; "
                "use optimizer='sgd' without momentum, or momentum=0"
            )

    def optimizer_options_of(self, experiment: ExperimentSpec) -> Mapping[str, JSON]:
        """Those of the experiment, with Nesterov's momentum."""
        options = super().optimizer_options_of(experiment)
        nesterov = {"momentum": self.momentum, "nesterov": True} if self.momentum else {}
        return {**options, **nesterov}

    @property
    def central(self) -> bool:
        """Whether a server holds the centre."""
        return self.center == "server"

    def copies(self, workers: int) -> Sequence[int]:
        """The centre: that of the server, or worker 0's."""
        return [workers if self.central else 0]

    def cycle(self, experiment: ExperimentSpec) -> int:
        """From one pull to the next."""
        return self.period

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """What a worker does, or the server."""
        if number == roles.workers:
            return self._serve(roles, number, mark)
        together = self.center == "allreduce"
        return self._together(roles, mark) if together else self._work(roles, number, mark)

    def _work(self, roles: Roles, number: int, mark: Any) -> Program:
        server, alpha = roles.workers, self._alpha(roles)
        own, step, wants, over = mark or (roles.weights, 0, False, False)
        while step < roles.steps * roles.epochs and not over:
            yield Mark((own, step, wants, over))
            meets = step > 0 and step % self.period == 0
            if meets:
                yield Send(server, Message(number, own, step=step, ends=wants))
            found = yield Compute(own)
            if meets:
                centre = yield Receive(server)
                own, over = own - alpha * (own - centre.values), centre.ends
                yield Adopt(own)
            own = (yield Update(found.values)) if found.rows else own
            step, wants = step + 1, wants or found.last
            del found  # the next gradient may lie where this one did
        yield Send(server, Message(number, own, step=step, ends=wants, wants=False))

    def _serve(self, roles: Roles, number: int, mark: Any) -> Program:
        centre, alpha, over, epoch = roles.weights, self._alpha(roles), False, 0
        reached, left = dict.fromkeys(range(roles.workers), 0), roles.workers
        if mark is not None:
            centre, over, epoch, reached, left = mark
        while left:
            yield Mark((centre, over, epoch, reached, left))
            heard = yield Receive()
            over = over or heard.ends
            if heard.wants:
                yield Send(heard.source, Message(number, centre, ends=over), answers=heard)
            else:
                left -= 1
            centre = yield Adopt(centre + alpha * (heard.values - centre))
            reached[heard.source] = heard.step
            while min(reached.values()) >= (epoch + 1) * roles.steps:
                yield Snapshot(epoch, centre)
                epoch += 1

    def _together(self, roles: Roles, mark: Any) -> Program:
        alpha, total = self._alpha(roles), roles.steps * roles.epochs
        own, centre, step, wants, over = mark or (roles.weights, roles.weights, 0, False, False)
        while step < total and not over:
            yield Mark((own, centre, step, wants, over))
            meets, before = step > 0 and step % self.period == 0, centre
            if meets:
                yield Begin(self._pull(own - centre, step, wants))
            found = yield Compute(own)
            if meets:
                mean = yield Join()
                centre, over = centre + alpha * roles.workers * mean.values, mean.last
                own = yield Adopt(own - alpha * (own - before))
            own = (yield Update(found.values)) if found.rows else own
            step, wants = step + 1, wants or found.last
            del found  # the next gradient may lie where this one did
            if step == total or over:
                mean = yield self._pull(own - centre, step, wants)
                centre = yield Adopt(centre + alpha * roles.workers * mean.values)
            if step % roles.steps == 0:
                yield Snapshot(step // roles.steps - 1, centre)

    def _pull(self, away: Vector, step: int, wants: bool) -> AllReduce:
        """All springs together."""
        return AllReduce(Gradient(away, 1, 0.0, step, wants), self.scheduled)

    def _alpha(self, roles: Roles) -> Vector:
        """α, in the type of the weights."""
        return np.asarray(self.alpha, roles.weights.dtype)
