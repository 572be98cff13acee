"""Test the map of methods, an offline page with cells, papers, notebooks and empty cells."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from click.testing import CliRunner

from labkit.cli.app import app
from labkit.cli.methods import page, sources
from labkit.cli.methods.method import members, placed
from labkit.figures.taxonomy import COLUMNS, ROWS
from labkit.strategies import AXES, STRATEGIES

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page, which is written to a folder beside the notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "notebooks").symlink_to(NOTEBOOKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(app, ["methods", "--map", "site/map.html"])
        assert (done.exit_code, done.stdout) == (0, "")
        return Path("site/map.html").read_text()


def test_every_strategy_stands_in_each_of_its_cells(written: str) -> None:
    section = r'<section class="cell" data-place="(\d+)"(.*?)</section>'
    cells = dict(re.findall(section, written, re.S))
    for name, kind in STRATEGIES.items():
        for cell in kind.cells():
            row = ROWS.index((cell.architecture, cell.parallelism))
            place = row * len(COLUMNS) + COLUMNS.index(cell.synchronization)
            item = re.search(rf'<li data-method="{name}">.*?</li>', cells[str(place)])
            assert item, f"{name} is not in {cell}"
            assert cell.compression in item[0]
            assert cell.scheduling in item[0]


def test_a_method_has_its_paper_and_links_that_lead_to_its_notebooks(written: str) -> None:
    assert '<a href="https://arxiv.org/abs/1603.02339">Vishnu 2016</a>' in written
    for each in placed(sources(NOTEBOOKS)):
        named = [part.split(", ")[0] for part in each.kind.paper.split("; ")]
        assert [paper.cited for paper in each.method.papers] == named
        for cited, number in each.method.papers:
            link = f'<a href="https://arxiv.org/abs/{number}">{cited}</a>'
            assert (link if number else cited) in written
            assert not number or f"{cited}, arXiv {number}" in each.kind.paper
        assert each.notebooks
        for path in each.notebooks:
            assert f'<a href="../notebooks/{path.name}">{path.stem}</a>' in written


def test_cells_without_a_method_are_listed(written: str) -> None:
    words = unescape(re.search(r'<ul id="bare">(.*?)</ul>', written, re.S)[1])  # type: ignore[index]
    filled = {(c.architecture, c.parallelism) for kind in STRATEGIES.values() for c in kind.cells()}
    for row in ROWS:
        bare = f"<li>{' × '.join(row)}: none at all</li>" in words
        assert bare == (row not in filled)


def test_the_page_asks_no_host_and_its_script_gets_what_it_chooses_from(written: str) -> None:
    assert "default-src 'none'; script-src 'sha256-" in unescape(written)
    markup = re.sub(r"<script.*?</script>", "", written, flags=re.S)
    assert not re.search(r'(?:src|href)="(?!https://arxiv\.org/|\.\./notebooks/|#|data:)', markup)
    data = json.loads(re.search(r'<script [^>]*id="standings">(.*?)</script>', written)[1])  # type: ignore[index]
    assert len(data["places"]) == len(ROWS) * len(COLUMNS)
    told = {each["method"]: set() for each in data["standings"]}  # type: dict[str, set[tuple[str, str]]]
    for each in data["standings"]:
        told[each["method"]] |= {tuple(pair) for pair in each["at"]}
    for name, kind in STRATEGIES.items():
        assert told[name] == {(cell.compression, cell.scheduling) for cell in kind.cells()}


def test_members_of_all_families_stand_on_the_axes() -> None:
    assert {"TopK", "AllReduce", "ErrorFeedback"} <= set(members("compression", "sparsification"))
    assert "pipedream" in members("synchronization", "stale synchronous")
    assert members("scheduling", "unlocked") == ["DelayedGradients"]


def test_the_tables_have_every_strategy_and_a_dash_in_each_empty_cell() -> None:
    lines = page(NOTEBOOKS).splitlines()
    tables = [[part.strip() for part in line.split("|")[1:-1]] for line in lines if " × " in line]
    rows = {part[0]: part[1:] for part in tables if len(part) > 1}
    for architecture, parallelism in ROWS:
        cells = rows[f"{architecture} × {parallelism}"]
        for column, text in zip(COLUMNS, cells, strict=True):
            here = [
                name
                for name, kind in STRATEGIES.items()
                if any(c[:3] == (architecture, column, parallelism) for c in kind.cells())
            ]
            assert {*re.findall(r"\[(\w+)\]\(#", text)} == set(here)
            assert (text == "—") == (not here)
    assert len(rows["synchronous × none"]) == len(AXES["scheduling"])
