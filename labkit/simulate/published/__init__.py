"""Published figures, and what the simulator makes of them."""

from labkit.simulate.published import allreduce, bugliarello, pipelines
from labkit.simulate.published.curves import (
    PUBLISHED,
    SOFTSYNC,
    SOFTSYNC_LATER,
    Scaling,
    Softsync,
)
from labkit.simulate.published.reproduction import VERDICTS, Judged, Reproduction

REPRODUCTIONS: tuple[Reproduction, ...] = (
    *bugliarello.REPRODUCTIONS,
    *allreduce.REPRODUCTIONS,
    *pipelines.REPRODUCTIONS,
)


def reproduce() -> list[Judged]:
    """Every published figure beside ours."""
    return [row for each in REPRODUCTIONS for row in each.reproduce()]


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
