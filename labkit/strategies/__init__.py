"""Strategies: what workers exchange, and when; one a file."""

from labkit.strategies.allreduce import AllReduce
from labkit.strategies.asynchronous_diloco import AsynchronousDiLoCo
from labkit.strategies.averaging import ParameterAveraging
from labkit.strategies.codistillation import Codistillation
from labkit.strategies.delayed import DelayedGradients
from labkit.strategies.downpour import Downpour
from labkit.strategies.elastic import ElasticAveraging
from labkit.strategies.gossip import Gossip
from labkit.strategies.layerwise import Layerwise
from labkit.strategies.locally_connected import LocallyConnected
from labkit.strategies.parameter_server import ParameterServer
from labkit.strategies.peer import Peer
from labkit.strategies.pipeline import Pipeline
from labkit.strategies.scheduled_blocks import ScheduledBlocks
from labkit.strategies.stale import SoftSync, StaleSynchronous
from labkit.strategies.strategy import (
    Batch,
    Predicted,
    Predictor,
    ProgramStrategy,
    Serving,
    Session,
    Stateful,
    Step,
    Strategy,
    TrainingState,
    Watcher,
)
from labkit.strategies.taxonomy import AXES, Cell
from labkit.strategies.tensor_parallel import TensorParallel
from labkit.strategies.tf_distribute import KINDS as TF_KINDS
from labkit.strategies.tf_distribute import LOCAL as TF_LOCAL
from labkit.strategies.tf_distribute import RING, TFDistribute

STRATEGIES: dict[str, type[Strategy]] = {
    kind.__name__: kind
    for kind in (
        *(AllReduce, Pipeline, Layerwise, DelayedGradients, TensorParallel, LocallyConnected),
        *(ParameterServer, StaleSynchronous, SoftSync, Downpour),
        *(ParameterAveraging, AsynchronousDiLoCo, ElasticAveraging, Gossip, Codistillation),
        *(ScheduledBlocks, TFDistribute, Peer),
    )
}

__all__ = [
    "AXES",
    "RING",
    "STRATEGIES",
    "TF_KINDS",
    "TF_LOCAL",
    "AllReduce",
    "AsynchronousDiLoCo",
    "Batch",
    "Cell",
    "Codistillation",
    "DelayedGradients",
    "Downpour",
    "ElasticAveraging",
    "Gossip",
    "Layerwise",
    "LocallyConnected",
    "ParameterAveraging",
    "ParameterServer",
    "Peer",
    "Pipeline",
    "Predicted",
    "Predictor",
    "ProgramStrategy",
    "ScheduledBlocks",
    "Serving",
    "Session",
    "SoftSync",
    "StaleSynchronous",
    "Stateful",
    "Step",
    "Strategy",
    "TFDistribute",
    "TensorParallel",
    "TrainingState",
    "Watcher",
]
