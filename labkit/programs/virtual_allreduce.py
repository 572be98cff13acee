"""An allreduce on the virtual clock: its result, and the time when each worker receives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from labkit.common.state import record
from labkit.compression import Compressor, Gather, Mean, Request, State, nbytes
from labkit.compression.simulated_reduction import reduce_all
from labkit.network import Network
from labkit.network.topology import Seconds
from labkit.programs.actions import AllReduceAction, Gradient, Vector
from labkit.simulate import Simulation, simulate


@record()
@dataclass(frozen=True)
class AllReduceState:
    """The result of an allreduce for one worker.

    Attributes:
        mean: Mean of the gradients of all workers.
        held: Seconds for which the worker waited for the last worker to start the allreduce.
        stop: Time, in s, at which the worker has received the mean.
        nbytes: Bytes of the vector that the worker contributed to the allreduce.
        wire, messages: Total bytes and number of messages that the worker sent.
    """

    mean: Gradient
    held: float
    stop: float
    nbytes: int
    wire: int
    messages: int


class VirtualAllReduce:
    """Simulated allreduces of workers that call them at different times.

    Args:
        workers: Number of workers.
        network: Network between the workers; None if an allreduce takes no time.
        shapes: Shapes of the model's weights, whose gradients are concatenated to flat vectors.
        seed: Seed of the compressors' random numbers.
    """

    def __init__(
        self, workers: int, network: Network | None, shapes: Sequence[tuple[int, ...]], seed: int
    ) -> None:
        self._workers, self._shapes, self._seed = workers, shapes, seed
        # The simulated network ignores slowdowns of computation, because the ranks' arrival times
        # already include these slowdowns.
        self._network = network and network.with_full_speed_compute
        self._here: dict[int, tuple[AllReduceAction, float]] = {}
        self._states: dict[tuple[int, int, int], State] = {}

    def add_worker(
        self, worker: int, action: AllReduceAction, now: float
    ) -> dict[int, AllReduceState] | None:
        """Register a worker's call; the call of the last worker returns one result per worker."""
        self._here[worker] = action, now
        if len(self._here) < self._workers:
            return None
        workers = sorted(self._here)
        actions = [self._here[worker][0] for worker in workers]
        arrivals = np.array([self._here[worker][1] for worker in workers])
        self._here = {}
        gradients = [action.gradient for action in actions]
        mean, sends = self._mean(actions)
        clock, messages, wire = arrivals, np.zeros(len(arrivals)), np.zeros(len(arrivals))
        for kind, size in sends:
            clock, sent, carried = self._exchange(kind, size, clock, action.algorithm)
            messages, wire = messages + sent, wire + carried
        gradient = Gradient(
            mean,
            sum(gradient.rows for gradient in gradients),
            _mean([gradient.loss for gradient in gradients]),
            gradients[0].step,
            last=any(gradient.last for gradient in gradients),
        )
        payload_bytes = sum(size for _, size in sends)
        return {
            worker: AllReduceState(
                *(gradient, float(arrivals.max() - arrivals[worker]), float(clock[worker])),
                *(int(payload_bytes), int(wire[worker]), int(messages[worker])),
            )
            for worker in workers
        }

    def _exchange(
        self, kind: str, size: float, arrivals: np.ndarray, algorithm: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each rank's end time, number of sent messages, and number of sent bytes."""
        none = np.zeros(len(arrivals))
        if self._network is None or len(arrivals) == 1:
            return np.full(len(arrivals), arrivals.max()), none, none
        start = arrivals.min()
        name = algorithm if kind == "sum" else "allgather_ring"
        # In an allgather, each rank contributes its own payload, so the bytes of all ranks are
        # added.
        total_bytes = size if kind == "sum" else size * len(arrivals)
        simulation = self._simulated(name, total_bytes, self._network, arrivals - start)
        return start + simulation.finish, simulation.messages, simulation.sent

    def _simulated(
        self, name: str, nbytes: float, network: Network, arrivals: Seconds
    ) -> Simulation:
        """Simulate a collective that the ranks start at the times `arrivals`, in s."""
        return simulate(name, len(arrivals), nbytes, network, compute=arrivals)

    def _mean(self, actions: Sequence[AllReduceAction]) -> tuple[Vector, list[tuple[str, float]]]:
        """Return the mean gradient, and (kind, bytes) of each collective that computes it."""
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
        return self._compressed_mean(first.compressor, weighted, first.fragment)

    def _compressed_mean(
        self, compressor: Compressor, weighted: Sequence[Vector], fragment: int
    ) -> tuple[Vector, list[tuple[str, float]]]:
        """Compute the same mean as `labkit.exchange.compressed` does with one bucket per rank."""
        import tensorflow as tf

        sends: list[tuple[str, float]] = []

        def record_requests(requests: Sequence[Request]) -> None:
            kind = "sum" if isinstance(requests[0], Mean) else "gather"
            sends.append((kind, float(max(map(handed, requests)))))

        means = []
        for number, (start, stop, shape) in enumerate(self._pieces(compressor, weighted[0].size)):
            tensors = [tf.constant(vector[start:stop].reshape(shape)) for vector in weighted]
            for rank in range(len(weighted)):
                if (fragment, rank, number) not in self._states:
                    # A simulated run uses the same compression seed as a run on MPI ranks.
                    seed = self._seed + 1_000 * fragment + number
                    first = compressor.start(shape, rank, seed, len(weighted))
                    self._states[fragment, rank, number] = first
            states = [self._states[fragment, rank, number] for rank in range(len(weighted))]
            results = reduce_all(compressor, tensors, states, record_requests)
            for rank, reduced in enumerate(results):
                self._states[fragment, rank, number] = reduced.state
            means.append(np.asarray(results[0].mean).reshape(-1))
        return np.concatenate(means), sends

    def _pieces(self, compressor: Compressor, size: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return (start, stop, shape) of each separately compressed part of a vector."""
        if not compressor.by_layer:
            return [(0, size, (size,))]
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in self._shapes)]).tolist()
        return [(*edges, shape) for edges, shape in zip(pairwise(ends), self._shapes, strict=True)]


def _mean(losses: Sequence[float]) -> float:
    """Return the mean of the reported losses; NaN marks replica members that report no loss."""
    known_losses = [loss for loss in losses if not np.isnan(loss)]
    return float(np.mean(known_losses)) if known_losses else float("nan")


def handed(request: Request) -> int:
    """Return the payload size in bytes of one rank in the requested collective operation."""
    if isinstance(request, Gather):
        return nbytes(request.payload)
    if isinstance(request, Mean):
        return int(np.asarray(request.value).nbytes)
    return int(np.asarray(request.indices).nbytes + np.asarray(request.values).nbytes)
