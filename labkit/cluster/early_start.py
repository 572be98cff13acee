"""An early start of engines, at the same time as the start of a notebook's kernel.

    python -m labkit.cluster.early_start FOLDER START

The module starts the cluster that the notebook will need. It works like `labkit prestart`, but
starts engines only once. The process keeps the cluster alive until the notebook claims the cluster.
The process also releases the cluster when its standard input closes.
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
from labkit.cluster.lease import POLL_INTERVAL, WARM, Lease, default_name, folder_of, locked
from labkit.cluster.start import Start
from labkit.cluster.warm import inherited
from labkit.common.errors import LabkitError
from labkit.common.machine import check_ranks

# The constant UNCLAIMED is the time in seconds after which labkit ends engines that no notebook has
# claimed.
UNCLAIMED = 60.0


@contextmanager
def early_engines(launch_options: Start | None) -> Iterator[None]:
    """Start a cluster while the context lasts; an unclaimed cluster ends with the context.

    If the early start fails, the notebook starts the cluster itself and reports the error.

    Args:
        launch_options: Launch options of the ranks; None: start no cluster.
    """
    if launch_options is None or not launch_options.is_local:
        yield
        return
    folder = folder_of(default_name(launch_options)).resolve()
    folder.mkdir(exist_ok=True, mode=0o700)
    if launch.is_up(folder):  # A cluster that is already running needs no early start.
        yield
        return
    starter = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "labkit.cluster.early_start",
            str(folder),
            launch_options.to_json(),
        ],
        # The pipe closes when this process ends, and then the starter process exits, too.
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # The starter process runs in the cluster's folder. The cluster's folder contains no Python
        # modules that a process could import by mistake.
        cwd=folder,
        env=inherited(),
        start_new_session=True,
    )
    with starter:
        try:
            yield
        finally:
            # The starter process releases its lease on the cluster when it ends.
            starter.terminate()


def main(folder: Path, launch_options: Start) -> None:
    """Start a cluster, and hold a lease until a notebook claims it or `UNCLAIMED` seconds pass."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    with locked(folder / "start.lock"):
        if launch.is_up(folder):
            return
        check_ranks(launch_options.ranks)
        lease = Lease(folder, WARM)
        try:
            launch.launch(folder, launch_options, warm=True)
        except BaseException:
            lease.release()
            raise
    end = time.monotonic() + UNCLAIMED
    while lease.path.exists() and launch.is_up(folder) and time.monotonic() < end:
        time.sleep(POLL_INTERVAL)
    lease.release()


def _end_with_input() -> None:
    """Exit when standard input closes; locks and leases are released when the process ends."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Start.from_json(sys.argv[2]))
    except LabkitError as error:
        sys.exit(str(error))
