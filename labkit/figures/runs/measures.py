"""Parameters that differ and numbers that were measured, by name, for figures over any of them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from labkit.common.content import is_number
from labkit.common.errors import InvalidInput
from labkit.figures.kit import entries as naming
from labkit.figures.kit.axes import Value, number_text, word
from labkit.figures.kit.entries import Entry
from labkit.records.run import flatten

MEASURES = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "wire_bytes_per_step": "bytes a step",
    "train_seconds": "training, s",
    "samples_per_second": "samples/s",
}
_OTHERS = {"step_ms.median": "step, ms", "payload_bytes_per_step": "payload, bytes a step"}
# Whatever was timed is a speed; a run that failed its gate has none.
_TIMED = ("second", "_ms", "samples_per")


def parameters(shown: Sequence[Entry]) -> dict[str, list[Value]]:
    """The parameters in which the runs differ, by name: one value a run, None where it has none."""
    rows = naming.differences([entry.run for entry in shown])
    return {
        name: [row.get(name) for row in rows] for name in dict.fromkeys(n for r in rows for n in r)
    }


def measured(shown: Sequence[Entry], name: str) -> list[float | None]:
    """One number a run; None where it was not measured, or may not be shown."""
    return [_number(entry, name) for entry in shown]


def values_of(shown: Sequence[Entry], name: str) -> list[Value]:
    """A parameter that differs, or a number that was measured: one value a run.

    Raises: InvalidInput, where no run has it, and no run ever could.
    """
    given = parameters(shown)
    if name in given:
        return given[name]
    if name not in MEASURES and name not in numbers(shown):
        raise unknown(shown, name)
    return [*measured(shown, name)]


def unknown(shown: Sequence[Entry], name: str) -> InvalidInput:
    """What to say of a name that no run knows."""
    # Parameters first: a misspelt name is more often one of them.
    known = list(dict.fromkeys([*parameters(shown), *numbers(shown)]))
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return InvalidInput(
        f"no run has a differing parameter or a number {name!r}{hint}; there are: "
        f"{', '.join(known)}"
    )


def numbers(shown: Sequence[Entry]) -> list[str]:
    """The names of all numbers that were measured, without the extremes of seeds."""
    flat = (flatten(_results(entry)) for entry in shown)
    return sorted({name for row in flat for name, value in row.items() if is_number(value)})


def spread(entry: Entry, name: str) -> tuple[float, float] | None:
    """The least and the greatest of the run's seeds; None for a run of one seed."""
    ends = (entry.metrics.get("spread") or {}).get(name)
    return (float(ends[0]), float(ends[1])) if ends else None


def title_of(name: str) -> str:
    """The name for an axis."""
    return (MEASURES | _OTHERS).get(name, name.rpartition(".")[2].replace("_", " "))


def text_of(name: str, value: Value) -> str:
    """A value for the eye: shares in per cent, other numbers in three figures, words as words."""
    if not is_number(value):
        return word(name, value)
    return f"{value:.1%}" if name.endswith("accuracy") else number_text(value)


def is_timed(name: str) -> bool:
    """Whether the number is a speed or a duration."""
    return any(part in name for part in _TIMED)


def _number(entry: Entry, name: str) -> float | None:
    if entry.gate_failed and is_timed(name):
        return None
    value = flatten(_results(entry)).get(name)
    return float(value) if is_number(value) else None


def _results(entry: Entry) -> dict[str, Value]:
    return {k: v for k, v in entry.metrics.items() if k not in ("epochs", "spread")}
