"""Parameter servers: servers hold the weights; workers fetch weights and push gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from labkit.common.errors import InvalidInput
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
from labkit.strategies.servers import Quota, Servers, aggregate
from labkit.strategies.strategy import ExperimentSpec
from labkit.strategies.taxonomy import Cell


class ParameterServer(Servers):
    r"""Servers hold weights and optimizer; workers push gradients and receive new weights.

    Synchronous: in each step, a server waits for the gradients of all n workers. The server applies
        the mean gradient \(\bar g = \sum_k b_k g_k / \sum_k b_k\). The gradient \(g_k\) is the mean
        over the \(b_k\) samples of worker k. The gradients are added in the order of the workers.
        With c backup workers, a server waits only for the first n - c gradients. The server ignores
        all later gradients of the step. Asynchronous: a server applies each gradient on arrival.
        When a gradient arrives, the server's weights are τ updates newer than the worker's weights.
        With a single worker, training is the same as without a server.

    The first server ends training when the workers have computed the batches of all epochs. An
    epoch ends when all workers together have processed as many samples as the data set has. Each
    worker has its own moving statistics of normalization layers; the final model has those of
    worker 0.

    Args:
        servers: The number of servers that hold the weights.
        synchronous: Whether an update waits for all workers except backup workers. If `synchronous`
            is False, a server applies each gradient as soon as it arrives.
        colocated: Whether servers run on the ranks of the first workers and share their links. If
            `colocated` is False, the ranks of servers follow those of workers.
        placement: How tensors are assigned to servers. "round_robin" and "greedy" follow
            TensorFlow's rules; "sharded" cuts the flat weights into equal ranges.
        transport: How messages travel between ranks. "two_sided": a send with a matching receive.
            "one_sided": the sender writes messages into the memory of the receiver.
            "one_sided_dynamic": messages stay in the memory of the sender. The sender announces an
            offset, and the receiver reads at the offset. On the virtual clock, the simulation of
            all three transports is the same: messages flow over links.
        optimizer: The Keras name of the servers' optimizer, which uses the experiment's learning
            rate. If `optimizer` is None, the servers use the experiment's optimizer.
        backup_workers: The number c of gradients per step for which a synchronous update does not
            wait.
        compressor: The method that compresses gradients and changes of weights. A compressor is a
            name in `labkit.compression.COMPRESSORS`, or an object of a named class. The default
            None means no compression.
        stages: The number of pipeline stages into which the model of each worker is cut; default:
            1. Exactly one tensor passes between two neighbouring stages. The cuts are chosen so
            that the largest stage has as few parameters as possible. Each stage pushes the
            gradients and fetches the weights of its own layers. Servers apply the gradients of all
            stages of a worker together.
        grid: The rows and columns of the grid of machines that form one worker; default: one
            machine. The machines divide layers into tiles, and Dense layers into units, as in
            `SpatialParallel`. Each machine pushes the gradients and fetches the weights of its own
            tiles and units. The first machine stores the kernels of Conv2D layers. The first
            machine sends the kernels to the other machines, and sums their gradients. A grid cannot
            be combined with stages.

    Source: M. Li et al.: Scaling distributed machine learning with the parameter server, OSDI 2014.
    J. Chen et al., Revisiting distributed synchronous SGD, 2016, arXiv 1604.00981 (backup workers).
    Difference from the papers: a server answers each push with its weights, so that a worker needs
    one exchange per step and server, not two.
    """

    synchronization: ClassVar[tuple[str, ...]] = ("synchronous", "asynchronous")
    paper: ClassVar[str] = "Li 2014, OSDI; Chen 2016, arXiv 1604.00981"

    servers: PositiveInt = Field(1, kw_only=False, le=1_000)
    synchronous: bool = True
    backup_workers: NonNegativeInt = 0

    def cell(self, workers: int) -> Cell:
        """Return the place in the taxonomy, synchronous if an update waits for all workers."""
        waits = "synchronous" if self.synchronous else "asynchronous"
        return super().cell(workers)._replace(synchronization=waits)

    @property
    def exact(self) -> bool:
        """Whether every update waits for all workers, and nothing is compressed."""
        return self.synchronous and self.backup_workers == 0 and self.compressor is None

    @property
    def serves_concurrently(self) -> bool:
        """Whether a server answers at once, even while the worker on the same rank computes."""
        return not self.synchronous

    def tolerated_failures(self, workers: int) -> int:
        """Return how many workers may fail: `backup_workers`; if asynchronous, all but one."""
        return self.backup_workers if self.synchronous else super().tolerated_failures(workers)

    def check(self, experiment: ExperimentSpec) -> None:
        """Raise InvalidInput for options that servers do not support, before any rank starts."""
        super().check(experiment)
        if self.backup_workers and not self.synchronous:
            raise InvalidInput(
                f"backup_workers={self.backup_workers} with synchronous=False: asynchronous "
                "updates wait for "
                "no gradient, so that backup workers have no effect; give backup_workers=0, or "
                "synchronous=True"
            )
        if self.backup_workers >= experiment.workers:
            raise InvalidInput(
                f"backup_workers={self.backup_workers} of workers={experiment.workers} leave no "
                "gradient for "
                f"an update; allowed: 0 to {experiment.workers - 1}"
            )

    def _scaled_fields(self, scale: float) -> dict[str, Any]:
        return {"backup_workers": round(self.backup_workers * scale)}

    def serve(self, roles: Roles, number: int, mark: Any) -> Program:
        """Return a server's program."""
        if self.synchronous:
            return aggregate(
                roles, number, mark, self.server_channels(roles, number), self.backup_workers
            )
        return self._serve_asynchronously(roles, number, mark)

    def _serve_asynchronously(self, roles: Roles, number: int, mark: Any) -> Program:
        """Return the program of a server that applies each gradient on arrival."""
        weights, version = roles.part(number).take(roles.weights), 0
        channels, quota, finished = self.server_channels(roles, number), Quota(roles, number), 0
        if mark is not None:
            weights, version, channels, quota, finished = mark
        while finished < roles.workers:
            yield RestartPoint((weights, version, channels, quota, finished))
            push = yield Receive()
            if push.values is None:
                quota.leaves(push)
                finished += 1
                continue
            channel = channels[push.source]
            if push.rows:
                gradient = yield Code(partial(channel.pushed, push.values))
                weights = yield Update(gradient, (push,))
                version += 1
            else:
                yield Drop(push)
            ends = quota.ends(push)
            payload = yield Code(partial(channel.answer, weights))
            yield Send(push.source, Message(number, payload, version, ends=ends), answers=push)
            for epoch in quota.epochs():
                yield Snapshot(epoch, weights)
        for epoch in quota.epochs(last=True):
            yield Snapshot(epoch, weights)
