"""Where labkit keeps what is not a result: caches, compiled Python, folders of running clusters."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from contextlib import suppress
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import platformdirs

from labkit.common.errors import LabkitError


def cache_folder(name: str) -> Path:
    """A folder that may be deleted at any time (`LABKIT_CACHE`, else the user's cache folder)."""
    root = os.environ.get("LABKIT_CACHE") or platformdirs.user_cache_dir("labkit", appauthor=False)
    return _made(Path(root) / name)


def runtime_folder(name: str) -> Path:
    """A folder of this user's for what lives as long as a process.

    `LABKIT_RUNTIME`, else XDG_RUNTIME_DIR, else a folder in the temporary one.

    Raises:
        LabkitError: others may write there, or it is a link.
    """
    given = os.environ.get("LABKIT_RUNTIME") or os.environ.get("XDG_RUNTIME_DIR")
    root = Path(given or tempfile.gettempdir()) / f"labkit-{os.getuid()}"
    # In a folder that all may write to, anybody can make one of this name before us: a link, too.
    with suppress(FileExistsError):
        root.mkdir(parents=True, mode=0o700)
    there = root.lstat()
    if not stat.S_ISDIR(there.st_mode):
        wrong = "is a link or a file, not a folder"
    elif there.st_uid != os.getuid():
        wrong = "belongs to another user"
    elif stat.S_IMODE(there.st_mode) & 0o077:
        wrong = f"is open to other users (mode {stat.S_IMODE(there.st_mode):o}, allowed is 700)"
    else:
        return _made(root / name)
    raise LabkitError(f"{root} {wrong}; remove it, or set LABKIT_RUNTIME to a folder of yours")


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


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _is_compiled(package: str) -> bool:
    spec = find_spec(package)
    # By one package for all: an installer compiles everything, or nothing.
    source = spec.origin if spec else None
    return source is not None and Path(cache_from_source(source)).exists()
