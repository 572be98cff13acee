"""The metrics of a run, computed from its history by the same rules for all runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypeAlias, TypedDict

import numpy as np

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import LabkitError
from labkit.experiment import Experiment
from labkit.records.run import Run, flatten
from labkit.records.store import Record
from labkit.records.timed_steps import is_applied, is_asynchronous, with_end_times

if TYPE_CHECKING:
    from labkit.communicator.clock import Offset
    from labkit.exchange import BadValues
    from labkit.model_parallel.memory import Memory
    from labkit.model_parallel.messages import LayerRow


# A `Row` contains the values of one training step on one rank, with the columns in
# `store.HISTORY_COLUMNS`.
Row: TypeAlias = Mapping[str, float]
Rows: TypeAlias = list[dict[str, JSON]]
# An `Event` consists of kind, step, bucket, start in seconds, and stop in seconds.
Event: TypeAlias = tuple[str, int, int, float, float]


class FirstDifference(TypedDict):
    """The first operation in which a run differs from its reference run.

    All operations before the first difference are equal in the run and its reference run. The field
    `operation` may be "initial weights", "batch" (rows of input) or "gradient" (on one rank). The
    field `operation` may also be "mean" (over ranks) or "optimizer" (update of weights). The value
    "round" of `operation` means a round of the reduction schedule. The value "bucket" of
    `operation` means packing or unpacking of a gradient bucket. The value "collection" of
    `operation` means collection of the trained weights.
    """

    step: int
    layer: str
    # The field `rank` is None if every rank that has this layer differs from the reference run.
    rank: int | None
    operation: str
    bucket: int | None
    round: int | None  # The rounds of a reduction are counted from 1.
    expected: float
    found: float


class Verdict(TypedDict):
    """The verdict of the equivalence check, with the place of the difference after a failure."""

    verdict: Literal["passed", "failed", "not applicable"]
    max_abs_difference: float | None
    tolerance: float | None
    reason: str
    place: NotRequired[FirstDifference]


def place_text(place: FirstDifference) -> str:
    """Return a text that describes where a run first differs from its reference run."""
    location = "" if place["rank"] is None else f" on rank {place['rank']}"
    parts = [f"{n} {place[n]}" for n in ("round", "bucket") if place[n] is not None]
    details = f" ({', '.join(parts)})" if parts else ""
    return (
        f"first difference in step {place['step']}: {place['operation']} of {place['layer']}"
        f"{location}{details}, "
        f"{place['found']:.9g} instead of {place['expected']:.9g}"
    )


@dataclass(frozen=True)
class WholeResult:
    """The results of a run that belong to the whole run, not to a single rank.

    Attributes:
        epochs: Metrics after each epoch.
        evaluation: Metrics of the trained model on held-out samples.
        equivalence: Verdict of the check that the run is equivalent to its reference run.
        environment: Versions of packages, and hardware of the machine.
        exchange: Method of gradient exchange, with the reason for its choice; None if no gradients
            are exchanged.
        partition: Positions at which the model is cut into stages; None if it is not cut.
        checkpoints: Number and costs of the run's checkpoints; None if the run writes no
            checkpoints.
        faults: Failures of ranks that training survived, with the seconds that each of them cost.
        membership_history: For each set of ranks that trained together, their first training step.
        model: Bytes of the trained model's .keras file; None if Keras cannot save the model.
    """

    epochs: list[dict[str, float]]
    evaluation: Mapping[str, float]
    equivalence: Verdict
    environment: Mapping[str, JSON] = field(default_factory=dict)
    faults: Rows = field(default_factory=list)
    membership_history: Rows = field(default_factory=list)
    exchange: Mapping[str, JSON] | None = None
    partition: Mapping[str, JSON] | None = None
    checkpoints: Mapping[str, JSON] | None = None
    model: bytes | None = None


@dataclass(frozen=True)
class RankResult:
    """The results of one rank of a run.

    Attributes:
        rows: History of the rank, with one row per step.
        memory: Measured and predicted bytes on the rank, with one entry per kind of memory.
        peak: Peak memory of the rank's process in bytes.
        stopped: Whether the user stopped the training early; default: False.
        timeline: Timed events of the rank, see `labkit.exchange.Timeline`.
        offsets: Offsets of this rank's clock from the clock of rank 0, measured before and after
            training.
        compression_stats: Rows with statistics of gradient compression.
        resources: Samples of processor time, memory and traffic during training.
        nonfinite: Records of gradients and losses that were infinite or NaN.
        update_log: Events of the parameter servers, one per gradient; see
            `labkit.programs.event_log.EventLog`.
        layers: One entry per layer under tensor parallelism, with its division and the bytes that
            it sends.
        whole: Results of the whole run, on rank 0; None on other ranks.
    """

    rows: Sequence[Row]
    memory: Memory
    peak: int
    stopped: bool = False
    timeline: Sequence[Event] = ()
    offsets: Sequence[Offset] = ()
    compression_stats: Rows = field(default_factory=list)
    layers: Sequence[LayerRow] = ()
    resources: Sequence[Row] = ()
    nonfinite: Sequence[BadValues] = ()
    update_log: Sequence[Row] = ()
    whole: WholeResult | None = None


def on_one_clock(events: Sequence[Event], offsets: Sequence[Offset]) -> Sequence[Event]:
    """Return a rank's events with times on rank 0's clock; clock drift is assumed to be linear.

    If no measured offset exceeds its error, as on a single host, times are unchanged.
    """
    if all(abs(offset.seconds) <= offset.within for offset in offsets):
        return events
    import numpy as np

    moments, seconds = [offset.moment for offset in offsets], [offset.seconds for offset in offsets]

    def corrected(time: float) -> float:
        return time - float(np.interp(time, moments, seconds))

    return [
        (kind, step, bucket, corrected(start), corrected(stop))
        for kind, step, bucket, start, stop in events
    ]


def memory_bytes(results: Iterable[RankResult]) -> dict[str, int]:
    """Return each kind of memory and the peak process memory in bytes, as maxima over ranks.

    Gradients have the same dtype as weights. With a mixed-precision policy, weights stay float32
    and are cast when used. Only activations therefore have another dtype than the weights.
    """
    # The maximum memory over all ranks decides whether a job fits a machine.
    bytes_by_rank = [result.memory.trained() | {"peak": result.peak} for result in results]
    return {
        kind: max(rank_bytes[kind] for rank_bytes in bytes_by_rank) for kind in bytes_by_rank[0]
    }


# In a run with more than 20 steps, step times exclude the first step and ten warm-up steps.
WARM_UP = 10


def summarise(
    experiment: Experiment,
    rows: Sequence[Row],
    ranks: Mapping[int, RankResult],
    whole_result: WholeResult,
) -> Record:
    """Return the metrics of a run, which labkit stores in the file metrics.json.

    The slowest rank determines the duration of a training step. With asynchronous workers, each
    step of each worker is a separate measurement. The first training step is reported separately,
    because the model is traced in it. In a run of more than 20 steps, the 10 steps after the first
    are warm-up. The warm-up steps are not timed. The median, p10 and p90 of the step time are
    computed from the remaining steps. Steps that measure compression statistics are excluded,
    unless all steps measure them.

    Args:
        experiment: Experiment that was run.
        rows: History rows of all ranks.
        ranks: Results of the surviving ranks; each key is a rank number.
        whole_result: Results of the whole run, which rank 0 returns.
    """
    # The package psutil is imported inside the function, because most callers of this module do not
    # need it.
    import psutil

    steps = _Steps.of(rows, experiment.seed)
    # The bytes per step exclude the first training step. In the first step, ranks also send
    # one-time data, such as initial weights.
    later = [row for row in rows if row["step"] > 0] or rows
    # Step times have a minimum and a long tail, so percentiles describe them better than a standard
    # deviation.
    median, p10, p90 = (float(np.percentile(steps.timed, q)) for q in (50, 10, 90))
    evaluation = {f"test_{name}": value for name, value in whole_result.evaluation.items()}
    cores = psutil.cpu_count(logical=True) or 1
    # The key `test_loss` is always present, so that other code need not test whether it exists.
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
            **_link_bytes(later),
            "clock": experiment.clock,
            "network": None if experiment.network is None else str(experiment.network),
            "oversubscribed": _process_count(experiment) * experiment.threads > cores,
            "workers": experiment.workers,
            "threads": experiment.threads,
            "exchange": whole_result.exchange,
            "memory_bytes": memory_bytes(ranks.values()),
            "memory": [{"rank": k} | asdict(result.memory) for k, result in ranks.items()],
            "clocks": [
                {"rank": k, "offset_s": offset.seconds, "within_s": offset.within}
                for k, rank in ranks.items()
                for offset in rank.offsets[-1:]
            ],
            "partition": whole_result.partition,
            **({"checkpoints": whole_result.checkpoints} if whole_result.checkpoints else {}),
            "codec_ms_per_step": 1e3 * float(np.mean([row["codec_seconds"] for row in later])),
            **_nonfinite_values(experiment, list(ranks.values())),
            "equivalence": whole_result.equivalence,
            "faults": whole_result.faults,
            "membership_history": whole_result.membership_history,
            "epochs": whole_result.epochs,
        }
    )


def _nonfinite_values(experiment: Experiment, ranks: Sequence[RankResult]) -> Record:
    """Return a record of infinite or NaN losses and gradients, or {} if all values are finite."""
    bad_values = sorted((b for rank in ranks for b in rank.nonfinite), key=lambda b: b["step"])
    if not bad_values:
        return {}
    steps = len({bad["step"] for bad in bad_values})
    return {"nonfinite": {"policy": experiment.on_nonfinite, "steps": steps, "found": bad_values}}


def _process_count(experiment: Experiment) -> int:
    """Return the number of concurrent processes of a run, which is 1 on the virtual clock."""
    virtual = experiment.clock == "virtual"
    return 1 if virtual else experiment.strategy.processes(experiment.workers)


@dataclass(frozen=True)
class _Steps:
    """The durations of a run's timed training steps, and its samples per second.

    Attributes:
        timed: Seconds of each timed step.
        rate: Samples per second, summed over all ranks. With asynchronous workers, `rate` counts
            only samples whose gradients are applied after the warm-up.
        first, whole: Seconds of the first training step, and total seconds of all training steps.
    """

    timed: np.ndarray
    rate: float
    first: float
    whole: float

    @classmethod
    def of(cls, rows: Sequence[Row], seed: int) -> _Steps:
        """Return the durations of training steps, computed from the history rows of all ranks."""
        import pandas as pd

        history = pd.DataFrame(list(rows)).assign(seed=seed)
        table, paced = with_end_times(history), is_asynchronous(history)
        if "relative_error" not in table:
            table["relative_error"] = math.nan
        table["samples"] = table["samples"].where(is_applied(table), 0)
        steps = table.groupby("step").agg(
            ended=("ended", "max"),
            seconds=("seconds", "max"),
            samples=("samples", "sum"),
            looked=("relative_error", "count"),
        )
        first = 1 + WARM_UP if len(steps) > 2 * WARM_UP else min(1, len(steps) - 1)
        ended, late = steps["ended"].to_numpy(), steps.iloc[first:]
        chosen = table[table["step"] >= first] if paced else late
        # A training step that measures compression statistics compresses gradients twice, so it
        # takes longer than other steps.
        unseen = chosen[chosen["relative_error" if paced else "looked"].fillna(0) == 0]
        chosen = unseen if len(unseen) else chosen
        timed = chosen["seconds"].to_numpy(float)
        if paced:
            rate = late["samples"].sum() / (ended[-1] - (ended[first - 1] if first else 0.0))
        else:
            rate = np.median(chosen["samples"]) / np.median(timed)
        return cls(timed, float(rate), float(ended[0]), float(ended[-1]))


def _link_bytes(rows: Sequence[Row]) -> Record:
    """Return a rank's mean bytes per step to other hosts, or {} if there is only one host."""
    link_bytes = [row["link_bytes"] for row in rows if "link_bytes" in row]
    return {"link_bytes_per_step": float(np.mean(link_bytes))} if link_bytes else {}


def aggregate(seeds: Sequence[Run]) -> Record:
    """Return the medians of metrics over several repeats of a run, as one record.

    The entry `spread` contains, for each numeric metric, the [minimum, maximum] over the repeats.
    A text metric keeps the text of the first repeat. The verdict of the equivalence check is the
    worst verdict of all repeats. The median of an epoch metric covers the same epoch of all
    repeats.

    Raises:
        LabkitError: If no repeat has completed.
    """
    records = [seed.metrics for seed in seeds if seed.status["state"] == "completed"]
    if not records:
        raise LabkitError(
            f"none of {len(seeds)} repeats completed, so there are no results to aggregate"
        )
    checks = [record["equivalence"] for record in records if "equivalence" in record]
    merged: Record = _median(records)
    if checks:
        # A failed equivalence check counts as the worst verdict. Among equivalence checks with the
        # same verdict, the check with the largest difference counts as the worst.
        rank = [
            (check["verdict"] == "failed", check.get("max_abs_difference") or 0) for check in checks
        ]
        merged["equivalence"] = checks[rank.index(max(rank))]
    merged["oversubscribed"] = any(record.get("oversubscribed") for record in records)
    merged["repeats"] = len(records)
    merged["spread"] = _spread(records)
    return merged


def _spread(records: Sequence[Record]) -> dict[str, list[float]]:
    # The metrics `epochs` (a list) and `equivalence` (one verdict) have no minimum and maximum over
    # repeats.
    scalars = ({k: v for k, v in r.items() if k not in ("epochs", "equivalence")} for r in records)
    flat = [flatten(record) for record in scalars]
    columns = {key: [row[key] for row in flat if is_number(row.get(key))] for key in flat[0]}
    return {key: [min(values), max(values)] for key, values in columns.items() if values}


def _median(values: Sequence[Any]) -> Any:
    """Return medians of numbers, also inside dicts and lists; of other values, the first one."""
    first = next((value for value in values if value is not None), None)
    if is_number(first):
        return statistics.median(value for value in values if is_number(value))
    if isinstance(first, dict):
        # The function `dict.fromkeys` keeps the order of keys, which a set would lose.
        keys = dict.fromkeys(key for value in values if value for key in value)
        return {key: _median([value.get(key) for value in values if value]) for key in keys}
    if isinstance(first, list):
        length = min(len(value) for value in values if value is not None)
        return [_median([value[index] for value in values if value]) for index in range(length)]
    return first
