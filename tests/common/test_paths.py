"""Test that labkit's processes cache compiled bytecode even if Python stores none."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.common import files
from labkit.common.errors import LabkitError

SAY = "import os, sys; print(os.environ.get('PYTHONPYCACHEPREFIX'), sys.dont_write_bytecode)"


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set up a Python without stored bytecode, and return the folder for bytecode in the cache."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(files, "_is_compiled", lambda package: False)
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    return tmp_path / "cache"


def test_a_started_process_writes_into_the_cache_and_not_beside_sources(
    forgetful: Path, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "module.py").write_text("pass")
    files.keep_bytecode()
    subprocess.run([sys.executable, "-c", "import module"], cwd=tmp_path / "lib", check=True)
    assert [path.name for path in (tmp_path / "lib").iterdir()] == ["module.py"]
    assert list(forgetful.rglob("module.*.pyc"))


def test_what_is_compiled_or_kept_already_needs_nothing(
    forgetful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_is_compiled", lambda package: True)
    assert files.bytecode_variables() == {}
    monkeypatch.setattr(files, "_is_compiled", lambda package: False)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert files.bytecode_variables() == {}


def test_a_folder_that_the_user_has_chosen_stays(
    forgetful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "/chosen")
    assert files.bytecode_variables() == {}
    files.keep_bytecode()
    assert os.environ["PYTHONPYCACHEPREFIX"] == "/chosen"
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1"


def test_what_was_compiled_at_installation_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    source = tmp_path / "installed.py"
    source.write_text("pass")
    assert not files._is_compiled("installed")
    py_compile.compile(str(source))
    assert files._is_compiled("installed")
    assert not files._is_compiled("not_installed")


def test_commands_hand_it_on(forgetful: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from labkit.cli.app import app

    CliRunner().invoke(app, ["ls", "nowhere"])
    said = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True)
    assert said.stdout.split() == [str(forgetful / "bytecode"), "False"]


def link(root: Path) -> str:
    """Make the folder a link to another folder of this user, as an attacker might."""
    (root.parent / "open").mkdir(mode=0o777)
    root.symlink_to(root.parent / "open")
    return "is a link"


def shared(root: Path) -> str:
    """Create a folder into which other users can write."""
    root.mkdir()
    root.chmod(0o770)
    return "is accessible to other users"


def file(root: Path) -> str:
    """Create a file instead of a folder."""
    root.touch(0o700)
    return "is a link or a file"


PRIVATE = [("LABKIT_RUNTIME", files.runtime_folder), ("LABKIT_STATE", files.state_folder)]


@pytest.mark.parametrize(("name", "folder"), PRIVATE)
@pytest.mark.parametrize("make", [link, shared, file])
def test_a_private_folder_that_others_may_have_made_is_refused(
    make: Callable[[Path], str],
    name: str,
    folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, str(tmp_path))
    wrong = make(tmp_path / f"labkit-{os.getuid()}")
    with pytest.raises(LabkitError, match=f"{wrong}.*; remove .*, or set {name}"):
        folder("clusters")


def test_a_runtime_folder_is_its_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_RUNTIME", str(tmp_path))
    before = os.umask(0)
    try:
        folder = files.runtime_folder("clusters")
    finally:
        os.umask(before)
    assert folder == files.runtime_folder("clusters")
    assert folder.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("home", ["a file", "nothing", "below a file"])
def test_a_home_that_cannot_be_used_has_its_caches_elsewhere_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    (tmp_path / "file").touch()
    place = {"a file": "file", "nothing": "/proc/nothing", "below a file": "file/home"}[home]
    for name in ("LABKIT_CACHE", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / place))
    monkeypatch.setenv("LABKIT_RUNTIME", str(tmp_path / "runtime"))
    files._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="cannot be used.*LABKIT_CACHE.*for now") as told:
        folders = {files.cache_folder("gates") for _ in range(3)}
    assert len(told) == 1
    (folder,) = folders
    assert folder.is_dir()
    assert tmp_path / "runtime" in folder.parents


@pytest.mark.parametrize(
    ("name", "folder"),
    [("LABKIT_CACHE", files.cache_folder), *PRIVATE],
)
def test_a_folder_that_is_named_and_cannot_be_used_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: Callable[[str], Path]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(name, str(tmp_path / "file"))
    with pytest.raises(
        LabkitError, match=f"cannot be used: .*; set {name} to a folder that you can write to"
    ):
        folder("gates")


def test_a_runtime_folder_of_a_login_that_nobody_has_made_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LABKIT_RUNTIME", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file" / "nobody"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert tmp_path in files.runtime_folder("clusters").parents
