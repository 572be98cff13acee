"""The gradient exchange, which computes the ranks' mean gradients inside the training step."""

from labkit.exchange.compressed import BucketLayer, ReductionRecord
from labkit.exchange.exchange import BUCKET_BYTES, Exchange
from labkit.exchange.gradient import weight_by_rows
from labkit.exchange.guard import BadNumbers, BadValues, Guard, Policy
from labkit.exchange.reduction import NotFinite
from labkit.exchange.schedules import SCHEDULES
from labkit.exchange.timeline import Timeline, timeline_rows

__all__ = [
    "BUCKET_BYTES",
    "SCHEDULES",
    "BadNumbers",
    "BadValues",
    "BucketLayer",
    "Exchange",
    "Guard",
    "NotFinite",
    "Policy",
    "ReductionRecord",
    "Timeline",
    "timeline_rows",
    "weight_by_rows",
]
