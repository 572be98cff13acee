"""Compute the mean of a bucket over the ranks, with or without compression."""

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
    """A gradient or its compressed mean is infinite or NaN, which would make the residuals NaN."""


class BucketMean(Protocol):
    """A function that replaces buckets by their means, which are the same on all ranks."""

    def __call__(self, layout: BucketLayout, number: int, first: bool) -> None:
        """Compute the mean of a parcel (bucket or table), and write it into the layout.

        Args:
            layout: The layout, which contains this rank's gradients and weight.
            number: The number of the parcel (bucket or table).
            first: Whether the parcel (bucket or table) is the first one in its training step.
        """


class Plain:
    """The weighted mean of uncompressed gradients.

    Args:
        communicator: The Communicator of the ranks.
    """

    what = "the exchange of gradients"

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        # The attribute `_total` is the sum of the weights of all ranks in the current training
        # step.
        self._total: float | None = None

    def __call__(self, layout: BucketLayout, number: int, first: bool) -> None:
        """Compute the mean of a parcel (bucket or table), see `BucketMean`."""
        weight, choice = layout.weights[number], layout.choice
        parcels = len(layout.parcels)
        what = self.what if parcels == 1 else f"{self.what}, bucket {number} of {parcels}"
        # During a sum in shared memory, ranks read each other's weights directly. A sum outside
        # shared memory needs the total weight of all ranks before the sum starts.
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
    """The mean of compressed gradients; each rank weights its gradients before compression.

    Args:
        communicator: The Communicator of the ranks.
        compressor: The gradient compressor.
        seed: The seed of the compressor's random choices.

    Attributes:
        mean: The object that runs the compressor.
        watchers: Callbacks that receive the input and the result of each bucket.
        scaled: Whether loss scaling is on. If true, all ranks skip a step after an overflow.
    """

    what = "the exchange of compressed gradients"

    def __init__(self, communicator: Communicator, compressor: Compressor, seed: int) -> None:
        self._communicator, self._compressor = communicator, compressor
        self.mean = CompressedMean(communicator, compressor, seed)
        self.watchers: list[Watcher] = []
        self.scaled = False

    def __call__(self, layout: BucketLayout, number: int, first: bool) -> None:
        """Compute the compressed mean of a parcel (bucket or table), see `BucketMean`.

        Raises:
            NotFinite: A gradient or a compressed mean is not finite, and the step is not skipped.
        """
        pieces, layers = layout.layers(number)
        weight = layout.weights[number]
        reports = self._communicator.allgather((weight, _bad_layer(pieces, layers)), self.what)
        # The weight NaN means that a rank's guard skips the training step. The guard of a rank
        # checks gradients for NaN and infinity.
        skips = any(np.isnan(weight) for weight, _ in reports)
        bad = [f"{name} on rank {rank}" for rank, (_, name) in enumerate(reports) if name]
        if bad or skips:
            self._skip(pieces, bad, skips)
            return
        total = sum(weight for weight, _ in reports)
        share = weight * self._communicator.size / total if total else 0.0
        for piece in pieces:
            piece *= piece.dtype.type(share)
        record = self.mean.reduce(number, pieces, layers, layout.choice.algorithm, self.what)
        # All ranks raise `NotFinite` together, because the compressed mean is the same on all
        # ranks.
        if name := _bad_layer([record.mean[x.start : x.stop] for x in layers], layers):
            raise NotFinite(
                f"the gradient of {name} is finite, but after compression with "
                f"{self._compressor!r} it is infinite or NaN, because its values are too large "
                "for this compressor; lower the learning rate, clip gradients (clipnorm), or "
                "choose another compressor"
            )
        for watcher in self.watchers:
            # Watchers (callbacks) receive the training step in which the bucket was packed. Some
            # ranks may already be in the next training step.
            watcher(number, layers, replace(record, step=layout.steps[number]))

    def _skip(self, pieces: Sequence[np.ndarray], bad: Sequence[str], by_guard: bool) -> None:
        """Set the bucket to NaN, so that all ranks skip the step, and no residual changes."""
        if not (self.scaled or by_guard):
            raise NotFinite(
                f"the gradient of {', '.join(bad)} is infinite or NaN; lower the learning rate, "
                "or clip gradients (clipnorm)"
            )
        for piece in pieces:
            piece[...] = np.nan


def _bad_layer(pieces: Sequence[np.ndarray], layers: Sequence[BucketLayer]) -> str:
    """Return the name of the first layer with a non-finite value; "" if there is no such layer."""
    for piece, layer in zip(pieces, layers, strict=True):
        # The dot product of a gradient with itself reveals non-finite values in one pass. A
        # non-finite dot product may only be an overflow, so a second test decides.
        if not np.isfinite(np.dot(piece, piece)) and not np.isfinite(piece).all():
            return layer.name
    return ""
