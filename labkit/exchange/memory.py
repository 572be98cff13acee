"""Where the gradients of an exchange lie, and where their means are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.communicator import Communicator
from labkit.exchange.bucket import Bucket, Slot, places


class Memory:
    """An arena of gradients for each dtype, which stays where it is from step to step.

    Means take the place of the gradients; or, where all ranks are on one host and add up in shared
    memory, they are written once for all of them.

    Args:
        communicator: allocates, and so do all its ranks.
        lengths: elements of each variable.
        dtypes: of each variable.
        buckets: what lies where.
        common: one memory for the means of all ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        lengths: Sequence[int],
        dtypes: Sequence[np.dtype[Any]],
        buckets: Sequence[Bucket],
        common: bool,
    ) -> None:
        names = [dtype.name for dtype in dtypes]
        starts = places(lengths, names, [dtype.itemsize for dtype in dtypes])
        ends: dict[str, int] = {}
        for bucket in buckets:
            ends[bucket.dtype] = max(ends.get(bucket.dtype, 0), bucket.stop)
        kinds = dict(zip(names, dtypes, strict=True))

        def arenas(common: bool) -> dict[str, np.ndarray]:
            return {
                name: communicator.allocate(end, kinds[name], common) for name, end in ends.items()
            }

        self._gradients, self._common = arenas(False), common
        self._results = arenas(True) if common else self._gradients
        self.means = [
            self._results[name][start : start + length]
            for start, length, name in zip(starts, lengths, names, strict=True)
        ]  # of each variable

    def gradients(self, bucket: Bucket) -> np.ndarray:
        """What of this rank travels together."""
        return self._gradients[bucket.dtype][bucket.start : bucket.stop]

    def into(self, bucket: Bucket) -> np.ndarray | None:
        """Where the bucket's means are written; None: in place of the gradients."""
        if not self._common:
            return None
        return self._results[bucket.dtype][bucket.start : bucket.stop]

    def piece(self, bucket: Bucket, slot: Slot) -> np.ndarray:
        """The gradients of one slot."""
        return self._gradients[bucket.dtype][slot.offset : slot.offset + slot.length]
