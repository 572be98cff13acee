"""Figures: what runs reached and how fast, and what their communication does and costs."""

from __future__ import annotations

from labkit.figures.bandwidth import bandwidth
from labkit.figures.codec import step_parts
from labkit.figures.compare import compare, curves, parts, show, speedup, table, throughput
from labkit.figures.comparison_reading import comparison_reading
from labkit.figures.compression_reading import compression_reading
from labkit.figures.costs import cost_curves, cost_reading
from labkit.figures.counts import counts_reading, counts_table
from labkit.figures.deployment import deployment, deployment_reading
from labkit.figures.grid_traffic import grid_traffic
from labkit.figures.heat import has_grid, heat_map
from labkit.figures.hidden import exchange_reading, hidden
from labkit.figures.layer_traffic import layer_traffic
from labkit.figures.linked import linked
from labkit.figures.links import link_reading, link_utilisation
from labkit.figures.microscope import microscope, microscope_reading
from labkit.figures.parallel import parallel_coordinates
from labkit.figures.pareto import pareto
from labkit.figures.pipeline_gantt import pipeline_gantt
from labkit.figures.pipeline_speedup import pipeline_speedup
from labkit.figures.pipeline_steps import pipeline_steps
from labkit.figures.precision import (
    loss_scale_reading,
    loss_scales,
    memory_reading,
    precision_table,
)
from labkit.figures.predictions import measurements, predicted_and_measured, prediction_reading
from labkit.figures.reading import reading
from labkit.figures.scatter import scatter
from labkit.figures.seed_by_seed import seed_by_seed, seed_reading
from labkit.figures.stage_reading import cut_reading, pipeline_reading
from labkit.figures.stage_tables import pipeline_table, rank_table
from labkit.figures.staged_runs import measured_pipeline, predicted_pipeline
from labkit.figures.timeline import timeline
from labkit.figures.trace import message_trace

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
