"""Which blocks of a model's weights a round changes: by turns, by chance, or where most moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from labkit.common.state import record

Select = Literal["priority", "round_robin", "random"]
Matrix = NDArray[np.float64]


@record(
    *("_parallel", "_select", "_floor", "_depends", "_random", "_order", "_chosen"),
    *("_round", "_changes"),
)
class BlockRounds:
    r"""Chooses blocks for each round, no two of which depend on each other.

    By priority block j is drawn with a probability that grows with its last change and with the
    rounds a that it has waited since,

    \[p_j \propto a_j \bigl(|\delta_j| + \eta \max_k |\delta_k|\bigr),\]

    and a block that never was chosen comes before all others. A block that depends on one that is
    chosen already waits for another round, and the next one in the order takes its place.

    Args:
        count: of blocks.
        parallel: the most blocks of a round.
        select: "priority"; "round_robin": who has waited longest comes first; "random": anybody.
        depends: shape (count, count), whether two blocks must not change in one round; None: all
            may.
        floor: η.
        seed: all that have the same choose the same.

    Source: S. Lee, J. K. Kim, X. Zheng, Q. Ho, G. Gibson, E. Xing: On model parallelization and
    scheduling strategies for distributed machine learning, NIPS 2014 (STRADS). Differs from it: η
    is relative to the largest change, as changes shrink to nothing at the optimum; waiting counts,
    as a block that did not move once would else be forgotten; and places of blocks that must wait
    are filled.
    """

    def __init__(
        self,
        count: int,
        parallel: int,
        select: Select = "priority",
        depends: NDArray[np.bool_] | None = None,
        floor: float = 0.01,
        seed: int = 0,
    ) -> None:
        self._parallel, self._select, self._floor = parallel, select, floor
        self._depends = depends
        self._random = np.random.default_rng(seed)
        self._order = np.arange(count)  # who has waited longest comes first
        self._chosen = np.zeros(count)  # in which round, last
        self._round = 0
        self._changes = np.full(count, np.inf)  # of those that never were chosen

    def next(self) -> NDArray[np.intp]:
        """The numbers of the blocks of the next round, sorted."""
        order = self._candidates()
        chosen: list[int] = []
        free = np.ones(len(order), bool)
        for block in order:
            if len(chosen) == self._parallel:
                break
            if free[block]:
                chosen.append(block)
                if self._depends is not None:
                    free &= ~self._depends[block]
        waits = ~np.isin(self._order, chosen)
        self._order = np.concatenate([self._order[waits], chosen]).astype(np.intp)
        self._chosen = self._chosen.copy()  # a state that somebody keeps has the last one
        self._chosen[chosen] = self._round
        self._round += 1
        return np.sort(np.array(chosen, np.intp))

    def learn(self, chosen: Sequence[int] | NDArray[np.intp], changes: Sequence[float]) -> None:
        """How much the blocks of a round have changed."""
        self._changes = self._changes.copy()  # as above
        self._changes[chosen] = np.abs(changes)

    def _candidates(self) -> NDArray[np.intp]:
        """All blocks, whoever comes first before the others."""
        if self._select == "round_robin":
            return self._order
        if self._select == "random":
            return self._random.permutation(len(self._order))
        # Gumbel's trick: sorted like this they are drawn one by one, without putting back.
        noise = self._random.gumbel(size=len(self._order))
        known = np.isfinite(self._changes)
        moved, waited = np.where(known, self._changes, 0.0), self._round - self._chosen
        most = moved.max()
        with np.errstate(divide="ignore"):
            weight = np.log(waited * (moved + self._floor * most))
        weight = np.where(known & (most > 0), weight, 0.0)
        # Two keys: strangers first.
        return np.lexsort((-(weight + noise), known))


def couplings(products: Matrix, ends: Sequence[int]) -> Matrix:
    r"""How strongly blocks depend on each other, from the curvature of the loss.

    \[c_{ab} = \|H_{ab}\| / \sqrt{\|H_{aa}\|\,\|H_{bb}\|},\]

    the larger one of (a, b) and (b, a). For blocks of one weight of a linear model under squared
    errors this is the correlation of two columns, as scheduled lasso takes it.

    Args:
        products: shape (blocks, weights); row a is the Hessian times a vector of ±1 on block a, 0
            elsewhere.
        ends: where blocks begin and end in the flat weights; blocks + 1 numbers.

    Returns:
        shape (blocks, blocks); 0 where one of the two has no curvature, and on the diagonal.
    """
    norms = np.sqrt(np.add.reduceat(products**2, ends[:-1], axis=1))
    own = np.sqrt(np.diag(norms))
    scale = np.outer(own, own)
    found = np.divide(norms, scale, out=np.zeros_like(norms), where=scale > 0)
    np.fill_diagonal(found, 0.0)
    return np.maximum(found, found.T)
