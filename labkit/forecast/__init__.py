"""Forecasts of experiments on any network, from costs that are measured on one machine."""

from labkit.forecast.calibration import (
    Calibration,
    CodecCost,
    CollectiveCost,
    LayerCost,
    ModelCost,
    Overhead,
    Provenance,
    Spread,
    StepCost,
    WayCost,
    model_of,
)
from labkit.forecast.calibration_store import fits, sources
from labkit.forecast.forecast import Forecast, Prices, forecast
from labkit.forecast.programs import of_program
from labkit.forecast.query import PARTS, Query, StepForecast
from labkit.forecast.slices import of_grid, of_tensor_parallel
from labkit.forecast.stages import of_stages
from labkit.forecast.study import MapPoint, Study

__all__ = [
    "PARTS",
    "Calibration",
    "CodecCost",
    "CollectiveCost",
    "Forecast",
    "LayerCost",
    "MapPoint",
    "ModelCost",
    "Overhead",
    "Prices",
    "Provenance",
    "Query",
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
