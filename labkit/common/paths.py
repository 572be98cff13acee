"""Where labkit keeps what is not a result: caches, compiled Python, folders of running clusters."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
import tempfile
import warnings
from functools import cache
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import platformdirs

from labkit.common.errors import LabkitError


def cache_folder(name: str) -> Path:
    """A folder that may be deleted at any time: `LABKIT_CACHE`, else the user's cache folder.

    Where the user's home cannot be written, it lies in the runtime folder.

    Raises:
        LabkitError: the folder cannot be made.
    """
    if given := os.environ.get("LABKIT_CACHE"):
        return _usable(Path(given) / name, "LABKIT_CACHE")
    root = Path(platformdirs.user_cache_dir("labkit", appauthor=False))
    try:
        _usable(root, "LABKIT_CACHE")
    except LabkitError as error:
        # A home that is a file, or that an image's user does not own: what is kept is not results.
        root = runtime_folder("cache")
        _warn_once(f"{error}; until then caches are kept in {root}")
    return _usable(root / name, "LABKIT_CACHE")


def state_folder(name: str) -> Path:
    """A folder of this user's for what outlives a login: `LABKIT_STATE`, else the state folder.

    Where the user's home cannot be written, it lies in the runtime folder.

    Raises:
        LabkitError: others may write there, it is a link, or it cannot be made.
    """
    if given := os.environ.get("LABKIT_STATE"):
        return _private(Path(given), "LABKIT_STATE", name)
    try:
        return _private(platformdirs.user_state_path(), "LABKIT_STATE", name)
    except LabkitError as error:
        root = runtime_folder(name)
        _warn_once(f"{error}; until then what labkit has started is noted in {root}")
        return root


def runtime_folder(name: str) -> Path:
    """A folder of this user's for what lives as long as a process.

    `LABKIT_RUNTIME`, else XDG_RUNTIME_DIR, else a folder in the temporary one.

    Raises:
        LabkitError: others may write there, it is a link, or it cannot be made.
    """
    given = os.environ.get("LABKIT_RUNTIME")
    login = os.environ.get("XDG_RUNTIME_DIR")
    # A login by other means than systemd's names a folder that nobody has made.
    login = login if login and os.access(login, os.W_OK | os.X_OK) else None
    return _private(Path(given or login or tempfile.gettempdir()), "LABKIT_RUNTIME", name)


def peers_folder() -> Path:
    """Where environments of other frameworks are (`LABKIT_PEERS`, else the user's data folder)."""
    data = platformdirs.user_data_path("labkit", appauthor=False)
    return Path(os.environ.get("LABKIT_PEERS") or data / "peers").absolute()


def usable_cores() -> int:
    """Cores that this process may use."""
    # A container or a queue may give a process fewer than the machine has; macOS cannot tell.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bytecode_variables() -> dict[str, str]:
    """Variables with which started processes find what earlier ones have compiled.

    Containers often set PYTHONDONTWRITEBYTECODE. Each engine would then compile TensorFlow anew
    and take three times as long to start. What is compiled is kept in labkit's own cache: nothing
    is written beside anybody's sources. Nothing is set where Python keeps what it compiles, where
    a folder for it is set already, or where what labkit needs was compiled when it was installed.
    """
    chosen = sys.pycache_prefix or "PYTHONPYCACHEPREFIX" in os.environ
    if not sys.dont_write_bytecode or chosen or _is_compiled("ipyparallel"):
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache_folder("bytecode"))}


def keep_bytecode() -> None:
    """Set these variables for all processes that this one starts from now on."""
    os.environ.update(bytecode_variables())


def fingerprint() -> str:
    """Checksum of labkit's own source: what another labkit has measured or started is not ours."""
    checksum = hashlib.sha256()
    # Sorted: a folder lists its files in any order.
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        checksum.update(file.read_bytes())
    return checksum.hexdigest()


def _private(place: Path, variable: str, name: str) -> Path:
    """Return a folder within this user's in a place, which must be open to nobody else.

    Args:
        place: where the user's folder lies.
        variable: that names another place.
        name: of the folder.
    """
    root = place / f"labkit-{os.getuid()}"
    if not os.path.lexists(root):
        _usable(root, variable)
    # In a folder that all may write to, anybody can make one of this name before us: a link, too.
    there = root.lstat()
    if not stat.S_ISDIR(there.st_mode):
        wrong = "is a link or a file, not a folder"
    elif there.st_uid != os.getuid():
        wrong = "belongs to another user"
    elif stat.S_IMODE(there.st_mode) & 0o077:
        wrong = f"is open to other users (mode {stat.S_IMODE(there.st_mode):o}, allowed is 700)"
    else:
        return _usable(root / name, variable)
    raise LabkitError(f"{root} {wrong}; remove it, or set {variable} to a folder of yours")


def _usable(folder: Path, variable: str) -> Path:
    """Return a folder that this process can write to, made where it does not exist.

    Args:
        folder: in question.
        variable: that names another one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        told = f"{folder} cannot be used: {error.strerror}"
        raise LabkitError(f"{told}; set {variable} to a folder of yours") from error
    return folder


@cache
def _warn_once(line: str) -> None:
    warnings.warn(line, stacklevel=3)


def _is_compiled(package: str) -> bool:
    spec = find_spec(package)
    # By one package for all: an installer compiles everything, or nothing.
    source = spec.origin if spec else None
    return source is not None and Path(cache_from_source(source)).exists()
