"""One odd record is one line, wherever it came from; the rest is listed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from sample_runs import write_run

from labkit.cli.app import app
from labkit.records.shape import FIELDS, wrong_field
from labkit.records.store import read_json

ODD = [5, 1e300, "", "text", [1], [[1]], {"x": "y"}, {"x": {"y": 1}}, True]
PLACES = [(file, field) for file, fields in FIELDS.items() for field in fields]


@pytest.mark.parametrize(("file", "field"), PLACES)
def test_a_field_of_an_odd_kind_is_told_and_what_labkit_writes_is_not_odd(
    tmp_path: Path, file: str, field: str
) -> None:
    record = read_json(write_run(tmp_path).path / file)
    assert wrong_field(file, record) is None
    told = [wrong_field(file, record | {field: value}) for value in ODD]
    assert sum(line is not None for line in told) >= len(ODD) // 2
    assert all(line is None or line.startswith(f"{field} is ") for line in told)


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("status.json", {"started": 5}),
        ("status.json", {"ended": "yesterday"}),
        ("status.json", {"ended": "2026-01-01T00:00:00"}),
        ("status.json", {"state": ["completed"]}),
        ("metrics.json", {"equivalence": [1]}),
        ("metrics.json", {"equivalence": {"verdict": ["passed"]}}),
        ("metrics.json", {"test_accuracy": "high"}),
        ("metrics.json", {"epochs": {"0": 1}}),
        ("metrics.json", {"step_ms": "5"}),
        ("metrics.json", {"schema": 99}),
        ("experiment.json", {"strategy": 5}),
        ("experiment.json", {"workers": 10**30}),
    ],
)
def test_one_odd_record_does_not_end_a_listing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, fields: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    good, bad = (write_run(Path("runs"), name) for name in ("good", "bad"))
    place = bad.path / file
    place.write_text(json.dumps(read_json(place) | fields))
    done = CliRunner().invoke(app, ["ls", "runs"])
    assert (done.exit_code, done.exception) == (0, None)
    assert good.name in done.stdout
    assert bad.name not in done.stdout
    assert [line.split(" left out: ")[0] for line in done.stderr.splitlines()] == [
        f"runs/{bad.name}"
    ]


@pytest.mark.parametrize(
    "file", ["status.json", "experiment.json", "metrics.json", "history.parquet"]
)
def test_nobody_waits_for_a_pipe_among_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.chdir(tmp_path)
    good, bad = (write_run(Path("runs"), name) for name in ("good", "bad"))
    (bad.path / file).unlink()
    os.mkfifo(bad.path / file)
    done = CliRunner().invoke(app, ["ls", "runs"])
    assert done.exit_code == 0
    assert good.name in done.stdout
    assert f"runs/{bad.name} left out" in done.stderr


def test_a_deep_record_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(Path("runs"))
    (run.path / "metrics.json").write_text('{"schema": 1, "x": ' + "[" * 100_000 + "]" * 100_000)
    done = CliRunner().invoke(app, ["ls", "runs"])
    assert (done.exit_code, len(done.stderr.splitlines())) == (0, 1)
