"""`labkit bench report` makes pages of real runs, and opens them in a browser."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from sample_runs import write_run

from labkit.bench.pages import BROWSERS
from labkit.cli.app import app


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no Chromium on this machine")
def test_a_row_for_each_number_of_runs(tmp_path: Path) -> None:
    for workers in (1, 2):
        write_run(tmp_path / "runs", workers=workers)
    file = tmp_path / "rows.json"
    words = ["bench", "report", str(tmp_path / "runs"), "--counts", "1,3", "--json", str(file)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "first figure, s" in done.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["runs"], row["copied"]) for row in rows] == [(1, 0), (3, 1)]
    # Plotly alone is 4.8 MB of a page, and no figure is there before the page.
    assert all(4 < row["mb"] < 8 and 0 < row["first_s"] <= row["all_s"] for row in rows)
    assert all(row["processor_s"] > 0 for row in rows)


@pytest.mark.parametrize("counts", ["2", "0"])
def test_no_runs_or_none_asked_for_is_one_line(tmp_path: Path, counts: str) -> None:
    if counts == "0":
        write_run(tmp_path)
    done = CliRunner().invoke(app, ["bench", "report", str(tmp_path), "--counts", counts])
    assert done.exit_code != 0
    assert "runs in" in done.output or "no Chromium found" in done.output
