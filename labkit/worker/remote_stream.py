"""A rank that tells how far it is from a host that does not see the run's folder."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.records.store import Record
from labkit.records.stream import lines


class Afar:
    """The rank's side of a stream that whoever has called it carries on; made inside the call.

    What the rank tells is published beside the call's answer. The wish to stop comes as an abort of
    the call: ipyparallel drops calls that have not begun, and notes the others, which it leaves
    alone.
    """

    def __init__(self) -> None:
        from IPython.core.getipython import get_ipython

        self._kernel = get_ipython().kernel
        self._call = self._kernel.get_parent()["header"]["msg_id"]
        self._told = 0

    def write(self, kind: str, records: Sequence[Record]) -> None:
        """Publish records of a kind."""
        from ipyparallel.engine.datapub import publish_data

        if records:
            publish_data({str(self._told): lines(kind, records)})  # a name twice is one lost
            self._told += 1

    def stop_asked(self) -> bool:
        """Whether someone wants training to end."""
        return self._call in self._kernel.aborted
