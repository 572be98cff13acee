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
    SignSGD,
    TernGrad,
    Threshold,
    TopK,
)
from .experiment import Experiment, VirtualClock
from .figures import compare, summarize, table
from .hosts import testbed
from .jobs.form import parameter_form
from .jobs.log import log
from .network import ComputeTime, Fault, Network, Slowdown
from .records import export as export
from .records.checkpoints import Checkpoint
from .records.run import Run, load_runs, to_dataframe
from .report import report
from .strategies import (
    AllReduce,
    AsynchronousDiLoCo,
    BlockCoordinateDescent,
    Codistillation,
    DelayedGradients,
    Downpour,
    ElasticAveraging,
    ExternalFramework,
    Gossip,
    Layerwise,
    ParameterAveraging,
    ParameterServer,
    Pipeline,
    SoftSync,
    SpatialParallel,
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
    "BlockCoordinateDescent",
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
    "ExternalFramework",
    "Fault",
    "Float16",
    "Gossip",
    "Int8",
    "InvalidInput",
    "LabkitError",
    "Layerwise",
    "Network",
    "OneBit",
    "ParameterAveraging",
    "ParameterServer",
    "Pipeline",
    "PowerSGD",
    "RandomK",
    "Run",
    "SignSGD",
    "Slowdown",
    "SoftSync",
    "SpatialParallel",
    "StaleSynchronous",
    "TFDistribute",
    "TensorParallel",
    "TernGrad",
    "Threshold",
    "TopK",
    "VirtualClock",
    "calibrate",
    "compare",
    "load_runs",
    "log",
    "parameter_form",
    "predict",
    "replay",
    "report",
    "run",
    "summarize",
    "table",
    "testbed",
    "to_dataframe",
]
