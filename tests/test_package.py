"""Test the package: a fast import, names of its functions, and use on ranks."""

from __future__ import annotations

import ast
import email
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

import cloudpickle
import pytest
import yaml
from packaging.requirements import Requirement

import labkit as lk
from labkit.common import imports
from labkit.common.errors import LabkitError
from labkit.common.files import DISTRIBUTION, example_files
from labkit.common.imports import EXTRA_OF
from tests.acceptance.matrix import QUICK, TRAINING
from tests.sample_calibrations import calibration

ROOT = Path(__file__).parents[1]


def said(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = {"tensorflow", "mpi4py", "papermill", "nbconvert", "plotly", "pandas", "numpy"}
    assert (
        said(f"import sys, labkit, labkit.cli.app; print({heavy!r} & set(sys.modules))") == "set()"
    )


@pytest.mark.battery(1, 2)
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


PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]
FIXED = tomllib.loads(PYPROJECT)["dependency-groups"]["fixed"]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def declared() -> dict[str, tuple[str, Requirement]]:
    """Return extra ("" is the core) and requirement of each dependency, without `gpu`."""
    lists = {"": PROJECT["dependencies"]} | PROJECT["optional-dependencies"]
    return {
        normalized(requirement.name): (extra, requirement)
        for extra, lines in lists.items()
        for requirement in map(Requirement, lines)
        if extra != "gpu" and requirement.name != PROJECT["name"]
    }


def test_each_dependency_has_a_floor_a_ceiling_and_a_reason() -> None:
    names = [normalized(Requirement(line).name) for line in PROJECT["dependencies"]]
    assert names == sorted(names)
    for _, requirement in declared().values():
        bounds = sorted(bound.operator for bound in requirement.specifier)
        assert bounds == ["<", ">="], f"{requirement} has no floor or no ceiling"
        [line] = [text for text in PYPROJECT.splitlines() if f'"{requirement.name}>=' in text]
        assert re.search(r" # \S.{7}", line), f"{requirement} has no reason"


def test_developers_install_one_version_of_each_dependency_which_its_range_allows() -> None:
    fixed = {normalized(name): number for name, number in (line.split("==") for line in FIXED)}
    assert fixed.keys() == declared().keys()
    for name, (_, requirement) in declared().items():
        assert requirement.specifier.contains(fixed[name]), f"{requirement} excludes {fixed[name]}"
        assert version(name) == fixed[name]


def test_the_suites_of_the_matrix_are_there() -> None:
    for name in (*QUICK, *TRAINING):
        assert not name.startswith("tests/") or (ROOT / name).exists(), name


def test_all_is_every_extra_but_gpu_and_extras_name_the_project() -> None:
    extras = PROJECT["optional-dependencies"]
    named = {Requirement(line).name for lines in extras.values() for line in lines}
    assert {name for name in named if "labkit" in name} == {PROJECT["name"]}
    [everything] = map(Requirement, extras["all"])
    inside = {extra for name in everything.extras for extra in (name, *_inside(extras[name]))}
    assert inside == extras.keys() - {"all", "gpu"}


def _inside(lines: list[str]) -> set[str]:
    return {extra for line in lines for extra in Requirement(line).extras}


# Debian packages simgrid for its own Python, and the others are in environments of `labkit
# frameworks setup`.
ELSEWHERE = {"simgrid", "torch", "horovod", "jax"}


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


def test_each_module_that_labkit_imports_belongs_to_the_core_or_to_a_named_extra() -> None:
    known = packages_distributions()
    for path in sorted((ROOT / "labkit").rglob("*.py")):
        for package in imported(path):
            names = {normalized(name) for name in known.get(package, [package])}
            owners = {declared()[name][0] for name in names & declared().keys()}
            where = f"{path.relative_to(ROOT)} imports {package}"
            assert owners == {EXTRA_OF.get(package, "")}, where


# The core brings these with nbconvert.
WITH_THE_CORE = {"jupyter_client", "jupyter_core", "zmq"}
LIGHT = """
import sys
sys.modules.update(dict.fromkeys({absent}))
import labkit
from labkit.cli.app import app
for line in sys.stdin.read().splitlines():
    if code := app(line.split(), standalone_mode=False):
        sys.exit(code)
"""


@pytest.mark.slow
def test_the_core_lists_compares_reports_simulates_and_forecasts(tmp_path: Path) -> None:
    absent = sorted((EXTRA_OF.keys() | {"scipy"}) - WITH_THE_CORE)
    assert {"tensorflow", "keras", "jupyterlab", "optuna", "sklearn"} <= set(absent)
    shutil.copytree(ROOT / "tests/records/former", tmp_path / "runs")
    (tmp_path / "job").mkdir()
    shutil.copy(ROOT / "notebooks/tour.ipynb", tmp_path / "job/output.ipynb")
    calibration().save(tmp_path / "calibration.json")
    forecast = "mlp -p dataset digits -p batch_size 64 --calibration calibration.json"
    commands = [
        "ls runs",
        "compare runs --parquet table.parquet",
        "report runs",
        "report runs --notebook job/output.ipynb -o notebook.html",
        "simulate ring --workers 512 --bytes 1e8 --network 10GbE",
        f"forecast {forecast} --network 10GbE --workers 1,8",
    ]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(absent=absent)],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = {"compare.html", "table.parquet", "report.html", "notebook.html"}
    assert written <= {path.name for path in tmp_path.iterdir()}
    assert "averaged-e4056525" in done.stdout
    assert "ring, 512 ranks" in done.stdout
    assert re.search(r"^8 .*", done.stdout, re.M)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run tour.ipynb", "train"),
        ("sweep tour.ipynb workers=1,2", "train"),
        ("lab", "lab"),
        ("bench collectives --workers 2", "train"),
    ],
)
def test_a_command_names_the_extra_that_it_lacks(line: str, expected: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "notebooks/tour.ipynb", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(absent=["tensorflow", "jupyterlab"])],
        input=line,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    *_, last = done.stderr.splitlines()
    assert last.startswith("labkit: the package ")
    assert f"install it: uv sync --inexact --extra {expected} " in last
    assert done.returncode == 1


def test_an_installed_package_is_told_to_use_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr(imports, "__file__", str(tmp_path / "labkit/common/imports.py"))
    with pytest.raises(LabkitError, match=rf'install it: pip install "{DISTRIBUTION}\[search\]"$'):
        imports.optional("optuna")
    with pytest.raises(LabkitError, match="the package optuna is not installed"):
        imports.require("search")


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
    tools = [entry for entry in groups["dev"] if isinstance(entry, str)]  # versions are ranges here
    assert {"--editable .[all]", *groups["tests"], *tools} == set(pip)
