"""Statistics of gradient compression: error, direction, residual, and sent values per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from labkit.communicator import Communicator
from labkit.exchange.compressed import BucketLayer, ReductionRecord

WHOLE = "all layers"  # the layer name in the row for a whole bucket
Row = dict[str, Any]
FIGURES = ("relative_error", "cosine", "residual_norm", "bits_per_parameter", "fraction_sent")


class CompressionStats:
    r"""A comparison of compressed mean gradients with exact means, in every n-th training step.

    Each row contains the statistics of one layer on one rank. In the formulas, \(\hat g\) is the
    compressed mean gradient, and \(\bar g\) the exact mean gradient. `relative_error` is \(\|\hat
    g-\bar g\| / \|\bar g\|\).
    `cosine` is the cosine of the angle between the compressed mean \(\hat g\) and the exact mean
    \(\bar g\). `residual_norm` is \(\|e_r\|\), the norm of the compression error that rank r
    stores; 0 for compressors without memory. `bits_per_parameter` counts this rank's payload; if a
    payload contains a whole bucket, its bits are divided among layers in proportion to their
    nonzero values. `fraction_sent` is the fraction of gradient elements that this rank sent as
    nonzero values.

    The traffic meter and the emulated network do not count the messages that compute the exact
    mean. A step that compares a bucket with its exact mean takes longer than other steps.

    Args:
        communicator: The Communicator of the ranks.
        every: The number of steps from one comparison to the next.

    Attributes:
        rows: The statistics of all comparisons so far, one row per layer and comparison.
    """

    def __init__(self, communicator: Communicator, every: int) -> None:
        self._communicator, self._every = communicator, every
        self.rows: list[Row] = []

    def observe(self, bucket: int, layers: Sequence[BucketLayer], record: ReductionRecord) -> None:
        """Every `every` training steps, compare a bucket with its exact mean (collective)."""
        if record.step % self._every:
            return
        total = self._communicator.allreduce_small(
            record.given.astype(np.float64), "compression statistics"
        )
        true = total / self._communicator.size
        whole = BucketLayer(WHOLE, 0, len(true), (len(true),))
        sizes = (float(record.payload_bytes), *_bytes_of(layers, record))
        for layer, size in zip((whole, *layers), sizes, strict=True):
            part = slice(layer.start, layer.stop)
            self.rows.append(
                {
                    "step": record.step,
                    "rank": self._communicator.rank,
                    "bucket": bucket,
                    "layer": layer.name,
                    **_comparison(true[part], record.mean[part]),
                    "residual_norm": 0.0
                    if record.residual is None
                    else _norm(record.residual[part]),
                    "bits_per_parameter": 8 * size / max(layer.stop - layer.start, 1),
                    "parameters": layer.stop - layer.start,
                    "fraction_sent": float(np.count_nonzero(record.sent[part]))
                    / max(layer.stop - layer.start, 1),
                }
            )

    def by_step(self) -> dict[int, Row]:
        """Return each step's statistics: means over buckets, weighted by parameter counts."""
        by_step: dict[int, list[Row]] = {}
        for row in self.rows:
            if row["layer"] == WHOLE:
                by_step.setdefault(row["step"], []).append(row)
        return {
            step: {
                name: float(
                    np.average([r[name] for r in rows], weights=[r["parameters"] for r in rows])
                )
                for name in FIGURES
            }
            for step, rows in by_step.items()
        }


def _bytes_of(layers: Sequence[BucketLayer], record: ReductionRecord) -> list[float]:
    """Return, for each layer, its payload bytes in the reduction of one bucket."""
    if record.layer_bytes is not None:
        return [float(size) for size in record.layer_bytes]
    sent = [np.count_nonzero(record.sent[layer.start : layer.stop]) for layer in layers]
    return [record.payload_bytes * count / max(sum(sent), 1) for count in sent]


def _comparison(true: np.ndarray, mean: np.ndarray) -> dict[str, float]:
    length, scale = _norm(true), _norm(mean)
    return {
        "relative_error": _norm(mean - true) / length if length else 0.0,
        "cosine": float(true @ mean) / (length * scale) if length and scale else 0.0,
    }


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64, copy=False)))
