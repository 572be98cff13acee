"""Test the package: a fast import, names of its functions, and use on ranks."""

from __future__ import annotations

import ast
import email
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path

import cloudpickle
import pytest
import yaml

import labkit as lk
from labkit.common.files import DISTRIBUTION, example_files

ROOT = Path(__file__).parents[1]


def said(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = {"tensorflow", "mpi4py", "papermill", "nbconvert", "plotly", "pandas", "numpy"}
    assert (
        said(f"import sys, labkit, labkit.cli.app; print({heavy!r} & set(sys.modules))") == "set()"
    )


@pytest.mark.parametrize("first", ["labkit.records.run", "labkit.report", "labkit.jobs.form"])
def test_names_are_functions_whatever_module_was_loaded_before(first: str) -> None:
    program = f"import labkit as lk, {first}; print(lk.run.__name__, lk.report.__name__, "
    assert (
        said(program + "lk.parameter_form.__name__, lk.Run.__name__)")
        == "run report parameter_form Run"
    )


@pytest.mark.parametrize(
    "name", ["schedules.ALLREDUCE", "compression.COMPRESSORS", "export.export"]
)
def test_parts_are_there_from_the_start(name: str) -> None:
    assert said(f"import labkit; print(labkit.{name} is not None)") == "True"


def test_every_public_name_is_there() -> None:
    assert set(dir(lk)) >= {"Cluster", "Experiment", "Run", "compare", "report", "run"}
    for name in lk.__all__:
        assert getattr(lk, name) is not None


def test_a_function_that_names_it_travels() -> None:
    def work() -> object:
        return lk.Experiment

    assert cloudpickle.loads(cloudpickle.dumps(work))() is lk.Experiment


def declared() -> dict[str, str]:
    """Return the version of each dependency by name, as package indices write names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(line.split("==") for line in project["dependencies"])
    assert list(pinned) == sorted(pinned, key=lambda name: normalized(name)), "out of order"
    return {normalized(name): number for name, number in pinned.items()}


def extras() -> dict[str, str]:
    """Return the versions of optional dependencies by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for some in project["optional-dependencies"].values() for line in some]
    return {normalized(name): number for name, number in (line.split("==") for line in lines)}


# Debian packages simgrid for its own Python, and the others are in environments of `labkit
# frameworks setup`.
ELSEWHERE = {"simgrid", "torch", "horovod", "jax"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(path: Path) -> Iterator[str]:
    """Yield the packages that a file imports, also inside functions, without labkit's own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        packages = {name.split(".")[0] for name in names} - ELSEWHERE
        yield from packages - {"labkit"} - sys.stdlib_module_names


def test_what_is_imported_is_declared() -> None:
    known = packages_distributions()
    wanted = {
        normalized(distribution): f"{path.relative_to(ROOT)} imports {package}"
        for path in sorted((ROOT / "labkit").rglob("*.py"))
        for package in imported(path)
        for distribution in known.get(package, [package])
    }
    base, more = declared(), extras()
    assert [why for name, why in wanted.items() if name not in base | more] == []
    here = {normalized(name) for names in known.values() for name in names}
    given = base | {name: number for name, number in more.items() if name in here}
    assert {name: version(name) for name in given} == given


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = ["uv", "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    [path] = folder.glob("*.whl")
    assert path.name == f"{DISTRIBUTION.replace('-', '_')}-{lk.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_a_wheel_has_the_package_and_what_its_commands_copy(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if name.startswith("labkit/")}
    tracked = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "labkit"]
    package = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "labkit/py.typed" in names
    copied = {name: name for name in example_files()} | {"DATA.md": "data/README.md"}
    examples = {f"labkit/examples/{name}" for name in copied.values()}
    assert names == {*package.stdout.splitlines(), *examples}


@pytest.mark.slow
def test_a_wheel_says_whose_it_is_and_names_no_file_of_the_repository(
    wheel: zipfile.ZipFile,
) -> None:
    information = f"{DISTRIBUTION.replace('-', '_')}-{lk.__version__}.dist-info"
    licence = wheel.read(f"{information}/licenses/LICENSE").decode()
    assert re.search(r"Copyright 20\d\d The labkit authors", licence)
    assert "http://www.apache.org/licenses/LICENSE-2.0" in licence
    message = email.message_from_bytes(wheel.read(f"{information}/METADATA"))
    assert message["Name"] == DISTRIBUTION
    assert message["Author"] == "The labkit authors"
    assert message["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in message.get_all("Classifier", [])
    page = message.get_payload()
    assert isinstance(page, str)
    # On an index, a link must be an address or a heading of the page.
    assert re.findall(r"\]\((?!https:|#)\S+\)", page) == []
    assert page.count("**Picture:** ") == len(re.findall(r"!\[", (ROOT / "README.md").read_text()))


def test_conda_brings_what_the_tests_want() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    assert {"--editable .", *groups["dev"]} == set(pip)
