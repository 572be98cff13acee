"""`labkit bench start` refuses what it cannot time, before anything starts."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from labkit.cli.app import app


def test_a_notebook_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "start", "--notebook", str(tmp_path / "none.ipynb")])
    assert done.exit_code != 0
    assert "no such file" in done.output
