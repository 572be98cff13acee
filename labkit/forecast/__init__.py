"""What an experiment would take anywhere: measured once on one machine, then computed."""

from labkit.forecast.asked import PARTS, Asked, Taken
from labkit.forecast.calibration import (
    Calibration,
    CodecCost,
    CollectiveCost,
    InputCost,
    LayerCost,
    ModelCost,
    Overhead,
    Source,
    Spread,
    StepCost,
    model_of,
)

__all__ = [
    "PARTS",
    "Asked",
    "Calibration",
    "CodecCost",
    "CollectiveCost",
    "InputCost",
    "LayerCost",
    "ModelCost",
    "Overhead",
    "Source",
    "Spread",
    "StepCost",
    "Taken",
    "model_of",
]
