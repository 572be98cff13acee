"""What compression did to each gradient: error, direction, what was kept back, what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.communicator import Communicator
from labkit.exchange.compressed import Layer, Seen

WHOLE = "all layers"  # of the bucket
Row = dict[str, Any]
FIGURES = ("relative_error", "cosine", "residual_norm", "bits_per_parameter", "fraction_sent")


class Microscope:
    r"""Compares, in some steps, the mean that was applied with the true mean of the gradients.

    For each layer and rank: `relative_error` \(\|\hat g - \bar g\| / \|\bar g\|\), `cosine` of the
    angle between both, `residual_norm` \(\|e_r\|\) (0 for compressors without memory),
    `bits_per_parameter` of this rank's payload (of a bucket that is one payload, each layer has the
    share of its values other than 0), `fraction_sent` (share of values other than 0).
    The true mean travels outside the traffic and any emulated network; steps that are looked at
    last longer and say so.

    Args:
        communicator: the ranks.
        every: steps from one look to the next.
    """

    def __init__(self, communicator: Communicator, every: int) -> None:
        self._communicator, self._every = communicator, every
        self.rows: list[Row] = []

    def look(self, bucket: int, layers: Sequence[Layer], seen: Seen) -> None:
        """A watcher of `Exchange` (collective)."""
        if seen.step % self._every:
            return
        total = self._communicator.tally(seen.given.astype(np.float64), "the microscope")
        true = total / self._communicator.size
        whole = Layer(WHOLE, 0, len(true), (len(true),))
        sizes = (float(seen.payload_bytes), *_bytes_of(layers, seen))
        for layer, size in zip((whole, *layers), sizes, strict=True):
            part = slice(layer.start, layer.stop)
            self.rows.append(
                {
                    "step": seen.step,
                    "rank": self._communicator.rank,
                    "bucket": bucket,
                    "layer": layer.name,
                    **_comparison(true[part], seen.mean[part]),
                    "residual_norm": 0.0 if seen.residual is None else _norm(seen.residual[part]),
                    "bits_per_parameter": 8 * size / max(layer.stop - layer.start, 1),
                    "parameters": layer.stop - layer.start,
                    "fraction_sent": float(np.count_nonzero(seen.sent[part]))
                    / max(layer.stop - layer.start, 1),
                }
            )

    def by_step(self) -> dict[int, Row]:
        """The figures of whole buckets; where a step has several, their mean by parameters."""
        found: dict[int, list[Row]] = {}
        for row in self.rows:
            if row["layer"] == WHOLE:
                found.setdefault(row["step"], []).append(row)
        return {
            step: {
                name: float(
                    np.average([r[name] for r in rows], weights=[r["parameters"] for r in rows])
                )
                for name in FIGURES
            }
            for step, rows in found.items()
        }


def _bytes_of(layers: Sequence[Layer], seen: Seen) -> list[float]:
    """Of the payload, what each layer took."""
    if seen.layer_bytes is not None:
        return [float(size) for size in seen.layer_bytes]
    sent = [np.count_nonzero(seen.sent[one.start : one.stop]) for one in layers]
    return [seen.payload_bytes * count / max(sum(sent), 1) for count in sent]


def _comparison(true: np.ndarray, mean: np.ndarray) -> dict[str, float]:
    length, scale = _norm(true), _norm(mean)
    return {
        "relative_error": _norm(mean - true) / length if length else 0.0,
        "cosine": float(true @ mean) / (length * scale) if length and scale else 0.0,
    }


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64, copy=False)))
