"""Closed forms: time of every allreduce, by the textbook and by this network model."""

from __future__ import annotations

from labkit.network import Network
from labkit.schedules import Cost, named


def textbook(name: str, size: int) -> Cost:
    """The form that textbooks give, p ranks; a fold (`folded`) is added where p ≠ 2ᵐ.

    Raises: InvalidInput, for a name without a form.
    Source: Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009.
    """
    return named(name).cost(size)


def modelled(name: str, size: int) -> tuple[Cost, ...]:
    """The ways through a schedule on one switch; `simulate` takes exactly the slowest of them.

    So it is at every size on links that serve one message after the other, and on shared links
    wherever no rank sends early into another's round: always with powers of two. Elsewhere, such
    as a tree of 3 or a butterfly of 6, messages of two rounds share a link, and no form is known.

    They differ from the textbook where a rank hands all messages of a round to its link, which
    sends them one behind the other: α is paid once a round, not p - 1 times; and where the number
    of ranks is no power of two. Each schedule says beside its drawing how.

    Raises: InvalidInput, for a name without a form.
    """
    return named(name).ways(size)


def closed_form(name: str, size: int, nbytes: float, network: Network, gamma: float = 0.0) -> float:
    """Time in s of an allreduce as `modelled`: the slowest of its ways."""
    return max(way.seconds(nbytes, network, gamma) for way in modelled(name, size))
