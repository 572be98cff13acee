"""Where the time goes that the exchange adds to a step, line by line, each beside its limit."""

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
LIMITS = {"pack": COPY, "sum": "raw allreduce"}  # a line and the kind that it cannot be less than


def kinds(
    communicator: Communicator, elements: int, step: Callable[[Averaging], Callable[[], object]]
) -> dict[str, Callable[[], object]]:
    """Steps to take in turns with those of the exchange.

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
    """Seconds of the last steps, medians, from the timelines of all ranks, which share a clock.

    "pack": of the rank that has packed last, for which all wait; "sum": from then on until all have
    the mean; "wait": of a rank for the last one, the mean over ranks, which adds nothing to the
    step of the slowest.
    """
    last = max(event[1] for own in events for event in own)
    found: dict[str, list[float]] = {"pack": [], "sum": [], "wait": []}
    of_steps = [_by_step(own) for own in events]
    for step in range(last - steps + 1, last + 1):
        packs = [[e for e in own.get(step, []) if e[0] == "pack"] for own in of_steps]
        served = [e[4] for own in of_steps for e in own.get(step, []) if e[0] == "communicate"]
        if not served or not all(packs):
            continue
        ends = [max(event[4] for event in own) for own in packs]
        slowest = packs[int(np.argmax(ends))]
        found["pack"].append(sum(event[4] - event[3] for event in slowest))
        found["sum"].append(max(served) - max(ends))
        found["wait"].append(max(ends) - float(np.mean(ends)))
    return {line: float(np.median(seconds)) for line, seconds in found.items()}


def _by_step(events: Sequence[Event]) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event[1], []).append(event)
    return found


def rows(
    found: Mapping[str, float],
    seconds: Mapping[str, Sequence[float]],
    added: Mapping[str, Sequence[float]],
    schedule: str,
) -> Iterator[tuple[str, Row]]:
    """Each line of the budget: what it takes, and the least that it could, ms.

    Args:
        found: what `taken` says.
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
