"""The results that the ranks of a run return at the end of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NotRequired, TypeAlias, TypedDict

from labkit.common.canonical_json import JSON

if TYPE_CHECKING:
    from labkit.communicator.clock import Offset
    from labkit.exchange import BadValues
    from labkit.model_parallel.memory import Memory
    from labkit.model_parallel.messages import LayerRow

Row: TypeAlias = Mapping[str, float]  # history of one training step (`store.HISTORY_COLUMNS`)
Rows: TypeAlias = list[dict[str, JSON]]
Event: TypeAlias = tuple[str, int, int, float, float]  # (kind, step, bucket, start in s, stop in s)


class FirstDifference(TypedDict):
    """The first operation in which a run differs from its reference run.

    All operations of the training step before the first difference are equal in the run and in its
    reference run. The field `operation` is "initial weights", "batch" (rows of input), "gradient"
    (on one rank), "mean" (over ranks), "optimizer" (update of weights), "round", "bucket", or
    "collection". The value "round" means a round of the reduction schedule. The value "bucket"
    means packing or unpacking of a gradient bucket, and "collection" means collection of the
    trained weights.
    """

    step: int
    layer: str
    rank: int | None  # None if all ranks with `layer` differ from the reference
    operation: str
    bucket: int | None
    round: int | None  # number of the reduction round, counted from 1
    expected: float
    found: float


class Verdict(TypedDict):
    """The verdict of the equivalence check; after a failure, also the place of the difference."""

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
        membership_history: For each set of ranks that trained together, the number of their first
            training step.
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
        memory: Bytes that the rank stores, measured and predicted, by kind of memory.
        peak: Peak memory of the rank's process in bytes.
        stopped: Whether the user stopped the training early; default: False.
        timeline: Timed events of the rank, see `labkit.exchange.Timeline`.
        offsets: Offsets of this rank's clock from the clock of rank 0, measured before and after
            training.
        compression_stats: Rows with statistics of gradient compression.
        nonfinite: Records of gradients and losses that were infinite or NaN.
        update_log: One event of the parameter servers for each gradient, see
            `labkit.programs.event_log.EventLog`.
        layers: For each layer under tensor parallelism, how it is divided, and the bytes that it
            sends.
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
    """Return a rank's events with times of rank 0's clock; clocks are assumed to drift linearly.

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
    """Return the bytes of each kind of memory, and the peak of a process, as maxima over ranks.

    Gradients have the same dtype as weights. With a mixed-precision policy, weights stay float32
    and are cast when they are used, so only activations have another dtype.
    """
    # The maximum over ranks decides whether a job fits a machine.
    bytes_by_rank = [result.memory.trained() | {"peak": result.peak} for result in results]
    return {
        kind: max(rank_bytes[kind] for rank_bytes in bytes_by_rank) for kind in bytes_by_rank[0]
    }
