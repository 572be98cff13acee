"""A benchmark of inference: several strategies on several networks predict the same batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.network import Network
from labkit.strategies import Strategy

if TYPE_CHECKING:
    from labkit.worker.answering import InferenceServer, Rows

ALONE = "one process"
Record: TypeAlias = dict[str, JSON]


@dataclass(frozen=True)
class ServingSpec:
    """The settings of an inference benchmark.

    Attributes:
        file: Saved Keras model, given as a path or as bytes.
        x: Array (rows, …) of input rows, which arrive at rank 0. If a batch has more rows than x,
            the rows of x are repeated.
        ways: The strategies to compare, keyed by name.
        networks: The networks to emulate, keyed by name. The value None means no emulation.
        batch_sizes: The batch sizes to compare, in rows.
        repeats: How many single batches are timed for each size, strategy and network.
        streams: How many streams of batches are timed for each size, strategy and network.
        under_way: Number of batches in one stream; the server may process several of them at once.
    """

    file: str | bytes
    x: np.ndarray
    ways: Mapping[str, Strategy]
    networks: Mapping[str, Network | None]
    batch_sizes: Sequence[int]
    repeats: int
    streams: int
    under_way: int


@dataclass(frozen=True)
class ServingResult:
    """The results of an inference benchmark on one rank.

    Attributes:
        times: On rank 0, one row per call. The columns are network, way (the strategy), batch_size,
            what, rows and seconds. The column `what` contains "first", "batch" or "stream".
        weights_bytes: For each strategy, the total bytes of weights on this rank.
        differences: On rank 0, the largest prediction error of each strategy. The error is the
            absolute difference from the predictions of one process.
        largest: On rank 0, the largest absolute value in the predictions of one process.
        precision: Machine epsilon of the dtype of the predictions.
    """

    times: list[Record]
    weights_bytes: dict[str, int]
    differences: dict[str, float]
    largest: float
    precision: float


def serve(communicator: Communicator, spec: ServingSpec) -> ServingResult:
    """Run an inference benchmark on this rank, and return its times (collective).

    For each strategy, network and batch size, the first call traces the graph; it is therefore
    recorded separately. Strategies, networks and batch sizes take turns. Other load on the machine
    therefore affects all strategies equally.

    Raises:
        InvalidInput: If the model has several inputs or outputs, or if a strategy cannot divide it.
    """
    from labkit.keras import use_one_device
    from labkit.worker.rank_state import restore

    use_one_device(communicator)
    try:
        return _Benchmark(communicator, spec).all()
    finally:
        restore()


class _Benchmark:
    """One inference server for each strategy and network, and the times measured on them."""

    def __init__(self, communicator: Communicator, spec: ServingSpec) -> None:
        from labkit.worker import inference
        from labkit.worker.answering import forward, inference_server

        self._communicator, self._spec = communicator, spec
        reference_model = inference.load(spec.file)
        if (
            len(getattr(reference_model, "outputs", None) or []) != 1
            or len(reference_model.inputs) != 1
        ):
            raise InvalidInput(
                "serving needs a model with one input array and one output array; for this model, "
                "use cluster.predict, which accepts nested structures"
            )
        x = spec.x.astype(reference_model.inputs[0].dtype)
        self._batches = {size: _rows(x, size) for size in spec.batch_sizes}
        self._expected = {
            size: forward(reference_model)(batch) for size, batch in self._batches.items()
        }
        like = self._expected[spec.batch_sizes[0]]
        self._communicators = {
            n: communicator.with_network(network) for n, network in spec.networks.items()
        }
        self._ways: dict[tuple[str, str], InferenceServer] = {}
        for network, over in self._communicators.items():
            self._ways[network, ALONE] = inference_server(over, reference_model, None, like)
            for name, strategy in spec.ways.items():
                # Each inference server gets its own copy of the model. A strategy that divides a
                # model frees some of its weights.
                model = inference.load(spec.file)
                self._ways[network, name] = inference_server(over, model, strategy, like)
        self._times: list[Record] = []
        self._differences = dict.fromkeys(spec.ways, 0.0)

    def all(self) -> ServingResult:
        """Time all calls and return the results; servers and batch sizes alternate."""
        cases = list(product(self._ways, self._spec.batch_sizes))
        for place, size in cases:
            self._time_call("first", place, size)
            # A batch with one row reaches only one replica. A stream of batches makes all replicas
            # trace their graphs.
            self._ways[place].stream([self._batches[size]] * self._spec.under_way)
        for what, count in (("batch", self._spec.repeats), ("stream", self._spec.streams)):
            for _ in range(count):
                for case in cases:
                    self._time_call(what, *case)
        for over in self._communicators.values():
            over.close()
        first, *_ = self._spec.networks
        weights_bytes = {
            name: self._ways[first, name].weights_bytes for name in (ALONE, *self._spec.ways)
        }
        largest = max(float(np.abs(outputs).max()) for outputs in self._expected.values())
        precision = float(np.finfo(self._expected[self._spec.batch_sizes[0]].dtype).eps)
        return ServingResult(self._times, weights_bytes, self._differences, largest, precision)

    def _time_call(self, what: str, case: tuple[str, str], size: int) -> None:
        network, name = case
        answers, x = self._ways[case], self._batches[size]
        count = self._spec.under_way if what == "stream" else 1

        def batch() -> list[Rows]:
            outputs = answers.batch(x)
            return [] if outputs is None else [outputs]

        outputs, seconds = self._seconds(
            batch if what != "stream" else lambda: answers.stream([x] * count)
        )
        if self._communicator.rank:
            return
        row: Record = {"network": network, "way": name, "batch_size": size, "what": what}
        self._times.append(row | {"rows": count * size, "seconds": seconds})
        if name != ALONE:
            self._differences[name] = max(
                self._differences[name],
                *(_largest_difference(y, self._expected[size]) for y in outputs),
            )

    def _seconds(self, call: Callable[[], list[Rows]]) -> tuple[list[Rows], float]:
        """Call a function; return its predictions, and the seconds that it took on this rank."""
        self._communicator.barrier("the next batch")
        clock = self._communicator.clock
        start = clock.now()
        outputs = call()
        return outputs, clock.now() - start


def _largest_difference(y: Rows, expected: Rows) -> float:
    return float(np.abs(y.astype(np.float64) - expected).max())


def _rows(x: Rows, size: int) -> Rows:
    """Return `size` rows of x; if x has fewer rows, start again from its first row."""
    return np.ascontiguousarray(x[np.arange(size) % len(x)])
