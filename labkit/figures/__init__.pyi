"""What `labkit.figures` offers; each name is imported when it is first used."""

from .cuts.grid_traffic import grid_traffic
from .cuts.layer_traffic import layer_traffic
from .cuts.pipeline_speedup import pipeline_speedup
from .cuts.stage_reading import cut_reading, pipeline_reading
from .cuts.stage_tables import measured_pipeline, pipeline_table, predicted_pipeline, rank_table
from .dataflow.control_order import control_order, control_reading, control_timeline
from .dataflow.input_gantt import input_timeline
from .dataflow.input_overhead import input_overhead, input_reading
from .dataflow.ready_figure import queue_reading, queue_table, ready_animation
from .dataflow.step_nodes import drawn_step, partitioned_step
from .dataflow.thread_sweep import thread_reading, thread_sweep
from .dataflow.transfers import transfers_reading, transfers_table
from .exchange.bandwidth import bandwidth
from .exchange.compression_reading import compression_reading
from .exchange.gantt import timeline
from .exchange.hidden import exchange_reading, hidden
from .exchange.hosts import (
    hosts_gains,
    hosts_reading,
    hosts_speedup,
    hosts_traffic,
    hosts_training,
    hosts_ways,
)
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
from .forecasts.answers import (
    break_even_reading,
    codec_table,
    sources_table,
    steps_table,
    steps_to,
    study_reading,
    verified_table,
)
from .forecasts.diagonal import diagonal_reading, forecast_diagonal
from .forecasts.scaling import forecast_scaling, scaling_reading, scaling_table
from .forecasts.winners import winners_map, winners_reading
from .graphs.break_even import break_even, break_even_table
from .graphs.collapse import collapsed
from .graphs.layered import layered
from .graphs.placement_reading import placement_reading, placer_reading
from .graphs.placements import makespans, placement_gantt, placement_table
from .graphs.step import step_picture
from .kit.readable import readable
from .methods.taxonomy import taxonomy_map
from .runs.blocks import blocks_reading, dependencies, optimality_gap
from .runs.codistilled import codistillation_reading, codistillation_table
from .runs.comparison import compare, curves, show, speedup, table, throughput
from .runs.comparison_reading import comparison_reading
from .runs.consensus import consensus, consensus_reading, gossip_table, slow_worker_reading
from .runs.deployment import deployment, deployment_reading
from .runs.heat import has_grid, heat_map
from .runs.interleaving import interleaving, staleness, staleness_reading
from .runs.large_batch import large_batch, large_batch_reading, large_batch_table
from .runs.league import fault_costs, fault_league, fault_reading, fault_table
from .runs.linked import linked
from .runs.parallel import parallel_coordinates
from .runs.pareto import pareto
from .runs.precision import loss_scale_reading, loss_scales, memory_reading, precision_table
from .runs.reading import reading
from .runs.search import search_history
from .runs.seed_by_seed import seed_by_seed, seed_reading
from .runs.seldom import period_cost, period_reading
from .runs.servers import server_prediction, server_reading, server_scaling
from .runs.serving import serving, serving_reading
from .runs.shards import shard_labels
from .runs.stale import race, race_reading, staleness_cost, staleness_cost_reading
from .runs.stale_clocks import staleness_by_clock, staleness_by_clock_reading
from .runs.stale_published import batch_reading, downpour_reading, rate_reading, softsync_published
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
    "blocks_reading",
    "break_even",
    "break_even_reading",
    "break_even_table",
    "codec_table",
    "codistillation_reading",
    "codistillation_table",
    "collapsed",
    "compare",
    "comparison_reading",
    "compression_reading",
    "consensus",
    "consensus_reading",
    "control_order",
    "control_reading",
    "control_timeline",
    "cost_curves",
    "cost_reading",
    "counts_reading",
    "counts_table",
    "curves",
    "cut_reading",
    "dependencies",
    "deployment",
    "deployment_reading",
    "diagonal_reading",
    "downpour_reading",
    "drawn_step",
    "exchange_reading",
    "fault_costs",
    "fault_league",
    "fault_reading",
    "fault_table",
    "forecast_diagonal",
    "forecast_scaling",
    "framework_reading",
    "framework_table",
    "gossip_table",
    "grid_traffic",
    "has_grid",
    "heat_map",
    "hidden",
    "hosts_gains",
    "hosts_reading",
    "hosts_speedup",
    "hosts_traffic",
    "hosts_training",
    "hosts_ways",
    "input_overhead",
    "input_reading",
    "input_timeline",
    "interleaving",
    "large_batch",
    "large_batch_reading",
    "large_batch_table",
    "layer_traffic",
    "layered",
    "link_reading",
    "link_utilisation",
    "linked",
    "loss_scale_reading",
    "loss_scales",
    "makespans",
    "measured_pipeline",
    "measurements",
    "memory_reading",
    "message_trace",
    "microscope",
    "microscope_reading",
    "optimality_gap",
    "parallel_coordinates",
    "pareto",
    "partitioned_step",
    "period_cost",
    "period_reading",
    "pipeline_gantt",
    "pipeline_reading",
    "pipeline_speedup",
    "pipeline_steps",
    "pipeline_table",
    "placement_gantt",
    "placement_reading",
    "placement_table",
    "placer_reading",
    "precision_table",
    "predicted_and_measured",
    "predicted_pipeline",
    "prediction_reading",
    "queue_reading",
    "queue_table",
    "race",
    "race_reading",
    "rank_table",
    "rate_reading",
    "readable",
    "reading",
    "ready_animation",
    "scaling_reading",
    "scaling_table",
    "scatter",
    "search_history",
    "seed_by_seed",
    "seed_reading",
    "server_prediction",
    "server_reading",
    "server_scaling",
    "serving",
    "serving_reading",
    "shard_labels",
    "show",
    "slow_worker_reading",
    "softsync_published",
    "sources_table",
    "speedup",
    "staleness",
    "staleness_by_clock",
    "staleness_by_clock_reading",
    "staleness_cost",
    "staleness_cost_reading",
    "staleness_reading",
    "step_parts",
    "step_picture",
    "steps_table",
    "steps_to",
    "study_reading",
    "table",
    "taxonomy_map",
    "thread_reading",
    "thread_sweep",
    "throughput",
    "timeline",
    "traffic_matrix",
    "transfers_reading",
    "transfers_table",
    "transport_gains",
    "transport_reading",
    "transport_steps",
    "transport_table",
    "transport_times",
    "transport_training",
    "verified_table",
    "winners_map",
    "winners_reading",
]
