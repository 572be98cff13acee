"""Test --quiet and --json: stdout has only the result, and errors stay on stderr."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sample_calibrations import calibration
from sample_runs import FAILED_GATE, write_run

from labkit.cli import doctor
from labkit.cli.app import app
from labkit.cli.doctor import Diagnosis
from labkit.cli.shared_options import Report
from labkit.records import store

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SAYS = NOTEBOOKS / "says_its_parameters.ipynb"
SWEPT = NOTEBOOKS / "is_swept.ipynb"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def labkit(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def parsed(text: str) -> Any:
    def refuse(name: str) -> None:
        pytest.fail(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_ls_gives_numbers_as_json_and_names_if_quiet() -> None:
    metrics = write_run(Path("runs"), "good").metrics
    write_run(Path("runs"), "wrong", measured={"equivalence": FAILED_GATE})
    job = store.new_job_directory("runs", "tour.ipynb", {"workers": 2})
    store.fail(job, "first line\nsecond line", rank=1)
    (write_run(Path("runs"), "damaged").path / "metrics.json").write_text("{")
    result = labkit("ls", "--json")
    good, failed, wrong = parsed(result.stdout)
    assert good["accuracy"] == metrics["test_accuracy"]
    assert good["samples_per_second"] == metrics["samples_per_second"]
    assert (good["kind"], failed["kind"]) == ("run", "job")
    assert (failed["rank"], failed["cause"]) == (1, "first line\nsecond line")
    assert (wrong["samples_per_second"], wrong["equivalence"]) == (None, "failed")
    assert "damaged left out" in result.stderr
    quiet = labkit("ls", "--quiet")
    assert quiet.stdout.splitlines() == [good["name"], failed["name"], wrong["name"]]
    assert quiet.stderr == result.stderr


def test_compare_gives_all_parameters_and_metrics_as_json() -> None:
    metrics = write_run(Path("runs"), "good").metrics
    write_run(Path("runs"), "other", seed=1)
    result = labkit("compare", "runs", "--json", "--csv", "table.csv")
    found = parsed(result.stdout)
    assert found["figure"] == "compare.html"
    assert Path("compare.html").is_file()
    assert Path("table.csv").is_file()
    assert [row["seed"] for row in found["runs"]] == [0, 1]
    assert found["runs"][0]["test_accuracy"] == metrics["test_accuracy"]
    assert labkit("compare", "runs", "--quiet").stdout == "compare.html\n"


def test_a_forecast_is_quietly_one_table() -> None:
    calibration().save(Path("machine.json"))
    words = ("-p", "batch_size", 64, "--calibration", "machine.json", "--network", "wan")
    quiet = labkit("forecast", "mlp", *words, "--workers", 2, "--quiet")
    assert [line.split()[0] for line in quiet.stdout.splitlines()] == ["workers", "2"]
    (row,) = parsed(labkit("forecast", "mlp", *words, "--workers", 2, "--json").stdout)
    assert row["workers"] == 2


def test_the_doctor_gives_findings_as_json_and_only_problems_if_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good, bad = Diagnosis("ok", "cores: 2"), Diagnosis("broken", "no disk", "buy one")
    monkeypatch.setattr(doctor, "CHECKS", [lambda: iter([good]), lambda: iter([bad])])
    result = labkit("doctor", "--json")
    assert result.exit_code == 1
    assert parsed(result.stdout) == [
        {"state": "ok", "what": "cores: 2", "fix": ""},
        {"state": "broken", "what": "no disk", "fix": "buy one"},
    ]
    assert labkit("doctor", "--quiet").stdout == f"{bad.line}\n"


def test_a_check_starts_nothing_and_is_json() -> None:
    checked = parsed(labkit("run", SAYS, "--check", "--json").stdout)
    assert checked == {"folder": None, "state": "checked", "cause": None, "rank": None, "runs": []}
    checked = parsed(labkit("sweep", SWEPT, "number=1,2", "--check", "--json").stdout)
    assert (checked["state"], checked["total"]) == ("checked", 2)
    assert [member["values"]["number"] for member in checked["members"]] == [1, 2]
    assert not Path("runs").exists()


@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_an_error_is_one_line_on_stderr(option: str) -> None:
    for words in (("run", SAYS, "-p", "cuont", 1), ("sweep", SWEPT), ("ls", "nowhere")):
        result = labkit(*words, option)
        assert (result.exit_code != 0, result.stdout) == (True, ""), words
        assert result.stderr.count("\n") == 1


def test_what_child_processes_print_goes_to_stderr_beside_json() -> None:
    script = (
        "import os, sys\n"
        "from labkit.cli.shared_options import Report\n"
        "with Report(False, True) as report:\n"
        "    os.system('echo child')\n"
        "    print('parent', flush=True)\n"
        "    report.result('text', {'nan': float('nan'), 'text': chr(0x9b)})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stderr.split() == ["child", "parent"]
    assert parsed(done.stdout) == {"nan": None, "text": "\x9b"}


def test_a_quiet_command_prints_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with Report(quiet=True, as_json=False) as report:
        print("progress", file=sys.stderr)
        report.details("details")
        report.error("error")
        report.result("result", None)
    assert capsys.readouterr() == ("result\n", "error\n")


@pytest.mark.slow
def test_a_notebook_and_a_sweep_print_only_their_result() -> None:
    done = parsed(labkit("run", SAYS, "--json").stdout)
    assert (done["state"], done["folder"]) == ("completed", "runs/says_its_parameters/001")
    assert labkit("run", SAYS, "--quiet").output == "runs/says_its_parameters/002\n"
    failed = labkit("run", NOTEBOOKS / "fails_in_its_second_cell.ipynb", "--json", "--quiet")
    assert failed.exit_code == 1
    assert parsed(failed.stdout)["state"] == "failed"
    assert failed.stderr.startswith("labkit: fails_in_its_second_cell.ipynb failed: cell In [")
    shutil.copy(SWEPT, "is_swept.ipynb")
    swept = labkit("sweep", "is_swept.ipynb", "number=1,2", "-p", "seconds", 0, "--json")
    found = parsed(swept.stdout)
    assert (found["state"], found["total"], found["completed"]) == ("completed", 2, 2)
    assert [member["state"] for member in found["members"]] == ["completed"] * 2
    assert all(member["seconds"] > 0 for member in found["members"])
    assert "2 of 2" not in swept.stderr
    quiet = labkit("sweep", found["folder"], "--resume", "--quiet")
    assert quiet.output == f"{found['folder']}\n"
