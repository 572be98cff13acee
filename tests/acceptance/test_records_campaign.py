"""Test the campaign of records, which creates runs and times `ls` and `compare` over them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from labkit.records.run import load_runs
from tests.acceptance.__main__ import campaigns
from tests.acceptance.records import make


@pytest.mark.heavy
def test_its_runs_are_whole_and_differ(tmp_path: Path) -> None:
    make(tmp_path / "runs", 25)
    runs = load_runs(tmp_path / "runs")
    assert [run.status["state"] for run in runs] == ["completed"] * 25
    assert len({(run.experiment["learning_rate"], run.experiment["seed"]) for run in runs}) == 25
    assert len(runs[-1].history) == 2 * 60


@pytest.mark.slow
def test_a_row_for_each_command_first_and_later(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ["records", "--listed", "3", "--compared", "2", "--json", str(file)]
    assert CliRunner().invoke(campaigns, words).exit_code == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["case"], row["what"], row["runs"]) for row in rows] == [
        *(("ls", "first", 3), ("ls", "later", 3)),
        *(("compare", "first", 2), ("compare", "later", 2)),
    ]
    assert all(row["processor_ms_per_run"] > 0 for row in rows)
