"""A breakdown of the time that the gradient exchange adds to a step, with lower limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.bench.timing import Row

if TYPE_CHECKING:
    import tensorflow as tf

    from labkit.bench.steps import Averaging
    from labkit.communicator import Communicator
    from labkit.exchange.timeline import Event

COPY, HANDED = (
    "copy",
    "handed over",
)  # further kinds of steps that are timed besides the steps with exchange
LIMITS = {
    "pack": COPY,
    "sum": "raw allreduce",
}  # maps each phase to the kind of step whose time is the phase's lower limit


def kinds(
    communicator: Communicator, elements: int, step: Callable[[Averaging], Callable[[], object]]
) -> dict[str, Callable[[], object]]:
    """Return the steps that the breakdown measures in addition to steps with gradient exchange.

    Args:
        communicator: Communicator of the ranks.
        elements: Total number of elements of all gradients.
        step: Function that builds a training step from a function that averages gradients.

    Returns:
        Two functions by name: the first copies as many bytes as packing gradients into shared
        memory does. The second function is a training step that only passes gradients to Python and
        returns values from the shared memory.
    """
    shared, own = communicator.allocate(elements), np.zeros(elements, np.float32)
    shared[...] = 0.0
    return {COPY: lambda: np.copyto(shared, own), HANDED: step(lambda g: _handed(g, shared))}


def _handed(gradients: list[tf.Tensor], shared: np.ndarray) -> list[tf.Tensor]:
    import tensorflow as tf

    ends = np.cumsum([gradient.shape.num_elements() for gradient in gradients])
    parts = np.split(shared, ends[:-1])
    means = [part.reshape(g.shape) for part, g in zip(parts, gradients, strict=True)]
    outputs = tf.numpy_function(lambda *_: means, gradients, [g.dtype for g in gradients])
    return [tf.ensure_shape(mean, g.shape) for mean, g in zip(outputs, gradients, strict=True)]


def phase_medians(events: Sequence[Sequence[Event]], steps: int) -> dict[str, float]:
    """Return the median seconds of each phase of the last `steps` steps, from all ranks' timelines.

    The timelines of all ranks use one clock. "pack" is the packing time of the rank that finishes
    packing last. "sum" is the time from the end of the last rank's packing until all ranks have the
    mean. "wait" is the time that a rank waits for the last rank, averaged over the ranks. The
    slowest rank does not wait, so the "wait" time does not lengthen its step.
    """
    packs = np.array(
        [_last("pack", rank_events, steps) for rank_events in events]
    )  # (ranks, steps, 2)
    sums = np.array([_last("communicate", rank_events, steps) for rank_events in events])
    ends = packs[..., 1]
    slowest = np.argmax(ends, 0), np.arange(ends.shape[1])
    lines = {
        "pack": (ends - packs[..., 0])[slowest],
        "sum": sums[..., 1].max(0) - ends.max(0),
        "wait": ends.max(0) - ends.mean(0),
    }
    return {line: float(np.median(seconds)) for line, seconds in lines.items()}


def _last(kind: str, events: Sequence[Event], steps: int) -> list[tuple[float, float]]:
    """Return the start and stop times of the last `steps` events of a kind (one event per step)."""
    return [event[3:] for event in events if event[0] == kind][-steps:]


def rows(
    medians: Mapping[str, float],
    seconds: Mapping[str, Sequence[float]],
    added: Mapping[str, Sequence[float]],
    schedule: str,
) -> Iterator[tuple[str, Row]]:
    """Yield each phase of the breakdown: its name, and a row with its time and lower limit (ms).

    The lower limit of a phase is the time that a simple copy, or an allreduce of all bytes, would
    take. Packing may take less time than its lower limit, because a rank does not pack the elements
    that it sums itself.

    Args:
        medians: Seconds of the phases, as `phase_medians` returns them.
        seconds: Seconds per step for each kind of step, one value per repeat.
        added: Seconds by which each kind of step takes longer than the local step, one value per
            repeat.
        schedule: Exchange schedule whose added time is broken down.
    """
    whole = float(np.median(added[schedule]))
    handover = float(np.median(added[HANDED]))
    lines = {
        "pack": medians["pack"],
        "sum": medians["sum"],
        "pass gradients from TensorFlow and back": handover,
    }
    # The remaining time is mostly the weight update, which reads memory that other ranks have
    # written.
    lines["other"] = whole - sum(lines.values())
    lines |= {"wait for other ranks (contained in the other lines)": medians["wait"], "all": whole}
    for line, line_seconds in lines.items():
        limit = float(np.median(seconds[LIMITS[line]])) if line in LIMITS else None
        row: Row = {
            "median_ms": 1e3 * line_seconds,
            "limit_ms": None if limit is None else 1e3 * limit,
        }
        yield f"where: {line}", row
