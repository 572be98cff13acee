"""Selection of the weight blocks for the next round, by priority, in turn or at random."""

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
    r"""Select the blocks of each round so that no two of them depend on each other.

    Let \(\delta_j\) be the most recent change of block j. Let \(a_j\) be the number of rounds since
    block j was last selected. Priority selection draws block j with probability \(p_j\):

    \[p_j \propto a_j \bigl(|\delta_j| + \eta \max_k |\delta_k|\bigr).\]

    Blocks that were never selected come first. A block that depends on a selected block waits for a
    later round. The next block in the order takes the waiting block's place.

    Args:
        count: Total number of blocks.
        parallel: Maximum number of blocks in a round.
        select: Rule of selection: "priority", "round_robin" (longest wait first), or "random"
            (uniform).
        depends: Boolean matrix of shape (count, count); None means no dependence. The value True
            marks two blocks that must not change in the same round.
        floor: The constant η, which gives blocks with little change a chance of selection.
        seed: Random seed; equal seeds give equal selections.

    Source: S. Lee, J. K. Kim, X. Zheng, Q. Ho, G. Gibson, E. Xing: On model parallelization and
    scheduling strategies for distributed machine learning, NIPS 2014 (STRADS). Difference from the
    paper: η is multiplied by the largest change, because all changes shrink to zero at the optimum.
    Priority selection uses the waiting time \(a_j\) as a factor. Without \(a_j\), a block that once
    did not move would never be drawn again. If a block must wait, the next independent block takes
    its place.
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
        # The array `_order` contains block numbers, with the block that waits longest first.
        self._order = np.arange(count)
        # The array `_chosen` contains, for each block, the number of the round that last selected
        # the block.
        self._chosen = np.zeros(count)
        self._round = 0
        # The recorded change of a block is infinite until a round has selected the block.
        self._changes = np.full(count, np.inf)

    def next(self) -> NDArray[np.intp]:
        """Return the sorted numbers of the blocks of the next round."""
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
        # The array is copied, because a saved state refers to the old array.
        self._chosen = self._chosen.copy()
        self._chosen[chosen] = self._round
        self._round += 1
        return np.sort(np.array(chosen, np.intp))

    def learn(self, chosen: Sequence[int] | NDArray[np.intp], changes: Sequence[float]) -> None:
        """Record how much the weights of the selected blocks changed in their round."""
        # The array is copied, because a saved state refers to the old array.
        self._changes = self._changes.copy()
        self._changes[chosen] = np.abs(changes)

    def _candidates(self) -> NDArray[np.intp]:
        """Return the numbers of all blocks in the order in which they should be selected."""
        if self._select == "round_robin":
            return self._order
        if self._select == "random":
            return self._random.permutation(len(self._order))
        # By the Gumbel trick, sorting by weight plus noise is a weighted random draw without
        # replacement.
        noise = self._random.gumbel(size=len(self._order))
        selected_before = np.isfinite(self._changes)
        moved, waited = np.where(selected_before, self._changes, 0.0), self._round - self._chosen
        largest = moved.max()
        with np.errstate(divide="ignore"):
            weight = np.log(waited * (moved + self._floor * largest))
        weight = np.where(selected_before & (largest > 0), weight, 0.0)
        # The last key of `lexsort` counts most, so blocks that were never selected come first.
        return np.lexsort((-(weight + noise), selected_before))


def couplings(products: Matrix, ends: Sequence[int]) -> Matrix:
    r"""Return the coupling strength of each pair of blocks, computed from the loss's curvature.

    \[c_{ab} = \|H_{ab}\| / \sqrt{\|H_{aa}\|\,\|H_{bb}\|}\]

    Entry (a, b) of the result is the larger of \(c_{ab}\) and \(c_{ba}\). The matrix \(H_{ab}\) is
    a block of the Hessian H. An example is a linear model with squared errors and one weight per
    block. Entry (a, b) of the result is then the correlation of two data columns. Scheduled lasso
    also uses the correlation of data columns.

    Args:
        products: Matrix of shape (blocks, weights); row a is the Hessian times one vector. The
            vector for row a is ±1 on block a and 0 elsewhere.
        ends: Offsets of the block boundaries in the flat weights; the list has blocks + 1 numbers.

    Returns: Matrix of shape (blocks, blocks), with 0 on the diagonal. The coupling with a block
        without curvature is also 0.
    """
    norms = np.sqrt(np.add.reduceat(products**2, ends[:-1], axis=1))
    roots = np.sqrt(np.diag(norms))
    scale = np.outer(roots, roots)
    coupling = np.divide(norms, scale, out=np.zeros_like(norms), where=scale > 0)
    np.fill_diagonal(coupling, 0.0)
    return np.maximum(coupling, coupling.T)
