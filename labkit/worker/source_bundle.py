"""Source files of a caller's modules, which are sent to hosts that lack the caller's folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

from labkit.common import imports

SourceBundle: TypeAlias = dict[str, bytes]

# Every host has the labkit package, so the bundle of sources omits labkit.
OWN = __name__.partition(".")[0]
# The environment variable LABKIT_FOLDER names the temporary folder of a remote engine.
FOLDER = "LABKIT_FOLDER"


def pack(modules: str) -> SourceBundle:
    """Return the sources of all modules and packages in some folders, keyed by relative path.

    A function can then import modules from the folder of the notebook on any host. Data files are
    not sent to other hosts.
    Ranks read data from LABKIT_DATA, or download labkit's data sets. If `modules` is empty, the
    result is {}.
    """
    packed: SourceBundle = {}
    for folder in map(
        Path, reversed(imports.split_folders(modules))
    ):  # If two folders have a file with the same name, the file of the earlier folder is used.
        inits = [init for init in folder.glob("*/__init__.py") if init.parent.name != OWN]
        inside = [file for init in inits for file in init.parent.rglob("*.py")]
        # Unreadable files are skipped, for example an editor's lock file, which is a broken
        # symbolic link.
        files = [file for file in (*folder.glob("*.py"), *inside) if os.access(file, os.R_OK)]
        packed |= {str(f.relative_to(folder)): f.read_bytes() for f in files if f.is_file()}
    return packed


def enter_folder(folder: str, modules: str, luggage: SourceBundle | None) -> None:
    """Change a rank's working folder to the caller's, and make the caller's modules importable.

    If the host lacks the caller's folder, the rank gets a temporary folder instead. The modules
    come from the bundle, unless folders on the rank's host contain the same files.

    Args:
        folder: Working folder of the caller.
        modules: Folders from which the caller imports modules. The value "" means no folders.
        luggage: Bundle of source files from `pack`. If None, the rank runs on the caller's host.
    """
    is_local = luggage is None
    if luggage and not _matches(imports.split_folders(modules), luggage):
        modules = _unpack(modules, luggage)
    os.chdir(
        folder if is_local or os.access(folder, os.R_OK | os.X_OK) else _substitute_folder(folder)
    )
    imports.append_folders(modules)


def _matches(folders: Sequence[str], luggage: SourceBundle) -> bool:
    """Return whether an import from the folders finds the same files as the bundle contains."""
    try:
        return all(
            _first(folders, name).read_bytes() == content for name, content in luggage.items()
        )
    except OSError:
        return False


def _first(folders: Sequence[str], name: str) -> Path:
    files = [file for folder in folders if (file := Path(folder, name)).exists()]
    return files[0] if files else Path(folders[0], name)


def _unpack(folder: str, luggage: SourceBundle) -> str:
    target = _substitute_folder(folder)
    for name, content in luggage.items():
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return str(target)


@cache
def _substitute_folder(folder: str) -> Path:
    return Path(tempfile.mkdtemp(dir=_temporary_folder()))


@cache
def _temporary_folder() -> str:
    # The call fails if another user has already created the folder.
    os.mkdir(os.environ[FOLDER], 0o700)
    return os.environ[FOLDER]
