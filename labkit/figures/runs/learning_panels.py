"""The learning curves as panels: training loss in one row, test results in the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.common.units import amounts_axis
from labkit.figures.kit.entries import MANY, Entry
from labkit.figures.kit.panels import Panel
from labkit.figures.runs import learning, speed
from labkit.figures.runs.learning import LossCurve

_AXES = {
    "step": "step",
    "seconds": "seconds since the first step",
    "bytes": "bytes on the wire, all ranks",
}
_SILENT = "one worker sends nothing"

Losses = list[tuple[Entry, LossCurve | None]]


def learning_panels(shown: Sequence[Entry]) -> tuple[list[Panel], list[Panel], str]:
    """Loss over steps, seconds and bytes; test results over the same; and the words for all."""
    losses = [(entry, learning.loss_curve(entry.run.history)) for entry in shown]
    words = "; ".join(f"{e.label}: {learning.in_words(e, curve)}" for e, curve in losses)
    return (
        [_loss_panel(losses, over) for over in _AXES],
        [_test_panel(losses, over) for over in _AXES],
        words,
    )


def _loss_panel(losses: Losses, over: str) -> Panel:
    traces = [
        trace
        for entry, curve in _drawn(losses, over)
        if curve is not None
        for trace in learning.loss_traces(entry, curve, over, len(losses))
    ]
    y = "loss, mean over ranks"
    return _panel(f"Training loss by {over}", y, traces, losses, over, "no history")


def _test_panel(losses: Losses, over: str) -> Panel:
    measure, measured = learning.epoch_measure([entry for entry, _ in losses])
    many = len(losses) > MANY
    found = (learning.epoch_trace(e, measure, over, c, many) for e, c in _drawn(losses, over))
    traces = [trace for trace in found if trace is not None]
    look = {"tickformat": ".0%"} if measure == "val_accuracy" else {}
    title, y = f"{measured} by {over}", measured.lower()
    return _panel(title, y, traces, losses, over, "no validation data", look)


def _panel(
    title: str,
    y: str,
    traces: list[dict[str, Any]],
    losses: Losses,
    over: str,
    empty: str,
    look: dict[str, Any] | None = None,
) -> Panel:
    """A panel whose note says which runs are not in it, and why."""
    refused = speed.refusals([entry for entry, _ in losses]) if over == "seconds" else ""
    note = refused or (empty if not traces else "")
    if over == "bytes" and not traces and any(curve is not None for _, curve in losses):
        note = _SILENT
    return Panel(
        title=title,
        x=_AXES[over],
        y=y if over == "step" else "",
        traces=traces,
        note=note,
        always_note=bool(refused),
        x_axis=_bytes_axis(losses) if over == "bytes" and traces else {},
        y_axis=look or {},
        link=over,
    )


def _drawn(losses: Losses, over: str) -> Losses:
    """The runs that may stand over this measure: seconds need a gate, bytes a second worker."""
    if over == "seconds":
        return [(entry, curve) for entry, curve in losses if not entry.gate_failed]
    if over == "bytes":
        return [(entry, curve) for entry, curve in losses if _bytes(curve) > 0]
    return losses


def _bytes(curve: LossCurve | None) -> float:
    return 0.0 if curve is None else float(curve.nbytes[-1])


def _bytes_axis(losses: Losses) -> dict[str, Any]:
    totals = [total for _, curve in losses if (total := _bytes(curve)) > 0]
    return amounts_axis(min(totals), max(totals))
