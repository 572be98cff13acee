"""What a rank hands over when its training has ended: each record that it makes is a field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NotRequired, TypeAlias, TypedDict

from labkit.common.canonical_json import JSON

if TYPE_CHECKING:
    from labkit.communicator.clock import Offset
    from labkit.exchange import Bad
    from labkit.model_parallel.memory import Memory
    from labkit.model_parallel.meter import LayerRow

Row: TypeAlias = Mapping[str, float]  # of a step; `store.HISTORY_COLUMNS` names what it has
Rows: TypeAlias = list[dict[str, JSON]]
Event: TypeAlias = tuple[str, int, int, float, float]  # kind, step, bucket, start, stop


class Place(TypedDict):
    """Where a run first differs from what it is held against.

    In this step everything before the operation was right: "initial weights", "batch" (the rows
    fed are other ones), "gradient", "mean", "round" (of the schedule that sums), "bucket" (packing
    and reading), "optimizer", or "collection" of the trained weights.
    """

    step: int
    layer: str
    rank: int | None  # None: all that have this layer
    operation: str
    bucket: int | None
    round: int | None  # from 1
    expected: float
    found: float


class Verdict(TypedDict):
    """What the equivalence gate has found, and of one that failed where, if it could tell."""

    verdict: Literal["passed", "failed", "not applicable"]
    max_abs_difference: float | None
    tolerance: float | None
    reason: str
    place: NotRequired[Place]


def told(place: Place) -> str:
    """A place in words."""
    whose = "" if place["rank"] is None else f" on rank {place['rank']}"
    parts = [f"{n} {place[n]}" for n in ("round", "bucket") if place[n] is not None]
    within = f" ({', '.join(parts)})" if parts else ""
    return (
        f"first in step {place['step']}: {place['operation']} of {place['layer']}{whose}{within}, "
        f"{place['found']:.9g} instead of {place['expected']:.9g}"
    )


@dataclass(frozen=True)
class WholeResult:
    """What is known of a run once, and not by each rank.

    Attributes:
        epochs: metrics after each epoch.
        evaluation: metrics of the held-out rows by the trained model.
        equivalence: of the gate.
        environment: versions and hardware.
        exchange: how gradients met, and why so; None where they did not.
        partition: where the model was cut into stages; None where it was not.
        checkpoints: how many, at what cost; None where none were asked for.
        faults: ranks that training has outlived, with what each has cost, s.
        stretches: from which step on which ranks trained.
        model: the bytes of a .keras file; None for a model that Keras cannot save.
    """

    epochs: list[dict[str, float]]
    evaluation: Mapping[str, float]
    equivalence: Verdict
    environment: Mapping[str, JSON] = field(default_factory=dict)
    faults: Rows = field(default_factory=list)
    stretches: Rows = field(default_factory=list)
    exchange: Mapping[str, JSON] | None = None
    partition: Mapping[str, JSON] | None = None
    checkpoints: Mapping[str, JSON] | None = None
    model: bytes | None = None


@dataclass(frozen=True)
class RankResult:
    """What one rank returns.

    Attributes:
        rows: its history, a row a step.
        memory: the bytes that it keeps, by kind, measured and predicted.
        peak: the most bytes that its process has taken.
        stopped: whether someone has ended its training early.
        timeline: what it did when, see `labkit.exchange.Timeline`.
        offsets: of its clock against rank 0's, before the training and after it.
        microscope: what compression did to its gradients.
        bad_numbers: gradients and losses that were not finite.
        interleaving: what servers did with each gradient, see `labkit.programs.event_log.EventLog`.
        layers: how each layer of a model in slices was cut, and what it has sent of it.
        whole: what rank 0 says for all.
    """

    rows: Sequence[Row]
    memory: Memory
    peak: int
    stopped: bool = False
    timeline: Sequence[Event] = ()
    offsets: Sequence[Offset] = ()
    microscope: Rows = field(default_factory=list)
    layers: Sequence[LayerRow] = ()
    bad_numbers: Sequence[Bad] = ()
    interleaving: Sequence[Row] = ()
    whole: WholeResult | None = None


def on_one_clock(events: Sequence[Event], offsets: Sequence[Offset]) -> Sequence[Event]:
    """A rank's events by the clock of rank 0; between two measurements clocks drift evenly.

    Clocks whose difference is within what can be measured are one, as on one host.
    """
    if all(abs(offset.seconds) <= offset.within for offset in offsets):
        return events
    import numpy as np

    moments, seconds = [offset.moment for offset in offsets], [offset.seconds for offset in offsets]

    def told(time: float) -> float:
        return time - float(np.interp(time, moments, seconds))

    return [
        (kind, step, bucket, told(start), told(stop)) for kind, step, bucket, start, stop in events
    ]


def memory_bytes(results: Iterable[RankResult]) -> dict[str, int]:
    """The bytes of the rank that needs most: of each kind, and of the whole process.

    Gradients have the dtype of the weights. Under a mixed policy weights stay float32 and are
    cast where they are used, so that policies differ in activations.
    """
    # The rank that needs most decides whether a job fits a machine.
    found = [result.memory.trained() | {"peak": result.peak} for result in results]
    return {kind: max(own[kind] for own in found) for kind in found[0]}
