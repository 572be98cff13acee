"""Measuring all that forecasts are made from, on ranks, once a machine."""

from labkit.bench.calibrating.measure import FULL, QUICK, Effort, calibrate, measure

__all__ = ["FULL", "QUICK", "Effort", "calibrate", "measure"]
