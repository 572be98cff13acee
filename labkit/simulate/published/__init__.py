"""Published results and their reproduction by the simulator."""

from labkit.simulate.published import allreduce, bugliarello, pipelines
from labkit.simulate.published.reproduction import (
    PUBLISHED,
    SOFTSYNC,
    SOFTSYNC_LATER,
    VERDICTS,
    Judged,
    Reproduction,
    Scaling,
    Softsync,
)

REPRODUCTIONS: tuple[Reproduction, ...] = (
    *bugliarello.REPRODUCTIONS,
    *allreduce.REPRODUCTIONS,
    *pipelines.REPRODUCTIONS,
)


def reproduce() -> list[Judged]:
    """Return every published result together with its reproduction."""
    return [row for reproduction in REPRODUCTIONS for row in reproduction.reproduce()]


__all__ = [
    "PUBLISHED",
    "REPRODUCTIONS",
    "SOFTSYNC",
    "SOFTSYNC_LATER",
    "VERDICTS",
    "Judged",
    "Reproduction",
    "Scaling",
    "Softsync",
    "reproduce",
]
