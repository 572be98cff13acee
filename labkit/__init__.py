"""labkit: an experiment lab for distributed deep learning that lives in Jupyter."""

from labkit.cluster import Cluster, predict, run
from labkit.compression import (
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
from labkit.errors import InvalidInput, LabkitError
from labkit.experiment import Experiment
from labkit.figures import compare, reading, table
from labkit.report import report
from labkit.run import Run, frame, load_runs
from labkit.strategies import (
    AllReduce,
    DelayedGradients,
    Layerwise,
    LocallyConnected,
    Pipeline,
    TensorParallel,
)

__version__ = "0.1.0"

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
    "frame",
    "load_runs",
    "predict",
    "reading",
    "report",
    "run",
    "table",
]
