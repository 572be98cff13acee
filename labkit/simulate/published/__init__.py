"""Published figures, and what the simulator makes of them."""

from labkit.simulate.published import allreduce, bugliarello, pipelines
from labkit.simulate.published.curves import (
    PUBLISHED,
    SOFTSYNC,
    SOFTSYNC_LATER,
    Scaling,
    Softsync,
)
from labkit.simulate.published.study import Reproduction, Study

STUDIES: tuple[Study, ...] = (*bugliarello.STUDIES, *allreduce.STUDIES, *pipelines.STUDIES)


def reproduce() -> list[Reproduction]:
    """Every published figure beside ours."""
    return [row for study in STUDIES for row in study.reproduce()]


__all__ = [
    "PUBLISHED",
    "SOFTSYNC",
    "SOFTSYNC_LATER",
    "STUDIES",
    "Reproduction",
    "Scaling",
    "Softsync",
    "Study",
    "reproduce",
]
