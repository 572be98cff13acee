"""Networks: what they are (`Network`), and how messages share their links."""

from labkit.network.carrier import Carrier, carrier
from labkit.network.compute_time import ComputeTime
from labkit.network.fault import Fault
from labkit.network.fifo_links import Queues
from labkit.network.flows import FREE, Flows, drained, max_min
from labkit.network.links import Links, Transfers, Uncontended
from labkit.network.model import PRESETS, Network, Slowdown, slower_than_fastest

__all__ = [
    "FREE",
    "PRESETS",
    "Carrier",
    "ComputeTime",
    "Fault",
    "Flows",
    "Links",
    "Network",
    "Queues",
    "Slowdown",
    "Transfers",
    "Uncontended",
    "carrier",
    "drained",
    "max_min",
    "slower_than_fastest",
]
