"""Forecasts beside measured runs."""
