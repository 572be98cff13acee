"""Test that no labkit process runs modules from a folder of runs unless a notebook imports them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from labkit.common import imports

LABKIT = str(Path(sys.executable).with_name("labkit"))
MODULES = (
    *("numpy", "queue", "random", "json", "selectors", "tempfile", "labkit", "click", "zmq"),
    *("tensorflow", "keras", "mpi4py", "psutil", "ipyparallel", "sitecustomize", "usercustomize"),
)
CONFIGURATIONS = (
    *("ipcontroller_config", "ipengine_config", "ipcluster_config", "ipython_config"),
    *("ipython_kernel_config", "jupyter_config", "jupyter_lab_config", "jupyter_server_config"),
)
TRAP = "open({marks!r}, 'a').write({name!r} + ': ' + open('/proc/self/cmdline').read() + chr(10))\n"
# On this process and on the ranks, a notebook imports a module beside it, but the installed NumPy.
CELL = """
import labkit as lk
import helper
def where(communicator):
    import helper, numpy
    return helper.__name__, numpy.ones(2).sum()
with lk.Cluster(workers=2) as cluster:
    assert cluster.call(where) == [("helper", 2.0)] * 2
"""


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the file in which each trap module reports that it was run."""
    return tmp_path_factory.mktemp("marks") / "marks"


@pytest.fixture(scope="module")
def trapped(marks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an untrusted folder with trap modules and a notebook."""
    folder = tmp_path_factory.mktemp("stranger")
    for name in (*MODULES, *CONFIGURATIONS):
        (folder / f"{name}.py").write_text(TRAP.format(marks=str(marks), name=name))
    for profile in ("profile_default", "profile_default/startup", "profile_labkit"):
        (folder / profile).mkdir()
        for name in CONFIGURATIONS:
            text = TRAP.format(marks=str(marks), name=f"{profile}/{name}")
            (folder / profile / f"{name}.py").write_text(text)
    for template in ("basic", "lab"):
        (folder / template).mkdir()
        (folder / template / "conf.json").write_text(
            '{"preprocessors": {"1": {"type": "antigravity.fly", "enabled": true}}}'
        )
    (folder / "helper.py").touch()
    (folder / "runs").mkdir()
    declared = nbformat.v4.new_code_cell("a: int = 1", metadata={"tags": ["parameters"]})
    cells = [declared, nbformat.v4.new_code_cell(CELL)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "asks.ipynb")
    return folder


@pytest.fixture
def _path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", ["/lib", "/site-packages"])
    monkeypatch.setenv(imports.VARIABLE, "")  # monkeypatch restores it after the test
    monkeypatch.delenv(imports.VARIABLE)
    yield
    imports.append_folders("")


@pytest.mark.usefixtures("_path")
def test_a_folder_comes_last_and_in_place_of_the_one_before() -> None:
    imports.append_folders("/one")
    imports.append_folders("/two")
    assert sys.path == ["/lib", "/site-packages", "/two"]
    assert os.environ[imports.VARIABLE] == "/two"
    imports.append_folders("")
    assert sys.path == ["/lib", "/site-packages"]


@pytest.mark.usefixtures("_path")
def test_a_folder_that_is_on_the_path_already_keeps_its_place() -> None:
    imports.append_folders("/lib")
    assert sys.path == ["/lib", "/site-packages"]
    imports.append_folders("/other")
    assert sys.path == ["/lib", "/site-packages", "/other"]


@pytest.mark.usefixtures("_path")
def test_ranks_import_from_the_current_folder_where_their_caller_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert imports.extra_folders() == ""
    sys.path.insert(0, "")
    assert imports.extra_folders() == str(tmp_path)
    monkeypatch.setenv(imports.VARIABLE, "/of/the/notebook")
    assert imports.extra_folders() == "/of/the/notebook"


@pytest.mark.usefixtures("_path")
def test_a_notebook_imports_from_its_folder_and_then_from_its_callers(tmp_path: Path) -> None:
    (tmp_path / "a: b").mkdir()  # in PYTHONPATH, the colon would separate two folders
    imports.append_folders(imports.notebook_folders(Path("a: b/n.ipynb")))
    assert sys.path[2:] == [str(tmp_path / "a: b"), str(tmp_path)]
    imports.append_folders(imports.notebook_folders(Path("n.ipynb")))
    assert sys.path[2:] == [str(tmp_path)]


@pytest.mark.parametrize(
    "command",
    [
        [LABKIT, "ls"],
        [LABKIT, "run", "asks.ipynb"],
        [LABKIT, "report", "runs"],
        pytest.param([LABKIT, "lab", "--show-config-json"], marks=pytest.mark.slow),
        pytest.param([LABKIT, "sweep", "asks.ipynb", "a=1"], marks=pytest.mark.slow),
        pytest.param([LABKIT, "doctor"], marks=pytest.mark.slow),
    ],
    ids=lambda command: command[1],
)
def test_nothing_in_a_strangers_folder_runs(command: list[str], trapped: Path, marks: Path) -> None:
    marks.unlink(missing_ok=True)
    done = subprocess.run(command, cwd=trapped, capture_output=True, text=True)
    assert not marks.exists(), marks.read_text()
    assert done.returncode == 0, done.stdout + done.stderr
