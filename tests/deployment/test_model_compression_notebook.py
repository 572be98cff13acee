"""Test that the notebook has the required form, and runs from start to end with small values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.experiment import Experiment
from labkit.jobs.notebook import execute
from labkit.jobs.parameters import declared

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "model_compression.ipynb"


def test_the_parameters_of_model_compression_mean_what_they_mean_in_an_experiment() -> None:
    parameters = declared(NOTEBOOK)
    shared = {name: p for name, p in parameters.items() if name in Experiment.model_fields}
    options = ["model", "model_options", "dataset", "dataset_options"]
    assert list(shared) == ["workers", *options, "epochs", "batch_size", "optimizer", "seed"]
    Experiment(**{name: p.default for name, p in shared.items()})
    assert all(parameter.help for parameter in parameters.values())
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)


@pytest.mark.slow
def test_model_compression_measures_every_method(tmp_path: Path) -> None:
    given = {
        "dataset_options": {"rows": 256, "test_rows": 64},
        "model_options": {"widths": [32]},
        "modes": ["int8"],
        "sparsities": [0.9],
        "approximation_ranks": [4],
        "repeats_timed": 2,
        "fine_tune_epochs": 1,
        "epochs": 2,
    }
    job = execute(NOTEBOOK, given, tmp_path)
    assert job.state == "completed", job.cause
    cells = json.loads((job.path / "output.ipynb").read_text())["cells"]
    found = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    [figure] = [data for data in found if "application/vnd.plotly.v1+json" in data]
    assert "Compression of a trained model, 5 methods" in "".join(figure["text/plain"])
    readings = ["".join(data["text/markdown"]) for data in found if "text/markdown" in data]
    names = ("original", "int8", "prune 90%, global", "low rank 4", "low rank 4 + 1 epoch")
    assert all(f"- **{name}**: " in readings[-1] for name in names)
    [run] = [path.parent for path in job.path.glob("*/deployment")]
    assert len(list((run / "deployment").iterdir())) == 6
