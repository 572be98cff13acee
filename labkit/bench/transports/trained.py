"""What a way to carry arrays does to a training step, and to the time to an accuracy."""

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

WARM = 10  # steps


class Training(NamedTuple):
    """An MLP that learns the digits, by one worker and one server.

    Attributes:
        epochs, widths, batch_size: of the training.
        target: accuracy of held-out rows whose time is told.
    """

    epochs: int
    widths: Sequence[int]
    batch_size: int
    target: float

    def by(self, strategy: Strategy, network: Network | None = None) -> Experiment:
        """The experiment."""
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
            gate=False,
        )

    @property
    def nbytes(self) -> int:
        """Of the weights, from 64 pixels to 10 digits."""
        layers = [64, *self.widths, 10]
        return 4 * sum((before + 1) * after for before, after in pairwise(layers))


def served(transport: Transport) -> ParameterServer:
    """One server, which applies each gradient when it comes, as that of TensorFlow's does."""
    return ParameterServer(servers=1, synchronous=False, transport=transport)


def grpc() -> TFDistribute:
    """The same by TensorFlow, whose processes speak gRPC."""
    return TFDistribute(kind="parameter_server", servers=1)


def train_here(communicator: Communicator, experiment: Experiment, target: float) -> Row:
    """Train, and tell what rank 0 has noted (collective)."""
    from labkit.worker.work import work

    found = work(communicator, experiment)
    whole = communicator.share(found.whole and found.whole.epochs, what="what epochs reached")
    steps = [float(row["seconds"]) for row in found.rows]
    return told(steps, whole or [], target) if steps else {}  # a server takes none


def told(steps: Sequence[float], epochs: Sequence[Mapping[str, float]], target: float) -> Row:
    """The step's spread, ms, and s until an epoch's validation reached the target.

    Args:
        steps: seconds of each, of the worker.
        epochs: metrics after each.
        target: accuracy of held-out rows.
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
