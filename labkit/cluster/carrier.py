"""What goes between a run's folder and ranks whose hosts do not see it."""

from __future__ import annotations

from pathlib import Path

from labkit.cluster.calls import Calls
from labkit.records.result import RankResult
from labkit.records.stream import STOP, Writer


class Carrier:
    """Goes between a run's folder and those of its ranks whose hosts do not see it.

    Args:
        folder: of the stream.
        calls: on the ranks.
    """

    def __init__(self, folder: Path, calls: Calls[RankResult]) -> None:
        self._folder, self._calls = folder, calls
        self._writers: dict[int, Writer] = {}  # of ranks that were heard
        self._asked = False

    def carry(self, last: bool = False) -> None:
        """Write down what ranks have told; pass on the wish to stop, once."""
        for rank, told in self._calls.told(all_of_it=last):
            self._writers.setdefault(rank, Writer(self._folder, rank, {})).append(told)
        # The first rank asks for all; before it is heard it has perhaps not begun.
        if not self._asked and 0 in self._writers and (self._folder / STOP).exists():
            self._asked = True
            self._calls.ask_to_stop()
