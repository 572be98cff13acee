"""Runs of programs with meta vectors (with sizes, without values), to forecast the run times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.compression import Compressor, Mean
from labkit.forecast.allreduce_cost import FEW, VALUE, AllReduceCosts, Load
from labkit.forecast.meta_vector import MetaVector
from labkit.forecast.workers import Pace
from labkit.network import Links, Network
from labkit.network.topology import Seconds
from labkit.programs import (
    Backend,
    Code,
    CodecChannel,
    EventLog,
    Gradient,
    Message,
    Predict,
    Update,
)
from labkit.programs.actions import Action, Passed, Place, Program, Vector
from labkit.programs.event_log import Row
from labkit.programs.virtual_allreduce import VirtualAllReduce
from labkit.programs.virtual_runtime import VirtualRuntime
from labkit.simulate import Simulation


class MetaBackend:
    """A backend whose vectors have sizes but no values; it records when each step ends.

    The methods are those of `labkit.programs.event_log.Backend`.

    Args:
        rows: Number of samples per batch, one number for each worker.
        size, dtype: Number and dtype of the weights.
        slots: Number of values that the optimizer stores per weight.
        soft: Number of output values of the model per sample.

    Attributes:
        now: Function that returns the time on the virtual clock, s.
        rows: End time (s) and history row of each step.
    """

    def __init__(self, rows: Sequence[int], size: int, dtype: str, slots: int, soft: float) -> None:
        self._rows, self._size, self._dtype = rows, size, dtype
        self._slots, self._soft = slots, soft
        self._steps = [0] * len(rows)
        self.now: Callable[[], float] = lambda: 0.0
        self.rows: list[tuple[float, Row]] = []

    def gradient(self, worker: int, weights: Vector) -> Gradient:
        """Return a gradient for a worker's next batch, with a size but no values."""
        step, self._steps[worker] = self._steps[worker], self._steps[worker] + 1
        return Gradient(self._vector(self._size), self._rows[worker], 1.0, step)

    def distilled(self, worker: int, weights: Vector, soft: Vector, share: float) -> Gradient:
        """Return a gradient without values for a worker's next batch."""
        return self.gradient(worker, weights)

    def predictions(self, number: int, worker: int, step: int, weights: Vector) -> Vector:
        """Return a vector with the size of the model's outputs."""
        vector: Vector = self._vector(round(self._soft * self._rows[worker]))
        return vector

    def curved(self, worker: int, weights: Vector, ends: Sequence[int]) -> Gradient:
        """Return a placeholder without values for the curvature of the loss."""
        return Gradient(self._vector(self._size * (len(ends) - 1)), self._rows[worker], 0.0, 0)

    def forward(self, place: Place, weights: Vector, values: tuple[Vector, ...]) -> Passed:
        raise InvalidInput(
            "replicas with model parallelism have no forecast; give stages=1 and no grid"
        )

    def backward(self, place: Place, values: tuple[Vector, ...]) -> Gradient:
        raise InvalidInput(
            "replicas with model parallelism have no forecast; give stages=1 and no grid"
        )

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        """Return a vector that has the size of the gradient, but no values."""
        return gradient

    def states(self, worker: int) -> Vector:
        """Return a vector that has the size of the optimizer's slots, but no values."""
        vector: Vector = self._vector(self._slots * self._size)
        return vector

    def adopt(self, worker: int, weights: Vector, states: Vector | None) -> Vector:
        """Return the weights unchanged."""
        return weights

    def forget(self, worker: int) -> None:
        """Do nothing: the backend stores no state of a worker."""

    def step(self, row: Row) -> None:
        """Record the history row of a completed step, with the time on the virtual clock."""
        self.rows.append((self.now(), row))

    def snapshot(self, epoch: int, holder: int, weights: Vector, now: float) -> None:
        """Do nothing: a forecast evaluates no weights."""

    def stops(self) -> bool:
        """Return False: a forecast never stops early."""
        return False

    def _vector(self, size: int) -> Any:
        return MetaVector(size, self._dtype)


class AmountLog:
    """A record of amounts (such as bytes) by name and time, which can be summed over intervals."""

    def __init__(self) -> None:
        self._amounts: dict[str, list[tuple[float, float]]] = {}

    def add(self, name: str, now: float, amount: float) -> None:
        """Record an amount with its time in seconds."""
        self._amounts.setdefault(name, []).append((now, amount))

    def between(self, begin: float, end: float, prefix: str = "") -> dict[str, float]:
        """Sum the amounts of [begin, end) for each name with `prefix`, and remove the prefix."""
        return {
            name.removeprefix(prefix): sum(amount for now, amount in amounts if begin <= now < end)
            for name, amounts in self._amounts.items()
            if name.startswith(prefix)
        }


class _MetaAllReduce(VirtualAllReduce):
    """Allreduces of vectors that have sizes but no values; equal allreduces are simulated once.

    On a network, allreduces among at most `FEW` ranks are simulated as in `VirtualAllReduce`.
    With more than `FEW` ranks, or without a network, `AllReduceCosts` gives an allreduce's
    duration. The allreduce then starts when the last rank has arrived.
    """

    def __init__(
        self,
        workers: int,
        network: Network | None,
        shapes: Sequence[tuple[int, ...]],
        pace: Pace,
        tally: AmountLog,
    ) -> None:
        super().__init__(workers, network, shapes, 0)
        self._pace, self._tally = pace, tally
        # `_codec` contains the seconds to encode a vector before the exchange, and to decode it
        # after the exchange.
        self._codec = 0.0, 0.0
        self._simulations: dict[tuple[object, ...], Simulation] = {}
        self._now = 0.0

    def _exchange(
        self, kind: str, size: float, arrivals: Seconds, algorithm: str
    ) -> tuple[Seconds, Seconds, Seconds]:
        (encode, decode), self._codec = self._codec, (0.0, 0.0)
        self._now = float(arrivals.max())
        self._tally.add("codec", self._now, (encode + decode) * len(arrivals))
        arrivals, pace = arrivals + encode, self._pace
        exact = len(arrivals) == pace.query.workers <= FEW
        if not exact or (self._network is None and not pace.query.virtual):
            load = Load("sum" if kind == "sum" else "gather", size)
            estimate = AllReduceCosts(pace.query, algorithm, size).take(load)
            for link, nbytes in estimate.links.items():
                self._tally.add(f"link {link}", self._now, nbytes)
            self._tally.add("sent", self._now, estimate.sent)
            none = np.zeros(len(arrivals))
            return (
                np.full(len(arrivals), arrivals.max() + estimate.seconds.median + decode),
                none,
                none,
            )
        clock, messages, wire = super()._exchange(kind, size, arrivals, algorithm)
        rounds = messages.max()
        if pace.overheads and rounds:
            clock = clock + rounds * pace.overhead_seconds("emulated", wire.max() / rounds)
        self._tally.add("sent", self._now, float(wire.sum()))
        return clock + decode, messages, wire

    def _simulated(
        self, name: str, nbytes: float, network: Network, arrivals: Seconds
    ) -> Simulation:
        key = name, nbytes, arrivals.tobytes()
        if key not in self._simulations:
            self._simulations[key] = super()._simulated(name, nbytes, network, arrivals)
        simulation = self._simulations[key]
        for link, nbytes_of_link in zip(simulation.links, simulation.carried.tolist(), strict=True):
            self._tally.add(f"link {link}", self._now, nbytes_of_link)
        return simulation

    def _compressed_mean(
        self, compressor: Compressor, weighted: Sequence[Vector], fragment: int
    ) -> tuple[Vector, list[tuple[str, float]]]:
        encode, decode, payload = self._pace.codec(compressor, VALUE * weighted[0].size)
        sends, decoded = [], 1
        for start, stop, shape in self._pieces(compressor, weighted[0].size):
            for kind, size in compressor.collectives(
                shape, payload * (stop - start) / weighted[0].size
            ):
                sends.append(("sum" if kind is Mean else "gather", float(size)))
                decoded += 0 if kind is Mean else self._pace.query.workers
        self._codec = encode, decode * decoded
        return weighted[0], sends


class MetaRuntime(VirtualRuntime):
    """A virtual runtime for vectors that have sizes but no values: only times and bytes are valid.

    In contrast to `VirtualRuntime`, encoding and decoding take their measured time.

    Args:
        programs, hosts, backend, event_log, network, shapes: Arguments of `VirtualRuntime`.
        pace: Timing model of the forecast.
        tally: Record of bytes by link, and of other amounts.
        represented: For each simulated rank, the number of real ranks whose traffic it represents;
            by default 1.
        workers_per_worker: Number of real workers that each simulated worker represents.
    """

    def __init__(
        self,
        programs: Mapping[int, Program],
        hosts: Sequence[int],
        backend: Backend,
        event_log: EventLog,
        pace: Pace,
        tally: AmountLog,
        network: Network | None = None,
        shapes: Sequence[tuple[int, ...]] = (),
        represented: Mapping[int, float] | None = None,
        workers_per_worker: float = 1.0,
    ) -> None:
        super().__init__(programs, hosts, backend, event_log, pace, network, shapes)
        self._allreduces = _MetaAllReduce(len(programs), network, shapes, pace, tally)
        self._pace, self._tally = pace, tally
        self._represented, self._workers_per_worker = represented or {}, workers_per_worker
        self._links = Links(network, 1 + max(hosts)) if network is not None else None
        self._ways: dict[tuple[int, int], list[tuple[str, float]]] = {}

    def _execute(self, number: int, action: Action) -> tuple[bool, Any]:
        pace = self._pace
        match action:
            case Code(call) if isinstance(call, partial):
                call_method: Any = call.func  # The called function is a method of a `CodecChannel`.
                seconds, result = self._codec_call(
                    call_method.__self__, call_method.__name__, *call.args
                )
                if not seconds:
                    return True, result
                self._event_log.add_codec_time(number, seconds)
                self._answer(self.now + seconds, number, result)
                return False, None
            case Update(of=of):
                if number in pace.shares:
                    pace.factor = pace.alone if len(of) == 1 else pace.mean
                else:  # In this branch, a worker (not a server) updates its own weights.
                    self._tally.add("update", self.now, pace.updated(number, 0.0))
            case Predict():
                pace.factor = pace.predictions
        done = super()._execute(number, action)
        pace.factor = 1.0
        return done

    def _codec_call(
        self, channel: CodecChannel, method_name: str, values: Vector
    ) -> tuple[float, Any]:
        """Return the seconds that a call of a codec channel takes, and the call's result."""
        if channel.compressor is None:
            return 0.0, getattr(channel, method_name)(values)
        encode, decode, payload = self._pace.codec(channel.compressor, VALUE * channel.size)
        if method_name in ("push", "answer"):
            return encode, MetaVector(payload, np.uint8)
        return decode, MetaVector(channel.size, channel.dtype)

    def _route(self, source: int, to: int) -> list[tuple[str, float]]:
        """Return the links between two simulated ranks, and how many real ranks use each link."""
        if (source, to) not in self._ways:
            assert self._links is not None  # The type checker cannot know that a network exists.
            links_on_route = self._links.way(np.array([source]), np.array([to]))
            ends = [
                *((departure_link, source) for departure_link in links_on_route.departure),
                *((arrival_link, to) for arrival_link in links_on_route.arrival),
            ]
            self._ways[source, to] = [
                (self._links.names[int(link[0])], self._represented.get(end, 1.0))
                for link, end in ends
                if link[0] >= 0
            ]
        return self._ways[source, to]

    def _send(self, source: int, to: int, message: Message) -> None:
        ends = self._hosts[source], self._hosts[to]
        if message.values is not None and ends[0] != ends[1]:
            nbytes = message.values.nbytes
            self._tally.add("sent", self.now, self._workers_per_worker * nbytes)
            for link, factor in self._route(*ends) if self._links is not None else ():
                self._tally.add(f"link {link}", self.now, factor * nbytes)
        super()._send(source, to, message)
