"""Figures: what runs reached and how fast, and what their communication does and costs."""

from __future__ import annotations

from labkit.figures.cuts.grid_traffic import grid_traffic
from labkit.figures.cuts.layer_traffic import layer_traffic
from labkit.figures.cuts.pipeline_speedup import pipeline_speedup
from labkit.figures.cuts.stage_reading import cut_reading, pipeline_reading
from labkit.figures.cuts.stage_tables import pipeline_table, rank_table
from labkit.figures.cuts.staged_runs import measured_pipeline, predicted_pipeline
from labkit.figures.exchange.bandwidth import bandwidth
from labkit.figures.exchange.codec import step_parts
from labkit.figures.exchange.compression_reading import compression_reading
from labkit.figures.exchange.hidden import exchange_reading, hidden
from labkit.figures.exchange.microscope import microscope, microscope_reading
from labkit.figures.exchange.timeline import timeline
from labkit.figures.runs.compare import compare, curves, parts, show, speedup, table, throughput
from labkit.figures.runs.comparison_reading import comparison_reading
from labkit.figures.runs.deployment import deployment, deployment_reading
from labkit.figures.runs.heat import has_grid, heat_map
from labkit.figures.runs.linked import linked
from labkit.figures.runs.parallel import parallel_coordinates
from labkit.figures.runs.pareto import pareto
from labkit.figures.runs.precision import (
    loss_scale_reading,
    loss_scales,
    memory_reading,
    precision_table,
)
from labkit.figures.runs.reading import reading
from labkit.figures.runs.scatter import scatter
from labkit.figures.runs.seed_by_seed import seed_by_seed, seed_reading
from labkit.figures.schedules.costs import cost_curves, cost_reading
from labkit.figures.schedules.counts import counts_reading, counts_table
from labkit.figures.schedules.links import link_reading, link_utilisation
from labkit.figures.schedules.pipeline_gantt import pipeline_gantt
from labkit.figures.schedules.pipeline_steps import pipeline_steps
from labkit.figures.schedules.predictions import (
    measurements,
    predicted_and_measured,
    prediction_reading,
)
from labkit.figures.schedules.trace import message_trace

__all__ = [
    "bandwidth",
    "compare",
    "comparison_reading",
    "compression_reading",
    "cost_curves",
    "cost_reading",
    "counts_reading",
    "counts_table",
    "curves",
    "cut_reading",
    "deployment",
    "deployment_reading",
    "exchange_reading",
    "grid_traffic",
    "has_grid",
    "heat_map",
    "hidden",
    "layer_traffic",
    "link_reading",
    "link_utilisation",
    "linked",
    "loss_scale_reading",
    "loss_scales",
    "measured_pipeline",
    "measurements",
    "memory_reading",
    "message_trace",
    "microscope",
    "microscope_reading",
    "parallel_coordinates",
    "pareto",
    "parts",
    "pipeline_gantt",
    "pipeline_reading",
    "pipeline_speedup",
    "pipeline_steps",
    "pipeline_table",
    "precision_table",
    "predicted_and_measured",
    "predicted_pipeline",
    "prediction_reading",
    "rank_table",
    "reading",
    "scatter",
    "seed_by_seed",
    "seed_reading",
    "show",
    "speedup",
    "step_parts",
    "table",
    "throughput",
    "timeline",
]
