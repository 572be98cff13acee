"""Files of data sets: found in a folder or fetched once, and always held against a checksum."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labkit.common.errors import LabkitError


@dataclass(frozen=True)
class DataFile:
    """One file of a data set: `folder/name` under any data folder, its publisher, its checksum."""

    folder: str
    name: str
    url: str
    sha256: str


def search_folders() -> list[Path]:
    """Return the folders to look into, in order: `LABKIT_DATA`, then `data/` beside the work.

    Raises LabkitError when LABKIT_DATA names no folder: a typing error there must not start a
    download.
    """
    named = os.environ.get("LABKIT_DATA")
    if named and not Path(named).is_dir():
        raise LabkitError(
            f"LABKIT_DATA={named} is not a folder; set it to the folder that holds mnist/, adult/ "
            "and so on, or unset it to use data/"
        )
    return [Path(named), Path("data")] if named else [Path("data")]


def find(file: DataFile) -> Path | None:
    """Return where the file lies, its checksum verified, or None.

    Raises LabkitError when a file of that name has another checksum.
    """
    # In their order, so that one's own folder wins over what was downloaded.
    for folder in search_folders():
        path = folder / file.folder / file.name
        if path.is_file():
            verify(path, file.sha256)
            return path
    return None


def verify(path: Path, expected: str) -> None:
    """Raise LabkitError unless the file has the expected sha256; each state of it is read once."""
    status = path.stat()
    found = _sha256(path.resolve(), status.st_mtime_ns, status.st_size)
    if found != expected:
        raise LabkitError(
            f"{path} is not the published file: expected sha256 {expected}, found {found}; "
            "delete it, and the next run fetches it again"
        )


def fetch(file: DataFile) -> Path:
    """Download the file into the first data folder that can be written, and return its path.

    Several processes may fetch at once: each writes a file of its own and renames it when the
    checksum has matched. Raises LabkitError without a network, naming folder, file and address.
    """
    import pooch

    # A shared folder of data is often not ours to write to.
    writable = [folder for folder in search_folders() if os.access(folder, os.W_OK)]
    folder = [*writable, Path("data")][0] / file.folder
    paths = [place for place in (folder, folder.parent) if not place.exists()]
    try:
        # pooch holds it against the checksum, and renames it only then.
        return Path(pooch.retrieve(file.url, f"sha256:{file.sha256}", file.name, folder))
    except OSError as error:
        raise LabkitError(f"{how_to_get(file)}; fetching it failed: {_cause(error)}") from error
    except ValueError as error:
        raise LabkitError(f"{file.url} served another file than published: {error}") from error
    finally:
        for place in paths:
            with suppress(OSError):  # it has the file, or what others put there
                place.rmdir()


def how_to_get(file: DataFile) -> str:
    """Say which file is missing, where it belongs and where it comes from."""
    places = " or ".join(str(folder / file.folder) for folder in search_folders())
    return f"{file.name} is missing: put it into {places}; it is at {file.url}"


@cache
def _sha256(path: Path, mtime_ns: int, size: int) -> str:
    """Hash a file; time and size are part of the cache's key, so a changed file is read again."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _cause(error: BaseException) -> str:
    """Name the innermost cause: requests wraps "Connection refused" three times."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"
