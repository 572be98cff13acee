"""What an experiment would take anywhere: measured once on one machine, then computed."""

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
    "model_of",
]
