"""The traffic meter of one rank."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Traffic:
    """What one rank has handed over and how long it took; only ever grows.

    `payload_bytes` is what the rank handed to collectives and sends, `wire_bytes` what left it
    over links; of these `link_bytes` left its host. What a library sends counts with the least
    that any way of sending must. `wait_seconds` is spent until the other ranks had arrived,
    `transfer_seconds` on moving and adding the data after that. By `aside_seconds` the rank has
    seen steps last longer than who took them elsewhere, with asking and counting; they are no part
    of a step.
    """

    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    link_bytes: int = 0
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0
    aside_seconds: float = 0.0

    def copy(self) -> Traffic:
        """The counts as they stand now."""
        return Traffic(*(getattr(self, field.name) for field in fields(self)))

    def since(self, earlier: Traffic) -> Traffic:
        """What has come on top of an earlier copy."""
        return Traffic(
            *(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self))
        )
