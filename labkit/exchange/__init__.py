"""Exchange: how the ranks' gradients meet inside the training step."""

from labkit.exchange.compressed import Layer, Seen
from labkit.exchange.exchange import BUCKET_BYTES, Exchange
from labkit.exchange.gradient import weighed
from labkit.exchange.guard import Bad, BadNumbers, Guard, Policy
from labkit.exchange.reduction import NotFinite
from labkit.exchange.schedules import SCHEDULES
from labkit.exchange.timeline import Timeline, timeline_rows

__all__ = [
    "BUCKET_BYTES",
    "SCHEDULES",
    "Bad",
    "BadNumbers",
    "Exchange",
    "Guard",
    "Layer",
    "NotFinite",
    "Policy",
    "Seen",
    "Timeline",
    "timeline_rows",
    "weighed",
]
