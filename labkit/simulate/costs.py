"""Closed forms: time of every allreduce, by the textbook and by this network model."""

from __future__ import annotations

from labkit.network import Network
from labkit.schedules import Cost, named, tree

# In which no rank sends early into another's round, however many there are.
EVEN = (
    *("all_to_all", "master_worker", "round_robin", "ring", "spanning_trees"),
    *("allgather_ring", "reduce_scatter_ring"),
)


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


def exact_form(
    name: str, size: int, nbytes: float, network: Network, gamma: float = 0.0
) -> float | None:
    r"""What `simulate` takes, s, without its rounds; None where only these tell.

    On one switch with equal links `closed_form`, where it is exact: of these schedules at every
    size (`EVEN`), of all at every power of two and on links that serve one message after the other.
    On h equal hosts of P ranks each two more: "hierarchical" is its tree
    inside a host and its ring between them; "two_level", on shared links,
    \(2 (α_i + (P - 1) n / P b) + 2 (h - 1) (α + n / P h c)\), where b is a link inside a host and
    \(c = \min(b, B / P)\) what is left of an uplink B for one of P rings.
    """
    slow = any(each.transfer != 1.0 for each in network.slow.values())
    if network.links is not None or network.jitter or slow:
        return None
    if network.hosts is None:
        power = size & (size - 1) == 0
        exact = power or network.sharing == "fifo" or name in EVEN
        return closed_form(name, size, nbytes, network, gamma) if exact else None
    if not isinstance(network.hosts, int) or size % network.hosts:
        return None
    return _on_hosts(name, network.hosts, size // network.hosts, nbytes, network, gamma)


def _on_hosts(
    name: str, ranks: int, hosts: int, nbytes: float, network: Network, gamma: float
) -> float | None:
    """Of so many equal hosts with so many ranks each."""
    latency = network.latency if network.host_latency is None else network.host_latency
    inside = network.host_bandwidth or network.bandwidth
    if name == "hierarchical" and ranks & (ranks - 1) == 0:
        flat = {"hosts": None, "host_latency": None, "host_bandwidth": None}
        near = network.model_copy(update=flat | {"latency": latency, "bandwidth": inside})
        far = network.model_copy(update=flat | {"bandwidth": min(inside, network.bandwidth)})
        up_and_down = max(way.seconds(nbytes, near, gamma) for way in tree.ways(ranks))
        return up_and_down + closed_form("ring", hosts, nbytes, far, gamma)
    if name == "two_level" and network.sharing == "fair":
        part = nbytes / ranks
        piece = part / hosts
        left = min(inside, network.bandwidth / ranks)
        gather = (latency + (ranks - 1) * part / inside) if ranks > 1 else 0.0
        between = 2 * (network.latency + piece / left) + gamma * piece
        return 2 * gather + gamma * (ranks - 1) * part + (hosts - 1) * between
    return None
