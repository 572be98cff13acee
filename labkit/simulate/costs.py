"""Closed forms: time of every allreduce, by the textbook and by this network model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from labkit.common.errors import InvalidInput
from labkit.network import Network

Form = TypeVar("Form")


@dataclass(frozen=True)
class Cost:
    """a·α + b·nβ + c·nγ: α latency (s), β s a byte, γ s to add a byte, n bytes."""

    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0

    def seconds(self, nbytes: float, network: Network, gamma: float = 0.0) -> float:
        """Time of a buffer of `nbytes` on one switch with these links; gamma: s a byte."""
        per_byte = self.beta / network.bandwidth + self.gamma * gamma
        return self.alpha * network.latency + per_byte * nbytes

    def crossover(self, other: Cost, network: Network, gamma: float = 0.0) -> float | None:
        """The size in bytes at which both take as long; None where one is always ahead."""
        fixed = (self.alpha - other.alpha) * network.latency
        growth = (other.beta - self.beta) / network.bandwidth + (other.gamma - self.gamma) * gamma
        if growth == 0 or fixed / growth <= 0:
            return None
        return fixed / growth

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.alpha + other.alpha, self.beta + other.beta, self.gamma + other.gamma)


def textbook(name: str, size: int) -> Cost:
    """The form that textbooks give, p ranks; a fold (`folded`) is added where p ≠ 2ᵐ.

        all_to_all       (p - 1)(α + nβ + nγ)
        master_worker    2(p - 1)(α + nβ) + (p - 1)nγ
        tree             2⌈lg p⌉(α + nβ) + ⌈lg p⌉nγ
        round_robin      2(p - 1)α + 2(p - 1)/p nβ + (p - 1)/p nγ
        butterfly        lg p (α + nβ + nγ)
        rabenseifner     2 lg p α + 2(p - 1)/p nβ + (p - 1)/p nγ
        ring             2(p - 1)α + 2(p - 1)/p nβ + (p - 1)/p nγ
        hierarchical     tree of the larger host + ring of the two hosts
        spanning_trees   as round_robin (equal links: the trees are p stars)

    Raises: InvalidInput, for a name without a form.
    Source: Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009.
    """
    return _lookup(TEXTBOOK, name)(size)


def modelled(name: str, size: int) -> tuple[Cost, ...]:
    """The ways through a schedule on one switch; `simulate` takes exactly the slowest of them.

    Where they differ from the textbook, and why (F = ⌊lg p⌋):

    - all_to_all, master_worker, round_robin, spanning_trees: a rank hands all messages of a round
      to its link, which sends them one behind the other: α is paid once a round, not p - 1 times.
    - tree, p ≠ 2ᵐ: no way through the tree has ⌈lg p⌉ hops; the longest has F. But the root's
      link still carries ⌈lg p⌉ messages each way, so that one more nβ (or, where adding takes
      longer, nγ) up and nβ down come to F(2α + 2nβ + nγ).
    - butterfly, p = 2ᶠ + e: ranks that are not folded send early, so that nobody waits for all
      F + 2 hops: either the last of the unfolded ends after F + 1, or a hidden rank gets the
      result after 2 + ⌈lg e⌉ hops, behind F - ⌈lg e⌉ messages on its neighbour's link.
    - rabenseifner, ring: as in the textbook.
    - hierarchical: with the tree as here.

    Raises: InvalidInput, for a name without a form.
    """
    return _lookup(MODELLED, name)(size)


def closed_form(name: str, size: int, nbytes: float, network: Network, gamma: float = 0.0) -> float:
    """Time in s of an allreduce as `modelled`: the slowest of its ways."""
    return max(way.seconds(nbytes, network, gamma) for way in modelled(name, size))


def _lookup(forms: Mapping[str, Form], name: str) -> Form:
    if name not in forms:
        raise InvalidInput(f"no closed form for {name!r}: choose one of {', '.join(forms)}")
    return forms[name]


def _floor_lg(size: int) -> int:
    return size.bit_length() - 1


def _ceil_lg(size: int) -> int:
    return (size - 1).bit_length()


def _ring(size: int) -> Cost:
    steps = size - 1
    return Cost(2 * steps, 2 * steps / size, steps / size)


def _direct(size: int) -> Cost:
    return Cost(2 * (size > 1), _ring(size).beta, _ring(size).gamma)


def _fold(size: int) -> Cost:
    return Cost(2, 2, 1) if _floor_lg(size) < _ceil_lg(size) else Cost()


def _butterfly(size: int) -> Cost:
    rounds = _floor_lg(size)
    return Cost(rounds, rounds, rounds) + _fold(size)


def _rabenseifner(size: int) -> Cost:
    volume = _ring(1 << _floor_lg(size))
    return Cost(2 * _floor_lg(size), volume.beta, volume.gamma) + _fold(size)


def _tree(size: int) -> Cost:
    depth = _ceil_lg(size)
    return Cost(2 * depth, 2 * depth, depth)


def _hierarchical(size: int) -> Cost:
    return _tree(-(-size // 2)) + _ring(min(size, 2))


def _tree_ways(size: int) -> tuple[Cost, ...]:
    depth = _floor_lg(size)
    hops = Cost(2 * depth, 2 * depth, depth)
    if depth == _ceil_lg(size):
        return (hops,)
    return hops + Cost(beta=2), hops + Cost(beta=1, gamma=1)


def _butterfly_ways(size: int) -> tuple[Cost, ...]:
    rounds = _floor_lg(size)
    extra = size - (1 << rounds)
    if not extra:
        return (_butterfly(size),)
    met = _ceil_lg(extra)  # rounds in which folded ranks wait for one another
    hops, alone = Cost(met + 2, met + 2, met + 1), rounds - met
    last = Cost(rounds + 1, rounds + 1, rounds + 1)
    return last, hops + Cost(beta=alone), hops + Cost(gamma=alone)


def _hierarchical_ways(size: int) -> tuple[Cost, ...]:
    return tuple(way + _ring(min(size, 2)) for way in _tree_ways(-(-size // 2)))


TEXTBOOK: dict[str, Callable[[int], Cost]] = {
    "all_to_all": lambda p: Cost(p - 1, p - 1, p - 1),
    "master_worker": lambda p: Cost(2 * (p - 1), 2 * (p - 1), p - 1),
    "tree": _tree,
    "round_robin": _ring,
    "butterfly": _butterfly,
    "rabenseifner": _rabenseifner,
    "ring": _ring,
    "hierarchical": _hierarchical,
    "spanning_trees": _ring,
}

MODELLED: dict[str, Callable[[int], tuple[Cost, ...]]] = {
    "all_to_all": lambda p: (Cost(p > 1, p - 1, p - 1),),
    "master_worker": lambda p: (Cost(2 * (p > 1), 2 * (p - 1), p - 1),),
    "tree": _tree_ways,
    "round_robin": lambda p: (_direct(p),),
    "butterfly": _butterfly_ways,
    "rabenseifner": lambda p: (_rabenseifner(p),),
    "ring": lambda p: (_ring(p),),
    "hierarchical": _hierarchical_ways,
    "spanning_trees": lambda p: (_direct(p),),
}
