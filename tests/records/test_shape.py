"""Test that an odd record becomes one line and that all other runs are listed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as some
from sample_runs import experiment, metrics, write_run

from labkit.cli.app import app
from labkit.figures.kit.entries import distinct_labels
from labkit.jobs.listing import run_entry
from labkit.records import provenance
from labkit.records.analysis.columns import differences
from labkit.records.export import epoch_points, parameters, results, tags, timestamp
from labkit.records.folders import RunRecords
from labkit.records.run import key_metrics, run_from_records, to_dataframe, verdict
from labkit.records.shape import FIELDS, field_problem
from labkit.records.store import read_json

ODD = [5, 1e300, "", "text", [1], [[1]], {"x": "y"}, {"x": {"y": 1}}, True]
SWEEP = {
    "state": "completed",
    "notebook": "n.ipynb",
    "members": [{"folder": "001_workers=2", "values": {"workers": 2}, "repeat": 0}],
    "search": {"objectives": {"loss": False}, "trials": 3, "axes": {}, "fixed": {}, "enqueued": []},
    "jobs": None,
    "limit": 60.0,
    "slurm": None,
    "elements": [],
}
PLACES = [(file, field) for file, fields in FIELDS.items() for field in fields]


@pytest.mark.parametrize(("file", "field"), PLACES)
def test_a_field_of_an_odd_kind_is_told_and_what_labkit_writes_is_not_odd(
    tmp_path: Path, file: str, field: str
) -> None:
    run = write_run(tmp_path)
    provenance.write(run.path, begin=True)
    record = SWEEP if file == "sweep.json" else read_json(run.path / file)
    assert field_problem(file, record) is None
    told = [field_problem(file, record | {field: value}) for value in ODD]
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
        ("experiment.json", {"strategy": {}}),
        ("experiment.json", {"workers": 10**30}),
        ("experiment.json", {"model_options": {f"option{n}": n for n in range(9_000)}}),
        ("experiment.json", {"workers": -3}),
        ("metrics.json", {"logged": [{}]}),
        ("metrics.json", {"logged": ["own"], "own": [[1]]}),
        ("metrics.json", {"spread": {"test_accuracy": [1]}}),
        ("metrics.json", {"spread": []}),
        ("metrics.json", {"epochs": [{}]}),
        ("metrics.json", {"epochs": [{"step": "1"}]}),
        ("metrics.json", {"clocks": [{"rank": 0}]}),
        ("metrics.json", {"memory": [{}]}),
        ("metrics.json", {"step_ms": {}}),
        ("metrics.json", {"test_loss": float("nan")}),
        ("metrics.json", {"own": 10**400}),
        ("metrics.json", {"note": "\ud800"}),
        ("status.json", {"started": "0001-01-01T00:00:00+14:00"}),
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


@pytest.mark.battery(8, 16)
@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("field", FIELDS["provenance.json"])
def test_odd_inputs_are_compared_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("good", "bad"):
        provenance.write(write_run(Path("runs"), name).path, begin=True)
    place = next(Path("runs").glob("bad*")) / "provenance.json"
    place.write_text(json.dumps(read_json(place) | {field: value}))
    done = CliRunner().invoke(app, ["compare", "runs", "-o", "c.html"])
    assert (done.exit_code, done.exception) == (0, None), done.output


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


@pytest.mark.parametrize("field", ["a", "epochs", "logged", "spread", "model_options"])
@pytest.mark.parametrize("file", ["experiment.json", "metrics.json"])
def test_900_brackets_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, field: str
) -> None:
    monkeypatch.chdir(tmp_path)
    good, bad = (write_run(Path("runs"), name) for name in ("good", "bad"))
    (bad.path / file).write_text(f'{{"schema": 1, "{field}": {"[" * 900 + "]" * 900}}}')
    for words in (["ls", "runs"], ["compare", "runs", "-o", "c.html", "--csv", "c.csv"]):
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, done.exception) == (0, None)
        assert f"runs/{bad.name} left out" in done.stderr
    assert good.name in CliRunner().invoke(app, ["ls", "runs"]).stdout


@pytest.mark.parametrize("kind", ["run", "job", "file"])
def test_a_name_that_is_not_utf8_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    good, bad = (write_run(Path("runs"), name) for name in ("good", "bad"))
    if kind == "file":
        Path(os.fsdecode(os.fsencode(bad.path) + b"/\xff.parquet")).write_bytes(b"torn")
    else:
        os.rename(bad.path, os.fsencode(tmp_path) + b"/runs/\xff")
    if kind == "job":
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/runs/\xff/params.yaml")).write_text("{}")
    for words in (["ls", "runs"], ["compare", "runs", "-o", "c.html"]):
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, done.exception) == (0, None)
        assert len(done.stderr.splitlines()) == 1
        assert "left out" in done.stderr
    assert good.name in CliRunner().invoke(app, ["ls", "runs"]).stdout


@pytest.mark.parametrize("folder", ["m" * 300, "", "a\0b", "..", ".", "/", "/a", "a/..", 5, None])
def test_a_sweep_with_a_member_of_an_odd_name_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: object
) -> None:
    monkeypatch.chdir(tmp_path)
    good = write_run(Path("runs"), "good")
    sweep = Path("runs/sweep")
    sweep.mkdir()
    members = [{"folder": folder, "values": {}, "repeat": 0}]
    (sweep / "sweep.json").write_text(json.dumps(SWEEP | {"schema": 1, "members": members}))
    done = CliRunner().invoke(app, ["ls", "runs"])
    assert (done.exit_code, done.exception) == (0, None)
    assert good.name in done.stdout
    assert done.stderr.startswith("sweep left out: ")


def test_an_odd_environment_takes_no_run_with_it(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run.path / "environment.json").write_text("[]")
    with pytest.warns(UserWarning, match="shown without it"):
        assert run.environment == {}


JSON = some.recursive(
    some.none() | some.booleans() | some.integers(-(10**17), 10**17) | some.floats(-1e300, 1e300),
    lambda inner: (
        some.lists(inner, max_size=3) | some.dictionaries(some.sampled_from("abc"), inner)
    ),
    max_leaves=5,
)
KNOWN = [(file, field) for file, field in PLACES if file not in ("sweep.json", "provenance.json")]


@settings(max_examples=250, deadline=None)
@given(some.sampled_from(KNOWN), JSON | some.sampled_from(ODD))
def test_what_the_shape_lets_through_is_read_by_all(place: tuple[str, str], value: Any) -> None:
    file, field = place
    records = {"experiment.json": experiment(), "metrics.json": metrics(2, 3), "status.json": DONE}
    records[file] = records[file] | {field: value}
    if value is None or field_problem(file, records[file]):
        return
    found = RunRecords(Path("run"), *(records[f"{name}.json"] for name in NAMES))
    if found.status["state"] != "completed":
        return
    run = run_from_records(found)
    run.__dict__["environment"] = {}
    to_dataframe([run])
    key_metrics(run), verdict(run), run.memory
    results(run), parameters(run), tags(run)
    list(epoch_points(run.metrics.get("epochs") or [], timestamp(run, "started")))
    assert run_entry(run, "run").row
    distinct_labels([run, run], differences([run, run]))


NAMES = ("experiment", "status", "metrics")
DONE = {"state": "completed", "started": "2026-01-01T00:00:00+00:00", "ended": None}
