from . import compression as compression
from . import datasets as datasets
from . import export as export
from . import figures as figures
from . import models as models
from . import network as network
from . import schedules as schedules
from . import simulate as simulate
from . import strategies as strategies
from .cluster import Cluster, predict, run
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
from .errors import InvalidInput, LabkitError
from .experiment import Experiment
from .figures import compare, reading, table
from .form import form
from .report import report
from .run import Run, frame, load_runs
from .strategies import (
    AllReduce,
    DelayedGradients,
    Layerwise,
    LocallyConnected,
    Pipeline,
    TensorParallel,
)

__version__: str

__all__ = [
    "DGC",
    "QSGD",
    "AllReduce",
    "BFloat16",
    "Chain",
    "Cluster",
    "DelayedGradients",
    "ErrorFeedback",
    "Experiment",
    "Float16",
    "Int8",
    "InvalidInput",
    "LabkitError",
    "Layerwise",
    "LocallyConnected",
    "OneBit",
    "Pipeline",
    "PowerSGD",
    "RandomK",
    "Run",
    "SignMajority",
    "TensorParallel",
    "TernGrad",
    "Threshold",
    "TopK",
    "compare",
    "form",
    "frame",
    "load_runs",
    "predict",
    "reading",
    "report",
    "run",
    "table",
]
