"""Parameter servers: weights live on servers, workers fetch them and push gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from labkit.common.errors import InvalidInput
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
from labkit.strategies.servers import Servers, aggregate
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell
from labkit.strategies.work_quota import Quota


class ParameterServer(Servers):
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
        transport: on ranks, "two_sided" sends and receives; "one_sided" puts messages into memory
            that their reader has set aside, who takes no part; "one_sided_dynamic" leaves them in
            the sender's and tells their reader where, who fetches them. On the virtual clock all
            are flows.
        optimizer: of the servers, by its Keras name, at the experiment's rate; None: the
            experiment's.
        backups: gradients of a clock that are not waited for.
        compressor: how workers and servers say less, in both directions: gradients through it,
            weights as differences from what the worker has by now, see `programs.CodecChannel`;
            one of `labkit.compression.COMPRESSORS`, its name, or None.
        stages: each worker is a replica of so many places with some of the layers each, between
            which one tensor passes; cut so that the largest has as few parameters as can be. Each
            pushes and fetches its own part, and servers take those of a replica together.
        grid: each worker is a replica over so many rows and columns of places, which compute tiles
            of its layers, and units of Dense ones, as machines of `LocallyConnected` do. Each
            pushes and fetches its own part; kernels of a Conv2D are those of the first, which hands
            them to the others and adds up their gradients. Not together with stages.

    Source: M. Li et al.: Scaling distributed machine learning with the parameter server, OSDI 2014;
    synchronous with backup workers: J. Chen et al., Revisiting distributed synchronous SGD, 2016,
    arXiv 1604.00981. Differs from them: a server answers each push with its weights, so that a
    worker has one exchange a step with each server, and not two.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("synchronous", "asynchronous")
    paper: ClassVar[str] = "Li 2014, OSDI; Chen 2016, arXiv 1604.00981"

    servers: PositiveInt = Field(1, kw_only=False, le=1_000)
    synchronous: bool = True
    backups: NonNegativeInt = 0

    def cell(self, workers: int) -> Cell:
        """Whether an update waits for all."""
        waits = "synchronous" if self.synchronous else "asynchronous"
        return super().cell(workers)._replace(synchronization=waits)

    @property
    def exact(self) -> bool:
        """Where every update waits for every worker, and nothing is left out."""
        return self.synchronous and self.backups == 0 and self.compressor is None

    @property
    def serves_concurrently(self) -> bool:
        """An asynchronous server answers at once; one that waits, waits for that worker, too."""
        return not self.synchronous

    def tolerated_failures(self, workers: int) -> int:
        """Those whom nothing waits for."""
        return self.backups if self.synchronous else super().tolerated_failures(workers)

    def check(self, experiment: ExperimentSpec) -> None:
        """Refuse what servers cannot do, before any rank starts."""
        super().check(experiment)
        if self.backups and not self.synchronous:
            raise InvalidInput(
                f"backups={self.backups} with synchronous=False: nothing waits for a gradient "
                "there; give backups=0, or synchronous=True"
            )
        if self.backups >= experiment.workers:
            raise InvalidInput(
                f"backups={self.backups} of workers={experiment.workers} leave nobody to wait "
                f"for; allowed: 0 to {experiment.workers - 1}"
            )

    def _fewer(self, scale: float) -> dict[str, Any]:
        return {"backups": round(self.backups * scale)}

    def serve(self, roles: Roles, number: int, mark: Any) -> Program:
        """What a server does."""
        if self.synchronous:
            return aggregate(roles, number, mark, self.talks(roles, number), self.backups)
        return self._applies(roles, number, mark)

    def _applies(self, roles: Roles, number: int, mark: Any) -> Program:
        """A server that applies each gradient when it comes."""
        weights, version = roles.part(number).take(roles.weights), 0
        talks, quota, gone = self.talks(roles, number), Quota(roles, number), 0
        if mark is not None:
            weights, version, talks, quota, gone = mark
        while gone < roles.workers:
            yield Mark((weights, version, talks, quota, gone))
            push = yield Receive()
            if push.values is None:
                quota.leaves(push)
                gone += 1
                continue
            talk = talks[push.source]
            if push.rows:
                gradient = yield Code(partial(talk.pushed, push.values))
                weights = yield Update(gradient, (push,))
                version += 1
            else:
                yield Drop(push)
            ends = quota.ends(push)
            said = yield Code(partial(talk.answer, weights))
            yield Send(push.source, Message(number, said, version, ends=ends), answers=push)
            for epoch in quota.epochs():
                yield Snapshot(epoch, weights)
        for epoch in quota.epochs(last=True):
            yield Snapshot(epoch, weights)
