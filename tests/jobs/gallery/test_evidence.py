"""Test that numbers are read with their units and found among a run's tables and figures."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import pytest
from sample_runs import write_run

from labkit.jobs.gallery.check import check_notebook
from labkit.jobs.gallery.evidence import numbers
from labkit.jobs.gallery.index_entry import GallerySpec
from labkit.records.run import Run

TABLE = pd.DataFrame(
    {"algorithm": ["ring", "tree"], "measured_ms": [12.5, 30.0], "bytes": [4096, 2**20]}
)
TRUE = "- **ring** takes 12.5 ms at 4 KiB, tree 2.40 times as long; 1 MiB takes it 0.03 s."


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("12.5 ms", [("time", 0.0125)]),
        ("1,234 samples/s and 3 %", [("plain", 1234.0), ("plain", 0.03)]),
        ("2.5 MiB over 100 Mb/s", [("bytes", 2.5 * 2**20), ("rate", 1e8)]),
        ("p = 0.0012, |Δ| 5.6e-17", [("plain", 0.0012), ("plain", 5.6e-17)]),
        ("1f1b, w2, ratio=0.01, 1GbE", []),
    ],
)
def test_numbers_are_read_with_their_units(text: str, read: list[tuple[str, float]]) -> None:
    assert [(number.kind, pytest.approx(number.value)) for number in numbers(text)] == read


def job(folder: Path, reading: str, figure: go.Figure | None = None) -> tuple[GallerySpec, Path]:
    """Return a notebook that shows a table and comments on it, and the job that executed it."""
    cell = {"cell_type": "code", "id": "a", "execution_count": None, "outputs": []}
    parameters = cell | {"metadata": {"tags": ["parameters"]}, "source": "n: int = 3  # rows"}
    answer = cell | {"metadata": {"tags": ["answer"]}, "source": "table"}
    prose = {"cell_type": "markdown", "id": "q", "metadata": {}, "source": "# Which one?"}
    head = {"metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    notebook = folder / "which.ipynb"
    notebook.write_text(json.dumps(head | {"cells": [prose, parameters, answer]}))
    shown = [{"text/html": TABLE.to_html()}, {"text/markdown": reading}]
    shown += [{"application/vnd.plotly.v1+json": json.loads(figure.to_json())}] if figure else []
    outputs = [{"output_type": "display_data", "metadata": {}, "data": each} for each in shown]
    path = folder / "job"
    path.mkdir()
    executed = head | {"cells": [prose, answer | {"outputs": outputs}]}
    (path / "output.ipynb").write_text(json.dumps(executed))
    (path / "params.yaml").write_text("{}\n")
    return GallerySpec(notebook), path


def test_true_sentences_stand(tmp_path: Path) -> None:
    verdict = check_notebook(*job(tmp_path, TRUE))
    assert verdict.faults == ()
    assert (verdict.sentences, verdict.number_count) == (1, 5)
    assert str(verdict).startswith("1 sentence, 5 numbers; the check would detect ")


@pytest.mark.parametrize(
    ("true", "false"),
    [
        ("12.5 ms", "11.5 ms"),
        ("2.40 times", "1.40 times"),
        ("4 KiB", "8 KiB"),
        ("0.03 s", "0.04 s"),
    ],
)
def test_a_planted_false_number_is_found(tmp_path: Path, true: str, false: str) -> None:
    verdict = check_notebook(*job(tmp_path, TRUE.replace(true, false)))
    assert [fault.split(" is in no")[0] for fault in verdict.faults] == [repr(false)]


def test_a_planted_false_conclusion_is_found(tmp_path: Path) -> None:
    verdict = check_notebook(*job(tmp_path, "- **ring**: 12.5 ms; wins in 5 of 4 sizes."))
    assert verdict.faults == ("'5 of 4': the part must not exceed the total",)


def test_a_number_may_stand_in_a_figure_but_not_in_its_summary_alone(tmp_path: Path) -> None:
    figure = go.Figure(go.Bar(x=["ring"], y=[7.25], hovertext=["waits 3.5 ms"]))
    figure.update_layout(yaxis_title="time, ms", meta={"alt": "ring gains 8.75 ms"})
    said = "- **ring** takes 7.25 ms and waits 3.5 ms; it gains 8.75 ms."
    [fault] = check_notebook(*job(tmp_path, said, figure)).faults
    assert fault.startswith("'8.75 ms'")


def test_a_number_may_stand_in_the_record_of_a_run(tmp_path: Path) -> None:
    asked, path = job(tmp_path, "- **ring**: test loss 0.125; 0.8125 of the answers right.")
    assert len(check_notebook(asked, path).faults) == 2
    run: Run = write_run(path / "run")
    record = json.loads((run.path / "metrics.json").read_text())
    record |= {"test_loss": 0.125, "test_accuracy": 0.8125}
    (run.path / "metrics.json").write_text(json.dumps(record))
    assert check_notebook(asked, path).faults == ()


def test_a_table_of_columns_of_columns_is_read(tmp_path: Path) -> None:
    wide = pd.DataFrame({("scale", 0): [0.25], ("scale", 1): [0.375]})
    asked, path = job(tmp_path, "- scale 0.25, then 0.375.")
    text = (path / "output.ipynb").read_text()
    shown = json.dumps(TABLE.to_html())
    assert shown in text
    (path / "output.ipynb").write_text(text.replace(shown, json.dumps(wide.to_html())))
    assert check_notebook(asked, path).faults == ()
