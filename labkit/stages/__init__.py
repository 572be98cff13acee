"""Models cut into stages: where a cut is possible, where it pays, and what runs on each rank."""

from labkit.stages.chain import Chain, split_model
from labkit.stages.delayed import Delayed
from labkit.stages.inference import Inference
from labkit.stages.ledger import Ledger
from labkit.stages.links import Links
from labkit.stages.open_time import open_time
from labkit.stages.partition import by_hand, by_parameters, cheapest
from labkit.stages.probe import block_seconds, kept_bytes
from labkit.stages.recurrent import RecurrentStage
from labkit.stages.runner import Batch, Runner
from labkit.stages.stage import Stage
from labkit.stages.whole import Whole

__all__ = [
    "Batch",
    "Chain",
    "Delayed",
    "Inference",
    "Ledger",
    "Links",
    "RecurrentStage",
    "Runner",
    "Stage",
    "Whole",
    "block_seconds",
    "by_hand",
    "by_parameters",
    "cheapest",
    "kept_bytes",
    "open_time",
    "split_model",
]
