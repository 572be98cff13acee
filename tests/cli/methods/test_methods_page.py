"""Test that every method has a source and a notebook, and that the methods page is up to date."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from labkit.cli.app import app
from labkit.cli.methods import Family, Method, families, page, sources, trying
from labkit.common.errors import InvalidInput

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
METHODS = [(family, method) for family in families() for method in family.methods()]


@pytest.mark.parametrize(
    ("family", "method"), METHODS, ids=[f"{f.place.split('.')[-1]}-{m.name}" for f, m in METHODS]
)
def test_a_method_says_what_it_is_and_where_it_comes_from(family: Family, method: Method) -> None:
    assert method.summary, "it has no docstring"
    assert method.cited, f"its docstring names no author and year: {method.source!r}"
    for parameter in method.parameters:
        assert parameter.help, f"its docstring says nothing of {parameter.name}"


def test_a_method_has_a_notebook() -> None:
    code = sources(NOTEBOOKS)
    without = {method.name for family, method in METHODS if not trying(family, method, code)}
    assert without == set()


def test_the_page_is_that_of_the_docstrings() -> None:
    written = (NOTEBOOKS / "METHODS.md").read_text()
    assert written == page(NOTEBOOKS), "write it anew: labkit methods -o notebooks/METHODS.md"


def test_the_command_prints_the_page_or_writes_it_with_links_that_lead_to_the_notebooks() -> None:
    folder = Path("notebooks")
    folder.mkdir()
    (folder / "mine.ipynb").write_text(json.dumps({"cells": [cell("lk.TopK(ratio=0.1)")]}))
    printed = CliRunner().invoke(app, ["methods"])
    assert printed.exit_code == 0
    assert "| TopK | Aji 2017 | `ratio`, `threshold` | [mine](mine.ipynb) |" in printed.stdout
    assert "| QSGD | Alistarh 2017 | `levels`, `bucket` | none yet |" in printed.stdout
    written = CliRunner().invoke(app, ["methods", "-o", "page.md"])
    assert (written.exit_code, written.stdout) == (0, "")
    assert "[mine](notebooks/mine.ipynb)" in Path("page.md").read_text()


def test_a_notebook_tries_what_it_names_and_what_its_parameters_take() -> None:
    by_title = {family.title: family for family in families()}
    ring = next(m for f, m in METHODS if m.name == "ring")
    pipeline = next((f, m) for f, m in METHODS if m.name == "gpipe")
    allreduce = by_title["Allreduce algorithms"]
    code = {
        Path("named"): 'lk.AllReduce(algorithm="ring")',
        Path("another"): 'lk.AllReduce(algorithm="tree")  # as bearings do',
        Path("any"): 'algorithm: str = "tree"  # a name of labkit.schedules.ALLREDUCE',
    }
    assert trying(allreduce, ring, code) == [Path("named"), Path("any")]
    assert trying(*pipeline, code) == []


def test_a_broken_notebook_is_named() -> None:
    Path("broken.ipynb").write_text("{")
    with pytest.raises(InvalidInput, match=r"broken\.ipynb is not a notebook"):
        page(Path())


def test_docstrings_are_read_without_tensorflow() -> None:
    script = (
        "import sys; from labkit.cli.methods import families; [f.methods() for f in families()]"
    )
    check = "; print('tensorflow' in sys.modules, 'mpi4py' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script + check], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def cell(source: str) -> dict[str, object]:
    return {"cell_type": "code", "metadata": {}, "source": [source]}


def test_a_name_selects_methods_and_an_unknown_one_is_refused() -> None:
    found = CliRunner().invoke(app, ["methods", "topk"])
    assert found.exit_code == 0
    assert found.stdout.startswith("### TopK\n")
    assert found.stdout.count("\n### ") == 0
    wrong = CliRunner().invoke(app, ["methods", "topkk"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "NAME='topkk' is not known (did you mean 'TopK'?)" in wrong.stderr
