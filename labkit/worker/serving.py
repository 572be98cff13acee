"""Timed answers: the same batches by several ways and over several networks, taking turns."""

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
    from labkit.worker.answering import Answers, Rows

ALONE = "one process"
Record: TypeAlias = dict[str, JSON]


@dataclass(frozen=True)
class ServingSpec:
    """What is answered, by whom, how often.

    Attributes:
        file: of the model, as Keras has saved it, or what it holds.
        x: rows that come to rank 0, (rows, …); larger batches repeat them.
        ways: strategies by the names that they have here.
        networks: by name; None: the machine's own.
        batch_sizes: rows of a batch.
        repeats: batches that are timed alone, of each size, by each way, over each network.
        streams: likewise streams of batches that lie ready.
        under_way: batches of a stream.
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
class Answered:
    """What a rank has to tell.

    Attributes:
        times: on rank 0, a row a call: network, way, batch_size, what ("first", "batch",
            "stream"), rows, seconds.
        weights_bytes: that this rank holds, by way.
        differences: on rank 0, by way: the largest from what one process answers.
        largest: on rank 0, the largest answer of one process.
        precision: of the answers' type, the least that 1 can be more by.
    """

    times: list[Record]
    weights_bytes: dict[str, int]
    differences: dict[str, float]
    largest: float
    precision: float


def serve(communicator: Communicator, asked: ServingSpec) -> Answered:
    """Answer batches on this rank, and time it.

    The first call of each kind, which traces, is apart. Then ways, networks and batches take turns,
    so that what else the machine does hits all alike.

    Raises:
        InvalidInput: a model with several inputs or outputs, or one that cannot be divided so.
    """
    from labkit.keras import use_one_device
    from labkit.worker.session import restore

    use_one_device(communicator)
    try:
        return _Timed(communicator, asked).all()
    finally:
        restore()


class _Timed:
    """All ways over all networks, and what has been measured of them."""

    def __init__(self, communicator: Communicator, asked: ServingSpec) -> None:
        from labkit.worker import inference
        from labkit.worker.answering import forward, way

        self._communicator, self._asked = communicator, asked
        whole = inference.load(asked.file)
        if len(getattr(whole, "outputs", None) or []) != 1 or len(whole.inputs) != 1:
            raise InvalidInput(
                "serving sends one array to a model and one back; this one has other inputs or "
                "outputs: use cluster.predict, which takes nests"
            )
        x = asked.x.astype(whole.inputs[0].dtype)
        self._batches = {size: _rows(x, size) for size in asked.batch_sizes}
        self._true = {size: forward(whole)(batch) for size, batch in self._batches.items()}
        like = self._true[asked.batch_sizes[0]]
        self._over = {n: communicator.over(network) for n, network in asked.networks.items()}
        self._ways: dict[tuple[str, str], Answers] = {}
        for network, over in self._over.items():
            self._ways[network, ALONE] = way(over, whole, None, like)
            for name, strategy in asked.ways.items():
                # A model of its own: cut, it loses the weights of others.
                own = inference.load(asked.file)
                self._ways[network, name] = way(over, own, strategy, like)
        self._times: list[Record] = []
        self._differences = dict.fromkeys(asked.ways, 0.0)

    def all(self) -> Answered:
        """Everything, in turns."""
        cases = list(product(self._ways, self._asked.batch_sizes))
        for place, size in cases:
            self._one("first", place, size)
            # A batch of one row does not come to all replicas, but a stream does: it traces there.
            self._ways[place].stream([self._batches[size]] * self._asked.under_way)
        for what, count in (("batch", self._asked.repeats), ("stream", self._asked.streams)):
            for _ in range(count):
                for case in cases:
                    self._one(what, *case)
        for over in self._over.values():
            over.close()
        first, *_ = self._asked.networks
        held = {name: self._ways[first, name].weights_bytes for name in (ALONE, *self._asked.ways)}
        largest = max(float(np.abs(each).max()) for each in self._true.values())
        precision = float(np.finfo(self._true[self._asked.batch_sizes[0]].dtype).eps)
        return Answered(self._times, held, self._differences, largest, precision)

    def _one(self, what: str, case: tuple[str, str], size: int) -> None:
        network, name = case
        answers, x = self._ways[case], self._batches[size]
        count = self._asked.under_way if what == "stream" else 1

        def batch() -> list[Rows]:
            found = answers.batch(x)
            return [] if found is None else [found]

        found, seconds = self._seconds(
            batch if what != "stream" else lambda: answers.stream([x] * count)
        )
        if self._communicator.rank:
            return
        row: Record = {"network": network, "way": name, "batch_size": size, "what": what}
        self._times.append(row | {"rows": count * size, "seconds": seconds})
        if name != ALONE:
            self._differences[name] = max(
                self._differences[name], *(_apart(y, self._true[size]) for y in found)
            )

    def _seconds(self, call: Callable[[], list[Rows]]) -> tuple[list[Rows], float]:
        """From rank 0's first move to its last answer."""
        self._communicator.meet("the next batch")
        clock = self._communicator.clock
        start = clock.now()
        found = call()
        return found, clock.now() - start


def _apart(y: Rows, true: Rows) -> float:
    return float(np.abs(y.astype(np.float64) - true).max())


def _rows(x: Rows, size: int) -> Rows:
    """So many rows, again from the first one where there are not as many."""
    return np.ascontiguousarray(x[np.arange(size) % len(x)])
