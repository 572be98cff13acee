"""Models cut into stages: where a cut is possible, where it pays, and what runs on each rank."""

from labkit.stages.chain import Chain, split_model
from labkit.stages.delayed import Delayed
from labkit.stages.links import Links
from labkit.stages.partition import by_hand, by_parameters, cheapest
from labkit.stages.runner import Batch, Runner
from labkit.stages.stage import Stage

__all__ = [
    "Batch",
    "Chain",
    "Delayed",
    "Links",
    "Runner",
    "Stage",
    "by_hand",
    "by_parameters",
    "cheapest",
    "split_model",
]
