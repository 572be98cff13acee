"""Forwarding of metrics and stop requests between a run's folder and ranks on other hosts."""

from __future__ import annotations

from pathlib import Path

from labkit.cluster.calls import Calls
from labkit.records.run_metrics import RankResult
from labkit.records.stream import STOP, StreamWriter


class StreamForwarder:
    """Forwards messages between a run's folder and ranks whose hosts cannot see the folder.

    Args:
        folder: Folder of the message stream, inside the run's folder.
        calls: The running calls on the ranks that send the messages.
    """

    def __init__(self, folder: Path, calls: Calls[RankResult]) -> None:
        self._folder, self._calls = folder, calls
        # `_writers` contains one writer for each rank that has sent messages.
        self._writers: dict[int, StreamWriter] = {}
        self._stop_sent = False

    def forward(self, last: bool = False) -> None:
        """Write new messages of the ranks to the stream, and forward a stop request once.

        Args:
            last: Whether to wait for messages that ended ranks have sent and that have not arrived
                yet.
        """
        for rank, message in self._calls.messages(wait=last):
            self._writers.setdefault(rank, StreamWriter(self._folder, rank, {})).append(message)
        # The stop request is sent after rank 0's first message, because this message shows that the
        # rank has started.
        if not self._stop_sent and 0 in self._writers and (self._folder / STOP).exists():
            self._stop_sent = True
            self._calls.request_stop()
