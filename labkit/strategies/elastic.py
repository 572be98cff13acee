"""Elastic averaging: an elastic force pulls each replica's weights towards central weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from labkit.common.errors import InvalidInput
from labkit.programs import (
    Adopt,
    AllReduceAction,
    Begin,
    Compute,
    Gradient,
    Join,
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
from labkit.strategies.replicas import SynchronousReplicas
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON


class ElasticAveraging(SynchronousReplicas):
    r"""An elastic force pulls each replica's weights and the central weights towards each other.

    At every `period`-th step, worker i applies the elastic force and a gradient. The force and the
    gradient are computed from the weights before the step:

    \[x_i \leftarrow x_i - \alpha (x_i - \tilde x) - \eta g_i(x_i), \qquad
    \tilde x \leftarrow \tilde x + \alpha (x_i - \tilde x),\]

    The messages are on their way while the worker computes the gradient. The centre \(\tilde x\) is
    the model that is evaluated.

    Args:
        alpha: The strength α of the elastic force.
        period: The number of steps between two applications of the elastic force.
        momentum: The Nesterov momentum of the local steps of each worker (EAMSGD).
        center: "server": a server on a separate rank holds the centre. The server answers workers
            in the order in which messages arrive. "allreduce": all workers hold the centre, and
            apply the force at the same steps. The "allreduce" variant is synchronous.

    After its last step, a worker applies the elastic force once more. Messages are never
    compressed. The final model has the moving statistics of worker 0's normalization layers.

    Source: S. Zhang, A. Choromanska, Y. LeCun, Deep learning with elastic averaging SGD, 2015,
    arXiv 1412.6651. Difference from the paper: the elastic force applies to the weights at which
    Nesterov's gradient is computed, because Keras stores those weights.
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
    def supports(cls, cell: Cell) -> bool:
        """Return True if a taxonomy place is both asynchronous and with servers, or neither."""
        asynchronous = cell.synchronization in ("asynchronous periodic", "asynchronous")
        return asynchronous == (cell.architecture == "parameter servers")

    def cell(self, workers: int) -> Cell:
        """Return the place in the taxonomy, which the fields `center` and `period` determine."""
        cell = super().cell(workers)
        if self.central:
            synchronization = "asynchronous" if self.period == 1 else "asynchronous periodic"
            return cell._replace(synchronization=synchronization)
        synchronization = "synchronous" if self.period == 1 else "periodic"
        return cell._replace(architecture="collective", synchronization=synchronization)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for conflicting options, before any rank starts."""
        super().check(experiment)
        workers = experiment.workers
        if self.center == "allreduce" and self.alpha * workers > 1:
            raise InvalidInput(
                f"alpha={self.alpha:g} with workers={workers} moves the centre by "
                f"{self.alpha * workers:g} times its distance to the workers' mean, which is "
                f"beyond that mean; use alpha up to {1 / workers:.3g}, such as 0.9 / workers"
            )
        if self.central and self.algorithm != "auto":
            raise InvalidInput(
                f"algorithm={self.algorithm!r} selects an allreduce, but center='server' uses "
                "none; remove the algorithm, or use center='allreduce'"
            )
        if self.momentum and (
            experiment.optimizer != "sgd" or "momentum" in experiment.optimizer_options
        ):
            raise InvalidInput(
                f"momentum={self.momentum:g} requires plain SGD, but the experiment has "
                f"optimizer={experiment.optimizer!r} with "
                f"{dict(experiment.optimizer_options)}; use optimizer='sgd' without momentum, "
                "or momentum=0"
            )

    def optimizer_options_of(self, experiment: ExperimentSpec) -> Mapping[str, JSON]:
        """Return the experiment's optimizer options, with the Nesterov momentum of the strategy."""
        options = super().optimizer_options_of(experiment)
        nesterov = {"momentum": self.momentum, "nesterov": True} if self.momentum else {}
        return {**options, **nesterov}

    @property
    def central(self) -> bool:
        """Whether a server holds the centre."""
        return self.center == "server"

    def copies(self, workers: int) -> Sequence[int]:
        """Return the number of the process that holds the centre: the server, or worker 0."""
        return [workers if self.central else 0]

    def cycle(self, experiment: ExperimentSpec) -> int:
        """Return the number of steps between two applications of the elastic force."""
        return self.period

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Return the program of a worker or of the server."""
        if number == roles.workers:
            return self._serve(roles, number, mark)
        synchronous = self.center == "allreduce"
        return (
            self._work_synchronously(roles, mark)
            if synchronous
            else self._work(roles, number, mark)
        )

    def _work(self, roles: Roles, number: int, mark: Any) -> Program:
        server, alpha = roles.workers, self._alpha(roles)
        weights, step, wants, ends = mark or (roles.weights, 0, False, False)
        while step < roles.steps * roles.epochs and not ends:
            yield RestartPoint((weights, step, wants, ends))
            is_due = step > 0 and step % self.period == 0
            if is_due:
                yield Send(server, Message(number, weights, step=step, ends=wants))
            gradient = yield Compute(weights)
            if is_due:
                centre = yield Receive(server)
                weights, ends = weights - alpha * (weights - centre.values), centre.ends
                yield Adopt(weights)
            weights = (yield Update(gradient.values)) if gradient.rows else weights
            step, wants = step + 1, wants or gradient.last
            del gradient  # The deletion frees memory for the next gradient.
        yield Send(server, Message(number, weights, step=step, ends=wants, wants=False))

    def _serve(self, roles: Roles, number: int, mark: Any) -> Program:
        centre, alpha, ends, epoch = roles.weights, self._alpha(roles), False, 0
        reached, active = dict.fromkeys(range(roles.workers), 0), roles.workers
        if mark is not None:
            centre, ends, epoch, reached, active = mark
        while active:
            yield RestartPoint((centre, ends, epoch, reached, active))
            message = yield Receive()
            ends = ends or message.ends
            if message.wants:
                yield Send(message.source, Message(number, centre, ends=ends), answers=message)
            else:
                active -= 1
            centre = yield Adopt(centre + alpha * (message.values - centre))
            reached[message.source] = message.step
            while min(reached.values()) >= (epoch + 1) * roles.steps:
                yield Snapshot(epoch, centre)
                epoch += 1

    def _work_synchronously(self, roles: Roles, mark: Any) -> Program:
        alpha, total = self._alpha(roles), roles.steps * roles.epochs
        weights, centre, step, wants, ends = mark or (roles.weights, roles.weights, 0, False, False)
        while step < total and not ends:
            yield RestartPoint((weights, centre, step, wants, ends))
            is_due, previous = step > 0 and step % self.period == 0, centre
            if is_due:
                yield Begin(self._pull(weights - centre, step, wants))
            gradient = yield Compute(weights)
            if is_due:
                mean = yield Join()
                centre, ends = centre + alpha * roles.workers * mean.values, mean.last
                weights = yield Adopt(weights - alpha * (weights - previous))
            weights = (yield Update(gradient.values)) if gradient.rows else weights
            step, wants = step + 1, wants or gradient.last
            del gradient  # The deletion frees memory for the next gradient.
            if step == total or ends:
                mean = yield self._pull(weights - centre, step, wants)
                centre = yield Adopt(centre + alpha * roles.workers * mean.values)
            if step % roles.steps == 0:
                yield Snapshot(step // roles.steps - 1, centre)

    def _pull(self, distance: Vector, step: int, wants: bool) -> AllReduceAction:
        """Return an allreduce of the differences between workers' weights and the centre."""
        return AllReduceAction(Gradient(distance, 1, 0.0, step, wants), self.scheduled)

    def _alpha(self, roles: Roles) -> Vector:
        """Return α as a number in the dtype of the weights."""
        return np.asarray(self.alpha, roles.weights.dtype)
