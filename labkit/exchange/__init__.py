"""The gradient exchange, which computes the ranks' mean gradients inside the training step."""

from labkit.exchange.autotune import SCHEDULES
from labkit.exchange.comm_thread import Timeline, timeline_rows
from labkit.exchange.compressed import BucketLayer, ReductionRecord
from labkit.exchange.exchange import BUCKET_BYTES, Exchange
from labkit.exchange.gradient import BadNumbers, BadValues, Guard, Policy, weight_by_rows
from labkit.exchange.reduction import NotFinite

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
