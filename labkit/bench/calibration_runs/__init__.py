"""Calibration: measurements on the ranks of a machine, from which forecasts are computed."""

from labkit.bench.calibration_runs.measure import Bench, Effort, calibrate

__all__ = ["Bench", "Effort", "calibrate"]
