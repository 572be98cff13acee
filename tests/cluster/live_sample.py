"""A handle of a submitted run without ranks: a test writes the reports of the ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.cluster.run_handle import RunHandle
from labkit.cluster.run_progress import Outline
from labkit.records import store
from labkit.records.run import Run
from labkit.records.store import this_process
from labkit.records.stream import FOLDER, StreamWriter

ROWS = [
    {"rank": rank, "epoch": 0, "step": step, "loss": 2.0 - step, "seconds": 0.5, "samples": 4.0}
    for step in range(2)
    for rank in range(2)
]


class Told(RunHandle):
    """A handle of a run that ends when the test sets `over`."""

    def __init__(self, directory: Path, label: str = "mine", epochs: int = 3) -> None:
        super().__init__(Outline(label, 2, epochs), directory)
        store.start(directory, {"workers": 2, "epochs": epochs})
        (directory / FOLDER).mkdir()
        self.over, self.failure = threading.Event(), None
        self.writers = [StreamWriter(directory / FOLDER, rank, this_process()) for rank in range(2)]

    def tell(self, kind: str, *records: dict[str, Any]) -> None:
        """Write records and read them; call this before the thread starts, which also reads."""
        for record in records:
            self.writers[int(record.get("rank", 0))].write(kind, [record])
        self._read(last=True)

    def _watch(self) -> Iterator[None]:
        while not self.over.wait(0.02):
            yield

    def _finish(self) -> Run:
        if self.failure is not None:
            raise self.failure
        store.interrupt(self.directory, "stopped by the user after 2 steps")
        return Run(self.directory)

    failure: BaseException | None
