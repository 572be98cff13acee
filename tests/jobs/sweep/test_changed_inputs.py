"""Test that a resumed sweep runs exactly the notebook runs whose inputs have changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import labkit as lk
from labkit.cli.app import app

PARAMETERS = 'member: str = "plain"'
CELL = """\
import sys
from pathlib import Path
if member == "plain":
    value = 1
if member == "helper":
    import helper
    value = helper.VALUE
if member == "data":
    value = len(Path("data.csv").read_text())
if member == "package":
    import tiny
    value = tiny.VALUE
if member == "all":
    import helper, tiny
    value = helper.VALUE + tiny.VALUE + len(Path("data.csv").read_text())
"""
LOG = """\
import labkit as lk
lk.log(value=value)"""
MEMBERS = ("plain", "helper", "data", "package", "all")
SWEEP = Path("runs/study-sweep")


def write_notebook(*sources: str) -> None:
    cells = [
        {
            "cell_type": "markdown" if source.startswith("#") else "code",
            "id": f"cell{place}",
            "metadata": {} if place else {"tags": ["parameters"]},
            **({} if source.startswith("#") else {"execution_count": None, "outputs": []}),
            "source": source,
        }
        for place, source in enumerate(sources)
    ]
    notebook = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    Path("study.ipynb").write_text(json.dumps(notebook))


class Environment:
    """Files beside the notebook, and an installed package, each of which a test can change."""

    def __init__(self, site: Path) -> None:
        self._site, self._versions, self._cell = site, 0, CELL
        write_notebook(PARAMETERS, CELL, LOG)
        Path("helper.py").write_text("VALUE = 1\n")
        Path("data.csv").write_text("1")
        Path("unused.csv").write_text("1")
        Path("unused.py").write_text("")
        (site / "tiny.py").write_text("VALUE = 2\n")
        self._metadata = site / "tiny-0.dist-info"
        self._metadata.mkdir()
        self._other = site / "other_package-0.dist-info"
        self._other.mkdir()

    def helper(self) -> None:
        """Change the module beside the notebook."""
        with open("helper.py", "a") as file:
            file.write("VALUE += 1\n")

    def data(self) -> None:
        """Change the data file."""
        with open("data.csv", "a") as file:
            file.write("1")

    def package(self) -> None:
        """Install another version of the package."""
        self._versions += 1
        self._metadata = self._metadata.rename(self._site / f"tiny-{self._versions}.dist-info")

    def unused(self) -> None:
        """Change a module, a file, a package and a Markdown cell that no notebook run uses."""
        self._versions += 1
        Path("unused.py").write_text("changed = True\n")
        Path("unused.csv").write_text("23")
        self._other = self._other.rename(self._site / f"other_package-{self._versions}.dist-info")
        write_notebook(PARAMETERS, self._cell, LOG, f"# Remark {self._versions}")

    def cell(self) -> None:
        """Change a code cell of the notebook."""
        self._versions += 1
        self._cell = f"{CELL}# {self._versions}"
        write_notebook(PARAMETERS, self._cell, LOG)

    def same(self) -> None:
        """Write all files again, with the same content."""
        for name in ("helper.py", "data.csv"):
            Path(name).write_text(Path(name).read_text())


AFFECTED = {
    "helper": {"helper", "all"},
    "data": {"data", "all"},
    "package": {"package", "all"},
    "cell": {*MEMBERS},
    "unused": set(),
    "same": set(),
}


@pytest.fixture
def environment(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Environment:
    site = tmp_path_factory.mktemp("lib") / "site-packages"
    site.mkdir()
    folders = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    return Environment(site)


def sweep(members: tuple[str, ...], *options: str) -> str:
    command = [Path(sys.executable).with_name("labkit"), "sweep", "study.ipynb"]
    # A sweep forks from its process, in which no TensorFlow of other tests may run.
    done = subprocess.run(
        [*command, f"member={','.join(members)}", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def starts() -> dict[str, str]:
    """Return the time at which each notebook run started, by its member."""
    return {
        str(run.experiment["member"]): str(run.status["started"]) for run in lk.load_runs(SWEEP)
    }


def repeated_after(members: tuple[str, ...], *changes: Callable[[], None]) -> set[str]:
    """Make changes, resume the sweep, and return the members that have run again."""
    before = starts()
    for change in changes:
        change()
    sweep(members, "--resume")
    after = starts()
    assert before.keys() == after.keys() == {*members}
    return {member for member in members if after[member] != before[member]}


def value_of(member: str) -> object:
    return next(run for run in lk.load_runs(SWEEP) if run.experiment["member"] == member).metrics[
        "value"
    ]


@pytest.mark.heavy  # the processes of notebook runs
def test_a_changed_helper_is_not_forgotten(environment: Environment) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "add", "helper.py"], check=True)
    subprocess.run(["git", *author, "commit", "-qm", "first"], check=True)
    sweep(("helper",))
    first = lk.load_runs(SWEEP)[0].provenance
    assert (first["files"].keys(), len(first["repository"]["commit"])) == ({"helper.py"}, 40)
    environment.helper()
    told = sweep(("helper",), "--resume")
    assert "1 completed notebook run out of date (001): helper.py has changed" in told
    assert value_of("helper") == 2
    assert "+VALUE += 1" in lk.load_runs(SWEEP)[0].provenance["repository"]["diff"]
    compared = CliRunner().invoke(app, ["compare", str(SWEEP), f"{SWEEP}/.earlier"]).output
    assert "different inputs: uncommitted changes" in compared
    assert "`helper.py` (2 versions)" in compared


COMBINATIONS = [
    *(("helper",), ("data",), ("package",), ("cell",), ("unused",), ("same",), ()),
    *(("helper", "data"), ("helper", "package"), ("data", "package"), ("same", "unused")),
    *(("helper", "data", "package"), ("cell", "helper"), ("unused", "data")),
    *(("same", "package"), ("helper",), ("data", "same"), ("package", "unused")),
    *(("helper", "same", "unused"), ("data", "package", "unused", "same")),
]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_exactly_the_affected_members_run_in_twenty_resumes(environment: Environment) -> None:
    sweep(MEMBERS)
    assert len(COMBINATIONS) == 20
    for kinds in COMBINATIONS:
        expected = set().union(*(AFFECTED[kind] for kind in kinds))
        changes = [getattr(environment, kind) for kind in kinds]
        assert repeated_after(MEMBERS, *changes) == expected, kinds
    helper, data = value_of("helper"), len(Path("data.csv").read_text())
    assert isinstance(helper, int)
    assert (value_of("all"), value_of("data")) == (helper + 2 + data, data)
