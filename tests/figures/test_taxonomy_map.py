"""Test the map of methods: each cell lists its methods, or says that it has none."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.figures import taxonomy_map
from labkit.figures.kit.canvas import Figure
from labkit.figures.taxonomy import COLUMNS, ROWS, MethodInCell, empty, grid
from labkit.strategies import Cell

ONE = MethodInCell(
    "One",
    "Curie 1911",
    ("tour", "compare"),
    Cell("collective", "synchronous", "data", "none", "sequential"),
)
STANDINGS = [
    ONE,
    ONE._replace(cell=ONE.cell._replace(compression="low rank")),
    MethodInCell("<Two>", "Noether 1918", (), ONE.cell),
    ONE._replace(cell=ONE.cell._replace(synchronization="periodic")),
]


@pytest.fixture(scope="module")
def figure() -> Figure:
    return taxonomy_map(STANDINGS)


def test_a_method_is_once_in_a_cell_whatever_else_it_can_be_there() -> None:
    laid = grid(STANDINGS)
    assert list(laid[ONE.row, "synchronous"]) == ["One", "<Two>"]
    assert len(laid) == len(ROWS) * len(COLUMNS)
    assert sum(map(bool, laid.values())) == 2


def test_cells_name_their_methods_and_empty_ones_have_a_dash(figure: Figure) -> None:
    colors, texts = figure.data
    row = ROWS.index(ONE.row)
    counts = np.array(colors["z"])
    assert counts[row].tolist() == [2, 0, 0, 1, 0]
    assert counts.sum() == 3
    first = row * len(COLUMNS)
    assert list(texts["text"][first : first + 5]) == ["One<br>&lt;Two&gt;", "—", "—", "One", "—"]
    assert colors["colorscale"][0][1].endswith(",0)"), "an empty cell has no colour"


def test_the_pointer_says_paper_notebooks_compression_and_scheduling(figure: Figure) -> None:
    said = figure.data[0]["customdata"][ROWS.index(ONE.row)]
    assert said[0].split("<br>") == [
        "<b>collective × data, synchronous</b>",
        "One (Curie 1911): none, low rank · sequential · tour, compare",
        "&lt;Two&gt; (Noether 1918): none · sequential · ",
    ]
    assert said[1] == "<b>collective × data, stale synchronous</b><br>no method here"


def test_the_words_list_full_cells_and_empty_ones(figure: Figure) -> None:
    assert "2 methods in 2 of 90 cells" in figure.alt
    assert "collective × data, synchronous: One, <Two>" in figure.alt
    assert "No method here: collective × data: stale synchronous, asynchronous, " in figure.alt
    lines = empty(STANDINGS)
    assert lines[0] == "collective × data: stale synchronous, asynchronous, asynchronous periodic"
    assert lines[1] == "collective × model by layers: none at all"
    assert len(lines) == len(ROWS)


def test_on_a_narrow_screen_a_cell_has_a_number() -> None:
    figure = taxonomy_map(STANDINGS, numbers=True)
    assert list(figure.data[1]["text"][:5]) == ["2", "—", "—", "1", "—"]
    heights = np.diff(figure.data[0]["y"])
    assert (heights == heights[0]).all()
