"""Forecasts held against what was measured: settings and forecasts are written down first."""
