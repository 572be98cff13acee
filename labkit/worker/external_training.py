"""What a process of another framework is told that trains an experiment's model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.experiment import Experiment


@dataclass(frozen=True)
class Task:
    """What the process is told.

    Attributes:
        experiment: what to train; its strategy is a `TFDistribute`.
        rows: of the training data, the first ones; the gate takes fewer.
        rank: of the worker; 0 where one process has them all.
        config: TF_CONFIG, or None.
        weights: that training begins with.
        optimizer: its `labkit.keras.Recipe`, pickled with classes of the user's own.
        options: what `keras.Model.compile` takes of the loss, pickled: Keras makes losses anew,
            of the float type that it has by then.
        folder: where processes read what is too large to be sent; it is gone when training ends.
    """

    experiment: Experiment
    rows: int
    rank: int
    config: dict[str, JSON] | None
    weights: list[np.ndarray]
    optimizer: bytes
    options: bytes
    folder: str
