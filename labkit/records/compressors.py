"""Texts that describe a run's compression, and the choice of an uncompressed baseline run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from labkit.common.canonical_json import JSON
from labkit.compression import COMPRESSORS
from labkit.records.run import Run, flatten

DENSE = "no compression"
MAX_NAME_LENGTH = 80
# Runs of the same training method may differ in name, network, seed and repeats.
_IGNORED_FIELDS = ("name", "network", "seed", "repeats")


def compressor_expression(compressor: JSON) -> str:
    """Return a compressor's record as an expression, such as `ErrorFeedback(TopK(ratio=0.01))`.

    The expression contains all numeric options, and each text or boolean that differs from its
    default.
    """
    if compressor is None:
        return DENSE
    if isinstance(compressor, list):
        return ", ".join(compressor_expression(part) for part in compressor)
    if not isinstance(compressor, Mapping):
        return str(compressor)
    name = str(compressor.get("name", ""))
    inside = ", ".join(
        compressor_expression(part) if isinstance(part, Mapping | list) else f"{field}={part}"
        for field, part in compressor.items()
        if field != "name" and part is not None and not _is_default(name, field, part)
    )
    return f"{name}({inside})" if inside else name


def compressor_of(run: Run) -> dict[str, JSON] | None:
    """Return the record of a run's compressor, or None if the run does not use compression."""
    compressor: dict[str, JSON] | None = (run.experiment.get("strategy") or {}).get("compressor")
    return compressor


def method(run: Run) -> str:
    """Return a text for a run's compression, such as `TopK(ratio=0.01)` or `no compression`."""
    text = compressor_expression(compressor_of(run))
    return text if len(text) <= MAX_NAME_LENGTH else text[: MAX_NAME_LENGTH - 1] + "…"


def task_fields(run: Run) -> dict[str, JSON]:
    """Return the fields that define a run's task: all except strategy, network and seeds."""
    return {name: value for name, value in method_fields(run).items() if name != "strategy"}


def baseline_of(run: Run, runs: Iterable[Run]) -> Run | None:
    """Return an uncompressed run of the same task as a compressed run, or None if there is none.

    A baseline on the same network has priority. Among several baselines, the run with the most
    similar strategy is chosen. For an uncompressed run, the result is None.
    """
    if compressor_of(run) is None:
        return None
    expected = task_fields(run)
    candidates = [
        other for other in runs if compressor_of(other) is None and task_fields(other) == expected
    ]
    return min(candidates, key=lambda other: _difference(other, run), default=None)


def _difference(one: Run, other: Run) -> tuple[bool, int]:
    strategy, other_strategy = (
        flatten(run.experiment.get("strategy") or {}) for run in (one, other)
    )
    differing = [
        name for name in strategy | other_strategy if strategy.get(name) != other_strategy.get(name)
    ]
    network = one.experiment.get("network") != other.experiment.get("network")
    # A run with the same network is preferred over a run with the same strategy. The network
    # influences a run more than the strategy.
    return network, sum(not name.startswith("compressor") for name in differing)


def method_fields(run: Run) -> dict[str, JSON]:
    """Return a run's experiment fields without name, network and seeds."""
    return {name: value for name, value in run.experiment.items() if name not in _IGNORED_FIELDS}


def _is_default(name: str, field: str, value: JSON) -> bool:
    # A record may contain a compressor that is not part of labkit. For example, a notebook may
    # define its own compressor.
    if name not in COMPRESSORS or not isinstance(value, str | bool):
        return False
    field_info = COMPRESSORS[name].model_fields.get(field)
    return field_info is not None and field_info.default == value
