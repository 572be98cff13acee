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
from labkit.forecast.forecast import Forecast, Prices, forecast

__all__ = [
    "PARTS",
    "Asked",
    "Calibration",
    "CodecCost",
    "CollectiveCost",
    "Forecast",
    "InputCost",
    "LayerCost",
    "ModelCost",
    "Overhead",
    "Prices",
    "Source",
    "Spread",
    "StepCost",
    "Taken",
    "forecast",
    "model_of",
]
