"""The time that the exchange adds to a step, line by line, each beside its lower limit."""

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

COPY, HANDED = "copy", "handed over"  # kinds of steps, beside those of the exchange
LIMITS = {"pack": COPY, "sum": "raw allreduce"}  # a line and bare work on all bytes


def kinds(
    communicator: Communicator, elements: int, step: Callable[[Averaging], Callable[[], object]]
) -> dict[str, Callable[[], object]]:
    """Return the kinds of steps that are interleaved with those of the exchange.

    Args:
        communicator: of the ranks.
        elements: of all gradients.
        step: the training step of a model, with what stands between gradients and update.

    Returns:
        A copy of as many bytes into memory that ranks share, as packing writes; and a step that
        hands gradients over to Python and means back out of that memory, and does nothing else.
    """
    shared, own = communicator.allocate(elements), np.zeros(elements, np.float32)
    shared[...] = 0.0
    return {COPY: lambda: np.copyto(shared, own), HANDED: step(lambda g: _handed(g, shared))}


def _handed(gradients: list[tf.Tensor], shared: np.ndarray) -> list[tf.Tensor]:
    import tensorflow as tf

    ends = np.cumsum([gradient.shape.num_elements() for gradient in gradients])
    parts = np.split(shared, ends[:-1])
    means = [part.reshape(g.shape) for part, g in zip(parts, gradients, strict=True)]
    found = tf.numpy_function(lambda *given: means, gradients, [g.dtype for g in gradients])
    return [tf.ensure_shape(mean, g.shape) for mean, g in zip(found, gradients, strict=True)]


def taken(events: Sequence[Sequence[Event]], steps: int) -> dict[str, float]:
    """Return medians of the last steps, s, from the timelines of all ranks, which share a clock.

    "pack" is the time of the rank that packs last; all others wait for it. "sum" lasts from there
    until all ranks have the mean. "wait" is the mean wait of a rank for the last one; it adds
    nothing to the step of the slowest rank.
    """
    packs = np.array([_last("pack", own, steps) for own in events])  # (ranks, steps, 2)
    served = np.array([_last("communicate", own, steps) for own in events])
    ends = packs[..., 1]
    slowest = np.argmax(ends, 0), np.arange(ends.shape[1])
    found = {
        "pack": (ends - packs[..., 0])[slowest],
        "sum": served[..., 1].max(0) - ends.max(0),
        "wait": ends.max(0) - ends.mean(0),
    }
    return {line: float(np.median(seconds)) for line, seconds in found.items()}


def _last(kind: str, events: Sequence[Event], steps: int) -> list[tuple[float, float]]:
    """Return start and stop of the last events of a kind; a step has one, because of one bucket."""
    return [event[3:] for event in events if event[0] == kind][-steps:]


def rows(
    found: Mapping[str, float],
    seconds: Mapping[str, Sequence[float]],
    added: Mapping[str, Sequence[float]],
    schedule: str,
) -> Iterator[tuple[str, Row]]:
    """Yield each line of the budget: its time, and the time of bare work on all bytes, ms.

    Packing may take less than a copy of all bytes: a rank does not pack what it sums itself.

    Args:
        found: of `taken`.
        seconds: of the kinds of steps, by repeat.
        added: by the kinds of steps, by repeat.
        schedule: whose budget it is.
    """
    whole = float(np.median(added[schedule]))
    handed = float(np.median(added[HANDED]))
    lines = {"pack": found["pack"], "sum": found["sum"], "hand over and back": handed}
    lines["other"] = whole - sum(lines.values())  # the update that reads what others have written
    lines |= {"wait, within others": found["wait"], "all": whole}
    for line, each in lines.items():
        limit = float(np.median(seconds[LIMITS[line]])) if line in LIMITS else None
        row: Row = {"median_ms": 1e3 * each, "limit_ms": None if limit is None else 1e3 * limit}
        yield f"where: {line}", row
