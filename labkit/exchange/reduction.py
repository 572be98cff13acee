"""What becomes of a bucket: the weighted mean over the ranks, as it is or through a compressor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

import numpy as np

from labkit.common.errors import LabkitError
from labkit.communicator import Communicator, scale
from labkit.compression import Compressor
from labkit.exchange.compressed import CompressedMean, Layer, Seen
from labkit.exchange.gradient import counted
from labkit.exchange.layout import Layout

Watcher: TypeAlias = Callable[[int, Sequence[Layer], Seen], None]


class NotFinite(LabkitError):
    """A gradient is infinite or not a number, or becomes so, and a memory would keep it."""


class BucketMean(Protocol):
    """What takes the mean of buckets, the same on all ranks."""

    def __call__(self, layout: Layout, number: int, first: bool) -> None:
        """Put the mean of a parcel where it is read.

        Args:
            layout: has the gradients, and this rank's weight.
            number: of the parcel.
            first: it is the first of its step.
        """


class Plain:
    """Gradients as they are: summed by their weights, and divided by all of these.

    Args:
        communicator: the ranks.
    """

    what = "the exchange of gradients"

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._total: float | None = None  # the weights of all ranks in this step

    def __call__(self, layout: Layout, number: int, first: bool) -> None:
        """See `BucketMean`."""
        weight, choice = layout.weights[number], layout.choice
        parcels = len(layout.parcels)
        what = self.what if parcels == 1 else f"{self.what}, bucket {number} of {parcels}"
        # Who adds up in shared memory reads the weights there.
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
            layout.aside(number),
        )

    def _rows(self, layout: Layout, number: int, share: float) -> None:
        table = layout.signature[layout.parcels[number][0]]
        indices, values = layout.rows(number)
        scale(values, share)
        what = f"{self.what} for {counted([table.name])[0]}"
        rows = indices, values, table.shape[0], layout.choice.algorithm, what
        layout.put_rows(number, *self._communicator.sum_rows(*rows))


class Compressed:
    """Gradients in fewer bytes: each is weighted first, so that the plain mean is theirs.

    Args:
        communicator: the ranks.
        compressor: how gradients are said.
        seed: of its random choices.

    Attributes:
        mean: steps the compressor.
        watchers: called with what each bucket was and became.
        scaled: the loss is scaled, so that an overflow is nobody's fault: all skip the step.
    """

    what = "the exchange of compressed gradients"

    def __init__(self, communicator: Communicator, compressor: Compressor, seed: int) -> None:
        self._communicator, self._compressor = communicator, compressor
        self.mean = CompressedMean(communicator, compressor, seed)
        self.watchers: list[Watcher] = []
        self.scaled = False

    def __call__(self, layout: Layout, number: int, first: bool) -> None:
        """See `BucketMean`. Raises: NotFinite."""
        pieces, layers = layout.layers(number)
        own = layout.weights[number]
        told = self._communicator.allgather((own, _trouble(pieces, layers)), self.what)
        skips = any(np.isnan(weight) for weight, _ in told)  # a guard has said so
        troubles = [f"{name} on rank {rank}" for rank, (_, name) in enumerate(told) if name]
        if troubles or skips:
            self._skip(pieces, troubles, skips)
            return
        total = sum(weight for weight, _ in told)
        share = own * self._communicator.size / total if total else 0.0
        for piece in pieces:
            piece *= piece.dtype.type(share)
        seen = self.mean.reduce(number, pieces, layers, layout.choice.algorithm, self.what)
        # The mean is the same on all ranks, and so is what they do now.
        if lost := _trouble([seen.mean[one.start : one.stop] for one in layers], layers):
            raise NotFinite(
                f"the gradient of {lost} is finite, but {self._compressor!r} makes it infinite or "
                "not a number: its values are too large for the method; lower the learning rate, "
                "clip gradients (clipnorm), or take another compressor"
            )
        for watcher in self.watchers:
            # By now some ranks may have begun the next step: watchers must agree on this one.
            watcher(number, layers, replace(seen, step=layout.steps[number]))

    def _skip(self, pieces: Sequence[np.ndarray], troubles: Sequence[str], asked: bool) -> None:
        """An overflow: every rank skips the step, and no memory keeps it."""
        if not (self.scaled or asked):
            raise NotFinite(
                f"the gradient of {', '.join(troubles)} is infinite or not a number; lower the "
                "learning rate, or clip gradients (clipnorm)"
            )
        for piece in pieces:
            piece[...] = np.nan


def _trouble(pieces: Sequence[np.ndarray], layers: Sequence[Layer]) -> str:
    """The first layer with a value that is not finite, or ""."""
    for piece, layer in zip(pieces, layers, strict=True):
        # One pass; it may overflow, so look again.
        if not np.isfinite(np.dot(piece, piece)) and not np.isfinite(piece).all():
            return layer.name
    return ""
