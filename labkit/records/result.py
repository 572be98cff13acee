"""The result that a rank returns at the end of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NotRequired, TypeAlias, TypedDict

from labkit.common.canonical_json import JSON

if TYPE_CHECKING:
    from labkit.communicator.clock import Offset
    from labkit.exchange import BadValues
    from labkit.model_parallel.memory import Memory
    from labkit.model_parallel.meter import LayerRow

Row: TypeAlias = Mapping[str, float]  # one training step; `store.HISTORY_COLUMNS` lists the columns
Rows: TypeAlias = list[dict[str, JSON]]
Event: TypeAlias = tuple[str, int, int, float, float]  # kind, step, bucket, start, stop


class FirstDifference(TypedDict):
    """The place where a run first differs from its reference run.

    All earlier operations of the step agree. `operation` names the differing one: "initial
    weights", "batch" (different rows), "gradient", "mean", "round" (of the reduction schedule),
    "bucket" (packing and unpacking), "optimizer", or "collection" of the trained weights.
    """

    step: int
    layer: str
    rank: int | None  # None: all ranks that hold this layer differ
    operation: str
    bucket: int | None
    round: int | None  # round of the reduction schedule, counted from 1
    expected: float
    found: float


class Verdict(TypedDict):
    """The verdict of the equivalence check, and the place of the first difference if it failed."""

    verdict: Literal["passed", "failed", "not applicable"]
    max_abs_difference: float | None
    tolerance: float | None
    reason: str
    place: NotRequired[FirstDifference]


def place_text(place: FirstDifference) -> str:
    """Return as text where a run first differs from its reference run."""
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
    """Results of a whole run, in contrast to the results of each rank.

    Attributes:
        epochs: Metrics after each epoch.
        evaluation: Metrics of the trained model on held-out samples.
        equivalence: Verdict of the equivalence check.
        environment: Versions of packages, and hardware of the machine.
        exchange: Method of gradient exchange and the reason for its choice; None without an
            exchange.
        partition: Positions at which the model is cut into stages; None for an uncut model.
        checkpoints: Number and cost of checkpoints; None if the run writes no checkpoints.
        faults: Rank failures that training survived, with the seconds that each cost.
        membership_history: First step of each set of ranks that trained together.
        model: Bytes of the trained model's .keras file; None for a model that Keras cannot save.
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
    """The result of one rank.

    Attributes:
        rows: History of the rank, with one row per step.
        memory: Bytes that the rank holds, by kind, measured and predicted.
        peak: Peak memory of the process in bytes.
        stopped: True if the user stopped training early; default: False.
        timeline: Timed events, see `labkit.exchange.Timeline`.
        offsets: Clock offsets to rank 0, measured before and after training.
        compression_stats: Rows with statistics of gradient compression.
        nonfinite: Gradients and losses that were not finite.
        update_log: The parameter servers' events for each gradient, see
            `labkit.programs.event_log.EventLog`.
        layers: Slicing of each layer under tensor parallelism, and the bytes that the layer sends.
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
    nonfinite: Sequence[BadValues] = ()
    update_log: Sequence[Row] = ()
    whole: WholeResult | None = None


def on_one_clock(events: Sequence[Event], offsets: Sequence[Offset]) -> Sequence[Event]:
    """Return a rank's events with times on the clock of rank 0; clock drift counts as linear.

    If all measured offsets are within their error, as on one host, times are not changed.
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
    """Return the maximum over ranks of the bytes of each kind, and of the process's peak memory.

    Gradients have the dtype of the weights. Under a mixed precision policy, weights stay float32
    and are cast on use, so that only the activations depend on the policy.
    """
    # The rank that needs the most memory decides whether a job fits a machine.
    bytes_by_rank = [result.memory.trained() | {"peak": result.peak} for result in results]
    return {
        kind: max(rank_bytes[kind] for rank_bytes in bytes_by_rank) for kind in bytes_by_rank[0]
    }
