"""Test that a journal not written by Optuna becomes one line and does not break a report."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_runs import write_run

from labkit.common.errors import LabkitError
from labkit.records import store
from labkit.records.analysis import curves as module
from labkit.records.analysis.curves import JOURNAL, search_results
from labkit.report import report

SEARCH = {"metric": "accuracy", "maximize": True, "trials": 3, "axes": {}, "fixed": {}}
STUDY = '{"op_code": 0, "worker_id": "w", "study_name": "labkit", "directions": [2]}\n'
TRIAL = '{"op_code": 4, "worker_id": "w", "study_id": 0, "datetime_start": "then"}\n'
ODD = [
    "",
    "{}\n",
    "{\n\n",
    "null\n",
    "[]\n",
    "\0\n",
    '{"op_code": 99}\n',
    "[" * 9_999,
    STUDY + TRIAL,
]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    store.write_json(tmp_path / "sweep.json", {"search": SEARCH})
    return tmp_path


@pytest.mark.parametrize("journal", ODD, ids=lambda text: repr(text[:20]))
def test_an_odd_journal_is_one_line(sweep: Path, journal: str) -> None:
    (sweep / JOURNAL).write_text(journal)
    with pytest.raises(LabkitError, match=rf"/{JOURNAL} cannot be read: ") as told:
        search_results(sweep)[0]
    assert len(str(told.value).splitlines()) == 1


def test_a_journal_of_no_trials_and_one_that_is_too_long(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sweep / JOURNAL).write_text(STUDY)
    assert len(search_results(sweep)[0].trials) == 0
    monkeypatch.setattr(module, "LONGEST_JOURNAL", 5)
    with pytest.raises(LabkitError, match="allowed: at most 5"):
        search_results(sweep)[0]


@pytest.mark.parametrize("record", [{"search": None}, {}])
def test_a_record_of_no_search_is_one_line(sweep: Path, record: dict[str, None]) -> None:
    (sweep / JOURNAL).write_text(STUDY)
    store.write_json(sweep / "sweep.json", record)
    with pytest.raises(LabkitError, match="cannot be read"):
        search_results(sweep)[0]


def test_a_report_leaves_the_figure_of_an_odd_journal_out(sweep: Path) -> None:
    run = write_run(sweep / "001_n=1")
    (sweep / JOURNAL).write_text("{}\n")
    with pytest.warns(UserWarning, match=rf"left out: .*/{JOURNAL} cannot be read") as told:
        page = report([run], sweep / "report.html")
    assert len(told) == 1
    assert run.name in page.read_text()
