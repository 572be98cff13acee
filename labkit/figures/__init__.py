"""Figures: what runs reached and how fast, and what their communication does and costs."""

from __future__ import annotations

from labkit.figures.bandwidth import bandwidth
from labkit.figures.codec import step_parts
from labkit.figures.compare import compare, curves, show, speedup, table, throughput
from labkit.figures.compression_reading import compression_reading
from labkit.figures.costs import cost_curves, cost_reading
from labkit.figures.counts import counts_reading, counts_table
from labkit.figures.deployment import deployment, deployment_reading
from labkit.figures.hidden import exchange_reading, hidden
from labkit.figures.links import link_reading, link_utilisation
from labkit.figures.live import live_figure
from labkit.figures.microscope import microscope, microscope_reading
from labkit.figures.pareto import pareto
from labkit.figures.pipeline_gantt import pipeline_gantt
from labkit.figures.precision import (
    loss_scale_reading,
    loss_scales,
    memory_reading,
    precision_table,
)
from labkit.figures.predictions import measurements, predicted_and_measured, prediction_reading
from labkit.figures.reading import reading
from labkit.figures.seed_by_seed import seed_by_seed, seed_reading
from labkit.figures.timeline import timeline
from labkit.figures.trace import message_trace

__all__ = [
    "bandwidth",
    "compare",
    "compression_reading",
    "cost_curves",
    "cost_reading",
    "counts_reading",
    "counts_table",
    "curves",
    "deployment",
    "deployment_reading",
    "exchange_reading",
    "hidden",
    "link_reading",
    "link_utilisation",
    "live_figure",
    "loss_scale_reading",
    "loss_scales",
    "measurements",
    "memory_reading",
    "message_trace",
    "microscope",
    "microscope_reading",
    "pareto",
    "pipeline_gantt",
    "precision_table",
    "predicted_and_measured",
    "prediction_reading",
    "reading",
    "seed_by_seed",
    "seed_reading",
    "show",
    "speedup",
    "step_parts",
    "table",
    "throughput",
    "timeline",
]
