"""Test that modules beside a notebook are found on hosts that do not see its folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from labkit.worker import source_bundle

# This script enters the folder twice, as two calls do, and prints its folder and what it imports
# from beside the caller.
RANK = """\
import os, sys
from labkit.worker import source_bundle

folder, home = sys.argv[1:]
seen, packed = os.access(folder, os.R_OK), source_bundle.pack(home)
for _ in range(2):
    source_bundle.enter_folder(folder, folder, packed)
import labkit, plain, nested.deep.er
assert labkit is sys.modules["labkit"] and hasattr(labkit, "__version__")
print(os.getcwd(), plain.__file__, plain.X, nested.deep.er.X)
"""


def home(folder: Path, x: int = 1) -> Path:
    for name in ("plain.py", "nested/__init__.py", "nested/deep/er.py", "labkit/__init__.py"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"X = {x}\n")
    (folder / "nested" / "data.csv").touch()
    (folder / ".#plain.py").symlink_to("nowhere")
    (folder / "loose").mkdir()
    (folder / "loose" / "script.py").touch()
    return folder


def entered(folder: Path, packed: Path, own: Path) -> list[str]:
    command = [sys.executable, "-P", "-c", RANK, str(folder), str(packed)]
    environment = {source_bundle.FOLDER: str(own), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_modules_and_packages_travel_and_nothing_else(tmp_path: Path) -> None:
    packed = source_bundle.pack(str(home(tmp_path / "home")))
    assert sorted(packed) == ["nested/__init__.py", "nested/deep/er.py", "plain.py"]


def test_a_host_that_has_the_folder_works_there(tmp_path: Path) -> None:
    folder = home(tmp_path / "home")
    own = tmp_path / "own"
    assert entered(folder, folder, own) == [str(folder), str(folder / "plain.py"), "1", "1"]
    assert not own.exists()


def test_one_that_has_not_works_in_a_folder_of_its_own(tmp_path: Path) -> None:
    own = tmp_path / "own"
    place, file, *values = entered(tmp_path / "none", home(tmp_path / "home"), own)
    assert (Path(place).parent, Path(file).parent, values) == (own, Path(place), ["1", "1"])
    assert own.stat().st_mode & 0o777 == 0o700


def test_other_modules_in_a_folder_of_that_name_are_not_taken_for_the_callers(
    tmp_path: Path,
) -> None:
    other, own = home(tmp_path / "other", x=2), tmp_path / "own"
    place, file, *values = entered(other, home(tmp_path / "home"), own)
    assert (place, Path(file).parents[1], values) == (str(other), own, ["1", "1"])
