"""Folders for caches, compiled Python files and the state of running clusters, not for results."""

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
    """Return a cache folder; its content may be deleted at any time.

    `LABKIT_CACHE` sets the parent folder; the default is the user's cache folder. If the user's
    cache folder is not writable, the cache is in the runtime folder.

    Raises:
        LabkitError: The folder cannot be created.
    """
    if parent := os.environ.get("LABKIT_CACHE"):
        return _usable(Path(parent) / name, "LABKIT_CACHE")
    root = Path(platformdirs.user_cache_dir("labkit", appauthor=False))
    try:
        _usable(root, "LABKIT_CACHE")
    except LabkitError as error:
        # In a container, the home folder may belong to another user, or may be a file.
        root = runtime_folder("cache")
        _warn_once(f"{error}; for now, labkit stores its caches in {root}")
    return _usable(root / name, "LABKIT_CACHE")


def state_folder(name: str) -> Path:
    """Return a private folder for state that remains after a login session.

    `LABKIT_STATE` sets the parent folder; the default is the user's state folder. If the user's
    state folder is not writable, the state is in the runtime folder.

    Raises:
        LabkitError: The folder is open to other users, is a link, or cannot be created.
    """
    if parent := os.environ.get("LABKIT_STATE"):
        return _private(Path(parent), "LABKIT_STATE", name)
    try:
        return _private(platformdirs.user_state_path(), "LABKIT_STATE", name)
    except LabkitError as error:
        root = runtime_folder(name)
        _warn_once(f"{error}; for now, labkit records its running processes in {root}")
        return root


def runtime_folder(name: str) -> Path:
    """Return a private folder for files that are needed only while a process runs.

    `LABKIT_RUNTIME` sets the parent folder; the default is `XDG_RUNTIME_DIR`, or the temporary
    folder.

    Raises:
        LabkitError: The folder is open to other users, is a link, or cannot be created.
    """
    parent = os.environ.get("LABKIT_RUNTIME")
    login = os.environ.get("XDG_RUNTIME_DIR")
    # Without systemd, the variable XDG_RUNTIME_DIR may name a folder that does not exist.
    login = login if login and os.access(login, os.W_OK | os.X_OK) else None
    return _private(Path(parent or login or tempfile.gettempdir()), "LABKIT_RUNTIME", name)


def peers_folder() -> Path:
    """Return the folder for Python environments of other frameworks; `LABKIT_PEERS` can set it."""
    data = platformdirs.user_data_path("labkit", appauthor=False)
    return Path(os.environ.get("LABKIT_PEERS") or data / "peers").absolute()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    # The CPU affinity is used, because a container or batch system may restrict it. macOS has no
    # CPU affinity, so all cores are counted.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bytecode_variables() -> dict[str, str]:
    """Return environment variables that let child processes reuse compiled Python files.

    Containers often set PYTHONDONTWRITEBYTECODE, so that Python writes no compiled files. Without
    compiled files, each engine would compile TensorFlow's Python files again, and would take three
    times as long to start. With the returned variables, Python writes compiled files into labkit's
    cache, never beside the sources. No variable is returned if Python writes bytecode anyway, if a
    bytecode folder is already set, or if the installer has compiled labkit's dependencies.
    """
    chosen = sys.pycache_prefix or "PYTHONPYCACHEPREFIX" in os.environ
    if not sys.dont_write_bytecode or chosen or _is_compiled("ipyparallel"):
        return {}
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache_folder("bytecode"))}


def keep_bytecode() -> None:
    """Set the variables of `bytecode_variables` for child processes that start later."""
    os.environ.update(bytecode_variables())


def fingerprint() -> str:
    """Return the SHA-256 of labkit's source, which identifies the version in measurements."""
    checksum = hashlib.sha256()
    # The files are sorted, because the order of files in a folder listing may vary.
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        checksum.update(file.read_bytes())
    return checksum.hexdigest()


def _private(place: Path, variable: str, name: str) -> Path:
    """Return a subfolder of this user's private folder; the private folder is inside `place`.

    Args:
        place: Folder that contains the private folder.
        variable: Name of the environment variable that sets `place`; the error message contains
            this name.
        name: Name of the subfolder in the private folder.
    """
    root = place / f"labkit-{os.getuid()}"
    if not os.path.lexists(root):
        _usable(root, variable)
    # If other users may write to `place`, one of them can create the private folder first, or put a
    # link in its place.
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode):
        wrong = "is a link or a file, not a folder"
    elif status.st_uid != os.getuid():
        wrong = "belongs to another user"
    elif stat.S_IMODE(status.st_mode) & 0o077:
        wrong = (
            f"is accessible to other users (its mode is {stat.S_IMODE(status.st_mode):o}; "
            "only mode 700 is allowed)"
        )
    else:
        return _usable(root / name, variable)
    raise LabkitError(
        f"{root} {wrong}; remove {root}, or set {variable} to a folder that belongs to you"
    )


def _usable(folder: Path, variable: str) -> Path:
    """Return a folder that this process can write to; create the folder if it does not exist.

    Args:
        folder: Path of the folder.
        variable: Environment variable by which users can choose another folder, for the error
            message.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        problem = f"{folder} cannot be used: {error.strerror}"
        raise LabkitError(f"{problem}; set {variable} to a folder that you can write to") from error
    return folder


@cache
def _warn_once(line: str) -> None:
    warnings.warn(line, stacklevel=3)


def _is_compiled(package: str) -> bool:
    spec = find_spec(package)
    # Checking one package is enough, because an installer compiles all packages or none.
    source = spec.origin if spec else None
    return source is not None and Path(cache_from_source(source)).exists()
