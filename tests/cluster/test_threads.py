"""Test threads of one process that use the same cluster at the same time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from labkit import Cluster


class Starting(Cluster):
    """A cluster whose engines are ready after a short delay.

    Args:
        folder: Folder of the cluster.
    """

    def __init__(self, folder: Path) -> None:
        self.starts = 0
        engines: Any = SimpleNamespace(folder=folder, release=lambda: None, start=self._count)
        engines.how_ended = lambda: None
        self._open(engines)

    def _count(self) -> Any:
        self.starts += 1
        time.sleep(0.1)

    def _check_shape(self) -> None:
        pass

    def _connect(self, connection: Any) -> Any:
        self._client: Any = SimpleNamespace(close=lambda: None)
        return self._client


def test_threads_that_find_no_engines_start_them_once(tmp_path: Path) -> None:
    cluster = Starting(tmp_path)
    cluster._release()
    clients: list[Any] = []
    threads = [threading.Thread(target=lambda: clients.append(cluster.client)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cluster.starts == 2
    assert clients == [cluster.client] * 3
