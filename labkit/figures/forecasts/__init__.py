"""Figures of forecasts, and comparisons of forecasts with measured runs."""
