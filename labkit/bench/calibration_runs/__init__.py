"""Measuring all that forecasts are made from, on ranks, once a machine."""

from labkit.bench.calibration_runs.measure import Bench, Effort, calibrate

__all__ = ["Bench", "Effort", "calibrate"]
