"""What an experiment would take anywhere: measured once on one machine, then computed."""

from labkit.forecast.calibration import (
    Calibration,
    CodecCost,
    CollectiveCost,
    LayerCost,
    ModelCost,
    Overhead,
    Source,
    Spread,
    StepCost,
    WayCost,
    model_of,
)
from labkit.forecast.forecast import Forecast, Prices, forecast
from labkit.forecast.programs import of_program
from labkit.forecast.provenance import fits, sources
from labkit.forecast.query import PARTS, Query, StepForecast
from labkit.forecast.slices import of_grid, of_tensor_parallel
from labkit.forecast.stages import of_stages
from labkit.forecast.study import Place, Study

__all__ = [
    "PARTS",
    "Calibration",
    "CodecCost",
    "CollectiveCost",
    "Forecast",
    "LayerCost",
    "ModelCost",
    "Overhead",
    "Place",
    "Prices",
    "Query",
    "Source",
    "Spread",
    "StepCost",
    "StepForecast",
    "Study",
    "WayCost",
    "fits",
    "forecast",
    "model_of",
    "of_grid",
    "of_program",
    "of_stages",
    "of_tensor_parallel",
    "sources",
]
