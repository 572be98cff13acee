"""Test the table of faults: values relative to the run without faults, and unfinished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_runs import write_run

from labkit import figures
from labkit.records import store
from labkit.records.run import Run


@pytest.fixture
def pairs(tmp_path: Path) -> dict[str, tuple[Run, Run]]:
    def run(name: str, ms: float, **measured: Any) -> Run:
        told = {"faults": [], **measured}
        return write_run(tmp_path, name, step_ms=ms, measured=told)

    fault = {"ranks": [1], "seconds": {"detect": 0.25, "agree": 0.5, "trace": 9.0}}
    ended = run("ended", 5.0)
    store.fail(ended.path, "rank 1 was killed")
    return {
        "stops": (run("calm", 5.0), ended),
        "half": (run("calm", 5.0), run("half", 10.0, test_accuracy=0.5)),
        "outlives": (run("calm", 5.0), run("hit", 5.0, faults=[fault])),
    }


def test_what_is_kept_is_held_against_the_undisturbed_run(
    pairs: dict[str, tuple[Run, Run]],
) -> None:
    table = figures.fault_table(pairs).set_index("strategy")
    assert list(table.index) == ["outlives", "half", "stops"]
    assert table["kept"]["outlives"] == pytest.approx(1)
    assert 0.5 < table["kept"]["half"] < 1
    assert (table["goodput, samples/s"]["stops"], table["samples lost"]["stops"]) == (0, 15360)
    assert table["recovery, s"]["outlives"] == 0.75  # the value from the record, without tracing


def test_who_did_not_finish_is_told_first_and_drawn_as_nothing(
    pairs: dict[str, tuple[Run, Run]],
) -> None:
    said = figures.summarize_fault(pairs).splitlines()
    assert said[0] == "- Did not finish: 1 of 3; **stops**."
    assert "Keeps the most of its goodput: **outlives**, 100.0%; " in said[1]
    assert "Largest loss of accuracy by faults: **half**; 50.00%, without faults " in said[-1]
    figure = figures.fault_comparison(pairs, "one is killed")
    assert "wall clock · network not emulated" in figure.layout.title.text
    assert "stops: did not finish" in figure.alt
