"""Test other frameworks: finding them, reporting missing ones and setting one up."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from labkit.cli.app import app
from labkit.common.errors import InvalidInput, LabkitError
from labkit.frameworks import environments
from labkit.frameworks.environments import MARKER_FILE, PEERS, SET_UP, Installation, find, setup
from labkit.frameworks.foreign import versions


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make no framework installed, and return the empty folder of environments."""
    monkeypatch.setattr(environments, "versions", lambda _: "")
    monkeypatch.setenv("LABKIT_PEERS", str(tmp_path / "peers"))
    for kind in PEERS.values():
        monkeypatch.delenv(kind.variable or "-", raising=False)
    return tmp_path / "peers"


def peers(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["frameworks", *arguments])


@pytest.mark.parametrize("name", SET_UP)
def test_what_is_not_installed_is_a_sentence_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    variable = PEERS[name].variable
    said = find(name)
    assert isinstance(said, str)
    assert f"{PEERS[name].module} is not installed" in said
    assert f"{variable} is not set; run labkit frameworks setup {name}" in said
    monkeypatch.setenv(variable, sys.executable + "-not-there")
    monkeypatch.setattr(environments, "_versions", lambda python, kind: "")
    assert f"nor in {variable}={sys.executable}-not-there" in str(find(name))
    listed = peers("list")
    assert listed.exit_code == 0
    assert f"labkit frameworks setup {name}" in listed.stdout


def test_what_was_set_up_is_found_where_it_is(nothing_installed: Path) -> None:
    folder = nothing_installed / "ddp"
    folder.mkdir(parents=True)
    assert isinstance(find("ddp"), str)  # the environment is not complete
    (folder / MARKER_FILE).write_text(json.dumps({"name": "ddp", "version": "9.8"}))
    assert find("ddp") == Installation("ddp", str(folder / "bin" / "python"), "9.8")
    # DDP and FSDP share an environment.
    assert find("fsdp") == Installation("fsdp", str(folder / "bin" / "python"), "9.8")
    assert f"ddp: 9.8 {folder}/bin/python" in peers("list").stdout.replace("\n", " ")


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ((), "uv and cmake and c++ or g++ or clang++"),
        (("uv", "g++"), "cmake"),
        (("uv", "cmake"), "c++ or g++ or clang++"),
    ],
)
def test_programs_that_are_missing_are_named_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: tuple[str, ...], missing: str
) -> None:
    for name in there:
        program(tmp_path / name, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    done = peers("setup", "horovod")
    assert done.exit_code == 2
    assert f"horovod needs {missing}, not found on PATH; install" in done.stderr
    assert not (tmp_path / "peers").exists()


def test_what_is_of_labkits_own_environment_is_not_set_up() -> None:
    with pytest.raises(
        InvalidInput, match=r"cannot install peer='multi_worker_mirrored'.*ddp, fsdp"
    ):
        setup("multi_worker_mirrored")
    assert peers("setup", "gossip").exit_code == 2


@pytest.mark.heavy
def test_each_command_is_said_and_only_what_is_complete_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places = tmp_path / "programs"
    places.mkdir()
    monkeypatch.setenv("PATH", f"{places}{os.pathsep}{os.environ['PATH']}")
    # This fake installer makes a Python that only prints a version.
    makes = 'for last; do :; done; mkdir -p "$last/bin"; echo "#!/bin/sh\necho noise; echo 9.8" '
    makes += '> "$last/bin/python"; chmod +x "$last/bin/python"'
    program(places / "uv", f'test "$1" = pip && exit 0; {makes}')
    said: list[str] = []
    found = setup("ddp", said.append)
    assert found == find("ddp") == Installation("ddp", found.python, "9.8")
    made, installed = said
    assert made.startswith(f"$ uv venv --clear --python {sys.executable} ")
    assert installed.startswith(f"$ uv pip install --python {found.python} torch==")
    program(places / "uv", f'test "$1" = pip && exit 3; {makes}')
    with pytest.raises(LabkitError, match=r"uv pip install .* ended with exit code 3"):
        setup("ddp")
    assert isinstance(find("ddp"), str)


def program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.mark.heavy
def test_another_python_may_have_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program(tmp_path / "python", "echo torch 9.8")  # this fake Python finds every module
    monkeypatch.setenv("LABKIT_TORCH_PYTHON", str(tmp_path / "python"))
    assert find("ddp") == Installation("ddp", str(tmp_path / "python"), "torch 9.8")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder of importable packages: torch version 9.8, and horovod without metadata."""
    for name in ("torch", "horovod"):
        (tmp_path / name).mkdir()
    released(tmp_path, "torch", "9.8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def released(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_what_is_installed_here_has_the_version_of_its_package(
    monkeypatch: pytest.MonkeyPatch, packages: Path
) -> None:
    monkeypatch.setattr(environments, "versions", versions)
    assert find("ddp") == Installation("ddp", sys.executable, "torch 9.8")
    assert isinstance(find("horovod"), str)  # a folder of that name without metadata is no package
    assert versions(["torch", "numpy"]) == f"torch 9.8, numpy {np.__version__}"
    assert versions(["torch", "horovod"]) == versions(["torch", "not_there"]) == ""


@pytest.mark.heavy
def test_an_upgrade_is_seen_in_another_python(
    monkeypatch: pytest.MonkeyPatch, packages: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    program(python, f'PYTHONPATH={packages} exec {sys.executable} "$@"')
    monkeypatch.setenv("LABKIT_TORCH_PYTHON", str(python))
    assert find("ddp") == Installation("ddp", str(python), "torch 9.8")
    (packages / "torch-9.8.dist-info").rename(packages / "torch-9.9.dist-info")
    metadata = packages / "torch-9.9.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("9.8", "9.9"))
    assert find("ddp") == Installation("ddp", str(python), "torch 9.9")


def test_keras_on_jax_is_the_one_that_labkit_has() -> None:
    assert f"keras=={version('keras')}" in PEERS["jax"].packages
