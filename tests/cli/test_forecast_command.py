"""Test `labkit forecast`: a table over numbers of workers, or all numbers as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sample_calibrations import calibration

from labkit.cli.app import app


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    calibration().save(tmp_path / "machine.json")
    return tmp_path / "machine.json"


def run(measured: Path, *words: str) -> Result:
    given = ["forecast", "mlp", "-p", "batch_size", "64", "--calibration", str(measured)]
    return CliRunner().invoke(app, [*given, *words])


def test_a_table_has_a_row_for_each_number_of_workers(measured: Path) -> None:
    prices = ("--price-per-node-hour", "2", "--ranks-per-node", "8", "--node-watts", "300")
    done = run(measured, "--network", "1GbE", "--workers", "1,8,10000", *prices)
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.output.splitlines()[2:5]] == ["1", "8", "10,000"]
    assert "simulated on 1GbE" in done.output
    assert "cost" in done.output


def test_all_figures_are_json(measured: Path) -> None:
    done = run(measured, "--network", "wan", "--workers", "2", "--json")
    (found,) = json.loads(done.output)
    assert found["workers"] == 2
    assert sum(found["parts_s"].values()) == pytest.approx(found["step_s"])
    assert found["low_s"] <= found["step_s"] <= found["high_s"]


def test_what_was_not_measured_ends_in_one_line(measured: Path) -> None:
    done = run(measured, "-p", "optimizer", "adam", "--network", "wan")
    assert done.exit_code == 2
    assert "measure it with `labkit calibrate`" in done.stderr
