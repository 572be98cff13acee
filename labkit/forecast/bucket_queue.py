"""The queue that exchanges gradient buckets one by one, and the wait of a step for the queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.exchange.bucket import Bucket, holders
from labkit.exchange.bucket_order import by_priority
from labkit.exchange.schedules import Schedule

ROUNDS = 8  # number of simulated steps, after which overlapping steps take constant time


@dataclass(frozen=True)
class BucketQueue:
    """A queue that exchanges gradient buckets while the ranks compute.

    Attributes:
        buckets: Gradient buckets, in the same layout as in the exchange.
        seconds: Seconds to exchange each bucket.
        layer_of: Number of the layer to which each variable belongs.
        forward, backward: Seconds of each layer in the forward and in the backward pass.
    """

    buckets: Sequence[Bucket]
    seconds: Sequence[float]
    layer_of: Sequence[int]
    forward: NDArray[np.float64]
    backward: NDArray[np.float64]

    def exposed(self, schedule: Schedule, workers: int) -> float:
        """Return the seconds of a step in which ranks only communicate and do not compute."""
        if schedule.after or not self.buckets:
            return sum(self.seconds)
        if schedule.into_next and workers > 1:
            return self._into_next()
        # The queue exchanges buckets in their order, so each bucket waits for all earlier buckets.
        finish = self._finish(range(len(self.buckets)), self.ready, 0.0)
        return max(0.0, finish[-1] - float(self.backward.sum()))

    @property
    def ready(self) -> list[float]:
        """The seconds from the start of the backward pass until each bucket is ready."""
        done = np.cumsum(self.backward[::-1])[::-1]
        first = [
            min(self.layer_of[slot.variable] for slot in bucket.slots) for bucket in self.buckets
        ]
        return [float(done[layer]) for layer in first]

    def _into_next(self) -> float:
        """Return how many seconds a steady step waits for the buckets of the previous step.

        The forward pass of each layer waits for the buckets that contain the layer's variables.
        """
        ready = self.ready
        urgency = [min(slot.variable for slot in bucket.slots) for bucket in self.buckets]
        order = by_priority([bucket - min(ready) for bucket in ready], self.seconds, urgency)
        needs: list[set[int]] = [set() for _ in self.forward]
        for variable, layer in enumerate(self.layer_of):
            needs[layer] |= set(holders(self.buckets, variable))
        finish, now, waited = [0.0] * len(self.buckets), 0.0, 0.0
        for _ in range(ROUNDS):
            waited = 0.0
            for layer, forward_seconds in enumerate(self.forward.tolist()):
                arrival = max((finish[bucket] for bucket in needs[layer]), default=0.0)
                waited += max(0.0, arrival - now)
                now = max(now, arrival) + forward_seconds
            finish = self._finish(order, [now + bucket for bucket in ready], max(finish))
            now += float(self.backward.sum())
        return waited

    def _finish(self, order: Iterable[int], ready: Sequence[float], free: float) -> list[float]:
        """Return the time when each bucket has been exchanged.

        Args:
            order: Order in which the queue exchanges the buckets, by number.
            ready: Time when each bucket is ready to be exchanged, s.
            free: Time from which the queue can exchange the first bucket, s.
        """
        finish = [0.0] * len(self.buckets)
        for bucket in order:
            free = finish[bucket] = max(ready[bucket], free) + self.seconds[bucket]
        return finish
