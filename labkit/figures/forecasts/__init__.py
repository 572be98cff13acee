"""Figures of forecasts and of their comparison with measured runs."""
