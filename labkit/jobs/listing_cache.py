"""What was listed of runs before, so that a folder of thousands is not read anew each time."""

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

LEAST = 500  # runs: fewer are read as fast
Row = tuple[str, ...]


class Listed:
    """The rows of the ended runs of a folder, each by what its files were when it was read.

    They lie in the user's own cache, not beside the runs: a folder of a stranger's brings none. A
    file that is missing, damaged, or of another labkit counts as none, and is written anew; where
    nothing can be written, all is read each time.

    Args:
        root: the folder that is listed.
    """

    def __init__(self, root: Path) -> None:
        self._name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]
        self._made_by = fingerprint()
        self._known = self._read()
        self._now: dict[str, tuple[str, Row]] = {}

    def row(self, name: str, folder: Folder, read: Callable[[], Row | str]) -> Row | str:
        """A run's row as it was, if its files are; else as it is read now."""
        stamp = _stamp(folder)
        known, row = self._known.get(name, ("", ()))
        if known == stamp:
            self._now[name] = stamp, row
            return row
        found = read()
        if not isinstance(found, str) and found[1] in store.ENDED:
            self._now[name] = stamp, found
        return found

    def keep(self) -> None:
        """Write down what was listed now, where it is not what was known."""
        if self._now != self._known:
            text = json.dumps({"made_by": self._made_by, "rows": self._now})
            with suppress(OSError, LabkitError):  # a list of runs does not need a place for another
                store.write_atomically(self._file(), text)

    def _file(self) -> Path:
        return cache_folder("listings") / f"{self._name}.json"

    def _read(self) -> dict[str, tuple[str, Row]]:
        try:
            kept = json.loads(self._file().read_bytes())
            if kept["made_by"] != self._made_by:
                return {}
            rows = kept["rows"].items()
            return {name: (str(stamp), tuple(map(str, row))) for name, (stamp, row) in rows}
        except (OSError, LabkitError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def _stamp(folder: Folder) -> str:
    """Size and time of a folder's files."""
    found = []
    for name in sorted(folder.files):
        try:
            file = os.stat(f"{folder.path}/{name}", follow_symlinks=False)
        except OSError:  # somebody removes the run just now
            continue
        found.append(f"{name} {file.st_mtime_ns} {file.st_size} {file.st_ino}")
    return "\n".join(found)
