"""What a step of a run spends: compute, codec, wire and wait seconds; bytes and messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.records.pace import in_order
from labkit.records.run import Run
from labkit.records.timed_steps import steady

if TYPE_CHECKING:
    import pandas

PARTS = ("compute", "codec", "wire", "wait")
_COLUMNS = {"wire": "communicate_seconds", "wait": "wait_seconds", "codec": "codec_seconds"}


@dataclass(frozen=True)
class StepCosts:
    """Medians over the steady steps of all seeds.

    Attributes:
        compute, codec, wire, wait: s, mean over ranks; compute is what the others leave of a step.
        work: s of compute and codec, on the rank that has most of them.
        payload: bytes that a rank hands over, mean over ranks and steps.
        sent: bytes that all ranks put on the wire, mean over steps.
        busiest: the same of the rank that sends most.
        messages, busiest_messages: as for bytes.
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
    """The costs of a run's steady steps (without the first 10); None without history."""
    history = run.history
    if history.empty:
        return None
    history = in_order(history)
    rows = _parts(history[history["step"].isin(steady(history["step"]))])
    steps = rows.groupby(["seed", "step"])
    # Over ranks the mean, for each costs as much as the others; over steps the median, which an
    # outlier does not move.
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
    # Runs before there were codecs have no column for them.
    parts: dict[str, Any] = {
        part: rows[column].fillna(0.0) if column in rows else 0.0
        for part, column in _COLUMNS.items()
    }
    # What overlaps with computation is in both, so that nothing may be left.
    rest = rows["seconds"] - parts["codec"] - parts["wire"] - parts["wait"]
    parts["compute"] = rest.clip(lower=0.0)
    return rows.assign(**parts, work=parts["compute"] + parts["codec"])
