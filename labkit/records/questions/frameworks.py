"""TensorFlow's own strategies beside labkit's: what each does, costs and reaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.common.content import JSON
from labkit.records.run import Run, gate_failed
from labkit.strategies import STRATEGIES, TF_KINDS
from labkit.strategies.tf_distribute import TFDistribute

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Beside:
    """Runs of TensorFlow's strategies and of labkit's.

    Attributes:
        table: a row a run: its strategy, where it stands, what a step costs, where it ends.
        pairs: rows of one of TensorFlow's, and of the run of labkit's that does the same.
    """

    table: pd.DataFrame
    pairs: list[tuple[pd.Series, pd.Series]]


def beside(runs: Mapping[str, Run]) -> Beside:
    """Runs by name, all completed."""
    import pandas as pd

    rows = [_row(name, run) for name, run in runs.items()]
    table = pd.DataFrame(rows)
    pairs = [
        (theirs, ours)
        for (_, theirs), run in zip(table.iterrows(), runs.values(), strict=True)
        if (fields := run.experiment["strategy"])["name"] == "TFDistribute"
        for (_, ours), other in zip(table.iterrows(), runs.values(), strict=True)
        if _does(other.experiment["strategy"], TF_KINDS[fields["kind"]].ours)
        and other.experiment["workers"] == run.experiment["workers"]
    ]
    return Beside(table, pairs)


def sent(run: Run) -> pd.DataFrame:
    """Bytes a step from task to task of TensorFlow's; no rows for a run that has none."""
    import pandas as pd

    exchange: dict[str, dict[str, dict[str, int]]] = run.metrics.get("exchange") or {}
    steps = run.history["step"].nunique()
    rows = [
        {"source": source, "target": target, "bytes": nbytes / steps}
        for source, row in exchange.get("sent_bytes", {}).items()
        for target, nbytes in row.items()
    ]
    return pd.DataFrame(rows, columns=["source", "target", "bytes"])


def _does(fields: Mapping[str, JSON], asked: Mapping[str, JSON]) -> bool:
    """Whether a strategy has these fields."""
    return all(fields.get(name) == value for name, value in asked.items())


def _row(name: str, run: Run) -> dict[str, JSON]:
    fields, metrics = run.experiment["strategy"], run.metrics
    failed = gate_failed(run)
    # Bytes of other processes are known where the kernel counts them.
    exchange = metrics.get("exchange") or {}
    counted = fields["name"] != TFDistribute.__name__ or bool(exchange.get("sent_bytes"))
    return {
        "run": name,
        **dict(_place(fields, exchange)),
        "gate": metrics["equivalence"]["verdict"],
        "sound": not failed,
        "step_ms": None if failed else metrics["step_ms"]["median"],
        "wire_bytes_per_step": metrics["wire_bytes_per_step"] if counted else None,
        "accuracy": metrics.get("test_accuracy", float("nan")),
    }


def _place(fields: Mapping[str, JSON], exchange: Mapping[str, JSON]) -> Iterator[tuple[str, JSON]]:
    if fields["name"] == TFDistribute.__name__:
        kind = TF_KINDS[str(fields["kind"])]
        yield "strategy", str(exchange.get("algorithm", "")).rpartition(".")[2]
        yield "architecture", kind.architecture
        yield "synchronization", kind.synchronization
        yield "algorithm", kind.algorithm
        options = ", ".join(f"{name}={v!r}" for name, v in kind.ours.items() if name != "name")
        yield "labkit's", f"{kind.ours['name']}({options})"
        return
    strategy = STRATEGIES[str(fields["name"])]
    waits = ("asynchronous", "synchronous")
    yield "strategy", strategy.__name__
    yield "architecture", strategy.architecture
    yield (
        "synchronization",
        waits[bool(fields["synchronous"])] if "synchronous" in fields else strategy.synchronization,
    )
    yield "algorithm", exchange.get("algorithm") or fields.get("algorithm", "")
    yield "labkit's", "itself"
