"""Exports hold every run and every number, and other tools can read them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from sample_runs import write_run

from labkit.cli import app
from labkit.errors import InvalidInput, LabkitError
from labkit.export import export
from labkit.run import Run


def mixed(root: Path) -> list[Run]:
    """Parameters that are a word here and a number there, a path, a switch, and nothing."""
    return [
        write_run(root, dataset="/home/alice/mnist.npz", limit="auto", fast=True),
        write_run(root, workers=4, limit=3, fast=False, learning_rate=None),
    ]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_what_was_written_is_read_again(tmp_path: Path, kind: str) -> None:
    path = export(mixed(tmp_path / "runs"), tmp_path / "new" / f"runs.{kind}")
    read = pd.read_csv(path) if kind == "csv" else pd.read_parquet(path)
    assert read["workers"].tolist() == [2, 4]
    assert read["limit"].tolist() == ["auto", "3"]
    assert read["fast"].tolist() == [True, False]
    assert read["step_ms.median"].tolist() == [5.0, 5.0]
    assert read["equivalence.verdict"].tolist() == ["passed", "passed"]
    assert read["learning_rate"].isna().tolist() == [False, True]
    assert "alice" not in path.read_bytes().decode(errors="replace")


def test_another_ending_and_no_runs_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"runs\.xlsx ends in neither"):
        export(mixed(tmp_path), tmp_path / "runs.xlsx")
    with pytest.raises(LabkitError, match="no runs to export"):
        export([], tmp_path / "runs.csv")
    assert not (tmp_path / "runs.csv").exists()


def test_the_command_writes_both(tmp_path: Path) -> None:
    mixed(tmp_path / "runs")
    arguments = ["compare", "runs", "--csv", "all.csv", "--parquet", "all.parquet"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "table: all.csv" in result.output
    assert len(pd.read_csv("all.csv")) == len(pd.read_parquet("all.parquet")) == 2
