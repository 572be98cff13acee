"""Test that a command checks its output file before any work, and replaces only labkit's files."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from labkit.common.errors import InvalidInput
from labkit.common.output import check_output, output_option

OWN = {
    "report.html": '<!doctype html><html><head><meta name="generator" content="labkit">',
    "trace.json": '{"otherData": {"generator": "labkit"}, "traceEvents": []}',
    "rows.json": '{"tried": 5, "bench": "fuzz", "case": "records"}\n',
    "machine.json": '{\n "schema_version": 2,\n "made": "2026",\n "machine": {"cores": 2}}',
    "job.yaml": "# n as an MPIJob\n# Written by `labkit kubernetes`, which does not run it.\n",
    "METHODS.md": "# Methods\n\nMade from the docstrings by `labkit methods -o METHODS.md`.\n",
    "runs.csv": "test_loss,workers,run,state,started\n0.5,2,a,completed,2026\n",
    "runs.parquet": "PAR1\0\1 run state started PAR1",
    "studies.json": '{"source": "a paper", "mark": "read", "study": "Figure 3"}\n',
    "report.json": '{"bench": "report", "runs": 5, "copied": 0}\n',
    "empty": "",
}
OTHERS = {
    "thesis.html": "<!doctype html><html><head><title>labkit</title>",
    "data.json": '{"rows": [1, 2], "text": "labkit"}',
    "notes.md": "# Notes on labkit\n\nDo not lose these.\n",
    "data.csv": "a,b,c\n1,2,3\n",
    "settings.json": '{"schema_version": 1,"user": "me"}',
    "studied.json": '{"study": "of a drug", "bench": "in the park"}',
    "README.md": "# Mine\n\nHow far it is off is measured by `labkit bench forecasts`.\n",
    "note": "run the state machine once started\n",
    "jobs.csv": "rerun,state,started\n1,2,3\n",
    "long.log": "log\n" + "run state started ok\n" * 3000,
    "photo.png": "\x89PNG",
}


@pytest.mark.parametrize("name", OWN)
def test_a_file_of_labkits_is_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(OWN[name])
    check_output(tmp_path / name)


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_somebody_elses_is_replaced_by_force_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(OTHERS[name])
    with pytest.raises(InvalidInput, match=r"was not written by labkit.*--force"):
        check_output(tmp_path / name)
    check_output(tmp_path / name, replace=True)


@pytest.mark.parametrize(
    "path", ["/", ".", "/dev/null", "n" * 300, "file/below", "/proc/self/none"]
)
def test_what_cannot_be_a_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for replace in (False, True):
        with pytest.raises(InvalidInput, match="cannot be written") as told:
            check_output(Path(path), replace)
        assert len(str(told.value)) < 400


def test_a_folder_that_can_be_made_is_no_obstacle(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "newer" / "r.html")
    assert not (tmp_path / "new").exists()


def test_a_command_with_an_output_refuses_before_it_works(tmp_path: Path) -> None:
    worked: list[Path] = []

    @click.command()
    @output_option("-o", "output", default="r.html")
    @output_option("--json", "file")
    def command(output: Path, file: Path | None) -> None:
        worked.append(output)

    place = tmp_path / "notes.md"
    place.write_text("mine")
    runner = CliRunner()
    for flag in ("-o", "--json"):
        done = runner.invoke(command, [flag, str(place)])
        assert isinstance(done.exception, InvalidInput)
        assert worked == []
        assert runner.invoke(command, [flag, str(place), "--force"]).exit_code == 0
        worked.clear()
    assert runner.invoke(command, ["--help"]).output.count("--force") == 1
