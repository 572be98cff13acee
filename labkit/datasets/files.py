"""Files of data sets: searched in folders or downloaded once, and verified by checksum."""

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
    """One file of a data set: its path `folder/name` below a data folder, its URL and checksum."""

    folder: str
    name: str
    url: str
    sha256: str


def search_folders() -> list[Path]:
    """Return the folders to search, in order: `LABKIT_DATA`, then `data/` in the working folder.

    Raises:
        LabkitError: LABKIT_DATA names no folder; this error keeps a misspelled path from starting a
            download.
    """
    named = os.environ.get("LABKIT_DATA")
    if named and not Path(named).is_dir():
        raise LabkitError(
            f"LABKIT_DATA={named} is not a folder; set LABKIT_DATA to the folder that contains "
            "mnist/, adult/ and so on, or unset it to use data/"
        )
    return [Path(named), Path("data")] if named else [Path("data")]


def find(file: DataFile) -> Path | None:
    """Return the file's path after verifying its checksum, or None if no folder contains it.

    Raises:
        LabkitError: A file with the name of the data set's file has a different checksum.
    """
    # The user's folder, LABKIT_DATA, is searched before the folder of downloads.
    for folder in search_folders():
        path = folder / file.folder / file.name
        if path.is_file():
            verify(path, file.sha256)
            return path
    return None


def verify(path: Path, expected: str) -> None:
    """Raise LabkitError if the sha256 differs from `expected`; unchanged files are hashed once."""
    status = path.stat()
    checksum = _sha256(path.resolve(), status.st_mtime_ns, status.st_size)
    if checksum != expected:
        raise LabkitError(
            f"{path} is not the published file: expected sha256 {expected}, found {checksum}; "
            "delete the file, and the next run downloads it again"
        )


def fetch(file: DataFile) -> Path:
    """Download the file into the first writable data folder, and return its path.

    Several processes may download at once: each process writes a temporary file, and renames the
    file after the checksum matches.

    Raises:
        LabkitError: The download failed; the message names folder, file and URL.
    """
    import pooch

    # Folders without write permission, such as a shared data folder, are skipped.
    writable = [folder for folder in search_folders() if os.access(folder, os.W_OK)]
    folder = [*writable, Path("data")][0] / file.folder
    paths = [place for place in (folder, folder.parent) if not place.exists()]
    try:
        # pooch verifies the checksum before it renames the downloaded file.
        return Path(pooch.retrieve(file.url, f"sha256:{file.sha256}", file.name, folder))
    except OSError as error:
        raise LabkitError(f"{how_to_get(file)}; the download failed: {_cause(error)}") from error
    except ValueError as error:
        raise LabkitError(
            f"the file downloaded from {file.url} is not the published file: {error}"
        ) from error
    finally:
        for place in paths:
            with suppress(OSError):  # `rmdir` keeps folders that are not empty
                place.rmdir()


def how_to_get(file: DataFile) -> str:
    """Return a message that names the missing file, its folder and its URL."""
    places = " or ".join(str(folder / file.folder) for folder in search_folders())
    return f"{file.name} is missing: download it from {file.url}, and put it into {places}"


@cache
def _sha256(path: Path, mtime_ns: int, size: int) -> str:
    """Return the sha256 of a file, cached until the file's modification time or size changes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _cause(error: BaseException) -> str:
    """Return an error's innermost cause; `requests` wraps a refused connection in three errors."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"
