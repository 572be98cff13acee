"""Where labkit keeps what is not a result: caches, and the folders of running clusters."""

from __future__ import annotations

import hashlib
import os
import tempfile
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
        LabkitError: somebody else owns that folder.
    """
    given = os.environ.get("LABKIT_RUNTIME") or os.environ.get("XDG_RUNTIME_DIR")
    root = Path(given or tempfile.gettempdir()) / f"labkit-{os.getuid()}"
    if _made(root).stat().st_uid != os.getuid():
        raise LabkitError(
            f"{root} belongs to another user; set LABKIT_RUNTIME to a folder of yours"
        )
    return _made(root / name)


def fingerprint() -> str:
    """Checksum of labkit's own source: what another labkit has measured or started is not ours."""
    checksum = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        checksum.update(file.read_bytes())
    return checksum.hexdigest()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
