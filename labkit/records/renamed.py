"""Conversion of records of schema 1 to the current names of fields and classes."""

from __future__ import annotations

from typing import Any

from labkit.common.canonical_json import SCHEMA
from labkit.common.renamed import (
    COMPUTE_TIME,
    EXPERIMENT,
    METRICS,
    VIRTUAL_CLOCK,
    Fields,
    Names,
    rename_classes,
    rename_keys,
    rename_network,
    rename_slowdowns,
)

TABLES: Names = {"compression_stats": "microscope", "update_log": "interleaving"}  # new -> former


def with_names_of_today(file: str, record: Fields) -> Fields:
    """Return a record of schema 1 with the current names of its fields and classes.

    Args:
        file: Name of the record's file, such as "experiment.json".
        record: Fields of the record, with the names that labkit used when it wrote the file.
    """
    if file == "experiment.json":
        return rename_experiment(record)
    if file == "metrics.json":
        record = rename_keys(record, METRICS)
        return (
            record | {"network": rename_network(record["network"])}
            if "network" in record
            else record
        )
    return record


def rename_experiment(record: Fields) -> Fields:
    """Return the fields of an experiment with their current names."""
    fields = rename_keys(record, EXPERIMENT)
    if "schema" in fields:
        fields["schema"] = SCHEMA
    defaults: tuple[Any, ...] = (None, [], [], [])  # default values of missing fields
    virtual = {
        new: fields.pop(old, default)
        for (old, new), default in zip(VIRTUAL_CLOCK.items(), defaults, strict=True)
    }
    if isinstance(virtual.get("compute_time"), dict):
        virtual["compute_time"] = rename_keys(virtual["compute_time"], COMPUTE_TIME)
    if fields.get("clock") == "virtual":
        fields["virtual"] = virtual
    if "stragglers" in fields:
        fields["stragglers"] = rename_slowdowns(fields["stragglers"])
    for name, rename in (("network", rename_network), ("strategy", rename_classes)):
        if name in fields:
            fields[name] = rename(fields[name])
    return fields
