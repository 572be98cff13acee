"""The effect of a transport on the step time and on the time to reach an accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from labkit.bench.timing import Row
from labkit.communicator import Transport
from labkit.experiment import Experiment
from labkit.network import Network
from labkit.strategies import ParameterServer, Strategy, TFDistribute

if TYPE_CHECKING:
    from labkit.communicator import Communicator

WARM = 10  # number of untimed steps at the start


class ServerTraining(NamedTuple):
    """Training of an MLP on the data set `digits`, with one worker and one parameter server.

    Attributes:
        epochs: Number of epochs.
        widths: Widths of the hidden layers.
        batch_size: Batch size.
        target: Validation accuracy that the training must reach; the time to reach it is measured.
    """

    epochs: int
    widths: Sequence[int]
    batch_size: int
    target: float

    def by(self, strategy: Strategy, network: Network | None = None) -> Experiment:
        """Return the training as an experiment with this strategy and network."""
        return Experiment(
            model="mlp",
            model_options={"widths": list(self.widths)},
            dataset="digits",
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=0.1,
            workers=1,
            strategy=strategy,
            network=network,
            verify=False,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all weights of the MLP, whose inputs are 64 pixels and outputs 10 digits."""
        layers = [64, *self.widths, 10]
        return 4 * sum((before + 1) * after for before, after in pairwise(layers))


def served(transport: Transport) -> ParameterServer:
    """Return labkit's asynchronous parameter server strategy, equivalent to TensorFlow's."""
    return ParameterServer(servers=1, synchronous=False, transport=transport)


def grpc() -> TFDistribute:
    """Return TensorFlow's parameter server strategy, whose processes use gRPC."""
    return TFDistribute(kind="parameter_server", servers=1)


def train_here(communicator: Communicator, experiment: Experiment, target: float) -> Row:
    """Train, and return this rank's step times and the time to the target accuracy (collective)."""
    from labkit.worker.work import work

    result = work(communicator, experiment)
    whole = communicator.broadcast_object(
        result.whole and result.whole.epochs, label="what epochs reached"
    )
    steps = [float(row["seconds"]) for row in result.rows]
    # A server rank runs no training steps, so it returns an empty summary.
    return summary(steps, whole or [], target) if steps else {}


def summary(steps: Sequence[float], epochs: Sequence[Mapping[str, float]], target: float) -> Row:
    """Return the spread of step times (ms) and the time to reach the target accuracy (s).

    Args:
        steps: Seconds of each step of one worker.
        epochs: Metrics after each epoch, in order.
        target: Validation accuracy to reach.
    """
    later = 1e3 * np.array(steps[WARM:] or steps)
    there = next((e for e in epochs if e.get("val_accuracy", 0.0) >= target), None)
    best = max((float(epoch.get("val_accuracy", 0.0)) for epoch in epochs), default=0.0)
    return {
        "median_ms": float(np.median(later)),
        "min_ms": float(later.min()),
        "p90_ms": float(np.percentile(later, 90)),
        "seconds_to_target": None if there is None else float(there["seconds"]),
        "target": target,
        "accuracy": best,
    }
