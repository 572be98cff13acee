"""From a run's rows to its metrics, by the rules of measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from labkit.common.canonical_json import is_number
from labkit.common.errors import LabkitError
from labkit.experiment import Experiment
from labkit.records.pace import applied, in_order, own_pace
from labkit.records.result import RankResult, Row, WholeResult, memory_bytes
from labkit.records.run import Run, flatten
from labkit.records.store import Record

WARM_UP = 10  # steps


def summarise(
    experiment: Experiment,
    rows: Sequence[Row],
    ranks: Mapping[int, RankResult],
    whole: WholeResult,
) -> Record:
    """The record of metrics.json.

    A step lasts as long as its slowest rank; where workers go at their own pace, a worker's own.
    The first step (tracing) stands apart; 10 further steps warm up where there are more than twice
    as many; the rest give median and spread, but for those that were looked at through a
    microscope, unless all were.

    Args:
        experiment: what was run.
        rows: history of all ranks.
        ranks: what they returned, in their order; not those that died.
        whole: what rank 0 said for all.
    """
    # In the function: not all who read metrics measure any.
    import psutil

    steps = _Steps.of(rows, experiment.seed)
    # The first step also sends what is sent once: initial weights, sizes.
    later = [row for row in rows if row["step"] > 0] or rows
    # Percentiles, not a deviation: steps have a least time and a long tail.
    median, p10, p90 = (float(np.percentile(steps.timed, q)) for q in (50, 10, 90))
    evaluation = {f"test_{name}": value for name, value in whole.evaluation.items()}
    cores = psutil.cpu_count(logical=True) or 1
    # `test_loss` is always there: readers of the record may rely on it.
    return (
        {"test_loss": None}
        | evaluation
        | {
            "samples_per_second": steps.rate,
            "step_ms": {"median": 1e3 * median, "p10": 1e3 * p10, "p90": 1e3 * p90},
            "timed_steps": len(steps.timed),
            "first_step_ms": 1e3 * steps.first,
            "train_seconds": steps.whole,
            "payload_bytes_per_step": float(np.mean([row["payload_bytes"] for row in later])),
            "wire_bytes_per_step": float(np.mean([row["wire_bytes"] for row in later])),
            **_between_hosts(later),
            "clock": experiment.clock,
            "network": None if experiment.network is None else str(experiment.network),
            "oversubscribed": _processes(experiment) * experiment.threads > cores,
            "workers": experiment.workers,
            "threads": experiment.threads,
            "exchange": whole.exchange,
            "memory_bytes": memory_bytes(ranks.values()),
            "memory": [{"rank": k} | asdict(each.memory) for k, each in ranks.items()],
            "clocks": [
                {"rank": k, "offset_s": offset.seconds, "within_s": offset.within}
                for k, rank in ranks.items()
                for offset in rank.offsets[-1:]
            ],
            "partition": whole.partition,
            **({"checkpoints": whole.checkpoints} if whole.checkpoints else {}),
            "codec_ms_per_step": 1e3 * float(np.mean([row["codec_seconds"] for row in later])),
            **_bad(experiment, list(ranks.values())),
            "equivalence": whole.equivalence,
            "faults": whole.faults,
            "stretches": whole.stretches,
            "epochs": whole.epochs,
        }
    )


def _bad(experiment: Experiment, ranks: Sequence[RankResult]) -> Record:
    """What was not finite, by step, rank and layer; nothing where all was."""
    found = sorted((b for rank in ranks for b in rank.bad_numbers), key=lambda b: b["step"])
    if not found:
        return {}
    steps = len({bad["step"] for bad in found})
    return {"bad_numbers": {"policy": experiment.bad_numbers, "steps": steps, "found": found}}


def _processes(experiment: Experiment) -> int:
    """That compute at once: one plays all workers of the virtual clock."""
    virtual = experiment.clock == "virtual"
    return 1 if virtual else experiment.strategy.processes(experiment.workers)


@dataclass(frozen=True)
class _Steps:
    """What steps took.

    Attributes:
        timed: s, of those that count.
        rate: samples a second of these; at the workers' own pace, of all that was applied after
            the warm-up.
        first, whole: s, of the first step and of all.
    """

    timed: np.ndarray
    rate: float
    first: float
    whole: float

    @classmethod
    def of(cls, rows: Sequence[Row], seed: int) -> _Steps:
        """From the rows of all ranks."""
        import pandas as pd

        history = pd.DataFrame(list(rows)).assign(seed=seed)
        table, paced = in_order(history), own_pace(history)
        if "relative_error" not in table:
            table["relative_error"] = math.nan
        table["samples"] = table["samples"].where(applied(table), 0)
        steps = table.groupby("step").agg(
            ended=("ended", "max"),
            seconds=("seconds", "max"),
            samples=("samples", "sum"),
            looked=("relative_error", "count"),
        )
        first = 1 + WARM_UP if len(steps) > 2 * WARM_UP else min(1, len(steps) - 1)
        ended, late = steps["ended"].to_numpy(), steps.iloc[first:]
        chosen = table[table["step"] >= first] if paced else late
        # A look through the microscope encodes and decodes once more, which no other step does.
        unseen = chosen[chosen["relative_error" if paced else "looked"].fillna(0) == 0]
        chosen = unseen if len(unseen) else chosen
        timed = chosen["seconds"].to_numpy(float)
        if paced:
            rate = late["samples"].sum() / (ended[-1] - (ended[first - 1] if first else 0.0))
        else:
            rate = np.median(chosen["samples"]) / np.median(timed)
        return cls(timed, float(rate), float(ended[0]), float(ended[-1]))


def _between_hosts(rows: Sequence[Row]) -> Record:
    """What leaves a rank's host in a step, where ranks were on several."""
    out = [row["link_bytes"] for row in rows if "link_bytes" in row]
    return {"link_bytes_per_step": float(np.mean(out))} if out else {}


def aggregate(seeds: Sequence[Run]) -> Record:
    """The metrics of repeats as one record: medians, `repeats`, and `spread` (key -> [min, max]).

    Words that all repeats share stay; the gate's verdict is the worst of them. Epochs are matched
    by their place. Raises LabkitError where no repeat completed.
    """
    records = [seed.metrics for seed in seeds if seed.status["state"] == "completed"]
    if not records:
        raise LabkitError(f"none of {len(seeds)} repeats completed: there is nothing to aggregate")
    gates = [record["equivalence"] for record in records if "equivalence" in record]
    merged: Record = _median(records)
    if gates:
        # The worst: a failed verdict first, then the largest difference.
        rank = [
            (gate["verdict"] == "failed", gate.get("max_abs_difference") or 0) for gate in gates
        ]
        merged["equivalence"] = gates[rank.index(max(rank))]
    # Words take the first seed's; this one counts if it is true of any.
    merged["oversubscribed"] = any(record.get("oversubscribed") for record in records)
    merged["repeats"] = len(records)
    merged["spread"] = _spread(records)
    return merged


def _spread(records: Sequence[Record]) -> dict[str, list[float]]:
    # Epochs are lists, and of verdicts the worst is told: a spread of neither says anything.
    kept = ({k: v for k, v in r.items() if k not in ("epochs", "equivalence")} for r in records)
    flat = [flatten(record) for record in kept]
    columns = {key: [row[key] for row in flat if is_number(row.get(key))] for key in flat[0]}
    return {key: [min(values), max(values)] for key, values in columns.items() if values}


def _median(values: Sequence[Any]) -> Any:
    """The median of numbers; of records by key, of lists by place; of anything else the first."""
    first = next((value for value in values if value is not None), None)
    if is_number(first):
        return statistics.median(value for value in values if is_number(value))
    if isinstance(first, dict):
        # In the order in which the first repeat has them; a set would shuffle the file.
        keys = dict.fromkeys(key for value in values if value for key in value)
        return {key: _median([value.get(key) for value in values if value]) for key in keys}
    if isinstance(first, list):
        length = min(len(value) for value in values if value is not None)
        return [_median([value[place] for value in values if value]) for place in range(length)]
    return first
