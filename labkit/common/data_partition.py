"""Which samples each worker has: alike ones, or by their labels."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

IID = "iid"
_DIRICHLET = re.compile(r"dirichlet\(([^()]+)\)")


def concentration(shards: str) -> float | None:
    """α of "dirichlet(α)"; None for "iid" and "by_label". Raises ValueError for anything else."""
    if shards in (IID, "by_label"):
        return None
    found = _DIRICHLET.fullmatch(shards)
    try:
        alpha = float(found[1]) if found else 0.0
    except ValueError:
        alpha = 0.0
    if not 1e-6 <= alpha < math.inf:
        raise ValueError(
            f"shards={shards!r} is not known; allowed: 'iid', 'by_label', or 'dirichlet(α)' with a "
            "number from 1e-6 on, such as 'dirichlet(0.3)'"
        )
    return alpha


def divided(
    labels: NDArray[Any] | int, sizes: Sequence[int], shards: str = IID, seed: int = 0
) -> list[NDArray[np.int64]]:
    r"""The samples of each worker: each sample in one shard, and shards as large as said.

    "iid": by lot. "by_label": sorted by label, and cut. "dirichlet(α)": each worker has shares
    \(q \sim \mathrm{Dir}(\alpha p)\) of the labels, where p are those of all samples, and draws its
    samples by them; of a label that is used up nothing is drawn, so the last shards are what the
    others have left. With α → ∞ shards are alike, with α → 0 each is of one label at first.

    Args:
        labels: whole numbers, one a sample; for "iid" how many samples there are will do.
        sizes: of the shards; they add up to the samples.
        shards: see above.
        seed: of the lots.

    Source: T.-M. H. Hsu, H. Qi, M. Brown: Measuring the effects of non-identical data distribution
    for federated visual classification, 2019, arXiv 1909.06335.
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
    stock = np.split(order, np.cumsum(counts)[:-1])  # by lot within a label
    taken = np.zeros_like(counts)
    found = []
    for size in sizes:
        draws = _drawn(rng, size, rng.dirichlet(alpha * counts / counts.sum()), counts - taken)
        parts = zip(stock, taken, taken + draws, strict=True)
        found.append(np.concatenate([own[start:stop] for own, start, stop in parts]))
        taken += draws
    return found


def _drawn(
    rng: np.random.Generator, size: int, shares: NDArray[np.float64], left: NDArray[np.int64]
) -> NDArray[np.int64]:
    """How many samples of each label: by these shares, as long as there are any left."""
    found = np.zeros_like(left)
    while missing := size - int(found.sum()):
        open_ = np.where(left > found, shares, 0.0)
        if not open_.sum():  # what this worker would have is used up
            open_ = (left - found).astype(np.float64)
        draws = rng.multinomial(missing, open_ / open_.sum())
        found = np.minimum(found + draws, left)
    return found
