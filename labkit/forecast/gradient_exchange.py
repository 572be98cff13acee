"""Forecast of a step in which replicas exchange gradient buckets, during or after computation.

The size and the order of the buckets are the same as in `labkit.exchange`. The cost of each bucket
comes from `AllReduceCosts` and the measured costs of compressors.
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
from labkit.exchange.bucket_layout import Bucket, in_buckets
from labkit.exchange.gradient import GradientSpec
from labkit.forecast.allreduce_cost import AllReduceCosts
from labkit.forecast.buckets import BucketCost, BucketQueue, bucket_cost
from labkit.forecast.calibration import (
    Provenance,
    Spread,
    StepCost,
    add_spreads,
    percentile_range,
    range_note,
    scale_spread,
    widen,
)
from labkit.forecast.query import COMPUTED, Query, StepForecast, network_error_sources
from labkit.forecast.workers import expected_maximum, group_ranks, run_deviation, slowest


@dataclass(frozen=True)
class Exchanged:
    """The forecast of a training step with the strategy `AllReduce`.

    Args:
        query: Query with the experiment and the calibration.
        algorithm, schedule, bucket_bytes, compressor: Arguments of `labkit.exchange.Exchange`.
    """

    query: Query
    algorithm: str
    schedule: str
    bucket_bytes: int
    compressor: Compressor | None = None

    def step_forecast(self) -> StepForecast:
        """Return the forecast of a training step: its parts, bytes, memory and sources.

        Raises:
            InvalidInput: The calibration lacks a necessary cost.
        """
        step, groups = self.largest_step, group_ranks(self.query, self.query.rows)
        computing = slowest(groups)
        slowest_seconds = expected_maximum(groups, computing)
        queue_seconds = sum(spreads_of_part.seconds for spreads_of_part in self.served)
        slowdown = slowest_seconds / step.seconds if step.seconds else 1.0
        exposed = queue_seconds
        if not self._follows_computation:
            exposed = self._line(slowdown).exposed(SCHEDULES[self.schedule], self.query.workers)
        share = exposed / queue_seconds if queue_seconds else 0.0
        parts = {name: getattr(step, name).median for name in COMPUTED}
        parts["wait"] = slowest_seconds - step.seconds
        spreads = []
        for name in ("pack", "codec", "wire"):
            spreads_of_part = [scale_spread(getattr(served, name), share) for served in self.served]
            parts[name] = sum(spread.median for spread in spreads_of_part)
            spreads += spreads_of_part
        computed = reduce(add_spreads, (getattr(step, name) for name in COMPUTED))
        deviation = run_deviation(computing) if any(rank.laws for rank in groups) else 0.0
        # An error of the predicted network time affects all buckets equally, so it does not average
        # out.
        network_error = parts["wire"] * (self.query.error or 0.0)
        total = widen(
            reduce(add_spreads, spreads, scale_spread(computed, slowdown)),
            float(np.hypot(deviation, network_error)),
        )
        low, high = (tenth + exposed for tenth in percentile_range(computing))
        return StepForecast(
            parts=parts,
            rows=max(self.query.rows),
            spread=(total.low / total.median, total.high / total.median)
            if total.median
            else (1.0, 1.0),
            nbytes=self._links(),
            memory=self.query.memory(max(self.query.rows))
            | {"buffers": float(sum(bucket.nbytes for bucket in self.buckets))},
            sources=tuple(self._sources()),
            more={
                "sent": sum(
                    spread.sent
                    for spreads_of_part in self.served
                    for spread in spreads_of_part.carried
                ),
                "buckets": len(self.buckets),
                "hidden": max(0.0, queue_seconds - exposed),
                "step_low": float(low),
                "step_high": float(high),
            },
        )

    @cached_property
    def largest_step(self) -> StepCost:
        """The step cost of the rank with the largest batch, without waits for other ranks."""
        return self.query.compute_step(max(self.query.rows))

    @property
    def _follows_computation(self) -> bool:
        """Whether the exchange follows the computation, for example because no core is free."""
        schedule = SCHEDULES[self.schedule]
        return schedule.after or (self.query.fills_host and not schedule.into_next)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The gradient buckets, laid out as in the exchange; empty if ranks exchange nothing."""
        if self.query.workers == 1 and self.compressor is None:
            return []
        schedule = SCHEDULES[self.schedule]
        weight_dtype = self.query.dtype
        shapes = [shape for layer in self.query.model.layers for shape in layer.weights]
        if not shapes:
            raise InvalidInput(
                "the layers of this model were not measured, so the sizes of its gradients are "
                "unknown; measure the model with `labkit calibrate`"
            )
        signature = [
            GradientSpec(f"{n}", shape, weight_dtype.name) for n, shape in enumerate(shapes)
        ]
        by_layer = self.compressor is not None and self.compressor.by_layer
        single_bucket = schedule.after or (self._follows_computation and self.compressor is None)
        return in_buckets(
            signature,
            [weight_dtype] * len(shapes),
            None if single_bucket else self.bucket_bytes,
            cut=not (single_bucket or by_layer),
            groups=self._layer_of if schedule.into_next and self.query.workers > 1 else None,
        )

    @cached_property
    def sums(self) -> AllReduceCosts:
        """The costs of the allreduces of all buckets."""
        return AllReduceCosts(
            self.query,
            self.algorithm,
            float(max((bucket.nbytes for bucket in self.buckets), default=0)),
            dense=self.compressor is None,
            turns=SCHEDULES[self.schedule].turns,
        )

    @cached_property
    def served(self) -> list[BucketCost]:
        """The cost of exchanging each bucket."""
        return [self._serve(number, bucket) for number, bucket in enumerate(self.buckets)]

    @cached_property
    def _layer_of(self) -> list[int]:
        """The number of the layer to which each variable belongs."""
        layers = enumerate(self.query.model.layers)
        return [number for number, layer in layers for _ in layer.weights]

    def _serve(self, number: int, bucket: Bucket) -> BucketCost:
        query = self.query
        shapes = [shape for layer in query.model.layers for shape in layer.weights]
        served = bucket_cost(query, self.sums, self.compressor, bucket, shapes)
        if query.virtual:
            return served
        pack = query.overhead_cost("bucket", bucket.nbytes)
        if number and not self._follows_computation and query.has_overhead("overlap"):
            # The measured overhead applies to the smallest gradient bucket. The code adds the extra
            # packing time of a larger bucket.
            excess = max(0.0, pack.median - query.overhead_cost("bucket").median)
            pack = add_spreads(
                query.overhead_cost("overlap"),
                scale_spread(pack, excess / pack.median if excess else 0.0),
            )
        if query.workers == 1:
            return replace(served, pack=pack)
        # A small allreduce sums the numbers of samples of all ranks. The small allreduce occurs
        # once per step or once per compressed bucket. Without a compressor, the allreduce algorithm
        # "shared_memory" needs no separate allreduce of the numbers of samples.
        if self.compressor is not None or (number == 0 and self.sums.chosen != "shared_memory"):
            pack = add_spreads(pack, self._barrier)
        if number == 0:
            pack = add_spreads(pack, query.overhead_cost("replicas"))
        return replace(served, pack=pack)

    @property
    def _barrier(self) -> Spread:
        """The cost of a barrier: measured time, plus log2(ranks) latencies on a real network."""
        query = self.query
        measured = query.overhead_cost("meeting")
        if query.network is None or query.emulated:
            return measured
        seconds = math.ceil(math.log2(query.workers)) * query.network.latency
        return add_spreads(measured, Spread(median=seconds, low=seconds, high=seconds))

    def _line(self, slowdown: float) -> BucketQueue:
        """Return the queue of buckets for a computation that takes `slowdown` times as long."""
        layers = self.query.model.layers
        return BucketQueue(
            self.buckets,
            [cost.seconds for cost in self.served],
            self._layer_of,
            slowdown
            * self.largest_step.forward.median
            * np.array([layer.forward for layer in layers]),
            slowdown
            * self.largest_step.backward.median
            * np.array([layer.backward for layer in layers]),
        )

    def _links(self) -> dict[str, float]:
        links: Counter[str] = Counter()
        for cost in self.served:
            for estimate in cost.carried:
                links.update(estimate.links)
        return dict(links)

    def _sources(self) -> Iterable[Provenance]:
        own, largest = self.largest_step, self.sums.largest
        how = f"{plural(own.together, 'rank')} at once, {own.forward.count} repeats"
        yield self.query.compute_source(
            max(self.query.rows), f"{how}, interpolated between batches"
        )
        yield self.sums.source
        yield from network_error_sources(self.query)
        if self.compressor is not None:
            compressor_json = self.compressor.to_json()
            sizes = (
                e.nbytes for e in self.query.calibration.codecs if e.compressor == compressor_json
            )
            note = range_note(largest, sizes)
            yield Provenance(f"{self.compressor!r}", f"measured, interpolated between sizes{note}")
        for name in (
            "bucket",
            "meeting",
            "replicas",
            *([] if self._follows_computation else ["overlap"]),
        ):
            yield self.query.overhead_source(name, largest if name == "bucket" else 0)
