"""The traffic meter of one rank."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Traffic:
    """The messages, bytes and seconds of one rank's communication; the counts never decrease.

    For collectives of the MPI library, `wire_bytes` and `link_bytes` count the minimum number of
    bytes that any algorithm must send.

    Attributes:
        messages: The number of messages sent.
        payload_bytes: Total bytes of the buffers passed to collectives and sends.
        wire_bytes: Bytes that this rank sent to other ranks.
        link_bytes: The bytes of `wire_bytes` that this rank sent to other hosts.
        wait_seconds: Seconds in which this rank waited for other ranks to reach a call.
        transfer_seconds: Seconds in which this rank transferred and added data after all ranks had
            arrived.
        aside_seconds: Seconds of requests and bookkeeping for work that another process does;
            training-step times exclude these seconds.
    """

    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    link_bytes: int = 0
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0
    aside_seconds: float = 0.0

    def copy(self) -> Traffic:
        """Return a copy of this meter with its current counts."""
        return Traffic(*(getattr(self, field.name) for field in fields(self)))

    def since(self, earlier: Traffic) -> Traffic:
        """Return the increase of all counts since an earlier copy of this meter."""
        return Traffic(
            *(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self))
        )
