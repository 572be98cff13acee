"""Test that results measured after an epoch have the same place as its losses on the curve."""

from __future__ import annotations

from pathlib import Path

from sample_runs import write_run

from labkit.records.analysis.curves import epoch_results, loss_curve


def test_epochs_and_steps_share_their_seconds_whatever_rank_0_waited(tmp_path: Path) -> None:
    epochs = [{"step": step, "seconds": 0.01 * step, "val_loss": 1.0} for step in (5, 20, 40)]
    run = write_run(tmp_path, steps=20, measured={"epochs": epochs, "first_step_ms": 300.0})
    curve = loss_curve(run.history)
    table = epoch_results(run, curve)
    reached = curve.set_index("step")["seconds"]
    assert list(table["seconds"][:2]) == [reached[5], reached[20]]
