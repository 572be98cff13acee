"""Of thousands of layers a microscope draws some, and says of how many."""

from __future__ import annotations

from pathlib import Path

from sample_runs import write_run

from labkit.figures import microscope
from labkit.records.store import write_table


def test_sixty_of_thousands_of_layers_are_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    figures = ("relative_error", "cosine", "residual_norm", "bits_per_parameter", "fraction_sent")
    rows = [
        {"step": 1, "rank": 0, "bucket": 0, "layer": f"layer {number}"}
        | dict.fromkeys(figures, 0.5)
        for number in range(3_000)
    ]
    write_table(run.path / "microscope.parquet", rows)
    figure = microscope(run)
    assert len({trace.name for trace in figure.data}) <= 60
    assert "60 of 3,000 layers are drawn" in str(figure.to_dict())
