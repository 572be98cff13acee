"""The line that serves buckets one after the other, and how long a step waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.exchange.bucket import Bucket, holders
from labkit.exchange.bucket_order import by_priority
from labkit.exchange.schedules import Schedule

ROUNDS = 8  # steps after which those that reach into each other take as long as all that follow


@dataclass(frozen=True)
class Line:
    """Buckets, when they can be ready, and how long each of them is served.

    Attributes:
        buckets: as the exchange lays them out.
        seconds: that each takes.
        layer_of: the layer of each variable.
        fore, back: s of each layer on the way forward, and back.
    """

    buckets: Sequence[Bucket]
    seconds: Sequence[float]
    layer_of: Sequence[int]
    fore: NDArray[np.float64]
    back: NDArray[np.float64]

    def exposed(self, schedule: Schedule, workers: int) -> float:
        """Seconds of a step in which it only waits."""
        if schedule.after or not self.buckets:
            return sum(self.seconds)
        if schedule.into_next and workers > 1:
            return self._into_next()
        # In their own order; each waits for those before it.
        finish = self._finish(range(len(self.buckets)), self.ready, 0.0)
        return max(0.0, finish[-1] - float(self.back.sum()))

    @property
    def ready(self) -> list[float]:
        """When each bucket can go, from the begin of the way back, which the last layer begins."""
        done = np.cumsum(self.back[::-1])[::-1]
        first = [
            min(self.layer_of[slot.variable] for slot in bucket.slots) for bucket in self.buckets
        ]
        return [float(done[layer]) for layer in first]

    def _into_next(self) -> float:
        """What a step waits for the one before, layer by layer, once all steps are alike."""
        ready = self.ready
        urgency = [min(slot.variable for slot in bucket.slots) for bucket in self.buckets]
        order = by_priority([each - min(ready) for each in ready], self.seconds, urgency)
        needs: list[set[int]] = [set() for _ in self.fore]
        for variable, layer in enumerate(self.layer_of):
            needs[layer] |= set(holders(self.buckets, variable))
        finish, now, waited = [0.0] * len(self.buckets), 0.0, 0.0
        for _ in range(ROUNDS):
            waited = 0.0
            for layer, own in enumerate(self.fore.tolist()):
                there = max((finish[each] for each in needs[layer]), default=0.0)
                waited += max(0.0, there - now)
                now = max(now, there) + own
            finish = self._finish(order, [now + each for each in ready], max(finish))
            now += float(self.back.sum())
        return waited

    def _finish(self, order: Iterable[int], ready: Sequence[float], free: float) -> list[float]:
        """When each is done on a line that is free from then on, served in this order."""
        finish = [0.0] * len(self.buckets)
        for bucket in order:
            free = finish[bucket] = max(ready[bucket], free) + self.seconds[bucket]
        return finish
