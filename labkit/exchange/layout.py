"""Where the gradients of a training step lie: buckets in an arena, laid out once for all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from labkit.communicator import Aside, Communicator
from labkit.exchange.arena import Arena, Packing, Piece
from labkit.exchange.bucket import Bucket, pack
from labkit.exchange.choice import Choice, Signature
from labkit.exchange.compressed import Layer

Dtypes: TypeAlias = Sequence["np.dtype[np.generic]"]


class Layout:
    """The buckets of one set of gradients, and what of a step is in them.

    Args:
        communicator: the ranks, whose layouts are equal.
        signature: name, shape and dtype of each gradient.
        dtypes: the same as NumPy has them.
        buckets: which gradients travel together.
        choice: how they are summed.
        dense: they travel as they are: what ranks of one host share need not be copied.
        after: they are packed while the training step stands still, so that what this rank adds up
            itself need not be copied either.
    """

    def __init__(
        self,
        communicator: Communicator,
        signature: Signature,
        dtypes: Dtypes,
        buckets: Sequence[Bucket],
        choice: Choice,
        dense: bool = True,
        after: bool = True,
    ) -> None:
        self.signature, self.buckets, self.choice = signature, buckets, choice
        shares = choice.in_place and dense
        self._arena = Arena(communicator, _lengths(signature), dtypes, buckets, shares)
        self._packings = [
            Packing(
                bucket,
                self._arena.gradients(bucket),
                communicator.own_part(bucket.length) if shares and after else slice(0, 0),
            )
            for bucket in buckets
        ]
        self._pieces: dict[int, list[Piece] | None] = {}
        self.weights: dict[int, float] = {}  # of this rank in each bucket: rows
        self.steps: dict[int, int] = {}  # of training, in which each bucket was packed

    @property
    def means(self) -> list[np.ndarray]:
        """Of each variable, flat; they are read where they lie."""
        return self._arena.means

    def pack(self, number: int, arrays: Sequence[np.ndarray], rows: np.ndarray, step: int) -> None:
        """Copy gradients into their bucket, and keep their weight."""
        self.weights[number], self.steps[number] = float(rows), step
        self._pieces[number] = self._packings[number](arrays, bool(rows))

    def gradients(self, number: int) -> np.ndarray:
        """All of a bucket, flat."""
        return self._arena.gradients(self.buckets[number])

    def aside(self, number: int) -> Aside:
        """What of a bucket's sum lies elsewhere."""
        return Aside(self._pieces.pop(number, None), self._arena.into(self.buckets[number]))

    def layers(self, number: int) -> tuple[list[np.ndarray], list[Layer]]:
        """The gradients of a bucket in the order of their places, and what they are."""
        bucket = self.buckets[number]
        pieces: list[np.ndarray] = []
        found: list[Layer] = []
        stop = 0
        for slot in sorted(bucket.slots, key=lambda slot: slot.offset):
            name, shape, _ = self.signature[slot.variable]
            whole = slot.length == int(np.prod(shape))
            start, stop = stop, stop + slot.length
            found.append(Layer(name, start, stop, shape if whole else (slot.length,)))
            pieces.append(self._arena.piece(bucket, slot))
        return pieces, found


def in_buckets(
    signature: Signature,
    dtypes: Dtypes,
    limit: int | None,
    cut: bool,
    groups: Sequence[int] | None = None,
) -> list[Bucket]:
    """The buckets of these gradients, see `bucket.pack`; one for each dtype where limit is None."""
    lengths = _lengths(signature)
    names, itemsizes = [each.name for each in dtypes], [each.itemsize for each in dtypes]
    all_of_them = sum(lengths) * 8 + 1  # bytes, of the widest dtype
    return pack(lengths, names, itemsizes, limit or all_of_them, cut=cut, groups=groups)


def _lengths(signature: Signature) -> list[int]:
    return [int(np.prod(shape)) for _, shape, _ in signature]
