"""Measurements of a trained model: right answers, bytes on disk, and inference time."""

from __future__ import annotations

import gzip
import math
import time
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import InvalidInput
from labkit.datasets import Dataset

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

Call: TypeAlias = "Callable[[tf.Tensor], tf.Tensor]"

WARM_UP = 10  # number of untimed calls before timing


def right_answers(model: keras.Model, data: Dataset, batch_size: int) -> NDArray[np.bool_]:
    """Return a flag for each answer: True if the right label has the largest score.

    For sequences, each time step of a test sample counts as one answer; for other data, each test
    sample counts as one answer.

    Raises:
        InvalidInput: Accuracy is undefined for the data or for the shape of the model's outputs.
    """
    scores = model.predict(data.x_test, batch_size=batch_size, verbose=0)
    if data.task == "regression" or scores.ndim != data.y_test.ndim + 1 or scores.shape[-1] < 2:
        raise InvalidInput(
            f"accuracy is not defined for a model with outputs of shape {list(scores.shape)} on "
            f"the {data.task} data {data.name!r}; give data of the task classification or "
            "next_character, and a model with one score per class"
        )
    right: NDArray[np.bool_] = scores.argmax(axis=-1) == data.y_test
    return right.ravel()


def chance(losses: int, gained: int) -> float:
    """Return the p-value of the sign test: the probability of an equally or more uneven split.

    The function computes the exact sign test (McNemar's) on the answers that only one of two models
    has right. The test accounts for the random choice of test data, but not for the random choice
    of training seeds.
    """
    changed, fewer = losses + gained, min(losses, gained)
    # The sum uses exact integers, because floats would overflow if thousands of answers changed.
    tail = sum(math.comb(changed, k) for k in range(fewer + 1))
    return min(1.0, float(Fraction(tail, 2**changed)) * 2)


def gzip_bytes(path: Path) -> int:
    """Return the size in bytes of a file after compression by gzip -9."""
    return len(gzip.compress(path.read_bytes(), 9))


def inference_ms(
    models: Mapping[str, keras.Model], x: NDArray[np.generic], repeats: int, calls: int
) -> dict[str, NDArray[np.float64]]:
    """Return each model's median milliseconds per call on one batch, for each repeat (repeats,).

    In each repeat, the models are timed in turn; each repeat starts with a different model. Because
    the models take turns, other load on the machine affects all models equally. Models are compiled
    and called some times before the timing starts.

    Args:
        models: The models to time, by name.
        x: Features of the timed batch.
        repeats: Number of repeats, each of which times all models.
        calls: Number of calls of each model per repeat.
    """
    import tensorflow as tf

    batch = tf.constant(x)
    # The models are compiled, as on an inference server, because this avoids Keras's overhead per
    # call.
    functions = {name: _compiled(model) for name, model in models.items()}
    for function in functions.values():
        for _ in range(WARM_UP):
            function(batch)
    names = list(functions)
    medians: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            medians[name].append(_median_ms(functions[name], batch, calls))
    return {name: np.array(values) for name, values in medians.items()}


def _compiled(model: keras.Model) -> Call:
    import tensorflow as tf

    compiled: Call = tf.function(lambda x: model(x, training=False), autograph=False)
    return compiled


def _median_ms(function: Call, batch: tf.Tensor, calls: int) -> float:
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        function(batch).numpy()  # `numpy()` waits for the result
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds))
