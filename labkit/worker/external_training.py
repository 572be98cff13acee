"""The task of a child process in which TensorFlow's strategies train an experiment's model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.experiment import Experiment


@dataclass(frozen=True)
class TrainingTask:
    """The task that a rank sends to a child process, which trains with `tf.distribute`.

    Attributes:
        experiment: The experiment to train; its strategy is a `TFDistribute`.
        rows: Number of first rows of the data set that are trained.
        rank: Number of the process's worker; 0 if one process runs all workers.
        config: Value of TF_CONFIG; None: one process runs all workers.
        weights: Initial weights of the model.
        optimizer: Pickled `labkit.keras.Recipe`, including custom classes.
        options: Pickled loss options of `keras.Model.compile`; the child process creates the losses
            with its float type.
        folder: Temporary folder for large data, removed when training ends.
    """

    experiment: Experiment
    rows: int
    rank: int
    config: dict[str, JSON] | None
    weights: list[np.ndarray]
    optimizer: bytes
    options: bytes
    folder: str
