"""Simulator, formulas and calibration that predict the times of collectives without processes."""

from labkit.schedules import AlphaBetaCost
from labkit.simulate.costs import (
    Fit,
    Measurement,
    calibrate,
    closed_form,
    exact_form,
    modelled,
    textbook,
)
from labkit.simulate.events import Trace
from labkit.simulate.pipeline import PipelineSimulation, simulate_pipeline
from labkit.simulate.published import (
    PUBLISHED,
    SOFTSYNC,
    SOFTSYNC_LATER,
    Judged,
    Scaling,
    Softsync,
    reproduce,
)
from labkit.simulate.simulation import Prediction, Simulation, predict, simulate

__all__ = [
    "PUBLISHED",
    "SOFTSYNC",
    "SOFTSYNC_LATER",
    "AlphaBetaCost",
    "Fit",
    "Judged",
    "Measurement",
    "PipelineSimulation",
    "Prediction",
    "Scaling",
    "Simulation",
    "Softsync",
    "Trace",
    "calibrate",
    "closed_form",
    "exact_form",
    "modelled",
    "predict",
    "reproduce",
    "simulate",
    "simulate_pipeline",
    "textbook",
]
