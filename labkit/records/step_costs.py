"""Costs of a run's step: seconds of compute, compression, transfer and wait; bytes; messages."""

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
    """Costs of a step, over the steady steps (all but the first 10) of all seeds.

    Attributes:
        compute, codec, wire, wait: Median seconds per step, averaged over ranks, of computation,
            compression, transfer and waiting; compute is the rest of the step.
        work: Median of the seconds of compute plus codec on the step's slowest rank.
        payload: Bytes per step that a rank passes to the gradient exchange, averaged over ranks and
            steps.
        sent: Total bytes that all ranks send per step, averaged over steps.
        busiest: Bytes per step of the rank that sends the most, averaged over steps.
        messages, busiest_messages: Numbers of messages per step, counted like `sent` and `busiest`.
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
    """Return the costs of a run's steps after the first 10, or None for a run without a history."""
    history = run.history
    if history.empty:
        return None
    history = with_end_times(history)
    rows = _parts(history[history["step"].isin(steady_steps(history["step"]))])
    steps = rows.groupby(["seed", "step"])
    # Times are averaged over ranks. The median over steps is robust to outliers.
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
    # Records of early labkit versions have no codec column.
    parts: dict[str, Any] = {
        part: rows[column].fillna(0.0) if column in rows else 0.0
        for part, column in _COLUMNS.items()
    }
    # Overlapped communication also counts as communication, so that the rest may be negative.
    rest = rows["seconds"] - parts["codec"] - parts["wire"] - parts["wait"]
    parts["compute"] = rest.clip(lower=0.0)
    return rows.assign(**parts, work=parts["compute"] + parts["codec"])
