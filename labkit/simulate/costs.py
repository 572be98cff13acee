"""Formulas for the time of every allreduce: from textbooks, and from labkit's network model."""

from __future__ import annotations

from labkit.network import Network
from labkit.schedules import AlphaBetaCost, get_collective, tree

# Schedules in which, for any number of ranks, no rank sends while another rank is still in an
# earlier round.
EVEN = (
    *("all_to_all", "master_worker", "round_robin", "ring", "spanning_trees"),
    *("allgather_ring", "reduce_scatter_ring"),
)


def textbook(name: str, size: int) -> AlphaBetaCost:
    """Return the textbook cost on p ranks, plus the cost of folding if the schedule needs folding.

    Raises:
        InvalidInput: If the schedule has no formula.

    Source: Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009.
    """
    return get_collective(name).cost(size)


def modelled(name: str, size: int) -> tuple[AlphaBetaCost, ...]:
    """Return the costs of the critical paths on one switch; the slowest gives the simulated time.

    The time of the slowest path is exact for any number of ranks if each link serves one message at
    a time. If messages share links, this time is exact unless a rank sends while another rank's
    earlier round uses the same link. The time is always exact if the number of ranks is a power of
    two. In other cases, messages of two rounds may share a link, and no formula is known. Examples
    are a tree of 3 ranks and a butterfly of 6 ranks.

    The costs of the critical paths differ from the textbook in two cases. First, if a rank submits
    all messages of a round to its link at once, α counts once per round, not p - 1 times. Second,
    if the number of ranks is not a power of two, the critical paths are different, as each schedule
    documents.

    Raises:
        InvalidInput: If the schedule has no formula.
    """
    return get_collective(name).critical_paths(size)


def closed_form(name: str, size: int, nbytes: float, network: Network, gamma: float = 0.0) -> float:
    """Return the time in s of an allreduce by formula: the slowest path of `modelled`."""
    return max(path.seconds(nbytes, network, gamma) for path in modelled(name, size))


def exact_form(
    name: str, size: int, nbytes: float, network: Network, gamma: float = 0.0
) -> float | None:
    r"""Return by formula the time in s that `simulate` would compute; None if no formula is exact.

    On one switch with equal links, the formula is `closed_form`. For the schedules in `EVEN`,
    `closed_form` is exact for any number of ranks. For all other schedules, it is exact if the
    number of ranks is a power of two, or if links serve one message at a time.

    On h equal hosts with P ranks each, there are formulas for two schedules. The time of
    "hierarchical" is that of its tree inside a host plus that of its ring between hosts.
    With a buffer of n bytes, γ = 0 and shared links, "two_level" takes \(2 (α_i + (P - 1) n / P b)
    + 2 (h - 1) (α + n / P h c)\). Here \(α_i\) and b are the latency and the bandwidth of a link
    inside a host. An uplink of bandwidth B is shared by P rings, so that each ring gets the
    bandwidth \(c = \min(b, B / P)\).
    """
    slow = any(s.transfer != 1.0 for s in network.stragglers.values())
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
    """Return the time in s on equal hosts of `ranks` ranks each; None if no formula is exact."""
    latency = network.latency if network.host_latency is None else network.host_latency
    inside = network.host_bandwidth or network.bandwidth
    if name == "hierarchical" and ranks & (ranks - 1) == 0:
        flat = {"hosts": None, "host_latency": None, "host_bandwidth": None}
        inner = network.model_copy(update=flat | {"latency": latency, "bandwidth": inside})
        outer = network.model_copy(update=flat | {"bandwidth": min(inside, network.bandwidth)})
        inside_hosts = max(
            path.seconds(nbytes, inner, gamma) for path in tree.critical_paths(ranks)
        )
        return inside_hosts + closed_form("ring", hosts, nbytes, outer, gamma)
    if name == "two_level" and network.sharing == "fair":
        part = nbytes / ranks
        piece = part / hosts
        ring_bandwidth = min(inside, network.bandwidth / ranks)
        gather = (latency + (ranks - 1) * part / inside) if ranks > 1 else 0.0
        between = 2 * (network.latency + piece / ring_bandwidth) + gamma * piece
        return 2 * gather + gamma * (ranks - 1) * part + (hosts - 1) * between
    return None
