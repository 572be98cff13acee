"""What the fields of a record may be: a record may come from a stranger, or from a torn disk.

Checked once, where a record is read, so that nothing that reads a run needs to doubt its fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TypeAlias, TypeGuard

from labkit.common.canonical_json import JSON

Field: TypeAlias = Callable[[JSON], bool]

MOST_FIELDS = 1_000  # that a record's table has as columns; those of experiments have some fifty
LONGEST_FOLDER = 255  # bytes; no file system has longer names
LARGEST_COUNT = 10**6  # of ranks, threads, repeats
EARLIEST, LATEST = datetime(1970, 1, 2).timestamp(), datetime(2200, 1, 1).timestamp()


def wrong_field(file: str, record: Mapping[str, JSON]) -> str | None:
    """What is wrong with the first odd field of a record, or None.

    Checked is what readers take for granted; other fields, and those that are null or missing,
    are let through. Not by pydantic, whose import takes longer than `labkit ls` does.

    Args:
        file: the record's name, such as "status.json".
    """
    if file in FIELDS and (count := _columns(record)) > MOST_FIELDS:
        return f"it has more than {MOST_FIELDS:,} fields ({count:,})"
    for name, is_fine in FIELDS.get(file, {}).items():
        value = record.get(name)
        if value is not None and not is_fine(value):
            kind = (is_fine.__doc__ or "").split(".")[0].rstrip()
            return f"{name} is {str(value)[:40]!r}; expected is {kind[0].lower()}{kind[1:]}"
    return _odd_result(record) if file == "metrics.json" else None


def _odd_result(metrics: Mapping[str, JSON]) -> str | None:
    """Return what is wrong with what `lk.log` has been given, or None."""
    logged = metrics.get("logged")
    for name in logged if isinstance(logged, list) else ():
        value = metrics.get(name)
        if not (value is None or truth(value) or number(value) or text(value)):
            return f"{name} is {str(value)[:40]!r}; expected is a number, a truth or a text"
    return None


def _columns(value: JSON) -> int:
    """Return how many columns a record makes in a table; a list is one."""
    if not isinstance(value, Mapping):
        return 1
    return sum(map(_columns, value.values()))


def text(value: JSON) -> bool:
    """Text of at most 100,000 letters."""
    return isinstance(value, str) and len(value) <= 100_000


def line(value: JSON) -> bool:
    """Text of at most 1,000 letters."""
    return isinstance(value, str) and len(value) <= 1_000


def truth(value: JSON) -> bool:
    """True or false."""
    return isinstance(value, bool)


def whole(value: JSON) -> bool:
    """A whole number of at most 18 digits."""
    return type(value) is int and -(10**18) < value < 10**18


def count(value: JSON) -> bool:
    """A whole number from 1 to a million."""
    # Of several seeds a record has medians, and the median of 2 and 2 is 2.0.
    return number(value) and 0 < value <= LARGEST_COUNT and value % 1 == 0


def process(value: JSON) -> bool:
    """The number of a process."""
    return type(value) is int and 0 < value < 2**31


def number(value: JSON) -> TypeGuard[float]:
    """A number."""
    return (type(value) is float and math.isfinite(value)) or whole(value)


def amount(value: JSON) -> bool:
    """A number from 0 on."""
    return number(value) and value >= 0


def positive(value: JSON) -> bool:
    """A number above 0."""
    return number(value) and value > 0


def moment(value: JSON) -> bool:
    """A moment with its time zone, as ISO 8601 writes it, from 1970 to 2200."""
    try:
        if not isinstance(value, str):
            return False
        read = datetime.fromisoformat(value)
        return read.tzinfo is not None and EARLIEST < read.timestamp() < LATEST
    except (ValueError, OverflowError):
        return False


def numbers(value: JSON) -> bool:
    """Numbers by name."""
    if not isinstance(value, dict):
        return False
    # Kind by kind: of thousands of runs each number is checked.
    odd = {*map(type, value.values())} - {float, int, type(None)}
    return not odd and all(each is None or number(each) for each in value.values())


def quantiles(value: JSON) -> bool:
    """Numbers under the names median, p10 and p90."""
    if not isinstance(value, dict) or not numbers(value):
        return False
    return all(value.get(name) is not None for name in ("median", "p10", "p90"))


def ends(value: JSON) -> bool:
    """The least and the greatest number by name."""
    return isinstance(value, dict) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(number, pair))
        for pair in value.values()
    )


def names(value: JSON) -> bool:
    """A list of at most 1,000 names, each of at most 1,000 letters."""
    return isinstance(value, list) and len(value) <= MOST_FIELDS and all(map(line, value))


def records(value: JSON) -> bool:
    """A list of records."""
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def listed(value: JSON) -> bool:
    """A list."""
    return isinstance(value, list)


def members(value: JSON) -> bool:
    """A list of records with a folder's name, values by name, and the number of the repeat."""
    return isinstance(value, list) and all(
        isinstance(each, dict)
        and isinstance(folder := each.get("folder"), str)
        and 0 < len(folder.encode()) <= LONGEST_FOLDER
        and folder not in (".", "..")  # nothing outside of the sweep
        and not {"/", "\0"} & {*folder}
        and isinstance(values := each.get("values"), dict)
        and _columns(values) <= MOST_FIELDS
        and whole(each.get("repeat", 0))
        for each in value
    )


def search(value: JSON) -> bool:
    """A record with metric, maximize, trials, axes and fixed."""
    kinds = {"metric": line, "maximize": truth, "trials": count, "axes": fields, "fixed": fields}
    return isinstance(value, dict) and all(
        is_fine(value.get(name)) for name, is_fine in kinds.items()
    )


def memory(value: JSON) -> bool:
    """A list of records with a rank, and with measured and predicted bytes by name."""
    return _ranked(value, {"measured": numbers, "predicted": numbers})


def clocks(value: JSON) -> bool:
    """A list of records with a rank, offset_s and within_s."""
    return _ranked(value, {"offset_s": number, "within_s": number})


def _ranked(value: JSON, parts: Mapping[str, Field]) -> bool:
    fields = {"rank": number, **parts}
    return isinstance(value, list) and all(
        isinstance(each, dict) and all(is_fine(each.get(name)) for name, is_fine in fields.items())
        for each in value
    )


def epochs(value: JSON) -> bool:
    """A list of the numbers of each epoch, by name, with its last step."""
    return isinstance(value, list) and all(
        numbers(each) and isinstance(each, dict) and number(each.get("step")) for each in value
    )


def fields(value: JSON) -> bool:
    """Values by name."""
    return isinstance(value, dict)


def named(value: JSON) -> bool:
    """A name, or values by name."""
    return line(value) or isinstance(value, dict)


def network(value: JSON) -> bool:
    """The text of a network, or its fields."""
    return text(value) or isinstance(value, dict)


def data(value: JSON) -> bool:
    """A name, values by name, or a list of these."""
    return named(value) or (isinstance(value, list) and all(map(named, value)))


def verdict(value: JSON) -> bool:
    """A verdict with its reason and its difference."""
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
        **dict.fromkeys(("started", "ended"), moment),
        **dict.fromkeys(("process_started", "since_boot"), number),
        "cause": text,
        "pid": process,
        "rank": whole,
        "resumed": records,
    },
    "experiment.json": {
        **dict.fromkeys(("workers", "threads", "repeats"), count),
        **dict.fromkeys(("epochs", "batch_size", "seed", "steps"), whole),
        **dict.fromkeys(("name", "optimizer", "precision", "clock", "notebook"), line),
        **dict.fromkeys(("model_options", "dataset_options", "optimizer_options"), fields),
        "model": named,
        "network": network,
        "dataset": data,
        "learning_rate": number,
        "slow": fields,
        "strategy": fields,
    },
    "metrics.json": {
        **dict.fromkeys(("test_accuracy", "test_loss"), number),
        **dict.fromkeys(("samples_per_second", "train_seconds", "first_step_ms"), amount),
        **dict.fromkeys(("payload_bytes_per_step", "wire_bytes_per_step"), amount),
        **dict.fromkeys(("link_bytes_per_step", "codec_ms_per_step"), amount),
        **dict.fromkeys(("workers", "threads", "repeats"), count),
        "clock": line,
        "network": network,
        **dict.fromkeys(("exchange", "partition", "checkpoints", "bad_numbers"), fields),
        **dict.fromkeys(("faults", "stretches"), records),
        "oversubscribed": truth,
        "memory_bytes": numbers,
        "step_ms": quantiles,
        "spread": ends,
        "logged": names,
        "equivalence": verdict,
        "epochs": epochs,
        "memory": memory,
        "clocks": clocks,
    },
    "environment.json": {},
    "sweep.json": {
        **dict.fromkeys(("state", "notebook", "plan", "slurm"), line),
        **dict.fromkeys(("started", "ended"), moment),
        **dict.fromkeys(("process_started", "since_boot"), number),
        "pid": process,
        "jobs": count,
        "limit": positive,
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
    "microscope": {
        **dict.fromkeys(("step", "rank"), WHOLE),
        "layer": TEXT,
        **dict.fromkeys(("relative_error", "cosine", "residual_norm"), NUMBER),
        **dict.fromkeys(("bits_per_parameter", "fraction_sent"), NUMBER),
    },
    "interleaving": {
        **dict.fromkeys(("server", "update", "worker", "step", "version"), WHOLE),
        **dict.fromkeys(("staleness", "sent", "delivered", "applied"), NUMBER),
    },
    "layers": {
        "rank": WHOLE,
        **dict.fromkeys(("layer", "slices", "why"), TEXT),
        **dict.fromkeys(("forward_bytes", "backward_bytes"), NUMBER),
        **dict.fromkeys(("weights_bytes", "whole_weights_bytes"), NUMBER),
    },
}
