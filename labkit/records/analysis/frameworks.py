"""A comparison of other frameworks' strategies with labkit's by taxonomy, costs and accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.common.canonical_json import JSON
from labkit.records.run import Run
from labkit.strategies import RING, STRATEGIES, ExternalFramework, TFDistribute
from labkit.strategies.tf_distribute import TFKind

if TYPE_CHECKING:
    import pandas as pd


EQUIVALENT_COLUMN = "labkit's"  # name of a column with the equivalent labkit strategy
# Experiment fields that do not change the work of training, so they may differ between compared
# runs.
NOT_WORK = ("schema", "name", "strategy", "verify")


@dataclass(frozen=True)
class FrameworkComparison:
    """The result of a comparison of other frameworks' runs with labkit's runs.

    Attributes:
        table: One row per run, with strategy, taxonomy, costs per step, and accuracy.
        pairs: Pairs of rows for the same work: one row of another framework, and one row of labkit.
        unmatched: Rows of other frameworks for which no equivalent labkit run exists, each with the
            reason.
    """

    table: pd.DataFrame
    pairs: list[tuple[pd.Series, pd.Series]]
    unmatched: list[tuple[pd.Series, str]]


def compare_frameworks(runs: Mapping[str, Run]) -> FrameworkComparison:
    """Compare other frameworks' completed runs with labkit's completed runs."""
    import pandas as pd

    table = pd.DataFrame([_row(name, run) for name, run in runs.items()])
    comparison = FrameworkComparison(table, [], [])
    rows_and_runs = [
        (row, run) for (_, row), run in zip(table.iterrows(), runs.values(), strict=True)
    ]
    for theirs, run in rows_and_runs:
        if (kind := _kind(run.experiment["strategy"])) is None:
            continue
        matching = [
            pair for pair in rows_and_runs if _matches(pair[1].experiment["strategy"], kind.ours)
        ]
        differences = [_differences(run, other) for _, other in matching]
        same = [ours for (ours, _), names in zip(matching, differences, strict=True) if not names]
        comparison.pairs.extend((theirs, ours) for ours in same)
        if not same:
            fewest = min(differences, key=len, default=[])
            reason = (
                f"other work: {', '.join(fewest)}"
                if fewest
                else "no run with the same model, data and settings"
            )
            comparison.unmatched.append(
                (theirs, f"labkit's {theirs[EQUIVALENT_COLUMN]} has {reason}")
            )
    return comparison


def sent_bytes(run: Run) -> pd.DataFrame:
    """Return the bytes per step between tasks of another framework; empty for labkit's runs."""
    import pandas as pd

    exchange: dict[str, dict[str, dict[str, int]]] = run.metrics.get("exchange") or {}
    # Older records lack `counted_steps`; their bytes are counted from the start of the processes,
    # over all steps.
    steps = exchange.get("counted_steps", run.history["step"].nunique())
    rows = [
        {"source": source, "target": target, "bytes": nbytes / steps}
        for source, row in (exchange.get("sent_bytes", {}) if steps else {}).items()
        for target, nbytes in row.items()
    ]
    return pd.DataFrame(rows, columns=["source", "target", "bytes"])


def _differences(run: Run, other: Run) -> list[str]:
    """Return the names of fields that define the work of training and differ between two runs."""
    one, two = run.experiment, other.experiment
    names = dict.fromkeys([*one, *two])
    return [name for name in names if name not in NOT_WORK and one.get(name) != two.get(name)]


def _matches(fields: Mapping[str, JSON], options: Mapping[str, JSON]) -> bool:
    """Return whether a strategy has exactly these options, and default values in other fields."""
    if fields["name"] != options["name"]:
        return False
    default = STRATEGIES[str(options["name"])]().to_json()
    return default | dict(fields) == default | dict(options)


def _kind(fields: Mapping[str, JSON]) -> TFKind | None:
    """Return the taxonomy of a strategy from another framework, or None for labkit's strategies."""
    if fields["name"] == ExternalFramework.__name__:
        return RING
    if fields["name"] != TFDistribute.__name__:
        return None
    return TFDistribute.model_validate({k: v for k, v in fields.items() if k != "name"}).equivalent


def _row(name: str, run: Run) -> dict[str, JSON]:
    fields, metrics = run.experiment["strategy"], run.metrics
    equivalence = metrics["equivalence"]
    # The bytes that other frameworks' processes send are known only if the operating system's
    # kernel counts them.
    exchange = metrics.get("exchange") or {}
    counted = _kind(fields) is None or bool(exchange.get("sent_bytes"))
    return {
        "run": name,
        **dict(_taxonomy(fields, exchange, run.experiment["workers"])),
        "network": metrics.get("network") or "this machine's own",
        "equivalence": equivalence["verdict"],
        "why": equivalence["reason"],
        # If equivalence is not verified, runs may do different work, so that their step times
        # cannot be compared.
        "step_ms": metrics["step_ms"]["median"] if equivalence["verdict"] == "passed" else None,
        "wire_bytes_per_step": metrics["wire_bytes_per_step"] if counted else None,
        "accuracy": metrics.get("test_accuracy", float("nan")),
    }


def _taxonomy(
    fields: Mapping[str, JSON], exchange: Mapping[str, JSON], workers: int
) -> Iterator[tuple[str, JSON]]:
    if (foreign_kind := _kind(fields)) is not None:
        yield "strategy", str(exchange.get("algorithm", "")).rpartition(".")[2]
        yield "architecture", foreign_kind.architecture
        yield "synchronization", foreign_kind.synchronization
        yield "algorithm", foreign_kind.algorithm
        options = ", ".join(
            f"{name}={v!r}" for name, v in foreign_kind.ours.items() if name != "name"
        )
        yield EQUIVALENT_COLUMN, f"{foreign_kind.ours['name']}({options})"
        yield "legacy", "Keras 3's fit does not support it" if foreign_kind.legacy else ""
        return
    kind = STRATEGIES[str(fields["name"])]
    cell = kind.model_validate({k: v for k, v in fields.items() if k != "name"}).cell(workers)
    yield "strategy", kind.__name__
    yield "architecture", cell.architecture
    yield "synchronization", cell.synchronization
    yield "algorithm", exchange.get("algorithm") or fields.get("algorithm", "")
    yield EQUIVALENT_COLUMN, "itself"
    yield "legacy", ""
