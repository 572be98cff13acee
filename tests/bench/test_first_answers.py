"""Test `labkit bench start`: alternating measurements, immediate output, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from labkit.bench import start
from labkit.cli.app import app


def test_a_notebook_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "start", "--notebook", str(tmp_path / "none.ipynb")])
    assert done.exit_code != 0
    assert "does not exist" in done.output


def test_kinds_take_turns_and_are_told_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = tmp_path / "some.ipynb"
    notebook.write_text("{}")
    turns = iter([[3.0], [1.0], [0.5], [0.1, 0.3], [5.0], [2.0], [0.7], [0.2, 0.6]])
    for way in ("_run", "_run_warm", "_second_cell", "_members"):
        monkeypatch.setattr(start, way, lambda _: next(turns))
    monkeypatch.setattr(start.warm, "stop", lambda workers: None)
    file = tmp_path / "rows.jsonl"
    asked = ["bench", "start", "--notebook", str(notebook), "--repeats", "2", "--json", str(file)]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    heard = done.output.splitlines()[:8]
    assert heard[:4] == ["run: 3 s", "run, warm: 1 s", "second cell: 0.5 s", "member: 0.1, 0.3 s"]
    assert heard[4:] == ["run: 5 s", "run, warm: 2 s", "second cell: 0.7 s", "member: 0.2, 0.6 s"]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    medians = {row["what"]: row["median_ms"] for row in rows}
    assert medians == pytest.approx(
        {"run": 4000, "run, warm": 1500, "second cell": 600, "member": 250}
    )
