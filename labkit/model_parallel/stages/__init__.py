"""Models divided into stages: possible cuts, balanced partitions, and execution on each rank."""

from labkit.model_parallel.stages.footprint import MemoryLedger
from labkit.model_parallel.stages.model_blocks import (
    INPUTS,
    BlockChain,
    Blocks,
    StageModels,
    split_model,
)
from labkit.model_parallel.stages.passing import OwnLosses, StageMessages
from labkit.model_parallel.stages.probe import block_passes, block_seconds, kept_bytes
from labkit.model_parallel.stages.recurrent import RecurrentStage, open_time
from labkit.model_parallel.stages.runner import Delayed, Inference, Runner
from labkit.model_parallel.stages.stage import Batch, Stage
from labkit.schedules.pipeline_stages import balance_costs, balance_parameters, explicit_partition

__all__ = [
    "INPUTS",
    "Batch",
    "BlockChain",
    "Blocks",
    "Delayed",
    "Inference",
    "MemoryLedger",
    "OwnLosses",
    "RecurrentStage",
    "Runner",
    "Stage",
    "StageMessages",
    "StageModels",
    "balance_costs",
    "balance_parameters",
    "block_passes",
    "block_seconds",
    "explicit_partition",
    "kept_bytes",
    "open_time",
    "split_model",
]
