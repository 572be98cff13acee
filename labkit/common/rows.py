"""Plans that assign data rows to ranks and steps, and partitions of rows among workers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.common.nearest import hint

IID = "iid"
_DIRICHLET = re.compile(r"dirichlet\(([^()]+)\)")


def concentration(shards: str) -> float | None:
    """Return α for the partition "dirichlet(α)", or None for the partitions "iid" and "by_label".

    Raises:
        ValueError: The text is not the name of a partition.
    """
    if shards in (IID, "by_label"):
        return None
    match = _DIRICHLET.fullmatch(shards)
    try:
        alpha = float(match[1]) if match else 0.0
    except ValueError:
        alpha = 0.0
    if not 1e-6 <= alpha < math.inf:
        raise ValueError(
            f"data_partition={shards!r} is not known{hint(shards, (IID, 'by_label'))}; allowed: "
            "'iid', 'by_label', or 'dirichlet(α)' with a number α of at least 1e-6, such as "
            "'dirichlet(0.3)'"
        )
    return alpha


def partition_samples(
    labels: NDArray[Any] | int, sizes: Sequence[int], shards: str = IID, seed: int = 0
) -> list[NDArray[np.int64]]:
    r"""Return the indices of the samples of each worker's shard; no sample is in two shards.

    The partition "iid" draws the shards at random. The partition "by_label" sorts the samples by
    label and cuts the sorted list into shards. The partition "dirichlet(α)" draws label proportions
    \(q \sim \mathrm{Dir}(\alpha p)\) for each worker. The vector p contains the label proportions
    of the whole data set. The partition "dirichlet(α)" then draws the samples of each worker
    according to the worker's label proportions q. If all samples of a label have been drawn, shards
    draw other labels. The last shards receive the remaining samples. For α → ∞ all shards have the
    same label proportions. For α → 0, each of the first shards has samples of only one label.

    Args:
        labels: Integer labels, one for each sample. For "iid", `labels` may also be the number of
            samples.
        sizes: Number of samples of each shard; the sum of all sizes is the number of samples.
        shards: Name of the partition: "iid", "by_label" or "dirichlet(α)".
        seed: Seed of the random draws.

    Reference: T.-M. H. Hsu, H. Qi, M. Brown: Measuring the effects of non-identical data
    distribution for federated visual classification, 2019, arXiv 1909.06335.
    """
    rng = np.random.default_rng(seed)
    alpha = concentration(shards)
    order = rng.permutation(sum(sizes))
    ends = np.cumsum(sizes)[:-1]
    if shards == IID:
        return np.split(order, ends)
    known = np.asarray(labels)
    order = order[np.argsort(known[order], kind="stable")]
    if alpha is None:
        return np.split(order, ends)
    counts = np.unique(known, return_counts=True)[1]
    # `stock` contains the samples of each label in random order.
    stock = np.split(order, np.cumsum(counts)[:-1])
    used = np.zeros_like(counts)
    indices = []
    for size in sizes:
        draws = _draw_counts(rng, size, rng.dirichlet(alpha * counts / counts.sum()), counts - used)
        parts = zip(stock, used, used + draws, strict=True)
        indices.append(np.concatenate([samples[start:stop] for samples, start, stop in parts]))
        used += draws
    return indices


def _draw_counts(
    rng: np.random.Generator, size: int, shares: NDArray[np.float64], available: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Draw the number of samples of each label in a shard, limited by the available samples."""
    counts = np.zeros_like(available)
    while missing := size - int(counts.sum()):
        weights = np.where(available > counts, shares, 0.0)
        # After the wanted labels run out, other labels fill the shard.
        if not weights.sum():
            weights = (available - counts).astype(np.float64)
        draws = rng.multinomial(missing, weights / weights.sum())
        counts = np.minimum(counts + draws, available)
    return counts


def cut(total: int, capacities: Sequence[float]) -> list[int]:
    r"""Return boundaries that divide `total` rows in proportion to the weights of the ranks.

    Rank r gets the rows from \(\lfloor N C_r \rfloor\) to \(\lfloor N C_{r+1} \rfloor\). Here N is
    `total`, and \(C_r\) is the share of the first r ranks in the total weight. For example, 10 rows
    with weights 1, 1, 2 give the boundaries [0, 2, 5, 10].
    """
    shares = np.concatenate([[0.0], np.cumsum(capacities)]) / np.sum(capacities)
    # Without the tolerance 1e-9, a rounding error could lower a boundary that should be a whole
    # number.
    return [int(np.floor(total * share + 1e-9)) for share in shares]


@dataclass(frozen=True)
class BatchPlan:
    """The batches of a training run on a data set with rows 0 … rows-1.

    With `owned=False`, each epoch uses one random permutation of all rows. With `owned=False`, the
    global batches do not depend on the number of ranks. Loss curves of runs with different numbers
    of ranks are then comparable. With `owned=True`, each rank owns a fixed set of rows and shuffles
    only these rows. In Vishnu et al. 2016, arXiv 1603.02339, rank 0 reads the samples and scatters
    them. With `owned=True`, a global batch consists of the rows that all ranks have drawn from
    their own rows.

    Args:
        rows: Number of rows of the data set.
        batch_size: Number of rows of a global batch; the last batch of an epoch may be smaller.
        capacities: Weights of the ranks, one number for each rank. Each rank's share of a batch is
            proportional to the rank's weight.
        seed: Seed of the random permutations.
        steps: Maximum number of steps per epoch; None: no limit.
        owned: Whether each rank uses the same set of rows during the whole run.
        shards: Name of the partition that assigns rows to ranks with `owned=True`, such as "iid".
        labels: Labels of the rows, needed for the partitions "by_label" and "dirichlet(α)". Without
            labels, a plan by label can only compute the sizes of the shards.
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
        """Number of global batches in one epoch."""
        full = -(-self.rows // self.batch_size)
        return full if self.steps is None else min(full, self.steps)

    def sizes(self, step: int) -> list[int]:
        """Return the number of rows that each rank gets from the batch of a step."""
        batch = min(self.batch_size, self.rows - step * self.batch_size)
        return np.diff(cut(batch, self.capacities)).tolist()

    def own_rows(self, rank: int) -> np.ndarray:
        """Return the indices of the rows that `rank` owns during the run (with `owned=True`)."""
        return self._partition[rank]

    @cached_property
    def _partition(self) -> list[np.ndarray]:
        labels = self.rows if self.labels is None else self.labels
        return partition_samples(labels, self._counts, self.shards, self.seed)

    @cached_property
    def _counts(self) -> list[int]:
        """Number of rows that each rank owns (with `owned=True`)."""
        full = -(-self.rows // self.batch_size)
        counts: list[int] = np.sum([self.sizes(step) for step in range(full)], axis=0).tolist()
        return counts

    def local(self, rank: int, epoch: int) -> list[np.ndarray]:
        """Return the indices of the rows of `rank`, one array per step; an array may be empty."""
        if self.owned:
            rows = self.own_rows(rank)
            return [rows[places] for places in self.places(rank, epoch)]
        # Ranks need not exchange the permutation, because each rank draws it from the same seed.
        order = np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        result = []
        for step in range(self.steps_per_epoch):
            batch = order[step * self.batch_size : (step + 1) * self.batch_size]
            ends_of_batch = cut(len(batch), self.capacities)
            result.append(batch[ends_of_batch[rank] : ends_of_batch[rank + 1]])
        return result

    def places(self, rank: int, epoch: int) -> list[np.ndarray]:
        """Return the batch rows of `rank` in each step, as indices into the rank's own rows."""
        # The seed includes the rank, because with the same seed all ranks would draw the same
        # permutation.
        rng = np.random.default_rng([self.seed, epoch, rank])
        places = rng.permutation(self._counts[rank])
        ends = np.cumsum([self.sizes(step)[rank] for step in range(self.steps_per_epoch)])
        return np.split(places[: ends[-1]], ends[:-1])

    def global_batches(self, epoch: int) -> list[np.ndarray]:
        """Return the global batch of each step: the row indices of all ranks in rank order."""
        parts = [self.local(rank, epoch) for rank in range(len(self.capacities))]
        return [np.concatenate(step) for step in zip(*parts, strict=True)]
