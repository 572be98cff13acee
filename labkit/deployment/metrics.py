"""What is measured of a model: right answers, bytes on disk, time of an inference."""

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

WARM_UP = 10  # calls


def right_answers(model: keras.Model, data: Dataset, batch_size: int) -> NDArray[np.bool_]:
    """Whether the largest score is the label's: a flag a test row, or a step of each sequence."""
    scores = model.predict(data.x_test, batch_size=batch_size, verbose=0)
    if data.task == "regression" or scores.ndim != data.y_test.ndim + 1 or scores.shape[-1] < 2:
        raise InvalidInput(
            f"a model with outputs of shape {list(scores.shape)} on the {data.task} data "
            f"{data.name!r} has no accuracy; allowed: classification or next_character, a score "
            "for each class"
        )
    right: NDArray[np.bool_] = scores.argmax(axis=-1) == data.y_test
    return right.ravel()


def chance(lost: int, gained: int) -> float:
    """Probability of a split at least as uneven, were each change as likely either way.

    The exact sign test (McNemar's) of the answers that two models do not share. It knows the draw
    of the test data, and nothing of other seeds.
    """
    changed, fewer = lost + gained, min(lost, gained)
    # Exactly, as whole numbers: floats overflow where thousands of answers have changed.
    tail = sum(math.comb(changed, k) for k in range(fewer + 1))
    return min(1.0, float(Fraction(tail, 2**changed)) * 2)


def gzip_bytes(path: Path) -> int:
    """Bytes of a file after gzip, level 9."""
    return len(gzip.compress(path.read_bytes(), 9))


def inference_ms(
    models: Mapping[str, keras.Model], x: NDArray[np.generic], repeats: int, calls: int
) -> dict[str, NDArray[np.float64]]:
    """Milliseconds of a call on one batch, for each model the median of each repeat, (repeats,).

    Models take turns within a repeat, and another begins each time, so that what else the machine
    does meets all of them. Compiled and warmed up before.

    Args:
        models: by name.
        x: one batch of features.
        repeats: rounds over all models.
        calls: of each model in a round.
    """
    import tensorflow as tf

    batch = tf.constant(x)
    # Compiled, as a server would have it: Keras's own overhead is the same for all.
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
        function(batch).numpy()  # the values are there
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds))
