"""Reductions of a bucket: the weighted mean over the ranks, plain or through a compressor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

import numpy as np

from labkit.common.errors import LabkitError
from labkit.communicator import Communicator, scale
from labkit.compression import Compressor
from labkit.exchange.bucket_layout import BucketLayout
from labkit.exchange.compressed import BucketLayer, CompressedMean, ReductionRecord
from labkit.exchange.gradient import renumber_names

Watcher: TypeAlias = Callable[[int, Sequence[BucketLayer], ReductionRecord], None]


class NotFinite(LabkitError):
    """A gradient or its compressed mean is infinite or NaN, which would spoil the residuals."""


class BucketMean(Protocol):
    """A function that reduces buckets to their means, which are the same on all ranks."""

    def __call__(self, layout: BucketLayout, number: int, first: bool) -> None:
        """Write the mean of a parcel (bucket or table) into the layout.

        Args:
            layout: The layout, with this rank's gradients and weight.
            number: The number of the parcel.
            first: Whether the parcel is the first one in its training step.
        """


class Plain:
    """The weighted mean of uncompressed gradients.

    Args:
        communicator: The Communicator of the ranks.
    """

    what = "the exchange of gradients"

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._total: float | None = None  # the sum of all ranks' weights in this step

    def __call__(self, layout: BucketLayout, number: int, first: bool) -> None:
        """Reduce a parcel (bucket or table), see `BucketMean`."""
        weight, choice = layout.weights[number], layout.choice
        parcels = len(layout.parcels)
        what = self.what if parcels == 1 else f"{self.what}, bucket {number} of {parcels}"
        # Other sums than those in shared memory, where ranks read each other's weights, need the
        # total of all weights first.
        if first and (layout.tables or not choice.in_place):
            self._total = self._communicator.total(weight, self.what)
        if layout.is_table(number):
            self._rows(layout, number, weight / self._total if self._total else 0.0)
            return
        self._communicator.mean(
            layout.gradients(number),
            weight,
            choice.algorithm,
            what,
            self._total,
            layout.separate_buffers(number),
        )

    def _rows(self, layout: BucketLayout, number: int, share: float) -> None:
        table = layout.signature[layout.parcels[number][0]]
        indices, values = layout.rows(number)
        scale(values, share)
        what = f"{self.what} for {renumber_names([table.name])[0]}"
        rows = indices, values, table.shape[0], layout.choice.algorithm, what
        layout.put_rows(number, *self._communicator.sum_rows(*rows))


class CompressedReduction:
    """The mean of compressed gradients, multiplied by each rank's weight before compression.

    Args:
        communicator: The Communicator of the ranks.
        compressor: The gradient compressor.
        seed: The seed of the compressor's random choices.

    Attributes:
        mean: The object that runs the compressor.
        watchers: Callbacks that receive the input and the result of each bucket.
        scaled: Whether the loss is scaled, so that all ranks skip a step after an overflow.
    """

    what = "the exchange of compressed gradients"

    def __init__(self, communicator: Communicator, compressor: Compressor, seed: int) -> None:
        self._communicator, self._compressor = communicator, compressor
        self.mean = CompressedMean(communicator, compressor, seed)
        self.watchers: list[Watcher] = []
        self.scaled = False

    def __call__(self, layout: BucketLayout, number: int, first: bool) -> None:
        """Reduce a parcel (bucket or table), see `BucketMean`.

        Raises:
            NotFinite: A gradient or a compressed mean is not finite, and the step is not skipped.
        """
        pieces, layers = layout.layers(number)
        weight = layout.weights[number]
        reports = self._communicator.allgather((weight, _bad_layer(pieces, layers)), self.what)
        skips = any(np.isnan(weight) for weight, _ in reports)  # a rank's guard skips the step
        bad = [f"{name} on rank {rank}" for rank, (_, name) in enumerate(reports) if name]
        if bad or skips:
            self._skip(pieces, bad, skips)
            return
        total = sum(weight for weight, _ in reports)
        share = weight * self._communicator.size / total if total else 0.0
        for piece in pieces:
            piece *= piece.dtype.type(share)
        record = self.mean.reduce(number, pieces, layers, layout.choice.algorithm, self.what)
        # All ranks raise this error, because the mean is the same on all ranks.
        if name := _bad_layer([record.mean[x.start : x.stop] for x in layers], layers):
            raise NotFinite(
                f"the gradient of {name} is finite, but after compression with "
                f"{self._compressor!r} it is infinite or NaN, because its values are too large "
                "for this compressor; lower the learning rate, clip gradients (clipnorm), or "
                "choose another compressor"
            )
        for watcher in self.watchers:
            # Watchers get the step in which the bucket was packed, because some ranks may have
            # begun the next step.
            watcher(number, layers, replace(record, step=layout.steps[number]))

    def _skip(self, pieces: Sequence[np.ndarray], bad: Sequence[str], by_guard: bool) -> None:
        """Set the bucket to NaN, so that every rank skips the step and no residual changes."""
        if not (self.scaled or by_guard):
            raise NotFinite(
                f"the gradient of {', '.join(bad)} is infinite or NaN; lower the learning rate, "
                "or clip gradients (clipnorm)"
            )
        for piece in pieces:
            piece[...] = np.nan


def _bad_layer(pieces: Sequence[np.ndarray], layers: Sequence[BucketLayer]) -> str:
    """Return the name of the first layer with a non-finite value; "": no layer has one."""
    for piece, layer in zip(pieces, layers, strict=True):
        # The dot product tests all values in one pass. Because it may overflow, a second test
        # decides.
        if not np.isfinite(np.dot(piece, piece)) and not np.isfinite(piece).all():
            return layer.name
    return ""
