"""Which rows each rank sees at each step: pure arithmetic, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.common.data_partition import IID, divided


def cut(total: int, capacities: Sequence[float]) -> list[int]:
    r"""Boundaries that divide `total` rows by the ranks' capacities.

    Rank r takes rows \(\lfloor N C_r \rfloor\) to \(\lfloor N C_{r+1} \rfloor\), where \(C\) is the
    cumulative share: 10 rows by capacities 1, 1, 2 -> [0, 2, 5, 10].
    """
    shares = np.concatenate([[0.0], np.cumsum(capacities)]) / np.sum(capacities)
    # One unit in the last place must not push a boundary below a whole number.
    return [int(np.floor(total * share + 1e-9)) for share in shares]


@dataclass(frozen=True)
class Plan:
    """The batches of a training run over rows 0 … rows-1.

    With `owned=False` each epoch is one permutation of all rows, so that runs with other numbers
    of ranks see the same global batches and their curves can be laid on each other. With
    `owned=True` each rank keeps the rows that it was given at the start and shuffles among those
    (Vishnu et al. 2016, arXiv 1603.02339: rank 0 reads the samples and scatters them); global
    batches are then those of all ranks' rows together.

    Args:
        rows: rows of the data set.
        batch_size: global batch; the last one of an epoch may be smaller.
        capacities: a rank's share of each batch, one number a rank.
        seed: of the permutations.
        steps: cap on the steps of an epoch.
        owned: see above.
        shards: how rows are divided that ranks own, see `labkit.common.data_partition`.
        labels: of the rows, by which they are; a rank that does not know them knows sizes alone.
    """

    rows: int
    batch_size: int
    capacities: tuple[float, ...]
    seed: int = 0
    steps: int | None = None
    owned: bool = False
    shards: str = IID
    labels: NDArray[Any] | None = field(default=None, compare=False, repr=False)

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one epoch."""
        full = -(-self.rows // self.batch_size)
        return full if self.steps is None else min(full, self.steps)

    def sizes(self, step: int) -> list[int]:
        """Rows that each rank holds of the batch of this step."""
        batch = min(self.batch_size, self.rows - step * self.batch_size)
        return np.diff(cut(batch, self.capacities)).tolist()

    def own_rows(self, rank: int) -> np.ndarray:
        """Rows that this rank has from the start (`owned`)."""
        return self._divided[rank]

    @cached_property
    def _divided(self) -> list[np.ndarray]:
        labels = self.rows if self.labels is None else self.labels
        return divided(labels, self._counts, self.shards, self.seed)

    @cached_property
    def _counts(self) -> list[int]:
        """How many rows each rank owns."""
        full = -(-self.rows // self.batch_size)
        counts: list[int] = np.sum([self.sizes(step) for step in range(full)], axis=0).tolist()
        return counts

    def local(self, rank: int, epoch: int) -> list[np.ndarray]:
        """The rows of this rank, an array a step; some may be empty."""
        if self.owned:
            own = self.own_rows(rank)
            return [own[places] for places in self.places(rank, epoch)]
        # Drawn by each rank for itself, from the same seed: no message is needed to agree on it.
        order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        result = []
        for step in range(self.steps_per_epoch):
            batch = order[step * self.batch_size : (step + 1) * self.batch_size]
            ends_of_batch = cut(len(batch), self.capacities)
            result.append(batch[ends_of_batch[rank] : ends_of_batch[rank + 1]])
        return result

    def places(self, rank: int, epoch: int) -> list[np.ndarray]:
        """The same as places within the rows that the rank owns (`owned`)."""
        # With the rank: all would shuffle in the same way otherwise.
        rng = np.random.default_rng([self.seed, epoch, rank])
        places = rng.permutation(self._counts[rank])
        ends = np.cumsum([self.sizes(step)[rank] for step in range(self.steps_per_epoch)])
        return np.split(places[: ends[-1]], ends[:-1])

    def whole(self, epoch: int) -> list[np.ndarray]:
        """The global batches, as one process would see them: the ranks' parts in rank order."""
        parts = [self.local(rank, epoch) for rank in range(len(self.capacities))]
        return [np.concatenate(step) for step in zip(*parts, strict=True)]
