"""Other frameworks' strategies beside labkit's: what each does, costs and reaches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.common.canonical_json import JSON
from labkit.records.run import Run
from labkit.strategies import RING, STRATEGIES, Peer, TFDistribute
from labkit.strategies.tf_distribute import Kind

if TYPE_CHECKING:
    import pandas as pd


OURS = "labkit's"  # column: which of labkit's strategies does the same
# What does not define the work that is done, of all that an experiment is.
NOT_WORK = ("schema", "name", "strategy", "gate")


@dataclass(frozen=True)
class FrameworkComparison:
    """Runs of other frameworks' strategies and of labkit's.

    Attributes:
        table: a row a run: its strategy, where it stands, what a step costs, where it ends.
        pairs: rows of one of theirs, and of the run of labkit's that does the same work.
        alone: rows of theirs without such a run, and why there is none.
    """

    table: pd.DataFrame
    pairs: list[tuple[pd.Series, pd.Series]]
    alone: list[tuple[pd.Series, str]]


def beside(runs: Mapping[str, Run]) -> FrameworkComparison:
    """Runs by name, all completed."""
    import pandas as pd

    table = pd.DataFrame([_row(name, run) for name, run in runs.items()])
    found = FrameworkComparison(table, [], [])
    each = [(row, run) for (_, row), run in zip(table.iterrows(), runs.values(), strict=True)]
    for theirs, run in each:
        if (kind := _kind(run.experiment["strategy"])) is None:
            continue
        kin = [pair for pair in each if _does(pair[1].experiment["strategy"], kind.ours)]
        differences = [_differences(run, other) for _, other in kin]
        same = [ours for (ours, _), names in zip(kin, differences, strict=True) if not names]
        found.pairs.extend((theirs, ours) for ours in same)
        if not same:
            least = min(differences, key=len, default=[])
            does = f"other work: {', '.join(least)}" if least else "no run beside it"
            found.alone.append((theirs, f"labkit's {theirs[OURS]} has {does}"))
    return found


def sent(run: Run) -> pd.DataFrame:
    """Bytes a step from task to task of another framework's; no rows for a run that has none."""
    import pandas as pd

    exchange: dict[str, dict[str, dict[str, int]]] = run.metrics.get("exchange") or {}
    # Records of before count from the start of the processes, over all steps.
    steps = exchange.get("counted_steps", run.history["step"].nunique())
    rows = [
        {"source": source, "target": target, "bytes": nbytes / steps}
        for source, row in (exchange.get("sent_bytes", {}) if steps else {}).items()
        for target, nbytes in row.items()
    ]
    return pd.DataFrame(rows, columns=["source", "target", "bytes"])


def _differences(run: Run, other: Run) -> list[str]:
    """What defines the work of one run, and is another of the other one."""
    one, two = run.experiment, other.experiment
    names = dict.fromkeys([*one, *two])
    return [name for name in names if name not in NOT_WORK and one.get(name) != two.get(name)]


def _does(fields: Mapping[str, JSON], asked: Mapping[str, JSON]) -> bool:
    """Whether a strategy has these fields, and all others as nobody has asked for."""
    if fields["name"] != asked["name"]:
        return False
    default = STRATEGIES[str(asked["name"])]().to_json()
    return default | dict(fields) == default | dict(asked)


def _kind(fields: Mapping[str, JSON]) -> Kind | None:
    """Where another framework's strategy stands; None for one of labkit's."""
    if fields["name"] == Peer.__name__:
        return RING
    if fields["name"] != TFDistribute.__name__:
        return None
    return TFDistribute.model_validate({k: v for k, v in fields.items() if k != "name"}).stands


def _row(name: str, run: Run) -> dict[str, JSON]:
    fields, metrics = run.experiment["strategy"], run.metrics
    gate = metrics["equivalence"]
    # Bytes of other processes are known where the kernel counts them.
    exchange = metrics.get("exchange") or {}
    counted = _kind(fields) is None or bool(exchange.get("sent_bytes"))
    return {
        "run": name,
        **dict(_place(fields, exchange, run.experiment["workers"])),
        "network": metrics.get("network") or "this machine's own",
        "gate": gate["verdict"],
        "why": gate["reason"],
        # Elsewhere nobody knows whether the same is computed, and how fast says nothing.
        "step_ms": metrics["step_ms"]["median"] if gate["verdict"] == "passed" else None,
        "wire_bytes_per_step": metrics["wire_bytes_per_step"] if counted else None,
        "accuracy": metrics.get("test_accuracy", float("nan")),
    }


def _place(
    fields: Mapping[str, JSON], exchange: Mapping[str, JSON], workers: int
) -> Iterator[tuple[str, JSON]]:
    if (theirs := _kind(fields)) is not None:
        yield "strategy", str(exchange.get("algorithm", "")).rpartition(".")[2]
        yield "architecture", theirs.architecture
        yield "synchronization", theirs.synchronization
        yield "algorithm", theirs.algorithm
        options = ", ".join(f"{name}={v!r}" for name, v in theirs.ours.items() if name != "name")
        yield OURS, f"{theirs.ours['name']}({options})"
        yield "legacy", "Keras 3's fit does not carry it" if theirs.legacy else ""
        return
    kind = STRATEGIES[str(fields["name"])]
    cell = kind.model_validate({k: v for k, v in fields.items() if k != "name"}).cell(workers)
    yield "strategy", kind.__name__
    yield "architecture", cell.architecture
    yield "synchronization", cell.synchronization
    yield "algorithm", exchange.get("algorithm") or fields.get("algorithm", "")
    yield OURS, "itself"
    yield "legacy", ""
