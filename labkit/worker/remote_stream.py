"""The progress stream of a rank whose host does not share the run's folder."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.records.store import Record
from labkit.records.stream import encode_lines


class RemoteStream:
    """The rank's end of a progress stream; the submitting process writes records to a folder.

    The rank publishes records as data of its ipyparallel call, so this object must be created
    within that call. A request to stop arrives as an abort of the call. ipyparallel drops calls
    that have not started, and marks a running call as aborted.
    """

    def __init__(self) -> None:
        from IPython.core.getipython import get_ipython

        self._kernel = get_ipython().kernel
        self._call = self._kernel.get_parent()["header"]["msg_id"]
        self._published = 0

    def write(self, kind: str, records: Sequence[Record]) -> None:
        """Publish records of one kind, such as "step" or "epoch"."""
        from ipyparallel.engine.datapub import publish_data

        if records:
            publish_data(
                {str(self._published): encode_lines(kind, records)}
            )  # records with the same name would replace each other
            self._published += 1

    def stop_asked(self) -> bool:
        """Return whether a user has asked to stop."""
        return self._call in self._kernel.aborted
