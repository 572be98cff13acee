"""Find processes of clusters that still run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

from labkit.cluster import fork_server

PATIENCE = 120.0  # timeout for tasks that take one or two seconds


def processes(folder: Path) -> list[psutil.Process]:
    """Return the living processes of clusters in a runtime folder."""
    found = []
    for process in psutil.process_iter():
        try:
            told = " ".join(process.cmdline()) + process.environ().get("LABKIT_RUNTIME", "")
            alive = process.status() != psutil.STATUS_ZOMBIE
            # A forked engine has the fork server's arguments and variables.
            if process.name() == fork_server.NAME.decode():
                told = " ".join(file.path for file in process.open_files())
            elif fork_server.__name__ in process.cmdline():
                continue  # The server belongs to no cluster.
        except psutil.Error:
            continue
        if str(folder) in told and alive and process.pid != os.getpid():
            found.append(process)
    return found


def left_of(folder: Path, patience: float = PATIENCE) -> list[str]:
    """Return the processes of a folder that still run after a timeout; an empty list if none."""
    end = time.monotonic() + patience
    while (left := processes(folder)) and time.monotonic() < end:
        time.sleep(0.2)
    return [" ".join(process.cmdline()) for process in left]
