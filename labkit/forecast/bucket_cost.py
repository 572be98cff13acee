"""What serving one bucket takes: its codec, and the collectives that its compressor asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from math import prod

from labkit.compression import Compressor, Gather, Mean, Request, SparseMean
from labkit.exchange.bucket import Bucket
from labkit.forecast.allreduce_cost import Carried, Sums
from labkit.forecast.calibration import Spread
from labkit.forecast.load import Kind, Load
from labkit.forecast.query import Query
from labkit.forecast.time_distributions import NOTHING, both, times

KINDS: tuple[tuple[type[Request], Kind], ...] = (
    *((Mean, "sum"), (Gather, "gather"), (SparseMean, "sparse")),
)


@dataclass(frozen=True)
class Served:
    """What the line needs for a bucket: to carry it, to say it in fewer bytes, to pack it."""

    carried: tuple[Carried, ...]
    codec: Spread = NOTHING
    pack: Spread = NOTHING

    @property
    def wire(self) -> Spread:
        """Of all that is carried, one after the other."""
        return reduce(both, (carried.seconds for carried in self.carried), NOTHING)

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.pack.median + self.codec.median + self.wire.median


def exchange(
    asked: Query,
    sums: Sums,
    compressor: Compressor | None,
    bucket: Bucket,
    shapes: Sequence[tuple[int, ...]],
) -> Served:
    """As `labkit.exchange.compressed` exchanges it; what packing takes is left out.

    What is summed is decoded for the mean and for what was sent, what is gathered once a rank more;
    on the virtual clock nothing of that takes time.

    Args:
        shapes: of all variables.

    Raises: InvalidInput, for what was not measured.
    """
    if compressor is None:
        return Served((sums.take(Load("sum", bucket.nbytes)),))
    cost = asked.codec(compressor, bucket.nbytes)
    decoded, carried = 1, []
    for asks in _turns(compressor, bucket, shapes, cost.payload):
        for kind, name in KINDS:
            nbytes = sum(size for each, size in asks if each is kind)
            if not nbytes:
                continue
            dense = bucket.nbytes if name == "sparse" else 0.0
            carried.append(sums.take(Load(name, nbytes, dense)))
            if kind is Gather:
                decoded += asked.workers
            elif kind is Mean and not compressor.by_layer:
                decoded += 1
    codec = NOTHING if asked.virtual else both(cost.encode, times(cost.decode, decoded))
    return Served(tuple(carried), codec)


def _turns(
    compressor: Compressor, bucket: Bucket, shapes: Sequence[tuple[int, ...]], payload: float
) -> Iterator[list[tuple[type[Request], float]]]:
    """What all that is compressed by itself asks for together, time after time."""
    tensors = [shapes[slot.variable] for slot in bucket.slots]
    if not compressor.by_layer:
        tensors = [(bucket.length,)]
    every = [
        compressor.collectives(shape, payload * prod(shape) / bucket.length) for shape in tensors
    ]
    for asks in zip_longest(*every):
        yield [ask for ask in asks if ask is not None]
