"""What clusters of a runtime folder have left running."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

PATIENCE = 120.0  # seconds for what takes one or two


def processes(folder: Path) -> list[psutil.Process]:
    """Living processes that belong to clusters in this runtime folder."""
    found = []
    for process in psutil.process_iter():
        try:
            told = " ".join(process.cmdline()) + process.environ().get("LABKIT_RUNTIME", "")
            alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            continue
        if str(folder) in told and alive and process.pid != os.getpid():
            found.append(process)
    return found


def left_of(folder: Path, patience: float = PATIENCE) -> list[str]:
    """What is left of a folder's processes when all are gone, or when the patience is over."""
    end = time.monotonic() + patience
    while (left := processes(folder)) and time.monotonic() < end:
        time.sleep(0.2)
    return [" ".join(process.cmdline()) for process in left]
