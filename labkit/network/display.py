"""A network: what its links carry, and who is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.common.html import card, folded, line, pairs, table
from labkit.common.units import seconds_text

if TYPE_CHECKING:
    from labkit.network import Network

MANY = 12  # links that are shown unfolded
_UNITS = ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s"), (1.0, "b/s"))


def network_html(network: Network) -> str:
    """Latency and bandwidth, hosts or links, slow ranks, and what a message of 1 MiB takes."""
    rows = {
        "latency": seconds_text(network.latency),
        "bandwidth of a link": rate_text(network.bandwidth),
        "1 MiB over one link": seconds_text(network.latency + 2**20 / network.bandwidth),
    }
    if network.jitter:
        rows["jitter"] = f"up to {seconds_text(network.jitter)} more, seed {network.seed}"
    if network.hosts is not None:
        rows |= _hosts(network)
    parts = [pairs(rows)]
    if network.links is not None:
        parts.append(_links(network))
    if network.slow:
        parts.append(_slow(network))
    if network.hosts is None and network.links is None:
        parts.append(line("every rank has one link to a switch that never blocks"))
    return card(f"Network {network.name}".strip(), *parts)


def rate_text(bandwidth: float) -> str:
    """Bytes/s as links are sold, in bits, and as buffers are counted.

    >>> rate_text(125e6)
    '1 Gb/s (125 MB/s)'
    """
    bits = 8 * bandwidth
    size, unit = next((pair for pair in _UNITS if bits >= pair[0]), _UNITS[-1])
    return f"{bits / size:.3g} {unit} ({bandwidth / 1e6:.3g} MB/s)"


def _hosts(network: Network) -> dict[str, str]:
    hosts = network.hosts
    told = f"{hosts} ranks each" if isinstance(hosts, int) else "; ".join(map(str, hosts or ()))
    rows = {"hosts": f"{told}; the ranks of one share its uplink"}
    if network.host_latency is not None:
        rows["latency in a host"] = seconds_text(network.host_latency)
    if network.host_bandwidth is not None:
        rows["bandwidth in a host"] = rate_text(network.host_bandwidth)
    return rows


def _links(network: Network) -> str:
    links = network.links or {}
    rows = [[f"{one} to {other}", rate_text(rate)] for (one, other), rate in links.items()]
    shown = table(rows, ["link", "bandwidth"])
    return shown if len(rows) <= MANY else folded(f"{len(rows)} links", shown)


def _slow(network: Network) -> str:
    rows = [
        [f"rank {rank}", f"{slow.compute:g} ×", f"{slow.transfer:g} ×", slow.law]
        for rank, slow in sorted(network.slow.items())
    ]
    return table(rows, ["slow", "compute", "transfer", "law"])
