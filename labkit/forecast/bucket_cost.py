"""The cost of exchanging one gradient bucket: compression, packing and collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from math import prod

from labkit.compression import Compressor, Gather, Mean, Request, SparseMean
from labkit.exchange.bucket import Bucket
from labkit.forecast.allreduce_cost import AllReduceCosts, CollectiveEstimate
from labkit.forecast.calibration import Spread
from labkit.forecast.load import Kind, Load
from labkit.forecast.query import Query
from labkit.forecast.time_distributions import NOTHING, add_spreads, scale_spread

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

    After an allreduce, a rank decodes twice: for the mean, and for the error feedback; a compressor
    that works by layer decodes only once. After a gather, a rank decodes the payloads of all ranks,
    and its own payload once more. On the virtual clock, encoding and decoding take no time.

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
    """Yield, per round, the collectives (type, bytes) that all tensors of a bucket request."""
    tensors = [shapes[slot.variable] for slot in bucket.slots]
    if not compressor.by_layer:
        tensors = [(bucket.length,)]
    collectives = [
        compressor.collectives(shape, payload * prod(shape) / bucket.length) for shape in tensors
    ]
    for requests in zip_longest(*collectives):
        yield [request for request in requests if request is not None]
