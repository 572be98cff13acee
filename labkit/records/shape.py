"""Checks of the types of record fields, and the former names of fields in old records.

Every record is checked once, when its file is read. Other code can therefore rely on the types of
the record's fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, TypeAlias, TypeGuard

from labkit.common.canonical_json import JSON, SCHEMA
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

Field: TypeAlias = Callable[[JSON], bool]

PROVENANCE = "provenance.json"
MAX_FIELDS = 1_000  # An experiment has only about 50 table columns.
MAX_ENTRIES = 10_000  # The mappings of `texts` are no columns of tables.
MAX_FOLDER_BYTES = 255  # Usual file systems limit a folder's name to 255 bytes.
MAX_COUNT = 10**6
EARLIEST, LATEST = datetime(1970, 1, 2).timestamp(), datetime(2200, 1, 1).timestamp()


def field_problem(file: str, record: Mapping[str, JSON]) -> str | None:
    """Return a description of the first invalid field of a record, or None if all fields are valid.

    Only the fields that labkit reads are checked. A field that is missing or null is valid.
    Pydantic is not used to check the fields of records. The import of Pydantic takes longer than
    the command `labkit ls`.

    Args:
        file: Name of the file that contains the record, such as "status.json".
    """
    if file in FIELDS and file != PROVENANCE and (count := _columns(record)) > MAX_FIELDS:
        return f"the record has more than {MAX_FIELDS:,} fields ({count:,})"
    for name, is_fine in FIELDS.get(file, {}).items():
        value = record.get(name)
        if value is not None and not is_fine(value):
            kind = (is_fine.__doc__ or "").split(".")[0].rstrip()
            return f"{name} is {str(value)[:40]!r}; expected: {kind[0].lower()}{kind[1:]}"
    return _result_problem(record) if file == "metrics.json" else None


def _result_problem(metrics: Mapping[str, JSON]) -> str | None:
    """Return a description of the first invalid value from `lk.log`, or None if all are valid."""
    logged = metrics.get("logged")
    for name in logged if isinstance(logged, list) else ():
        value = metrics.get(name)
        if not (value is None or boolean(value) or number(value) or text(value)):
            return f"{name} is {str(value)[:40]!r}; expected: a number, a boolean or a text"
    return None


def _columns(value: JSON) -> int:
    """Return the number of table columns of a flattened record, where a list is one column."""
    if not isinstance(value, Mapping):
        return 1
    return sum(map(_columns, value.values()))


def text(value: JSON) -> bool:
    """Text of at most 100,000 characters."""
    return isinstance(value, str) and len(value) <= 100_000


def line(value: JSON) -> bool:
    """Text of at most 1,000 characters."""
    return isinstance(value, str) and len(value) <= 1_000


def boolean(value: JSON) -> bool:
    """True or false."""
    return isinstance(value, bool)


def integer(value: JSON) -> bool:
    """An integer of at most 18 digits."""
    return type(value) is int and -(10**18) < value < 10**18


def count(value: JSON) -> bool:
    """An integer from 1 to a million."""
    # The metrics of several seeds contain medians of counts. The median is a float: the median of 2
    # and 2 is 2.0.
    return number(value) and 0 < value <= MAX_COUNT and value % 1 == 0


def process(value: JSON) -> bool:
    """The number of a process."""
    return type(value) is int and 0 < value < 2**31


def number(value: JSON) -> TypeGuard[float]:
    """A finite number."""
    return (type(value) is float and math.isfinite(value)) or integer(value)


def nonnegative(value: JSON) -> bool:
    """A number that is at least 0."""
    return number(value) and value >= 0


def positive(value: JSON) -> bool:
    """A number above 0."""
    return number(value) and value > 0


def timestamp(value: JSON) -> bool:
    """A time with a time zone in ISO 8601 format, from 1970 to 2200."""
    try:
        if not isinstance(value, str):
            return False
        time = datetime.fromisoformat(value)
        return time.tzinfo is not None and EARLIEST < time.timestamp() < LATEST
    except (ValueError, OverflowError):
        return False


def numbers(value: JSON) -> bool:
    """A mapping from names to numbers."""
    if not isinstance(value, dict):
        return False
    # The types of all values are checked first, because this check is fast even for thousands of
    # runs.
    other_types = {*map(type, value.values())} - {float, int, type(None)}
    return not other_types and all(
        number_or_none is None or number(number_or_none) for number_or_none in value.values()
    )


def quantiles(value: JSON) -> bool:
    """A mapping with numbers for median, p10 and p90."""
    if not isinstance(value, dict) or not numbers(value):
        return False
    return all(value.get(name) is not None for name in ("median", "p10", "p90"))


def ranges(value: JSON) -> bool:
    """A mapping from names to pairs of minimum and maximum."""
    return isinstance(value, dict) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(number, pair))
        for pair in value.values()
    )


def names(value: JSON) -> bool:
    """A list of at most 1,000 names, each of at most 1,000 characters."""
    return isinstance(value, list) and len(value) <= MAX_FIELDS and all(map(line, value))


def texts(value: JSON) -> bool:
    """A mapping from at most 10,000 names to texts of at most 1,000 characters."""
    return (
        isinstance(value, dict)
        and len(value) <= MAX_ENTRIES
        and all(map(line, value))
        and all(map(line, value.values()))
    )


def records(value: JSON) -> bool:
    """A list of records."""
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def listed(value: JSON) -> bool:
    """A list."""
    return isinstance(value, list)


def members(value: JSON) -> bool:
    """A list of records with a folder's name, a mapping of values, and a repeat number in each."""
    return isinstance(value, list) and all(
        isinstance(member, dict)
        and isinstance(folder := member.get("folder"), str)
        and 0 < len(folder.encode()) <= MAX_FOLDER_BYTES
        # The paths "." and ".." name no folder inside the sweep's folder.
        and folder not in (".", "..")
        and not {"/", "\0"} & {*folder}
        and isinstance(values := member.get("values"), dict)
        and _columns(values) <= MAX_FIELDS
        and integer(member.get("repeat", 0))
        for member in value
    )


def search(value: JSON) -> bool:
    """A record of a search with the fields objectives, trials, axes and fixed."""
    if not isinstance(value, dict):
        return False
    kinds: dict[str, Field] = {"trials": count, "axes": fields, "fixed": fields}
    if "metric" in value:  # Older labkit versions recorded one metric and no enqueued trials.
        kinds |= {"metric": line, "maximize": boolean}
    else:
        kinds |= {"objectives": objectives, "enqueued": records}
    return all(is_fine(value.get(name)) for name, is_fine in kinds.items())


def objectives(value: JSON) -> bool:
    """A mapping from the names of one or more metrics to booleans."""
    return (
        isinstance(value, dict)
        and 0 < len(value) <= MAX_FIELDS
        and all(line(name) and boolean(maximize) for name, maximize in value.items())
    )


def memory(value: JSON) -> bool:
    """A list of records, each with a rank, and with mappings of measured and predicted bytes."""
    return _is_rank_list(value, {"measured": numbers, "predicted": numbers})


def clocks(value: JSON) -> bool:
    """A list of records, each with the fields rank, offset_s and within_s."""
    return _is_rank_list(value, {"offset_s": number, "within_s": number})


def _is_rank_list(value: JSON, parts: Mapping[str, Field]) -> bool:
    fields = {"rank": number, **parts}
    return isinstance(value, list) and all(
        isinstance(entry, dict)
        and all(is_fine(entry.get(name)) for name, is_fine in fields.items())
        for entry in value
    )


def epochs(value: JSON) -> bool:
    """A list of records with numbers, one record per epoch."""
    return isinstance(value, list) and all(
        numbers(entry) and isinstance(entry, dict) and number(entry.get("step")) for entry in value
    )


def fields(value: JSON) -> bool:
    """A mapping from names to values."""
    return isinstance(value, dict)


def named_fields(value: JSON) -> bool:
    """A mapping from names to values, which must include a name."""
    return isinstance(value, dict) and line(value.get("name"))


def named(value: JSON) -> bool:
    """A name, or a mapping from names to values."""
    return line(value) or isinstance(value, dict)


def network(value: JSON) -> bool:
    """A network as text, or as a mapping of its fields."""
    return text(value) or isinstance(value, dict)


def data(value: JSON) -> bool:
    """A name, a mapping, or a list of names and mappings."""
    return named(value) or (isinstance(value, list) and all(map(named, value)))


def verdict(value: JSON) -> bool:
    """A verdict with its reason, difference and tolerance."""
    if not isinstance(value, dict) or not isinstance(value.get("verdict"), str):
        return False
    sizes = (value.get(name) for name in ("max_abs_difference", "tolerance"))
    return (
        fields(value.get("place", {}))
        and isinstance(value.get("reason", ""), str)
        and all(size is None or number(size) for size in sizes)
    )


FIELDS: dict[str, dict[str, Field]] = {
    "status.json": {
        **dict.fromkeys(("state", "notebook", "element", "content"), line),
        **dict.fromkeys(("started", "ended"), timestamp),
        **dict.fromkeys(("process_started", "since_boot"), number),
        "cause": text,
        "pid": process,
        "rank": integer,
        "resumed": records,
    },
    "experiment.json": {
        **dict.fromkeys(("workers", "threads", "repeats"), count),
        **dict.fromkeys(("epochs", "batch_size", "seed", "steps_per_epoch"), integer),
        **dict.fromkeys(("name", "optimizer", "precision", "clock", "notebook"), line),
        **dict.fromkeys(("model_options", "dataset_options", "optimizer_options"), fields),
        "model": named,
        "network": network,
        "dataset": data,
        "learning_rate": number,
        "stragglers": fields,
        "strategy": named_fields,
    },
    "metrics.json": {
        **dict.fromkeys(("test_accuracy", "test_loss"), number),
        **dict.fromkeys(("samples_per_second", "train_seconds", "first_step_ms"), nonnegative),
        **dict.fromkeys(("payload_bytes_per_step", "wire_bytes_per_step"), nonnegative),
        **dict.fromkeys(("link_bytes_per_step", "codec_ms_per_step"), nonnegative),
        **dict.fromkeys(("workers", "threads", "repeats"), count),
        "clock": line,
        "network": network,
        **dict.fromkeys(("exchange", "partition", "checkpoints", "nonfinite"), fields),
        **dict.fromkeys(("faults", "membership_history"), records),
        "oversubscribed": boolean,
        "memory_bytes": numbers,
        "step_ms": quantiles,
        "spread": ranges,
        "logged": names,
        "equivalence": verdict,
        "epochs": epochs,
        "memory": memory,
        "clocks": clocks,
    },
    "environment.json": {},
    PROVENANCE: {
        **dict.fromkeys(("files", "packages"), texts),
        "imports": names,
        "repository": fields,
        "cells": line,
        "files_omitted": integer,
    },
    "sweep.json": {
        **dict.fromkeys(("state", "notebook", "plan", "slurm"), line),
        **dict.fromkeys(("started", "ended"), timestamp),
        **dict.fromkeys(("process_started", "since_boot"), number),
        "pid": process,
        "jobs": count,
        "limit": positive,
        "retries": nonnegative,
        "elements": listed,
        "members": members,
        "search": search,
    },
}

WHOLE, NUMBER, TEXT = "int64", "float64", "object"
TABLES: dict[str, dict[str, str]] = {
    "timeline": {
        **dict.fromkeys(("rank", "step", "bucket"), WHOLE),
        "kind": TEXT,
        **dict.fromkeys(("start", "stop"), NUMBER),
    },
    "compression_stats": {
        **dict.fromkeys(("step", "rank"), WHOLE),
        "layer": TEXT,
        **dict.fromkeys(("relative_error", "cosine", "residual_norm"), NUMBER),
        **dict.fromkeys(("bits_per_parameter", "fraction_sent"), NUMBER),
    },
    "update_log": {
        **dict.fromkeys(("server", "update", "worker", "step", "version"), WHOLE),
        **dict.fromkeys(("staleness", "sent", "delivered", "applied"), NUMBER),
    },
    "layers": {
        "rank": WHOLE,
        **dict.fromkeys(("layer", "slices", "why"), TEXT),
        **dict.fromkeys(("forward_bytes", "backward_bytes"), NUMBER),
        **dict.fromkeys(("weights_bytes", "whole_weights_bytes"), NUMBER),
    },
    "resources": {
        "rank": WHOLE,
        **dict.fromkeys(("seconds", "cpu_seconds", "memory_bytes"), NUMBER),
        **dict.fromkeys(("sent_bytes", "received_bytes"), NUMBER),
    },
}


RENAMED_TABLES: Names = {
    "compression_stats": "microscope",
    "update_log": "interleaving",
}  # new -> former


def with_names_of_today(file: str, record: Fields) -> Fields:
    """Rename the fields and classes of a record of schema 1 to their current names.

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
    defaults: tuple[Any, ...] = (None, [], [], [])
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
