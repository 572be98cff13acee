"""Costs of a run's steps: bytes, and times of computation, compression, transfer and waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.records.pace import with_end_times
from labkit.records.run import Run
from labkit.records.timed_steps import steady_steps

if TYPE_CHECKING:
    import pandas

PARTS = ("compute", "codec", "wire", "wait")
_COLUMNS = {"wire": "communicate_seconds", "wait": "wait_seconds", "codec": "codec_seconds"}


@dataclass(frozen=True)
class StepCosts:
    """Costs of a training step, over all seeds and all steps except the first 10.

    Attributes:
        compute, codec, wire, wait: Seconds of computation, compression, transfer and waiting:
            averages over ranks, then medians over steps. The value `compute` is what remains of the
            step after the other times are subtracted.
        work: Seconds of `compute` plus `codec` on the rank where this sum is largest, as the median
            over steps.
        payload: Bytes per step that each rank passes to the gradient exchange, averaged over ranks
            and steps.
        sent: Total bytes that all ranks send per step, averaged over steps.
        busiest: Bytes per step that are sent by the rank that sends the most, averaged over steps.
        messages, busiest_messages: Messages per step of all ranks and of the rank that sends the
            most, averaged like `sent` and `busiest`.
    """

    compute: float
    codec: float
    wire: float
    wait: float
    work: float
    payload: float
    sent: float
    busiest: float
    messages: float
    busiest_messages: float


def step_costs(run: Run) -> StepCosts | None:
    """Return the costs of a run's steps after the first 10; None if the run has no history."""
    history = run.history
    if history.empty:
        return None
    history = with_end_times(history)
    rows = _parts(history[history["step"].isin(steady_steps(history["step"]))])
    steps = rows.groupby(["seed", "step"])
    # The times of a training step are averaged over ranks. The median over steps is used, because
    # outliers hardly change it.
    seconds = steps[list(PARTS)].mean().median()
    ranks = rows.groupby("rank")[["wire_bytes", "messages"]].mean()
    return StepCosts(
        **{part: float(seconds[part]) for part in PARTS},
        work=float(steps["work"].max().median()),
        payload=float(rows["payload_bytes"].mean()),
        sent=float(ranks["wire_bytes"].sum()),
        busiest=float(ranks["wire_bytes"].max()),
        messages=float(ranks["messages"].sum()),
        busiest_messages=float(ranks["messages"].max()),
    )


def _parts(rows: pandas.DataFrame) -> pandas.DataFrame:
    # Records of early labkit versions have no column for compression times.
    parts: dict[str, Any] = {
        part: rows[column].fillna(0.0) if column in rows else 0.0
        for part, column in _COLUMNS.items()
    }
    # Communication that overlaps computation is also subtracted, so the rest may be negative; it is
    # then set to 0.
    rest = rows["seconds"] - parts["codec"] - parts["wire"] - parts["wait"]
    parts["compute"] = rest.clip(lower=0.0)
    return rows.assign(**parts, work=parts["compute"] + parts["codec"])
