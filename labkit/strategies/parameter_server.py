"""Parameter servers: weights live on servers, workers fetch them and push gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from labkit.common.errors import InvalidInput
from labkit.programs import (
    Compute,
    Drop,
    Message,
    Parts,
    Program,
    Receive,
    Roles,
    Send,
    Snapshot,
    Update,
    placed,
)
from labkit.programs.actions import Vector
from labkit.strategies.refusals import OPTIMIZERS, one_of, refuse_in_parts, refuse_norms
from labkit.strategies.strategy import Question, Session, Strategy


class ParameterServer(Strategy):
    r"""Servers hold the weights and the optimizer; workers push gradients, and get new weights.

    Synchronous: a server waits for the gradients of one clock, and applies their mean
    \(\bar g = \sum_k b_k g_k / \sum_k b_k\), added up in the order of the workers. With b backup
    workers it waits for the first n - b of them, and drops what comes later. Asynchronous: each
    gradient is applied when it comes, to weights that are τ updates older than those that it is
    of; one worker alone trains as without a server.

    Who is done is said by the first server: after so many clocks, or as many gradients, as the
    epochs have batches; an epoch is over when as many samples were computed as the data have,
    whoever did it. Moving statistics of layers are kept by each worker, and the model keeps those
    of worker 0.

    Args:
        servers: how many hold weights.
        synchronous: whether an update waits for all workers.
        colocated: servers share the ranks, and the links, of the first workers; else they have
            ranks of their own, behind those of the workers.
        placement: which server holds which tensor: "round_robin" and "greedy" by TensorFlow's
            rules; "sharded" cuts the flat weights into equal stretches.
        optimizer: of the servers, by its Keras name, at the experiment's rate; None: the
            experiment's.
        backups: gradients of a clock that are not waited for.

    Source: M. Li et al.: Scaling distributed machine learning with the parameter server, OSDI 2014;
    synchronous with backup workers: J. Chen et al., Revisiting distributed synchronous SGD, 2016,
    arXiv 1604.00981. Differs from them: a server answers each push with its weights, so that a
    worker has one exchange a step with each server, and not two.
    """

    architecture: ClassVar[str] = "parameter servers"
    synchronization: ClassVar[str] = "synchronous or asynchronous"
    paper: ClassVar[str] = "Li 2014, OSDI; Chen 2016, arXiv 1604.00981"

    servers: PositiveInt = Field(1, kw_only=False, le=1_000)
    synchronous: bool = True
    colocated: bool = False
    placement: Literal["round_robin", "greedy", "sharded"] = "round_robin"
    optimizer: str | None = None
    backups: NonNegativeInt = 0

    @property
    def exact(self) -> bool:
        """Where every update waits for every worker."""
        return self.synchronous and self.backups == 0

    @property
    def plays(self) -> bool:
        """It is a program."""
        return True

    def optimizer_of(self, experiment: Question) -> str:
        """That of the servers."""
        return self.optimizer or experiment.optimizer

    @property
    def meanwhile(self) -> bool:
        """An asynchronous server answers at once; one that waits, waits for that worker, too."""
        return not self.synchronous

    def beside(self) -> int:
        """Ranks of servers that compute no gradients."""
        return 0 if self.colocated else self.servers

    def rows(self, batch_size: int, workers: int) -> int:
        """Rows of a worker's part of the batch."""
        return -(-batch_size // workers)

    def check(self, experiment: Question) -> None:
        """Refuse what servers cannot do, before any rank starts."""
        workers, options = experiment.workers, experiment.optimizer_options
        refuse_in_parts(experiment)
        if experiment.optimizer_options and self.optimizer is not None:
            raise InvalidInput(
                "optimizer_options are those of the experiment's optimizer, but the servers have "
                f"optimizer={self.optimizer!r}; leave one of both out"
            )
        if self.backups and not self.synchronous:
            raise InvalidInput(
                f"backups={self.backups} with synchronous=False: nothing waits for a gradient "
                "there; give backups=0, or synchronous=True"
            )
        if self.backups >= workers:
            raise InvalidInput(
                f"backups={self.backups} of workers={workers} leave nobody to wait for; allowed: "
                f"0 to {workers - 1}"
            )
        if self.colocated and self.servers > workers:
            raise InvalidInput(
                f"servers={self.servers} with colocated=True stand on the ranks of "
                f"workers={workers}; allowed: 1 to {workers}, or colocated=False"
            )
        if experiment.feed == "scatter":
            raise InvalidInput("feed='scatter' does not know servers; use feed='shard'")
        optimizer = self.optimizer_of(experiment)
        if self.placement == "sharded" and self.servers > 1:
            refuse_norms(optimizer, options, part="server")
        elif self.servers > 1 and options.get("global_clipnorm") is not None:
            raise InvalidInput(
                f"global_clipnorm={options['global_clipnorm']} needs the norm of all gradients, "
                "but each server has some of them; use clipnorm, or servers=1"
            )

    @field_validator("optimizer")
    @classmethod
    def _optimizer(cls, value: str | None) -> str | None:
        if value is not None:
            one_of("optimizer", value, OPTIMIZERS)
        return value

    def train(self, session: Session) -> None:
        """Play the programs of workers and servers."""
        session.play(self)

    # --- the programs ------------------------------------------------------------------------

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> list[Parts]:
        """What each server holds."""
        return placed(shapes, self.servers, self.placement)

    def hosts(self, workers: int) -> list[int]:
        """The place of each worker, then of each server."""
        first = 0 if self.colocated else workers
        return [*range(workers), *range(first, first + self.servers)]

    def program(self, roles: Roles, number: int) -> Program:
        """What this one does."""
        if number < roles.workers:
            return self._worker(roles, number)
        return self._waits(roles, number) if self.synchronous else self._applies(roles, number)

    def _worker(self, roles: Roles, number: int) -> Program:
        weights, versions = roles.weights, dict.fromkeys(roles.servers, 0)
        over = False
        while not over:
            found = yield Compute(weights)
            about = found.rows, found.step, found.last
            for server in roles.servers:
                part = roles.part(server).take(found.values)
                yield Send(server, Message(number, part, versions[server], *about))
            parts: dict[int, Vector] = {}
            for server in roles.servers:
                answer = yield Receive(server)
                parts[server], versions[server] = answer.values, answer.version
                over = over or answer.ends
            weights = roles.whole(parts)
        for server in roles.servers:
            yield Send(server, Message(number))  # nothing more will come

    def _waits(self, roles: Roles, number: int) -> Program:
        """A server of whose updates each waits for the gradients of one clock."""
        weights, clock, last = roles.part(number).take(roles.weights), 0, False
        total = roles.steps * roles.epochs
        here: list[Message] = []
        gone = 0
        while gone < roles.workers:
            push = yield Receive()
            if push.values is None:
                gone += 1
                continue
            last = last or push.ends
            if push.version < clock:
                yield Drop(push)
                answer = Message(number, weights, clock, ends=clock == total)
                yield Send(push.source, answer, answers=push)
                continue
            here.append(push)
            if len(here) < roles.workers - self.backups:
                continue
            here.sort(key=lambda message: message.source)
            weights = yield Update(_mean(here), tuple(here))
            clock += 1
            total = clock if last and number == roles.lead else total
            for each in here:
                ends = number == roles.lead and clock == total
                yield Send(each.source, Message(number, weights, clock, ends=ends), answers=each)
            here = []
            if clock % roles.steps == 0:
                yield Snapshot(clock // roles.steps - 1, weights)

    def _applies(self, roles: Roles, number: int) -> Program:
        """A server that applies each gradient when it comes."""
        weights, version = roles.part(number).take(roles.weights), 0
        epoch = roles.steps * roles.workers
        granted, total = roles.workers, epoch * roles.epochs
        came = gone = 0
        while gone < roles.workers:
            push = yield Receive()
            if push.values is None:
                gone += 1
                continue
            if push.rows:
                weights = yield Update(push.values, (push,))
                version += 1
            came += 1
            total = granted if push.ends else total
            ends = number == roles.lead and granted >= total
            granted += not ends
            yield Send(push.source, Message(number, weights, version, ends=ends), answers=push)
            if came % epoch == 0:
                yield Snapshot(came // epoch - 1, weights)


def _mean(pushes: Sequence[Message]) -> Vector:
    """The mean of gradients, weighted by their rows; the first ones first."""
    values = [push.values for push in pushes if push.values is not None]
    rows = [push.rows for push in pushes]
    if len(values) == 1:
        return values[0]
    total = max(sum(rows), 1)
    mean: Vector = values[0] * values[0].dtype.type(rows[0] / total)
    for each, count in zip(values[1:], rows[1:], strict=True):
        mean += each * each.dtype.type(count / total)
    return mean
