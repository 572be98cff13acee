"""Closed forms: the time of every allreduce by the textbook and by labkit's network model."""

from __future__ import annotations

from labkit.network import Network
from labkit.schedules import AlphaBetaCost, get_collective, tree

# Schedules in which no rank runs ahead of another rank's round, for any number of ranks.
EVEN = (
    *("all_to_all", "master_worker", "round_robin", "ring", "spanning_trees"),
    *("allgather_ring", "reduce_scatter_ring"),
)


def textbook(name: str, size: int) -> AlphaBetaCost:
    """Return the textbook cost on p ranks, including folding (`folded`) if the schedule needs it.

    Raises:
        InvalidInput: If the schedule has no formula.

    Source: Thakur, Rabenseifner and Gropp 2005; Patarasuk and Yuan 2009.
    """
    return get_collective(name).cost(size)


def modelled(name: str, size: int) -> tuple[AlphaBetaCost, ...]:
    """Return the costs of the critical paths on one switch; `simulate` takes the slowest path.

    The slowest path is exact for any number of ranks on links that serve one message at a time. On
    shared links, this time is exact if no rank sends while another rank's earlier round uses the
    link. This condition always holds if the number of ranks is a power of two. In other cases,
    messages of two rounds share a link, and no closed form is known. Examples are a tree of 3 ranks
    and a butterfly of 6 ranks.

    The costs of the critical paths differ from the textbook in two cases. If a rank submits all
    messages of a round to its link at once, α counts once per round, not p - 1 times. If the number
    of ranks is not a power of two, the critical paths differ; each schedule documents how.

    Raises:
        InvalidInput: If the schedule has no formula.
    """
    return get_collective(name).critical_paths(size)


def closed_form(name: str, size: int, nbytes: float, network: Network, gamma: float = 0.0) -> float:
    """Return the time in s of an allreduce: the slowest path of `modelled`."""
    return max(path.seconds(nbytes, network, gamma) for path in modelled(name, size))


def exact_form(
    name: str, size: int, nbytes: float, network: Network, gamma: float = 0.0
) -> float | None:
    r"""Return the time in s that `simulate` would compute, from a formula; None if none is exact.

    On one switch with equal links, the formula is `closed_form`. `closed_form` is exact for the
    schedules in `EVEN` with any number of ranks. `closed_form` is exact for all schedules if the
    number of ranks is a power of two, or if links serve one message at a time.

    On h equal hosts with P ranks each, there are formulas for two schedules. The time of
    "hierarchical" is that of its tree inside a host plus that of its ring between hosts.
    With a buffer of n bytes and γ = 0, "two_level" takes on shared links \(2 (α_i + (P - 1) n / P
    b) + 2 (h - 1) (α + n / P h c)\). Here \(α_i\) and b are the latency and the bandwidth of a link
    inside a host. Each of P rings gets the bandwidth \(c = \min(b, B / P)\) of an uplink with
    bandwidth B.
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
    """Return the time in s on hosts with `ranks` ranks each; None if no formula is exact."""
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
