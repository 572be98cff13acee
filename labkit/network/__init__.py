"""Models of networks: latency, bandwidth, topology, link sharing, slow ranks, and faults."""

from labkit.network.carrier import Carrier, carrier
from labkit.network.compute_time import ComputeTime
from labkit.network.fault import Fault
from labkit.network.flows import FREE, Flows, finish_times, max_min
from labkit.network.links import FifoLinks, Links, Transfers, Uncontended
from labkit.network.network import PRESETS, Network, Slowdown, relative_compute_times

__all__ = [
    "FREE",
    "PRESETS",
    "Carrier",
    "ComputeTime",
    "Fault",
    "FifoLinks",
    "Flows",
    "Links",
    "Network",
    "Slowdown",
    "Transfers",
    "Uncontended",
    "carrier",
    "finish_times",
    "max_min",
    "relative_compute_times",
]
