"""A step of replicas that exchange gradients: computing, and buckets on a line beside or behind it.

Buckets are those of `labkit.exchange`, served in its order; what one of them takes is said by
`Sums` and by the codec that was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.units import plural
from labkit.compression import Compressor
from labkit.exchange import SCHEDULES
from labkit.exchange.bucket import Bucket
from labkit.exchange.gradient import Gradient
from labkit.exchange.layout import in_buckets
from labkit.forecast.allreduce_cost import Sums
from labkit.forecast.bucket_cost import Served, exchange
from labkit.forecast.bucket_queue import Line
from labkit.forecast.calibration import Source, Spread, StepCost
from labkit.forecast.order_statistics import alike, last_of, of_run, slowest
from labkit.forecast.query import COMPUTED, Query, StepForecast, trust
from labkit.forecast.time_distributions import beyond, both, nine_tenths, times, widen


@dataclass(frozen=True)
class Exchanged:
    """The step of `AllReduce`.

    Args:
        asked: the experiment, and what was measured.
        algorithm, schedule, bucket_bytes, compressor: as of `labkit.exchange.Exchange`.
    """

    asked: Query
    algorithm: str
    schedule: str
    bucket_bytes: int
    compressor: Compressor | None = None

    def taken(self) -> StepForecast:
        """What it takes.

        Raises: InvalidInput, for what was not measured.
        """
        own, ranks = self.own, alike(self.asked, self.asked.rows)
        computing = slowest(ranks)
        last = last_of(ranks, computing)
        line = sum(each.seconds for each in self.served)
        late = last / own.seconds if own.seconds else 1.0
        exposed = line
        if not self._after:
            exposed = self._line(late).exposed(SCHEDULES[self.schedule], self.asked.workers)
        share = exposed / line if line else 0.0
        parts = {name: getattr(own, name).median for name in COMPUTED}
        parts["wait"] = last - own.seconds
        spreads = []
        for name in ("pack", "codec", "wire"):
            each = [times(getattr(served, name), share) for served in self.served]
            parts[name] = sum(one.median for one in each)
            spreads += each
        computed = reduce(both, (getattr(own, name) for name in COMPUTED))
        chance = of_run(computing) if any(rank.laws for rank in ranks) else 0.0
        # What is wrong with a network's time is so for all buckets together.
        wrong = parts["wire"] * (self.asked.error or 0.0)
        whole = widen(reduce(both, spreads, times(computed, late)), float(np.hypot(chance, wrong)))
        low, high = (tenth + exposed for tenth in nine_tenths(computing))
        return StepForecast(
            parts=parts,
            rows=max(self.asked.rows),
            spread=(whole.low / whole.median, whole.high / whole.median)
            if whole.median
            else (1.0, 1.0),
            nbytes=self._links(),
            memory=self.asked.memory(max(self.asked.rows))
            | {"buffers": float(sum(bucket.nbytes for bucket in self.buckets))},
            sources=tuple(self._sources()),
            more={
                "sent": sum(one.sent for each in self.served for one in each.carried),
                "buckets": len(self.buckets),
                "hidden": max(0.0, line - exposed),
                "step_low": float(low),
                "step_high": float(high),
            },
        )

    @cached_property
    def own(self) -> StepCost:
        """A step of the rank that has most rows, as if there were no others to wait for."""
        return self.asked.computed(max(self.asked.rows))

    @property
    def _after(self) -> bool:
        """Whether the step stands still for all buckets; an overlap where no core is free."""
        found = SCHEDULES[self.schedule]
        return found.after or (self.asked.fills_host and not found.into_next)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """As the exchange lays them out; none where there is nothing to exchange."""
        if self.asked.workers == 1 and self.compressor is None:
            return []
        found = SCHEDULES[self.schedule]
        dtype = self.asked.dtype
        shapes = [shape for layer in self.asked.model.layers for shape in layer.weights]
        if not shapes:
            raise InvalidInput(
                "the layers of this model were not measured, so that nobody knows its gradients; "
                "measure it by `labkit calibrate`"
            )
        signature = [Gradient(f"{n}", shape, dtype.name) for n, shape in enumerate(shapes)]
        by_layer = self.compressor is not None and self.compressor.by_layer
        together = found.after or (self._after and self.compressor is None)
        return in_buckets(
            signature,
            [dtype] * len(shapes),
            None if together else self.bucket_bytes,
            cut=not (together or by_layer),
            groups=self._layer_of if found.into_next and self.asked.workers > 1 else None,
        )

    @cached_property
    def sums(self) -> Sums:
        """What carries them."""
        return Sums(
            self.asked,
            self.algorithm,
            float(max((bucket.nbytes for bucket in self.buckets), default=0)),
            dense=self.compressor is None,
            turns=SCHEDULES[self.schedule].turns,
        )

    @cached_property
    def served(self) -> list[Served]:
        """What each bucket takes."""
        return [self._serve(number, bucket) for number, bucket in enumerate(self.buckets)]

    @cached_property
    def _layer_of(self) -> list[int]:
        """The layer of each variable."""
        layers = enumerate(self.asked.model.layers)
        return [number for number, layer in layers for _ in layer.weights]

    def _serve(self, number: int, bucket: Bucket) -> Served:
        asked = self.asked
        shapes = [shape for layer in asked.model.layers for shape in layer.weights]
        served = exchange(asked, self.sums, self.compressor, bucket, shapes)
        if asked.virtual:
            return served
        pack = asked.once("bucket", bucket.nbytes)
        if number and not self._after and asked.knows("overlap"):
            # That is all of a further bucket of the least size; a larger one takes more.
            more = max(0.0, pack.median - asked.once("bucket").median)
            pack = both(asked.once("overlap"), times(pack, more / pack.median if more else 0.0))
        if asked.workers == 1:
            return replace(served, pack=pack)
        # Ranks agree on their weights, once a step or with each bucket; not in memory they share.
        if self.compressor is not None or (number == 0 and self.sums.chosen != "shared_memory"):
            pack = both(pack, self._meeting)
        if number == 0:
            pack = both(pack, asked.once("replicas"))
        return replace(served, pack=pack)

    @property
    def _meeting(self) -> Spread:
        """A barrier: as here, and as many latencies as halves of the ranks need to hear of all."""
        asked = self.asked
        found = asked.once("meeting")
        if asked.network is None or asked.emulated:
            return found
        seconds = math.ceil(math.log2(asked.workers)) * asked.network.latency
        return both(found, Spread(median=seconds, low=seconds, high=seconds))

    def _line(self, late: float) -> Line:
        """What serves the buckets, while computing takes so much longer."""
        layers = self.asked.model.layers
        return Line(
            self.buckets,
            [each.seconds for each in self.served],
            self._layer_of,
            late * self.own.forward.median * np.array([layer.forward for layer in layers]),
            late * self.own.backward.median * np.array([layer.backward for layer in layers]),
        )

    def _links(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for each in self.served:
            for one in each.carried:
                found.update(one.links)
        return dict(found)

    def _sources(self) -> Iterable[Source]:
        own, largest = self.own, self.sums.largest
        how = f"{plural(own.together, 'rank')} at once, {own.forward.count} repeats"
        yield self.asked.computing(max(self.asked.rows), f"{how}, on a line between batches")
        yield self.sums.source
        yield from trust(self.asked)
        if self.compressor is not None:
            said = self.compressor.to_json()
            known = (e.nbytes for e in self.asked.calibration.codecs if e.compressor == said)
            far = beyond(largest, known)
            yield Source(f"{self.compressor!r}", f"measured, on a line between sizes{far}")
        for what in (
            "bucket",
            "meeting",
            "replicas",
            *([] if self._after else ["overlap"]),
        ):
            yield self.asked.overhead(what, largest if what == "bucket" else 0)
