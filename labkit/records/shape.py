"""What the fields of a record may be: a record may come from a stranger, or from a torn disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TypeAlias

from labkit.common.content import JSON

Field: TypeAlias = Callable[[JSON], bool]


def wrong_field(file: str, record: Mapping[str, JSON]) -> str | None:
    """What is wrong with the first odd field of a record, or None.

    Checked is what readers take for granted; other fields, and those that are null or missing,
    are let through. Not by pydantic, whose import takes longer than `labkit ls` does.

    Args:
        file: the record's name, such as "status.json".
    """
    for name, is_fine in FIELDS.get(file, {}).items():
        value = record.get(name)
        if value is not None and not is_fine(value):
            kind = (is_fine.__doc__ or "").split(".")[0].rstrip()
            return f"{name} is {str(value)[:40]!r}; expected is {kind[0].lower()}{kind[1:]}"
    return None


def text(value: JSON) -> bool:
    """Text."""
    return isinstance(value, str)


def whole(value: JSON) -> bool:
    """A whole number of at most 18 digits."""
    return type(value) is int and -(10**18) < value < 10**18


def number(value: JSON) -> bool:
    """A number."""
    return type(value) is float or whole(value)


def moment(value: JSON) -> bool:
    """A moment with its time zone, as ISO 8601 writes it."""
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def numbers(value: JSON) -> bool:
    """Numbers by name."""
    if not isinstance(value, dict):
        return False
    # Kind by kind: of thousands of runs each number is checked.
    odd = {*map(type, value.values())} - {float, int, type(None)}
    return not odd and all(type(each) is not int or whole(each) for each in value.values())


def records(value: JSON) -> bool:
    """A list of records."""
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def epochs(value: JSON) -> bool:
    """A list of the numbers of each epoch, by name."""
    return isinstance(value, list) and all(numbers(each) for each in value)


def fields(value: JSON) -> bool:
    """Values by name."""
    return isinstance(value, dict)


def verdict(value: JSON) -> bool:
    """A verdict with its reason and its difference."""
    if not isinstance(value, dict):
        return False
    words = all(isinstance(value.get(name, ""), str) for name in ("verdict", "reason"))
    sizes = (value.get(name) for name in ("max_abs_difference", "tolerance"))
    return (
        fields(value.get("place", {}))
        and words
        and all(size is None or number(size) for size in sizes)
    )


FIELDS: dict[str, dict[str, Field]] = {
    "status.json": {"state": text, "started": moment, "ended": moment, "rank": whole},
    "experiment.json": {
        **dict.fromkeys(("workers", "threads", "epochs", "batch_size", "seed", "repeats"), whole),
        **dict.fromkeys(("name", "optimizer", "precision"), text),
        **dict.fromkeys(("model_options", "dataset_options", "optimizer_options"), fields),
        "learning_rate": number,
        "strategy": fields,
    },
    "metrics.json": {
        **dict.fromkeys(("test_accuracy", "test_loss", "samples_per_second"), number),
        **dict.fromkeys(("train_seconds", "payload_bytes_per_step"), number),
        **dict.fromkeys(("wire_bytes_per_step", "link_bytes_per_step"), number),
        "step_ms": numbers,
        "equivalence": verdict,
        "epochs": epochs,
        "memory": records,
        "clocks": records,
    },
}
