"""The time of gradient exchange in buckets: cost of each bucket, and the queue of buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from math import prod

import numpy as np
from numpy.typing import NDArray

from labkit.compression import Compressor, Gather, Mean, Request, SparseMean
from labkit.exchange.autotune import Schedule, by_priority
from labkit.exchange.bucket_layout import Bucket, holders
from labkit.forecast.allreduce_cost import AllReduceCosts, CollectiveEstimate, Kind, Load
from labkit.forecast.calibration import NOTHING, Spread, add_spreads, scale_spread
from labkit.forecast.query import Query

KINDS: tuple[tuple[type[Request], Kind], ...] = (
    *((Mean, "sum"), (Gather, "gather"), (SparseMean, "sparse")),
)


@dataclass(frozen=True)
class BucketCost:
    """The cost of exchanging a gradient bucket: collectives, codec and packing."""

    carried: tuple[CollectiveEstimate, ...]
    codec: Spread = NOTHING
    pack: Spread = NOTHING

    @property
    def wire(self) -> Spread:
        """The total time of all collectives of the bucket, which run one after the other."""
        return reduce(add_spreads, (carried.seconds for carried in self.carried), NOTHING)

    @property
    def seconds(self) -> float:
        """The seconds to exchange the bucket: the sum of median packing, codec and wire times."""
        return self.pack.median + self.codec.median + self.wire.median


def bucket_cost(
    query: Query,
    sums: AllReduceCosts,
    compressor: Compressor | None,
    bucket: Bucket,
    shapes: Sequence[tuple[int, ...]],
) -> BucketCost:
    """Return the cost of a bucket's exchange by `labkit.exchange.compressed`, without packing.

    After an allreduce, a rank decodes once for the mean and once for the error feedback. A
    compressor that works layer by layer decodes only once. After a gather, a rank decodes the
    payloads of all ranks, and its own payload once more. On the virtual clock, encoding and
    decoding take no time.

    Args:
        query: Query with the experiment and the calibration.
        sums: Costs of allreduces.
        compressor: Compressor of the bucket; None if the bucket is sent uncompressed.
        bucket: Bucket to exchange.
        shapes: Shapes of all variables of the model.

    Raises:
        InvalidInput: The compressor or a collective was not measured.
    """
    if compressor is None:
        return BucketCost((sums.take(Load("sum", bucket.nbytes)),))
    cost = query.codec(compressor, bucket.nbytes)
    decoded, carried = 1, []
    for requests in _turns(compressor, bucket, shapes, cost.payload):
        for kind, name in KINDS:
            nbytes = sum(size for request, size in requests if request is kind)
            if not nbytes:
                continue
            dense = bucket.nbytes if name == "sparse" else 0.0
            carried.append(sums.take(Load(name, nbytes, dense)))
            if kind is Gather:
                decoded += query.workers
            elif kind is Mean and not compressor.by_layer:
                decoded += 1
    codec = (
        NOTHING if query.virtual else add_spreads(cost.encode, scale_spread(cost.decode, decoded))
    )
    return BucketCost(tuple(carried), codec)


def _turns(
    compressor: Compressor, bucket: Bucket, shapes: Sequence[tuple[int, ...]], payload: float
) -> Iterator[list[tuple[type[Request], float]]]:
    """Yield the collectives of each round as pairs (type, bytes), for all tensors of a bucket."""
    tensors = [shapes[slot.variable] for slot in bucket.slots]
    if not compressor.by_layer:
        tensors = [(bucket.length,)]
    collectives = [
        compressor.collectives(shape, payload * prod(shape) / bucket.length) for shape in tensors
    ]
    for requests in zip_longest(*collectives):
        yield [request for request in requests if request is not None]


ROUNDS = 8  # After this number of simulated steps, overlapping steps have a constant duration.


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
        """Return the seconds per step of the communication that no computation hides."""
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
            order: Numbers of the buckets, in the order of exchange.
            ready: Time when each bucket is ready to be exchanged, s.
            free: Time from which the queue can exchange the first bucket, s.
        """
        finish = [0.0] * len(self.buckets)
        for bucket in order:
            free = finish[bucket] = max(ready[bucket], free) + self.seconds[bucket]
        return finish
