"""Test that the campaign of reports refuses missing runs and missing counts in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from sample_runs import write_run

from tests.acceptance.__main__ import campaigns


@pytest.mark.parametrize("counts", ["2", "0"])
def test_no_runs_or_none_asked_for_is_one_line(tmp_path: Path, counts: str) -> None:
    if counts == "0":
        write_run(tmp_path)
    done = CliRunner().invoke(campaigns, ["report", str(tmp_path), "--counts", counts])
    assert done.exit_code != 0
    assert "both must be 1 or more" in done.output
