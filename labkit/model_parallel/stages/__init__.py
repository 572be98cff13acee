"""Models cut into stages: where a cut is possible, where it pays, and what runs on each rank."""

from labkit.model_parallel.stages.forward_only import Inference
from labkit.model_parallel.stages.late_gradients import Delayed
from labkit.model_parallel.stages.ledger import Ledger
from labkit.model_parallel.stages.microbatches import Batch
from labkit.model_parallel.stages.model_blocks import INPUTS, Blocks, Chain, Parts, split_model
from labkit.model_parallel.stages.open_time import open_time
from labkit.model_parallel.stages.passing import Links, OwnLosses
from labkit.model_parallel.stages.probe import block_passes, block_seconds, kept_bytes
from labkit.model_parallel.stages.recurrent import RecurrentStage
from labkit.model_parallel.stages.runner import Runner
from labkit.model_parallel.stages.stage import Stage
from labkit.schedules.pipeline.partition import by_hand, by_parameters, cheapest

__all__ = [
    "INPUTS",
    "Batch",
    "Blocks",
    "Chain",
    "Delayed",
    "Inference",
    "Ledger",
    "Links",
    "OwnLosses",
    "Parts",
    "RecurrentStage",
    "Runner",
    "Stage",
    "block_passes",
    "block_seconds",
    "by_hand",
    "by_parameters",
    "cheapest",
    "kept_bytes",
    "open_time",
    "split_model",
]
