"""Test that the book has a place for each name, and that it builds without a warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import labkit

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"
GUIDE = NOTEBOOKS / "guide"
VARIABLE = re.compile(r"\bLABKIT_[A-Z_]*[A-Z]\b")


def page(name: str) -> str:
    return (GUIDE / name).read_text(encoding="utf-8")


def listed(text: str) -> list[str]:
    """Return the entries of all tables of contents of a page."""
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(":")]


def test_every_public_name_has_its_entry() -> None:
    found = re.findall(r"^\.\. auto\w+:: labkit\.(\w+)$", page("reference/python.md"), re.MULTILINE)
    modules = {"compression", "datasets", "export", "figures", "models", "network", "schedules"}
    assert sorted(found) == sorted({*labkit.__all__} - modules - {"simulate", "strategies"})


def test_every_notebook_has_its_topic() -> None:
    found = [Path(entry).name for entry in listed(page("notebooks.md"))]
    assert sorted(found) == sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def test_every_page_is_in_the_contents_of_its_part() -> None:
    for index in GUIDE.glob("*/index.md"):
        pages = {path.stem for path in index.parent.glob("*.md")} - {"index"}
        assert {Path(entry).stem for entry in listed(index.read_text(encoding="utf-8"))} >= pages


def test_every_environment_variable_of_labkit_is_explained() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "labkit").rglob("*.py")]
    used = {name for text in sources for name in VARIABLE.findall(text)}
    assert used - {*VARIABLE.findall(page("reference/environment_variables.md"))} == set()


@pytest.mark.slow
def test_the_book_builds_without_a_warning(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from labkit.cli.app import app

    done = CliRunner().invoke(app, ["docs", str(NOTEBOOKS), "-o", str(tmp_path), "--strict"])
    assert done.exit_code == 0, done.output
    for name in ("index", "tour", "METHODS", "guide/reference/python"):
        assert (tmp_path / f"{name}.html").exists()
