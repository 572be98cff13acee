"""Where the gradients of a training step lie: buckets in an arena, laid out once for all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from labkit.communicator import Aside, Communicator, merged
from labkit.exchange.arena import Arena, Packing, Piece
from labkit.exchange.autotune import Choice
from labkit.exchange.bucket import Bucket, holders, pack
from labkit.exchange.compressed import Layer
from labkit.exchange.gradient import Signature

Dtypes: TypeAlias = Sequence["np.dtype[np.generic]"]


class Layout:
    """The buckets of one set of gradients, and what of a step is in them.

    A gradient that travels as rows is a parcel of its own, behind the buckets, and lies nowhere:
    it has other rows in each step.

    Args:
        communicator: the ranks, whose layouts are equal.
        signature: what the gradients are.
        dtypes: the same as NumPy has them.
        buckets: which gradients travel together.
        choice: how they are summed.
        dense: they travel as they are: what ranks of one host share need not be copied.
        after: they are packed while the training step stands still, so that what this rank adds up
            itself need not be copied either.

    Attributes:
        tables: the variables whose gradients travel as rows.
        parcels: the variables of each bucket, in the order of its slots, then each table.
        weights: of this rank in each parcel: rows of its batch.
        steps: of training, in which each parcel was packed.
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
        self.tables = [number for number, gradient in enumerate(signature) if gradient.rows]
        in_buckets = [[slot.variable for slot in bucket.slots] for bucket in buckets]
        self.parcels = in_buckets + [[table] for table in self.tables]
        self._rows: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by parcel
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
        self.weights: dict[int, float] = {}
        self.steps: dict[int, int] = {}

    def mean(self, variable: int) -> list[np.ndarray]:
        """A variable's mean, flat, read where it lies; of a table, rows and whose they are."""
        if variable not in self.tables:
            return [self._arena.means[variable]]
        indices, values = self._rows[self.holders(variable)[0]]
        return [values, indices]

    def holders(self, variable: int) -> list[int]:
        """Numbers of the parcels that hold elements of a variable."""
        if variable in self.tables:
            return [len(self.buckets) + self.tables.index(variable)]
        return holders(self.buckets, variable)

    def is_table(self, number: int) -> bool:
        """Whether a parcel holds rows of a table."""
        return number >= len(self.buckets)

    def pack(self, number: int, arrays: Sequence[np.ndarray], rows: np.ndarray, step: int) -> None:
        """Copy gradients into their parcel, and keep their weight.

        Args:
            number: of the parcel.
            arrays: whole gradients; of a table, rows and whose they are, some perhaps twice.
            rows: of the batch, behind these gradients.
            step: of training.
        """
        self.weights[number], self.steps[number] = float(rows), step
        if self.is_table(number):
            values, indices = arrays
            kept = slice(None) if rows else slice(0)
            self._rows[number] = merged(indices[kept].astype(np.int32), values[kept])
        else:
            self._pieces[number] = self._packings[number](arrays, bool(rows))

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Which rows of a table its parcel holds, ascending, and their values."""
        return self._rows[number]

    def put_rows(self, number: int, indices: np.ndarray, values: np.ndarray) -> None:
        """Replace the rows in a table's parcel."""
        self._rows[number] = indices, values

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
        layers: list[Layer] = []
        stop = 0
        for slot in sorted(bucket.slots, key=lambda slot: slot.offset):
            name, shape, *_ = self.signature[slot.variable]
            whole = slot.length == int(np.prod(shape))
            start, stop = stop, stop + slot.length
            layers.append(Layer(name, start, stop, shape if whole else (slot.length,)))
            pieces.append(self._arena.piece(bucket, slot))
        return pieces, layers


def in_buckets(
    signature: Signature,
    dtypes: Dtypes,
    limit: int | None,
    cut: bool,
    groups: Sequence[int] | None = None,
) -> list[Bucket]:
    """The buckets of these gradients, see `bucket.pack`; one for each dtype where limit is None."""
    lengths = _lengths(signature)
    names, itemsizes = [dtype.name for dtype in dtypes], [dtype.itemsize for dtype in dtypes]
    all_of_them = sum(lengths) * 8 + 1  # bytes, of the widest dtype
    return pack(lengths, names, itemsizes, limit or all_of_them, cut=cut, groups=groups)


def _lengths(signature: Signature) -> list[int]:
    """Elements of each gradient that lies in a bucket."""
    return [0 if gradient.rows else int(np.prod(gradient.shape)) for gradient in signature]
