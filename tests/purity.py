"""Decide which tests are pure: they need no TensorFlow, no MPI and no child process.

No author marks pure tests by hand. A test is pure unless its file imports heavy modules, it takes
the fixture `cluster`, or it is marked `slow`, `alone` or `heavy` (`heavy` if neither file nor
fixture shows what it starts). In every run of the suite, TensorFlow, MPI and child processes are
refused while a pure test runs, so a test wrongly taken for pure fails and says why.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from threading import get_ident

import pytest

HEAVY = ("tensorflow", "mpi4py")
SHOWN = "tensorflow|keras|mpi4py|subprocess|multiprocessing|IPython|jupyter_client|playwright"
IMPORTS = re.compile(rf"^\s*(?:import|from) (?:{SHOWN})\b", re.MULTILINE)
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}

_running: list[pytest.Item] = []  # the pure test that runs now, if any


def is_pure(item: pytest.Item) -> bool:
    """Return whether a test is pure: not marked, no cluster, no heavy imports."""
    marked = any(item.get_closest_marker(name) for name in ("slow", "exhaustive", "alone", "heavy"))
    takes_cluster = "cluster" in getattr(item, "fixturenames", ())
    return not (marked or takes_cluster or _imports_what_is_heavy(item.path))


def _imports_what_is_heavy(path: Path) -> bool:
    return path.suffix == ".py" and IMPORTS.search(path.read_text()) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files that would import TensorFlow when only pure tests are selected."""
    asked = config.option.markexpr == "pure"
    named = collection_path.name.startswith("test_")
    return True if asked and named and _imports_what_is_heavy(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the pure tests."""
    for item in items:
        if is_pure(item):
            item.add_marker(pytest.mark.pure)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> object:
    """Refuse heavy imports and child processes while a pure test runs."""
    _running[:] = [item] if item.get_closest_marker("pure") else []
    try:
        return (yield)
    finally:
        _running.clear()


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    # Threads that an earlier test left, such as a cluster's, do not belong to this test.
    if not _running or os.getpid() != _OWN or get_ident() != _MAIN:
        return
    needed = str(arguments[0]) if event == "import" else f"a process ({event})"
    if event in STARTS or (event == "import" and needed.split(".")[0] in HEAVY):
        item = _running[0]
        raise RuntimeError(
            f"{item.name} is no pure test, it needs {needed}: mark it with pytest.mark.heavy"
        )


_OWN, _MAIN = os.getpid(), get_ident()
sys.addaudithook(_refuse)
