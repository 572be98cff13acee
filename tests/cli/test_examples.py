"""Test `labkit examples`: it copies notebooks from a checkout or a wheel, and keeps files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from labkit.cli.app import app
from labkit.common import files

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
NAMES = [
    path.relative_to(NOTEBOOKS).as_posix()
    for path in NOTEBOOKS.rglob("*.*")
    if path.suffix in (".ipynb", ".md", ".yaml") or path.name == "conf.py"
]


def examples(*words: str) -> Result:
    return CliRunner().invoke(app, ["examples", *words])


def test_a_checkout_gives_its_notebooks_and_says_what_to_run() -> None:
    done = examples("new/books")
    assert done.exit_code == 0, done.output
    copied = [path for path in Path("new/books").rglob("*") if path.is_file()]
    found = [path.relative_to("new/books").as_posix() for path in copied]
    assert sorted(found) == sorted([*NAMES, "DATA.md"])
    for name in NAMES:
        assert Path("new/books", name).read_bytes() == (ROOT / "notebooks" / name).read_bytes()
    assert Path("new/books/DATA.md").read_bytes() == (ROOT / "data/README.md").read_bytes()
    command = next(line for line in done.output.splitlines() if line.startswith("to run one: "))
    checked = command.removeprefix("to run one: labkit ").split()
    assert CliRunner().invoke(app, [*checked, "--check"]).exit_code == 0


def test_an_existing_file_stays_and_no_other_is_written() -> None:
    Path("books").mkdir()
    Path("books/tour.ipynb").write_text("mine")
    done = examples("books")
    assert done.exit_code == 2
    assert "books/tour.ipynb would be overwritten: give another folder, or" in done.output
    assert [path.name for path in Path("books").iterdir()] == ["tour.ipynb"]
    assert examples("books", "--force").exit_code == 0
    assert Path("books/tour.ipynb").read_text() != "mine"
    assert f"and {len(NAMES)} more would be overwritten" in examples("books").output


def test_a_folder_that_cannot_exist_is_refused() -> None:
    Path("file").touch()
    done = examples("file/books")
    assert (done.exit_code, "file is no folder" in done.output) == (2, True)


def test_an_installed_labkit_copies_the_examples_of_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "labkit" / "examples"
    (inside / "data").mkdir(parents=True)
    for name in ("tour.ipynb", "METHODS.md", "check.yaml", "data/README.md"):
        (inside / name).write_text(name)
    monkeypatch.setattr(files, "_EXAMPLES", inside)
    assert files.checkout() is None
    assert examples("books").exit_code == 0
    assert Path("books/DATA.md").read_text() == "data/README.md"
    assert Path("books/tour.ipynb").read_text() == "tour.ipynb"


def test_methods_name_notebooks_also_in_a_folder_without_notebooks() -> None:
    printed = CliRunner().invoke(app, ["methods"]).output
    assert "](compression.ipynb)" in printed
    CliRunner().invoke(app, ["methods", "-o", "deep/methods.md"])
    link = re.search(r"\]\((\S*/compression\.ipynb)\)", Path("deep/methods.md").read_text())
    assert link is not None
    assert Path("deep", link[1]).samefile(ROOT / "notebooks" / "compression.ipynb")
