from . import compression as compression
from . import datasets as datasets
from . import figures as figures
from . import models as models
from . import network as network
from . import schedules as schedules
from . import simulate as simulate
from . import strategies as strategies
from .bench.calibration_runs import calibrate
from .cluster import Cluster, predict, replay, run
from .common.errors import InvalidInput, LabkitError
from .compression import (
    DGC,
    QSGD,
    BFloat16,
    Chain,
    ErrorFeedback,
    Float16,
    Int8,
    OneBit,
    PowerSGD,
    RandomK,
    SignMajority,
    TernGrad,
    Threshold,
    TopK,
)
from .experiment import Experiment
from .figures import compare, reading, table
from .hosts import testbed
from .jobs.form import form
from .jobs.log import log
from .network import ComputeTime, Fault, Network, Slowdown
from .records import export as export
from .records.checkpoints import Checkpoint
from .records.run import Run, frame, load_runs
from .report import report
from .strategies import (
    AllReduce,
    AsynchronousDiLoCo,
    Codistillation,
    DelayedGradients,
    Downpour,
    ElasticAveraging,
    Gossip,
    Layerwise,
    LocallyConnected,
    ParameterAveraging,
    ParameterServer,
    Peer,
    Pipeline,
    ScheduledBlocks,
    SoftSync,
    StaleSynchronous,
    TensorParallel,
    TFDistribute,
)

__version__: str

__all__ = [
    "DGC",
    "QSGD",
    "AllReduce",
    "AsynchronousDiLoCo",
    "BFloat16",
    "Chain",
    "Checkpoint",
    "Cluster",
    "Codistillation",
    "ComputeTime",
    "DelayedGradients",
    "Downpour",
    "ElasticAveraging",
    "ErrorFeedback",
    "Experiment",
    "Fault",
    "Float16",
    "Gossip",
    "Int8",
    "InvalidInput",
    "LabkitError",
    "Layerwise",
    "LocallyConnected",
    "Network",
    "OneBit",
    "ParameterAveraging",
    "ParameterServer",
    "Peer",
    "Pipeline",
    "PowerSGD",
    "RandomK",
    "Run",
    "ScheduledBlocks",
    "SignMajority",
    "Slowdown",
    "SoftSync",
    "StaleSynchronous",
    "TFDistribute",
    "TensorParallel",
    "TernGrad",
    "Threshold",
    "TopK",
    "calibrate",
    "compare",
    "form",
    "frame",
    "load_runs",
    "log",
    "predict",
    "reading",
    "replay",
    "report",
    "run",
    "table",
    "testbed",
]
