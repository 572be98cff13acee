"""How long workers, servers, messages and codecs take where programs are played without values."""

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
from labkit.programs.timing import TimingModel

WIDEST = 0.3  # σ of what is drawn: few repeats on a busy machine say more
UNLIKE = 0.02  # likewise, of ranks that share a machine


@dataclass
class Pace:
    """How long things take: laws by worker, and what a message takes beside its network.

    Attributes:
        asked: whose calibration says what codecs and messages take.
        laws: by worker.
        shares: of all weights, what each holder updates.
        hosts: the place of each; what does not leave it takes nothing.
        alone, mean: factors on a server's update by one gradient, and by the mean of several.
        predictions: on the time of one prediction.
        overheads: whether messages take what they take on this machine.
    """

    asked: Query
    laws: Sequence[TimingModel]
    shares: Mapping[int, float]
    hosts: Sequence[int]
    alone: float = 1.0
    mean: float = 1.0
    predictions: float = 1.0
    overheads: bool = False
    factor: float = 1.0  # on what is done next
    _known: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def computed(self, worker: int, step: int, start: float, share: float = 1.0) -> float:
        """See `labkit.programs.virtual_runtime.Times`."""
        return self.laws[worker].computed(worker, step, start, self.factor * share)

    def updated(self, holder: int, start: float) -> float:
        """See there."""
        return start + self.factor * self.shares.get(holder, 1.0) * self.laws[0].update

    def late(self, to: int, message: Message) -> float:
        """See there."""
        late = self.laws[0].late(to, message)
        if not self.overheads or self.hosts[message.source] == self.hosts[to]:
            return late
        return late + self.once("message", 0 if message.values is None else message.values.nbytes)

    def once(self, what: str, nbytes: float) -> float:
        """The median of an overhead, s."""
        key = what, nbytes
        if key not in self._known:
            self._known[key] = self.asked.once(what, nbytes).median
        return float(self._known[key])

    def codec(self, compressor: Compressor, nbytes: float) -> tuple[float, float, int]:
        """Seconds to encode and to decode, and bytes."""
        key = id(compressor), nbytes
        if key not in self._known:
            cost = self.asked.codec(compressor, nbytes)
            seconds = (0.0, 0.0) if self.asked.virtual else (cost.encode.median, cost.decode.median)
            self._known[key] = *seconds, cost.payload
        encode, decode, payload = self._known[key]
        return encode, decode, payload


def drawn_law(asked: Query, given: ComputeTime, spread: Spread) -> ComputeTime:
    """Lognormal with the median and the middle nine tenths that were measured.

    Of ranks of one machine the slowest was measured; they differ by so little as no two are alike.
    """
    if given.law != "constant" or asked.virtual:
        return given
    wide = math.log(spread.high / spread.low) / (2 * TAIL) if spread.low > 0 else WIDEST
    sigma = min(wide, WIDEST if asked.together == 1 else UNLIKE)
    mean = spread.median * math.exp(sigma**2 / 2)
    return ComputeTime(seconds=mean, law="lognormal", spread=sigma, update=given.update)
