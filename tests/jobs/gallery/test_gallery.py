"""Test the site of executed notebooks: complete after each one, offline, and without omissions."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from listening import watched

from labkit.cli.app import app

pytestmark = pytest.mark.heavy  # notebooks run in their own processes

ANSWERS = """\
import plotly.graph_objects as go
from labkit.figures.kit.entries import Markdown
figure = go.Figure(go.Bar(y=[n, 2 * n]), layout={"title": {"text": "Twice"}})
"""


def write_notebook(folder: Path, name: str, question: str, code: str, reading: str) -> None:
    sources = [
        ("markdown", f"# {question}", None),
        ("code", "n: int = 2  # of what is doubled", "parameters"),
        ("code", code, None),
        ("code", "figure", None),
        ("code", reading, "answer"),
    ]
    cells = []
    for place, (kind, source, tag) in enumerate(sources):
        cell = {"cell_type": kind, "id": f"{name}-{place}", "source": source}
        cell["metadata"] = {"tags": [tag]} if tag else {}
        cells.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    text = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / f"{name}.ipynb").write_text(json.dumps(text))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gallery")
    said = 'Markdown(f"- Nothing yet.\\n- **Twice** as much: {2 * n} <of {n}>.")'
    write_notebook(folder, "doubles", "How much is twice?", ANSWERS, said)
    write_notebook(folder, "fails", "What does <b> divide?", f"{ANSWERS}n / 0", "n")
    with watched() as open_to_others:
        result = gallery(folder)
    assert open_to_others == set()
    assert result.exit_code == 1, result.output
    assert "fails: failed: cell In [2]: ZeroDivisionError" in result.stderr
    assert result.stdout == f"gallery: {folder / 'site' / 'index.html'}; 1 failed\n"
    return folder


def gallery(folder: Path, *options: str) -> Result:
    site = ["-o", str(folder / "site")]
    return CliRunner().invoke(app, ["gallery", str(folder), *site, *options])


def test_the_index_has_a_question_an_answer_of_the_run_and_a_picture(site: Path) -> None:
    index = (site / "site" / "index.html").read_text()
    assert '<a href="doubles.html">How much is twice?</a>' in index
    assert "<strong>Twice</strong> as much: 4 &lt;of 2&gt;." in index
    assert index.count('class="labkit-figure"') == 1
    page = re.sub(r"(?s)<script.*?</script>", "", index)
    assert not re.search(r"(src|href)=.(https?:|//)", page)
    assert "default-src 'none'" in html.unescape(page)


def test_what_failed_is_shown_as_failed_with_its_page(site: Path) -> None:
    index = (site / "site" / "index.html").read_text()
    assert '<a href="fails.html">What does &lt;b&gt; divide?</a>' in index
    assert '<p class="failed">failed: cell In [2]: ZeroDivisionError: division by zero</p>' in index
    page = (site / "site" / "fails.html").read_text()
    assert "notebook, failed: cell In [2]: ZeroDivisionError" in page
    assert "Traceback" in page


def test_what_has_completed_is_kept_and_others_stay_in_the_index(site: Path) -> None:
    before = (site / "site" / "index.html").read_text()
    result = gallery(site, "--only", "doubles")
    assert (result.exit_code, result.stderr) == (0, "doubles: already completed\n")
    assert len(list((site / "site" / "runs" / "doubles").iterdir())) == 1
    assert (site / "site" / "index.html").read_text() == before


def test_one_that_is_not_there_is_refused_with_those_that_are(site: Path) -> None:
    result = gallery(site, "--only", "tour,doubles")
    assert (result.exit_code, result.stderr) == (
        2,
        f"labkit: {site} has no notebook tour; its notebooks: doubles, fails\n",
    )
    assert "no notebook *.ipynb" in gallery(site / "site").stderr


@pytest.mark.slow
def test_check_holds_each_set_of_values_and_finds_a_false_sentence(site: Path) -> None:
    said = 'Markdown(f"- **Twice** {n} is {2 * n:.1f}, or 4.0 as ever.")'
    write_notebook(site, "lies", "Is it?", f"{ANSWERS}", said)
    (site / "check.yaml").write_text("lies:\n  - {n: 2}\n  - {n: 3}\n")
    result = gallery(site, "--check", "--only", "lies", "-j", "2")
    assert result.exit_code == 1
    assert "lies (n=2): 1 sentence, 2 numbers" in result.stdout
    assert "'4.0' is in no table, figure or record of the run" in result.stdout
    assert result.stdout.endswith("2 runs, 1 with a fault\n")
    again = gallery(site, "--only", "fails")  # its result is not reused, as it has not completed
    assert (again.exit_code, again.stderr.splitlines()[0]) == (1, "fails: running")


@pytest.mark.slow
def test_the_words_of_the_tour_follow_from_its_numbers(tmp_path: Path) -> None:
    """Check the tour with one set of parameters; the test above shows that all sets are run."""
    shutil.copy(Path(__file__).parents[3] / "notebooks" / "tour.ipynb", tmp_path)
    (tmp_path / "check.yaml").write_text("tour:\n  - {epochs: 2}\n")
    result = gallery(tmp_path, "--check")
    assert result.exit_code == 0, result.output
    assert "runs, 0 with a fault" in result.stdout
