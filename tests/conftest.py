"""One cluster of four ranks for the whole session, and folders that are never the user's."""

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

pytest_plugins = ["purity"]

# A machine that does something else at the same time must not fail a property, and the same tree
# gets the same verdict each time; `--hypothesis-profile=explore` looks at new examples.
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile("labkit", deadline=None, derandomize=True)
hypothesis.settings.load_profile("labkit")

# What pytest makes of tests and Python of labkit is kept for the next process, as it is where no
# shell says otherwise.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Who is started in the background of a shell script ignores Ctrl-C; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Functions of test modules travel to the engines by value: engines cannot import tests."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        cloudpickle.register_pickle_by_value(module)


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Caches and clusters of this session lie in a folder of its own; data are found from there."""
    folder = tmp_path_factory.mktemp("labkit")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_RUNTIME", str(folder / "runtime"))
        patch.setenv("LABKIT_STATE", str(folder / "state"))
        patch.setenv("LABKIT_CACHE", str(folder / "cache"))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))  # the history of kernels
        # An mpiexec that is killed leaves files by its number, at which a later one would fail.
        patch.setenv("PRTE_MCA_prte_local_tmpdir_base", str(folder / "mpiexec"))
        patch.delenv("LABKIT_JOB", raising=False)
        if data := os.environ.get("LABKIT_DATA"):
            patch.setenv("LABKIT_DATA", str(Path(data).resolve()))
        yield folder


@pytest.fixture(autouse=True)
def own_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a test end up in its own temporary folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def keras_as_new() -> None:
    """A module finds nothing that the one before has set in the Keras of this process.

    What lives on from there, such as functions that were traced, costs this one no time: the
    collection of garbage, which follows each training, passes over it.
    """
    if "keras" in sys.modules:
        from labkit.worker.session import restore

        restore()
        gc.freeze()


@pytest.fixture(scope="session")
def shared_cluster(own_folders: Path) -> Iterator[labkit.Cluster]:
    """Four ranks for the whole session; TensorFlow is imported in them once."""
    with labkit.Cluster(workers=4, timeout=120) as up:
        yield up


@pytest.fixture(scope="module")
def cluster(shared_cluster: labkit.Cluster) -> labkit.Cluster:
    """The four ranks, as new: a module finds nothing that the one before has set in Keras.

    Nor does it wait for what lives on from there, as in this process.
    """

    def as_new(communicator: object) -> None:
        import gc

        from labkit.exchange import autotune
        from labkit.worker.session import leave_modules, restore

        autotune.usable_cores = lambda: 1000  # else an overlap would be none where cores are few
        if not gc.get_freeze_count():  # engines that have just started
            leave_modules()
        restore()
        gc.freeze()

    shared_cluster.call(as_new)
    return shared_cluster


def pytest_collection_finish() -> None:
    """Tests trace and solve a lot: garbage is collected often, and modules are none."""
    gc.collect()
    gc.freeze()
