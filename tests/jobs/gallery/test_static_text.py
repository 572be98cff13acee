"""Test that a notebook's own text states no measurement and holds for all parameter values."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.jobs import cells
from labkit.jobs.cells import NotebookCell
from labkit.jobs.gallery.check import check_specs, measured_numbers, outdated_defaults
from labkit.jobs.parameters import declared, known_values, validate_values

NOTEBOOKS = sorted((Path(__file__).parents[3] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_says_nothing_beforehand_that_a_run_may_deny(notebook: Path) -> None:
    written = cells.read(notebook)
    assert list(measured_numbers(written)) == []
    sets = check_specs([notebook])
    assert len(sets) == 2
    assert sets[0].values != sets[1].values or not sets[0].values
    defaults = known_values({name: p.default for name, p in declared(notebook).items()})
    for each in sets:
        validate_values(notebook, each.values)
        assert list(outdated_defaults(written, defaults, each.values)) == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("markdown", "Two ranks take 12 ms a step."),
        ("markdown", "It is 1.8x as fast."),
        ("markdown", "The master is in use 50 % of the time."),
        ("code", "print('On 4 KiB the ring wins by 3 %')"),
        ("code", "print(f'{name} takes 2.5 s')"),
    ],
)
def test_a_measured_number_in_a_notebook_itself_is_found(kind: str, text: str) -> None:
    assert len(list(measured_numbers([NotebookCell(kind, text, [])]))) >= 1


@pytest.mark.parametrize(
    "text",
    [
        "Chen et al. (2016), section 3; `-p network 100Mb`, `12 ms`; [a page](runs/3.5s).",
        "Of 4 ranks each sends to the next.",
    ],
)
def test_code_sources_and_counts_are_no_measurements(text: str) -> None:
    assert list(measured_numbers([NotebookCell("markdown", text, [])])) == []


def test_a_default_in_prose_is_found_where_a_run_changes_it() -> None:
    written = [NotebookCell("markdown", "1. One process plays up to 16 workers.", [])]
    defaults = {"played": [1, 4, 16], "network": "16GbE"}
    assert list(outdated_defaults(written, defaults, {})) == []
    [fault] = outdated_defaults(written, defaults, {"played": [1, 4], "network": "1GbE"})
    assert fault.startswith("16 is the default of played, which is [1, 4] in this run")
