"""Networks: what they are (`Network`), and how messages share their links."""

from labkit.network.carrier import Carrier, carrier
from labkit.network.flows import FREE, Flows, drained
from labkit.network.links import Links, Transfers
from labkit.network.model import PRESETS, Network, Slowdown
from labkit.network.queues import Queues
from labkit.network.sharing import max_min
from labkit.network.uncontended import Uncontended

__all__ = [
    "FREE",
    "PRESETS",
    "Carrier",
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
]
