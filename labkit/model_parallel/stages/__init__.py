"""Models cut into stages: where a cut is possible, where it pays, and what runs on each rank."""

from labkit.model_parallel.stages.chain import Chain, split_model
from labkit.model_parallel.stages.delayed import Delayed
from labkit.model_parallel.stages.inference import Inference
from labkit.model_parallel.stages.ledger import Ledger
from labkit.model_parallel.stages.links import Links
from labkit.model_parallel.stages.open_time import open_time
from labkit.model_parallel.stages.partition import by_hand, by_parameters, cheapest
from labkit.model_parallel.stages.probe import block_seconds, kept_bytes
from labkit.model_parallel.stages.recurrent import RecurrentStage
from labkit.model_parallel.stages.runner import Batch, Runner
from labkit.model_parallel.stages.stage import Stage
from labkit.model_parallel.stages.whole import Whole

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
