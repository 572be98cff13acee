"""Test that an interrupted notebook resumes: finished runs are kept, started runs continue."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from labkit.jobs.notebook import execute
from labkit.records import store
from labkit.records.run import load_runs

CELL = """
import pathlib, time
import labkit as lk

short = lk.Experiment(
    model="mlp", model_options={"widths": [4]}, workers=2, epochs=1, batch_size=64, verify=False
)
long = short.replace(epochs=2_000)
with lk.Cluster(workers=2) as cluster:
    cluster.run(short)
    live = cluster.submit(long, checkpoint=5)
    if not pathlib.Path("again").exists():
        while len(live.rows) < 20:
            time.sleep(0.02)
        live.stop()
        assert live.result().status["state"] == "completed"
    live.stop()
    print("went on from", live.result().status["resumed"][0]["step"])
"""


@pytest.mark.slow
def test_what_has_completed_stays_and_what_was_begun_goes_on(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbformat.write(notebook, tmp_path / "study.ipynb")
    first = execute(tmp_path / "study.ipynb", root=tmp_path / "runs")
    assert first.state == "failed"
    done, begun = load_runs(first.path)
    assert (done.status["state"], begun.status["state"]) == ("completed", "interrupted")
    status, steps = done.status, len(begun.history) // 2
    (Path.cwd() / "again").touch()
    again = execute(tmp_path / "study.ipynb", root=tmp_path / "runs", resume=True)
    assert (again.path, again.state) == (first.path, "completed")
    runs = load_runs(again.path)
    assert [run.path for run in runs] == [done.path, begun.path]
    assert runs[0].status == status
    assert runs[1].status["resumed"][0]["step"] == steps
    assert len(runs[1].history) >= 2 * steps
    assert store.unfinished_job(tmp_path / "runs", "study.ipynb", {}) is None
