"""Fixtures of all tests: one cluster of four ranks per session, and temporary folders."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import hypothesis
import pytest

import labkit
from labkit.cluster import fork_server

pytest_plugins = ["purity", "tiers"]

# Hypothesis has no deadline, because other processes may slow the machine down. It is derandomized,
# so that the same code gets the same result; `--hypothesis-profile=explore` tries new examples.
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile("labkit", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("labkit")

# The environment variable would prevent pytest and Python from storing compiled bytecode, which
# makes the next process faster.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# jsonschema would compile a grammar of web addresses, which takes seconds and which no test needs.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# A process that a shell script starts in the background ignores SIGINT, but some tests send SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Send functions of test modules to engines by value: engines cannot import tests."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Store caches and clusters of the session in a temporary folder, and keep the data folder."""
    folder = tmp_path_factory.mktemp("labkit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_RUNTIME", str(folder / "runtime"))
        patch.setenv("LABKIT_STATE", str(folder / "state"))
        patch.setenv("LABKIT_CACHE", str(folder / "cache"))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))  # the history of IPython kernels
        # A killed mpiexec leaves files that are named by its process number. A later mpiexec with
        # the same number would fail because of these files.
        patch.setenv("PRTE_MCA_prte_local_tmpdir_base", str(folder / "mpiexec"))
        patch.delenv("LABKIT_JOB", raising=False)
        if data := os.environ.get("LABKIT_DATA"):
            patch.setenv("LABKIT_DATA", str(Path(data).resolve()))
        yield folder
        fork_server.stop()


@pytest.fixture(autouse=True)
def own_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store the runs of a test in the temporary folder of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def keras_as_new() -> None:
    """Reset the state of Keras in this process before each test module.

    Freezing the remaining objects, such as traced functions, makes the garbage collections after
    each training faster.
    """
    if "keras" in sys.modules:
        from labkit.worker.rank_state import restore

        restore()
        gc.freeze()


@pytest.fixture(scope="session")
def shared_cluster(own_folders: Path) -> Iterator[labkit.Cluster]:
    """Start four ranks for the whole session, which import TensorFlow once."""
    with labkit.Cluster(workers=4, timeout=120) as up:
        yield up


@pytest.fixture(scope="module")
def cluster(shared_cluster: labkit.Cluster) -> labkit.Cluster:
    """Return the four ranks of the session, after a reset of Keras's state on each rank.

    The remaining objects on the ranks are frozen, which makes garbage collections faster.
    """

    def as_new(communicator: object) -> None:
        import gc

        from labkit.exchange import autotune
        from labkit.worker.rank_state import leave_modules, restore

        # Pretend many cores; with few cores overlap is disabled.
        autotune.usable_cores = lambda: 1000
        if not gc.get_freeze_count():  # only engines that have just started
            leave_modules()
        restore()
        gc.freeze()

    shared_cluster.call(as_new)
    return shared_cluster


def pytest_collection_finish() -> None:
    """Freeze all collected modules, so that garbage collections during tests are faster."""
    gc.collect()
    gc.freeze()
