"""The task of a process that trains an experiment with a TensorFlow distribution strategy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from labkit.common.canonical_json import JSON
from labkit.experiment import Experiment


@dataclass(frozen=True)
class TrainingTask:
    """The data that a rank sends to a child process for training with `tf.distribute`.

    Attributes:
        experiment: The experiment to train; its strategy is a `TFDistribute`.
        rows: Number of rows from the start of the data set that are used for training.
        rank: Number of the worker that the process runs; 0 if one process runs all workers.
        config: Value of the environment variable TF_CONFIG, or None if one process runs all
            workers.
        weights: Initial weights of the model.
        optimizer: Pickled `labkit.keras.Recipe`, from which the child process creates the
            optimizer. The pickle includes custom classes.
        options: Pickled loss options of `keras.Model.compile`. The child process creates the losses
            in its own float type.
        folder: Temporary folder for large data; it is removed when training ends.
    """

    experiment: Experiment
    rows: int
    rank: int
    config: dict[str, JSON] | None
    weights: list[np.ndarray]
    optimizer: bytes
    options: bytes
    folder: str
