"""Engines started ahead: while a notebook's kernel comes up, the cluster that it will ask for.

    python -m labkit.cluster.early_start FOLDER START

The process of this module starts a cluster as `labkit warm` does, but once, and holds its claim on
it only until the notebook has taken it, or nobody is at the other end of its input any more.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from labkit.cluster import launch
from labkit.cluster.cluster_name import folder_of, usual_name
from labkit.cluster.lease import LOOK_EVERY, WARM, Lease, locked
from labkit.cluster.start import Start
from labkit.cluster.warm import inherited
from labkit.common.capacity import check_ranks
from labkit.common.errors import LabkitError

UNCLAIMED = 60.0  # seconds after which they end: the notebook asked for others after all


@contextmanager
def started(how: Start | None) -> Iterator[None]:
    """Meanwhile a cluster of this shape starts, and waits for its user; it ends with this context.

    Where it does not start, its user will start it, and hear why that fails.

    Args:
        how: its ranks start; None: nothing is started.
    """
    if how is None or not how.is_local:
        yield
        return
    folder = folder_of(usual_name(how)).resolve()
    folder.mkdir(exist_ok=True, mode=0o700)
    if launch.is_up(folder):  # warm engines, or somebody's own
        yield
        return
    ahead = subprocess.Popen(
        [sys.executable, "-P", "-m", "labkit.cluster.early_start", str(folder), how.to_json()],
        stdin=subprocess.PIPE,  # it closes, however this process ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,  # where no module of anybody's lies
        env=inherited(),
        start_new_session=True,
    )
    with ahead:
        try:
            yield
        finally:
            ahead.terminate()  # if it is there yet: its claim ends with it


def main(folder: Path, how: Start) -> None:
    """Start a cluster, and hold it until it is taken or nobody wants it any more."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    with locked(folder / "start.lock"):
        if launch.is_up(folder):
            return
        check_ranks(how.ranks)
        lease = Lease(folder, WARM)
        try:
            launch.launch(folder, how, warm=True)
        except BaseException:
            lease.release()
            raise
    end = time.monotonic() + UNCLAIMED
    while lease.path.exists() and launch.is_up(folder) and time.monotonic() < end:
        time.sleep(LOOK_EVERY)
    lease.release()


def _end_with_input() -> None:
    """End at once, also amid a start: locks and claims go with the process."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Start.of_json(sys.argv[2]))
    except LabkitError as error:
        sys.exit(str(error))
