"""Test that no folder keeps the runs of a benchmark, even inside a notebook run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from labkit.bench.runs import temporary_runs
from labkit.records.checkpoints import RESUME_VARIABLE
from labkit.records.store import run_directory


@pytest.mark.parametrize(
    "names", [(), ("LABKIT_RUNS",), ("LABKIT_RUNS", "LABKIT_JOB", RESUME_VARIABLE)]
)
def test_runs_of_its_own_are_none_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LABKIT_RUNS", "LABKIT_JOB", RESUME_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name in names:
        monkeypatch.setenv(name, str(tmp_path / name))
    before = dict(os.environ)
    with temporary_runs() as folder:
        assert run_directory("a").is_relative_to(folder.resolve())
        assert (
            RESUME_VARIABLE not in os.environ
        )  # otherwise, the benchmark would get runs of an earlier attempt
        assert ("LABKIT_JOB" in os.environ) == ("LABKIT_JOB" in names)
    assert not folder.exists()
    assert os.environ == before
    assert [*tmp_path.iterdir()] == []
