"""Networks: what they are (`Network`), and their links at work (`Links`)."""

from labkit.network.links import Links, Transfers
from labkit.network.model import PRESETS, Network, Slowdown

__all__ = ["PRESETS", "Links", "Network", "Slowdown", "Transfers"]
