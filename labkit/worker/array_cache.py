"""Arrays kept between runs by what they are of, up to so many bytes: the oldest go first."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from labkit.records.store import write_atomically


class ArrayCache:
    """A folder of lists of arrays, each a file that is there whole or not at all.

    Args:
        folder: where they lie.
        limit: bytes of all files together.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit

    def take(self, key: str) -> list[np.ndarray] | None:
        """The arrays of this key, or None; they count as used now. A damaged file is as none."""
        file = self._file(key)
        try:
            data = file.read_bytes()
            os.utime(file)
        except FileNotFoundError:  # or another process has just let it go
            return None
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as found:
                return [found[f"arr_{number}"] for number in range(len(found.files))]
        except (BadZipFile, EOFError, KeyError, ValueError):
            return None  # whoever asks computes them, and puts them here anew

    def put(self, key: str, arrays: Sequence[np.ndarray]) -> None:
        """Keep these arrays, and let go of those that were not used for longest."""
        content = io.BytesIO()
        np.savez(content, *arrays)
        data = content.getvalue()
        if len(data) > self._limit:
            return
        write_atomically(self._file(key), data)
        self._make_room()

    def _make_room(self) -> None:
        files = [(file.stat(), file) for file in self._folder.glob("*.npz")]
        files.sort(key=lambda each: each[0].st_mtime_ns, reverse=True)
        kept = 0
        for facts, file in files:
            kept += facts.st_size
            if kept > self._limit:
                file.unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.npz"
