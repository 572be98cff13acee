"""Former names of public fields, classes, functions and options, with their current names.

Code that uses a former name gets an error with the current name. `labkit.records.shape` reads
records that contain former names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn, TypeAlias, TypeVar

Class = TypeVar("Class", bound=type)
Fields: TypeAlias = dict[str, Any]
Names: TypeAlias = Mapping[str, str]

# Records may contain the former names in the tables `EXPERIMENT` to `OPTIONS`, so
# `labkit.records.shape` also reads the tables.
EXPERIMENT: Names = {
    "steps": "steps_per_epoch",
    "slow": "stragglers",
    "bad_numbers": "on_nonfinite",
    "check_every": "replica_check_interval",
    "feed": "input_mode",
    "capacities": "batch_weights",
    "shards": "data_partition",
    "gate": "verify",
}
VIRTUAL_CLOCK: Names = {
    "compute": "compute_time",
    "later": "message_delays",
    "order": "update_order",
    "lost": "worker_failures",
}
COMPUTE_TIME: Names = {"law": "distribution", "spread": "sigma", "values": "trace"}
METRICS: Names = {"bad_numbers": "nonfinite", "stretches": "membership_history"}
# `CLASSES` maps former class names of strategies and compressors to their current names.
CLASSES: Names = {
    "LocallyConnected": "SpatialParallel",
    "Peer": "ExternalFramework",
    "ScheduledBlocks": "BlockCoordinateDescent",
    "SignMajority": "SignSGD",
}
_STALE: Names = {"remedy": "staleness_correction", "compensation": "delay_compensation"}
_SLICES: Names = {"slices": "tensor_parallel_size"}
# `OPTIONS` maps the current name of each strategy to the former names of its options.
OPTIONS: dict[str, Names] = {
    "AllReduce": {"microscope": "compression_stats_every"},
    "AsynchronousDiLoCo": {"delayed": "momentum_delay"},
    "BlockCoordinateDescent": {"select": "selection", "parallel": "blocks_per_round"},
    "Codistillation": {"weight": "distillation_weight"},
    "DelayedGradients": _SLICES,
    "Layerwise": {"chunks": "virtual_stages_per_rank", **_SLICES},
    "ParameterAveraging": {
        "outer": "outer_optimizer",
        "state": "optimizer_state",
        "delay": "overlap_steps",
        "warmup": "warmup_steps",
    },
    "ParameterServer": {"backups": "backup_workers"},
    "Pipeline": {"chunks": "virtual_stages_per_rank", **_SLICES},
    "SoftSync": {"splits": "n", **_STALE},
    "StaleSynchronous": _STALE,
    "TensorParallel": _SLICES,
}
# No record contains a former name from the table `_VIRTUAL` or from a table below it. `_VIRTUAL`
# contains former fields of an experiment, which are now part of the field `virtual`.
_VIRTUAL: Names = dict.fromkeys(VIRTUAL_CLOCK, "virtual")
_CODE: Names = {
    # The entries of `_CODE` begin with former names of attributes and arguments of clusters,
    # communicators and checkpoints.
    "limit": "timeout",
    "place": "map_by",
    "step": "launch_command",
    "live": "last_submitted",
    "everyone": "allgather_scalar",
    "share": "broadcast_object",
    "tally": "allreduce_small",
    "meet": "barrier",
    "over": "with_network",
    "be_slow": "set_slowdown",
    "failures": "mtbf",
    "keep": "max_to_keep",
    # prices, forecasts
    "node_hour": "price_per_node_hour",
    "gigabyte": "price_per_gb",
    "watts": "node_watts",
    "ranks_a_node": "ranks_per_node",
    "money": "cost",
    "training": "training_seconds",
    "taken": "step",
    "strong": "strong_efficiency",
    "weak": "weak_efficiency",
    # Further entries of `_CODE` are former names of fields of runs, and of functions of the
    # package.
    "microscope": "compression_stats",
    "interleaving": "update_log",
    "frame": "to_dataframe",
    "form": "parameter_form",
    "reading": "summarize",
    "fault_league": "fault_comparison",
    # The last entries of `_CODE` are former names of commands and of their options.
    "warm": "prestart",
    "peers": "frameworks",
    "--where": "--breakdown",
    "--node-hour": "--price-per-node-hour",
    "--gigabyte": "--price-per-gb",
    "--watts": "--node-watts",
    "--ranks-a-node": "--ranks-per-node",
}
FORMER = (
    EXPERIMENT,
    VIRTUAL_CLOCK,
    _VIRTUAL,
    COMPUTE_TIME,
    METRICS,
    CLASSES,
    *OPTIONS.values(),
    _CODE,
)


def name_today(name: object, allowed: Collection[str]) -> str | None:
    """Return the current name for a former name if `allowed` contains the current name, else None.

    >>> name_today("steps", ["steps_per_epoch", "epochs"])
    'steps_per_epoch'
    """
    if not isinstance(name, str):
        return None
    today = [names[name] for names in FORMER if name in names]
    if name.endswith("_reading"):
        today = [f"summarize_{name.removesuffix('_reading')}"]
    return next((new for new in today if new in allowed), None)


def refuse_former_attributes(kind: Class) -> Class:
    """Make a class raise AttributeError with the current name if a former name is read."""

    def refuse(self: object, name: str) -> NoReturn:
        raise missing_attribute(type(self).__name__, name, dir(kind))

    decorated: Any = kind
    decorated.__getattr__ = refuse
    return kind


def missing_attribute(owner: str, name: str, allowed: Collection[str]) -> AttributeError:
    """Return an AttributeError whose message gives the current name if `name` is a former name."""
    today = name_today(name, allowed)
    now = f": its name is now {today!r}" if today else ""
    return AttributeError(f"{owner!r} object has no attribute {name!r}{now}", name=name)


def rename_classes(value: Any) -> Any:
    """Return a JSON value in which strategies and compressors have their current class names."""
    if isinstance(value, list):
        return [rename_classes(item) for item in value]
    if not isinstance(value, dict):
        return CLASSES.get(value, value) if isinstance(value, str) else value
    fields = {key: rename_classes(item) for key, item in value.items()}
    fields = rename_keys(fields, OPTIONS.get(str(fields.get("name")), {}))
    return rename_network(fields) if "latency" in fields else fields


def rename_network(value: Any) -> Any:
    """Rename former fields of a network; return a value without former names unchanged."""
    if not isinstance(value, dict) or "slow" not in value:
        return value
    network = rename_keys(value, {"slow": "stragglers"})
    return network | {"stragglers": rename_slowdowns(network["stragglers"])}


def rename_slowdowns(value: Any) -> Any:
    """Rename former fields in each rank's slowdown; a slowdown that is a number stays unchanged."""
    if not isinstance(value, dict):
        return value
    return {k: rename_keys(v, COMPUTE_TIME) if isinstance(v, dict) else v for k, v in value.items()}


def rename_keys(record: Fields, names: Names) -> Fields:
    """Return a record in which each key in `names` is replaced by its current name."""
    return {names.get(key, key): value for key, value in record.items()}
