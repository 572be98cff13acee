"""Strategies define what workers exchange, and when; each strategy is a class."""

from labkit.strategies.allreduce import AllReduce
from labkit.strategies.asynchronous_diloco import AsynchronousDiLoCo
from labkit.strategies.averaging import ParameterAveraging
from labkit.strategies.block_coordinate_descent import BlockCoordinateDescent
from labkit.strategies.codistillation import Codistillation
from labkit.strategies.downpour import Downpour
from labkit.strategies.elastic import ElasticAveraging
from labkit.strategies.external_framework import ExternalFramework
from labkit.strategies.gossip import Gossip
from labkit.strategies.intra_layer import SpatialParallel, TensorParallel
from labkit.strategies.parameter_server import ParameterServer
from labkit.strategies.pipeline import DelayedGradients, Layerwise, Pipeline
from labkit.strategies.stale import SoftSync, StaleSynchronous
from labkit.strategies.strategy import (
    STRATEGIES,
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
from labkit.strategies.tf_distribute import KINDS as TF_KINDS
from labkit.strategies.tf_distribute import LOCAL as TF_LOCAL
from labkit.strategies.tf_distribute import RING, TFDistribute

STRATEGIES.update(
    (kind.__name__, kind)
    for kind in (
        *(AllReduce, Pipeline, Layerwise, DelayedGradients, TensorParallel, SpatialParallel),
        *(ParameterServer, StaleSynchronous, SoftSync, Downpour),
        *(ParameterAveraging, AsynchronousDiLoCo, ElasticAveraging, Gossip, Codistillation),
        *(BlockCoordinateDescent, TFDistribute, ExternalFramework),
    )
)

__all__ = [
    "AXES",
    "RING",
    "STRATEGIES",
    "TF_KINDS",
    "TF_LOCAL",
    "AllReduce",
    "AsynchronousDiLoCo",
    "Batch",
    "BlockCoordinateDescent",
    "Cell",
    "Codistillation",
    "DelayedGradients",
    "Downpour",
    "ElasticAveraging",
    "ExternalFramework",
    "Gossip",
    "Layerwise",
    "ParameterAveraging",
    "ParameterServer",
    "Pipeline",
    "Predicted",
    "Predictor",
    "ProgramStrategy",
    "Serving",
    "Session",
    "SoftSync",
    "SpatialParallel",
    "StaleSynchronous",
    "Stateful",
    "Step",
    "Strategy",
    "TFDistribute",
    "TensorParallel",
    "TrainingState",
    "Watcher",
]
