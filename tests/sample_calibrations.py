"""Hand-made calibrations with round numbers and no randomness."""

from __future__ import annotations

from typing import Any

import labkit as lk
from labkit.compression import Compressor
from labkit.forecast import (
    Calibration,
    CodecCost,
    CollectiveCost,
    LayerCost,
    ModelCost,
    Overhead,
    Spread,
    StepCost,
    model_of,
)

SHAPES = ((100, 1000), (1000,)), ((1000, 500), (500,)), ((500, 10), (10,))


def exactly(seconds: float, width: float = 0.0) -> Spread:
    """Return a constant time, or one that varies by this relative width."""
    return Spread(median=seconds, low=seconds * (1 - width), high=seconds * (1 + width))


def experiment(**fields: Any) -> lk.Experiment:
    return lk.Experiment(**{"dataset": "digits", "batch_size": 64, "verify": False} | fields)


def calibration(
    *compressors: Compressor,
    together: tuple[int, ...] = (1, 2, 4),
    width: float = 0.0,
    overheads: dict[str, float] | None = None,
    collectives: tuple[CollectiveCost, ...] = (),
    read: dict[int, Spread] | None = None,
) -> Calibration:
    """Return a calibration: 1 ms forward, 2 ms backward per row, 5 ms an update, 1 ms otherwise."""
    layers = tuple(
        LayerCost(
            name=f"layer {n}",
            kind="Dense",
            weights=weights,
            forward=1 / 3,
            backward=share,
            out=4,
        )
        for n, (weights, share) in enumerate(zip(SHAPES, (0.25, 0.5, 0.25), strict=True))
    )
    steps = tuple(
        StepCost(
            rows=rows,
            threads=1,
            together=ranks,
            forward=exactly(1e-3 * rows, width),
            backward=exactly(2e-3 * rows, width),
            update=exactly(5e-3, width),
            other=exactly(1e-3, width),
        )
        for rows in (1, 64)
        for ranks in together
    )
    return Calibration(
        made="2026-01-01T00:00:00+00:00",
        machine={"cpu": "abacus"},
        models=(
            ModelCost(
                model=model_of(experiment()), layers=layers, steps=steps, read=read or {}, slots=1
            ),
        ),
        codecs=tuple(
            CodecCost(
                compressor=compressor.to_json(),
                nbytes=1_000_000,
                encode=exactly(1e-3),
                decode=exactly(2e-3),
                payload=10_000,
            )
            for compressor in compressors
        ),
        collectives=collectives,
        overheads=tuple(
            Overhead(what=what, workers=2, seconds=exactly(seconds))
            for what, seconds in (overheads or {}).items()
        ),
    )
