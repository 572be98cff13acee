"""The partition of samples among workers: at random ("iid"), or skewed by label."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
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
    \(q \sim \mathrm{Dir}(\alpha p)\) for each worker, where p are the label proportions of the
    whole data set. The partition "dirichlet(α)" then draws the samples of each worker according to
    the worker's label proportions q. If all samples of a label have been drawn, this label is no
    longer drawn, so the last shards receive the remaining samples. For α → ∞ all shards have the
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
    stock = np.split(order, np.cumsum(counts)[:-1])  # the samples of a label, in random order
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
        if not weights.sum():  # no label with a positive share has samples left
            weights = (available - counts).astype(np.float64)
        draws = rng.multinomial(missing, weights / weights.sum())
        counts = np.minimum(counts + draws, available)
    return counts
