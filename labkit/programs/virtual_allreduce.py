"""An allreduce of all workers on the virtual clock: its value, and when each has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from labkit.common.state import record
from labkit.compression import Compressor, Gather, Mean, Request, State, nbytes
from labkit.compression.lockstep import reduce_all
from labkit.network import Network
from labkit.network.topology import Seconds
from labkit.programs.actions import AllReduce, Gradient, Vector
from labkit.simulate import Simulation, simulate


@record()
@dataclass(frozen=True)
class Meeting:
    """What one worker has of an allreduce.

    Attributes:
        mean: of all.
        held: s for which it waited for the last one to come.
        stop: when it has the mean, s.
        nbytes, wire, messages: what it has handed over, and sent on the way.
    """

    mean: Gradient
    held: float
    stop: float
    nbytes: int
    wire: int
    messages: int


class Together:
    """Workers that come to an allreduce one after the other.

    Args:
        workers: how many there are.
        network: on which they meet; None: it takes no time.
        shapes: of the weights, which lie flat one behind the other.
        seed: of compressors' random choices.
    """

    def __init__(
        self, workers: int, network: Network | None, shapes: Sequence[tuple[int, ...]], seed: int
    ) -> None:
        self._workers, self._shapes, self._seed = workers, shapes, seed
        # How slow a rank computes is in the moment at which it comes.
        self._network = network and network.prompt
        self._here: dict[int, tuple[AllReduce, float]] = {}
        self._states: dict[tuple[int, int, int], State] = {}

    def comes(self, worker: int, action: AllReduce, now: float) -> dict[int, Meeting] | None:
        """A worker is there; once all are, what each of them has."""
        self._here[worker] = action, now
        if len(self._here) < self._workers:
            return None
        workers = sorted(self._here)
        actions = [self._here[worker][0] for worker in workers]
        came = np.array([self._here[worker][1] for worker in workers])
        self._here = {}
        gradients = [action.gradient for action in actions]
        mean, sends = self._mean(actions)
        clock, messages, wire = came, np.zeros(len(came)), np.zeros(len(came))
        for kind, size in sends:
            clock, sent, carried = self._exchange(kind, size, clock, action.algorithm)
            messages, wire = messages + sent, wire + carried
        found = Gradient(
            mean,
            sum(gradient.rows for gradient in gradients),
            _mean([gradient.loss for gradient in gradients]),
            gradients[0].step,
            last=any(gradient.last for gradient in gradients),
        )
        handed = sum(size for _, size in sends)
        return {
            worker: Meeting(
                *(found, float(came.max() - came[worker]), float(clock[worker])),
                *(int(handed), int(wire[worker]), int(messages[worker])),
            )
            for worker in workers
        }

    def _exchange(
        self, kind: str, size: float, came: np.ndarray, algorithm: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """When each rank is done, the messages and bytes that it sent."""
        none = np.zeros(len(came))
        if self._network is None or len(came) == 1:
            return np.full(len(came), came.max()), none, none
        first = came.min()
        name = algorithm if kind == "sum" else "allgather_ring"
        # Gathered are payloads of all ranks, of which each brings one.
        whole = size if kind == "sum" else size * len(came)
        found = self._simulated(name, whole, self._network, came - first)
        return first + found.finish, found.messages, found.sent

    def _simulated(self, name: str, nbytes: float, network: Network, came: Seconds) -> Simulation:
        """A collective of ranks that come at these moments, s."""
        return simulate(name, len(came), nbytes, network, compute=came)

    def _mean(self, actions: Sequence[AllReduce]) -> tuple[Vector, list[tuple[str, float]]]:
        """The mean of all gradients, and what travelled for it: whether summed, and bytes."""
        gradients = [action.gradient for action in actions]
        rows = np.array([gradient.rows for gradient in gradients], np.float64)
        shares = rows / rows.sum()
        first = actions[0]
        if first.compressor is None:
            total = gradients[0].values * gradients[0].values.dtype.type(shares[0])
            for gradient, share in zip(gradients[1:], shares[1:], strict=True):
                total += gradient.values * gradient.values.dtype.type(share)
            return total, [("sum", float(total.nbytes))]
        weighted = [
            gradient.values * gradient.values.dtype.type(share * len(gradients))
            for gradient, share in zip(gradients, shares, strict=True)
        ]
        return self._compressed(first.compressor, weighted, first.fragment)

    def _compressed(
        self, compressor: Compressor, weighted: Sequence[Vector], fragment: int
    ) -> tuple[Vector, list[tuple[str, float]]]:
        """As `labkit.exchange.compressed` does it with one bucket, all ranks side by side."""
        import tensorflow as tf

        sends: list[tuple[str, float]] = []

        def asked(requests: Sequence[Request]) -> None:
            kind = "sum" if isinstance(requests[0], Mean) else "gather"
            sends.append((kind, float(max(map(handed, requests)))))

        means = []
        for number, (start, stop, shape) in enumerate(self._pieces(compressor, weighted[0].size)):
            tensors = [tf.constant(each[start:stop].reshape(shape)) for each in weighted]
            for rank in range(len(weighted)):
                if (fragment, rank, number) not in self._states:
                    seed = self._seed + 1_000 * fragment + number  # as on ranks
                    first = compressor.start(shape, rank, seed, len(weighted))
                    self._states[fragment, rank, number] = first
            states = [self._states[fragment, rank, number] for rank in range(len(weighted))]
            found = reduce_all(compressor, tensors, states, asked)
            for rank, reduced in enumerate(found):
                self._states[fragment, rank, number] = reduced.state
            means.append(np.asarray(found[0].mean).reshape(-1))
        return np.concatenate(means), sends

    def _pieces(self, compressor: Compressor, size: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """What of so many flat values is compressed together, and in which shape."""
        if not compressor.by_layer:
            return [(0, size, (size,))]
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in self._shapes)]).tolist()
        return [(*edges, shape) for edges, shape in zip(pairwise(ends), self._shapes, strict=True)]


def _mean(losses: Sequence[float]) -> float:
    """Of those that are known: a stage that is not the last one has none."""
    known = [loss for loss in losses if not np.isnan(loss)]
    return float(np.mean(known)) if known else float("nan")


def handed(request: Request) -> int:
    """Bytes that a rank hands over for a request."""
    if isinstance(request, Gather):
        return nbytes(request.payload)
    if isinstance(request, Mean):
        return int(np.asarray(request.value).nbytes)
    return int(np.asarray(request.indices).nbytes + np.asarray(request.values).nbytes)
