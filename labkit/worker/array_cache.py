"""A disk cache of arrays, which removes the least recently used files when it gets too large."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from labkit.records.store import write_atomically


class ArrayCache:
    """A folder of files with arrays; they are written atomically, so readers see complete files.

    Args:
        folder: Folder of the cached files.
        limit: Maximum number of bytes of all files together.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit

    def load(self, key: str) -> list[np.ndarray] | None:
        """Return a key's arrays and mark their file as used; None without a readable file."""
        file = self._file(key)
        try:
            data = file.read_bytes()
            os.utime(file)
        except FileNotFoundError:  # another process has perhaps just removed the file
            return None
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                return [archive[f"arr_{number}"] for number in range(len(archive.files))]
        except (BadZipFile, EOFError, KeyError, ValueError):
            return None  # the caller must compute and store the arrays again

    def store(self, key: str, arrays: Sequence[np.ndarray]) -> None:
        """Store arrays under a key; remove the least recently used files above the limit."""
        content = io.BytesIO()
        np.savez(content, *arrays)
        data = content.getvalue()
        if len(data) > self._limit:
            return
        write_atomically(self._file(key), data)
        self._make_room()

    def _make_room(self) -> None:
        files = [(file.stat(), file) for file in self._folder.glob("*.npz")]
        files.sort(key=lambda entry: entry[0].st_mtime_ns, reverse=True)
        total = 0
        for status, file in files:
            total += status.st_size
            if total > self._limit:
                file.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.npz"
