"""What `labkit.figures` offers; each name is imported when it is first used."""

from .cuts.grid_traffic import grid_traffic
from .cuts.layer_traffic import layer_traffic
from .cuts.pipeline_speedup import pipeline_speedup
from .cuts.stage_reading import cut_reading, pipeline_reading
from .cuts.stage_tables import measured_pipeline, pipeline_table, predicted_pipeline, rank_table
from .exchange.bandwidth import bandwidth
from .exchange.compression_reading import compression_reading
from .exchange.gantt import timeline
from .exchange.hidden import exchange_reading, hidden
from .exchange.layer_errors import microscope, microscope_reading
from .exchange.step_parts import step_parts
from .exchange.traffic_matrix import framework_reading, framework_table, traffic_matrix
from .exchange.transports import (
    transport_gains,
    transport_reading,
    transport_steps,
    transport_table,
    transport_times,
    transport_training,
)
from .runs.codistilled import codistillation_reading, codistillation_table
from .runs.comparison import compare, curves, show, speedup, table, throughput
from .runs.comparison_reading import comparison_reading
from .runs.consensus import consensus, consensus_reading, slow_worker_reading
from .runs.deployment import deployment, deployment_reading
from .runs.heat import has_grid, heat_map
from .runs.interleaving import interleaving, staleness, staleness_reading
from .runs.large_batch import large_batch, large_batch_reading, large_batch_table
from .runs.linked import linked
from .runs.parallel import parallel_coordinates
from .runs.pareto import pareto
from .runs.precision import loss_scale_reading, loss_scales, memory_reading, precision_table
from .runs.reading import reading
from .runs.search import search_history
from .runs.seed_by_seed import seed_by_seed, seed_reading
from .runs.seldom import period_cost, period_reading
from .runs.servers import server_prediction, server_reading, server_scaling
from .runs.shards import shard_labels
from .runs.stale import race, race_reading, staleness_cost, staleness_cost_reading
from .runs.stale_clocks import staleness_by_clock, staleness_by_clock_reading
from .runs.stale_published import (
    batch_reading,
    downpour_reading,
    rate_reading,
    softsync_published,
)
from .runs.two_numbers import scatter
from .schedules.cost_curves import cost_curves, cost_reading
from .schedules.link_use import link_reading, link_utilisation
from .schedules.message_counts import counts_reading, counts_table
from .schedules.message_trace import message_trace
from .schedules.pipeline_gantt import pipeline_gantt
from .schedules.pipeline_steps import pipeline_steps
from .schedules.predictions import measurements, predicted_and_measured, prediction_reading

__all__ = [
    "bandwidth",
    "batch_reading",
    "codistillation_reading",
    "codistillation_table",
    "compare",
    "comparison_reading",
    "compression_reading",
    "consensus",
    "consensus_reading",
    "cost_curves",
    "cost_reading",
    "counts_reading",
    "counts_table",
    "curves",
    "cut_reading",
    "deployment",
    "deployment_reading",
    "downpour_reading",
    "exchange_reading",
    "framework_reading",
    "framework_table",
    "grid_traffic",
    "has_grid",
    "heat_map",
    "hidden",
    "interleaving",
    "large_batch",
    "large_batch_reading",
    "large_batch_table",
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
    "period_cost",
    "period_reading",
    "pipeline_gantt",
    "pipeline_reading",
    "pipeline_speedup",
    "pipeline_steps",
    "pipeline_table",
    "precision_table",
    "predicted_and_measured",
    "predicted_pipeline",
    "prediction_reading",
    "race",
    "race_reading",
    "rank_table",
    "rate_reading",
    "reading",
    "scatter",
    "search_history",
    "seed_by_seed",
    "seed_reading",
    "server_prediction",
    "server_reading",
    "server_scaling",
    "shard_labels",
    "show",
    "slow_worker_reading",
    "softsync_published",
    "speedup",
    "staleness",
    "staleness_by_clock",
    "staleness_by_clock_reading",
    "staleness_cost",
    "staleness_cost_reading",
    "staleness_reading",
    "step_parts",
    "table",
    "throughput",
    "timeline",
    "traffic_matrix",
    "transport_gains",
    "transport_reading",
    "transport_steps",
    "transport_table",
    "transport_times",
    "transport_training",
]
