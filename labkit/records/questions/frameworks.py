"""Other frameworks' strategies beside labkit's: what each does, costs and reaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.common.content import JSON
from labkit.records.run import Run, gate_failed
from labkit.strategies import RING, STRATEGIES, TF_KINDS, Peer, TFDistribute
from labkit.strategies.tf_distribute import Kind

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Beside:
    """Runs of other frameworks' strategies and of labkit's.

    Attributes:
        table: a row a run: its strategy, where it stands, what a step costs, where it ends.
        pairs: rows of one of theirs, and of the run of labkit's that does the same.
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
        if (kind := _kind(run.experiment["strategy"])) is not None
        for (_, ours), other in zip(table.iterrows(), runs.values(), strict=True)
        if _does(other.experiment["strategy"], kind.ours)
        and all(other.experiment[n] == run.experiment[n] for n in ("workers", "network"))
    ]
    return Beside(table, pairs)


def sent(run: Run) -> pd.DataFrame:
    """Bytes a step from task to task of another framework's; no rows for a run that has none."""
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


def _kind(fields: Mapping[str, JSON]) -> Kind | None:
    """Where another framework's strategy stands; None for one of labkit's."""
    kinds = {Peer.__name__: RING, TFDistribute.__name__: TF_KINDS.get(str(fields.get("kind")))}
    return kinds.get(str(fields["name"]))


def _row(name: str, run: Run) -> dict[str, JSON]:
    fields, metrics = run.experiment["strategy"], run.metrics
    failed = gate_failed(run)
    # Bytes of other processes are known where the kernel counts them.
    exchange = metrics.get("exchange") or {}
    counted = _kind(fields) is None or bool(exchange.get("sent_bytes"))
    return {
        "run": name,
        **dict(_place(fields, exchange)),
        "network": metrics.get("network") or "this machine's own",
        "gate": metrics["equivalence"]["verdict"],
        "sound": not failed,
        "step_ms": None if failed else metrics["step_ms"]["median"],
        "wire_bytes_per_step": metrics["wire_bytes_per_step"] if counted else None,
        "accuracy": metrics.get("test_accuracy", float("nan")),
    }


def _place(fields: Mapping[str, JSON], exchange: Mapping[str, JSON]) -> Iterator[tuple[str, JSON]]:
    if (kind := _kind(fields)) is not None:
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
