"""A cache of table rows, so that listing thousands of runs does not read all records again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from labkit.common.errors import LabkitError
from labkit.common.paths import cache_folder, fingerprint
from labkit.records import store
from labkit.records.scan import Folder

LEAST = 500  # minimum number of folders for which a cache saves time
Row = tuple[str, ...]


class ListingCache:
    """The table rows of all ended runs in a folder, with sizes and times of each run's files.

    The cache is in the user's cache folder, not in the folder of runs, because another user's
    folder of runs could contain a forged cache. A cache file is rebuilt if it is missing, damaged
    or from another labkit version. If the cache cannot be written, all runs are read each time.

    Args:
        root: Folder whose runs are listed.
    """

    def __init__(self, root: Path) -> None:
        self._name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]
        self._made_by = fingerprint()
        self._known = self._read()
        self._now: dict[str, tuple[str, Row]] = {}

    def row(self, name: str, folder: Folder, read: Callable[[], Row | str]) -> Row | str:
        """Return a run's cached row if its files are unchanged; otherwise, return `read()`."""
        stamp = _stamp(folder)
        cached_stamp, row = self._known.get(name, ("", ()))
        if cached_stamp == stamp:
            self._now[name] = stamp, row
            return row
        new_row = read()
        if not isinstance(new_row, str) and new_row[1] in store.END_STATES:
            self._now[name] = stamp, new_row
        return new_row

    def save(self) -> None:
        """Write the present rows to the cache file if they differ from the cached rows."""
        if self._now != self._known:
            text = json.dumps({"made_by": self._made_by, "rows": self._now})
            # The listing also works if the cache cannot be written.
            with suppress(OSError, LabkitError):
                store.write_atomically(self._file(), text)

    def _file(self) -> Path:
        return cache_folder("listings") / f"{self._name}.json"

    def _read(self) -> dict[str, tuple[str, Row]]:
        try:
            cached = json.loads(self._file().read_bytes())
            if cached["made_by"] != self._made_by:
                return {}
            rows = cached["rows"].items()
            return {name: (str(stamp), tuple(map(str, row))) for name, (stamp, row) in rows}
        except (OSError, LabkitError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def _stamp(folder: Folder) -> str:
    """Return a text with name, modification time, size and inode of each file in a folder."""
    entries = []
    for name in sorted(folder.files):
        try:
            file = os.stat(f"{folder.path}/{name}", follow_symlinks=False)
        except OSError:  # another process is removing the run
            continue
        entries.append(f"{name} {file.st_mtime_ns} {file.st_size} {file.st_ino}")
    return "\n".join(entries)
