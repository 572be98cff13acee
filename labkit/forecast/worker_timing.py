"""The timing of workers, servers, messages and codecs when a forecast runs programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.compression import Compressor
from labkit.forecast.calibration import Spread
from labkit.forecast.order_statistics import TAIL
from labkit.forecast.query import Query
from labkit.network import ComputeTime
from labkit.programs import Message
from labkit.programs.timing_model import TimingModel

WIDEST = 0.3  # maximum σ of random times; few repeats on a busy machine may give more
UNLIKE = 0.02  # maximum σ of random times for ranks that share a machine


@dataclass
class Pace:
    """The timing of a forecast: a timing model per worker, and overheads of messages.

    Attributes:
        query: Query whose calibration gives the cost of codecs and messages.
        laws: Timing models, one per worker.
        shares: Fraction of all weights that each server updates, by program number.
        hosts: Simulated rank of each program; messages between programs on one rank take no time.
        alone: Factor by which the time of a server's update is multiplied if the update uses one
            gradient.
        mean: Factor by which the time of a server's update is multiplied if the update uses the
            mean of several gradients.
        predictions: Factor by which the time of one prediction of soft targets is multiplied.
        overheads: Whether messages have the measured overhead of this machine.
        factor: Factor by which the next duration is multiplied; the runtime sets the factor for
            each action.
    """

    query: Query
    laws: Sequence[TimingModel]
    shares: Mapping[int, float]
    hosts: Sequence[int]
    alone: float = 1.0
    mean: float = 1.0
    predictions: float = 1.0
    overheads: bool = False
    factor: float = 1.0  # the next duration is multiplied by this factor
    _known: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def computed(self, worker: int, step: int, start: float, share: float = 1.0) -> float:
        """Return the time when a computation ends, as `VirtualTiming.computed` does."""
        return self.laws[worker].computed(worker, step, start, self.factor * share)

    def updated(self, holder: int, start: float) -> float:
        """Return the time when an update of weights ends, as `VirtualTiming.updated` does."""
        return start + self.factor * self.shares.get(holder, 1.0) * self.laws[0].update

    def late(self, to: int, message: Message) -> float:
        """Return the additional delay of a message in seconds, as `VirtualTiming.late` does."""
        delay = self.laws[0].late(to, message)
        if not self.overheads or self.hosts[message.source] == self.hosts[to]:
            return delay
        return delay + self.overhead_seconds(
            "message", 0 if message.values is None else message.values.nbytes
        )

    def overhead_seconds(self, kind: str, nbytes: float) -> float:
        """Return the median seconds of an overhead, such as that of a message (cached)."""
        key = kind, nbytes
        if key not in self._known:
            self._known[key] = self.query.overhead_cost(kind, nbytes).median
        return float(self._known[key])

    def codec(self, compressor: Compressor, nbytes: float) -> tuple[float, float, int]:
        """Return the seconds to encode and to decode a gradient, and the bytes of its payload."""
        key = id(compressor), nbytes
        if key not in self._known:
            cost = self.query.codec(compressor, nbytes)
            seconds = (0.0, 0.0) if self.query.virtual else (cost.encode.median, cost.decode.median)
            self._known[key] = *seconds, cost.payload
        encode, decode, payload = self._known[key]
        return encode, decode, payload


def measured_distribution(query: Query, compute_time: ComputeTime, spread: Spread) -> ComputeTime:
    """Return a lognormal distribution with the measured median and middle 90% of compute times.

    For ranks on one machine, only the slowest rank was measured, so the σ of each rank is limited
    to `UNLIKE`.
    """
    if compute_time.distribution != "constant" or query.virtual:
        return compute_time
    measured_sigma = math.log(spread.high / spread.low) / (2 * TAIL) if spread.low > 0 else WIDEST
    sigma = min(measured_sigma, WIDEST if query.ranks_per_machine == 1 else UNLIKE)
    mean = spread.median * math.exp(sigma**2 / 2)
    return ComputeTime(
        seconds=mean, distribution="lognormal", sigma=sigma, update=compute_time.update
    )
