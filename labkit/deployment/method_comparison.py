"""A comparison of compression methods for a trained model: accuracy, file size, inference time."""

from __future__ import annotations

import gzip
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit import datasets
from labkit.common.errors import InvalidInput, LabkitError
from labkit.datasets import Dataset
from labkit.deployment.smaller_models import CompressionMethod, uncompiled_copy
from labkit.records.run import Run

if TYPE_CHECKING:
    import keras
    import pandas
    import tensorflow as tf


Call: TypeAlias = "Callable[[tf.Tensor], tf.Tensor]"

WARM_UP = 10  # Each model is called `WARM_UP` times before its calls are timed.


def right_answers(model: keras.Model, data: Dataset, batch_size: int) -> NDArray[np.bool_]:
    """Return one flag per predicted label: True if the predicted label is correct.

    For sequences, each time step of a test sample counts as one answer. For other data, each test
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
    """Return the p-value of a two-sided sign test for the numbers of lost and gained answers.

    The function computes the exact sign test (McNemar's) for two models. The sign test uses only
    answers that exactly one model has right. The sign test accounts for the random choice of test
    data. The sign test ignores the random choice of training seeds.
    """
    changed, fewer = losses + gained, min(losses, gained)
    # The sum uses exact integers, because floats would overflow if the models disagreed on
    # thousands of labels.
    tail = sum(math.comb(changed, k) for k in range(fewer + 1))
    return min(1.0, float(Fraction(tail, 2**changed)) * 2)


def gzip_bytes(path: Path) -> int:
    """Return the size in bytes of a file after compression by gzip -9."""
    return len(gzip.compress(path.read_bytes(), 9))


def inference_ms(
    models: Mapping[str, keras.Model], x: NDArray[np.generic], repeats: int, calls: int
) -> dict[str, NDArray[np.float64]]:
    """Return each model's milliseconds per call on one batch: one median for each repeat.

    In each repeat, the models are timed in turn; each repeat starts with a different model. Because
    the models take turns, other load on the machine affects all models equally. Before the timing
    starts, each model is compiled and then called several times.

    Args:
        models: The models to time, by name.
        x: Features of the timed batch.
        repeats: Number of repeats, each of which times all models.
        calls: Number of calls of each model per repeat.
    """
    import tensorflow as tf

    batch = tf.constant(x)
    # The models are compiled, as on an inference server, to avoid Keras's overhead per call.
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
        function(batch).numpy()  # The call of `numpy()` waits until the result is computed.
        seconds.append(time.perf_counter() - start)
    return 1e3 * float(np.median(seconds))


ORIGINAL = "original"
Row: TypeAlias = dict[str, float | str]
COLUMNS = (
    *("family", "what", "extra_epochs", "accuracy", "right", "lost", "gained", "chance"),
    *("test_answers", "parameters", "bytes", "smaller", "keras_gzip_bytes"),
    *("inference_ms", "time_ratio", "time_ratio_low", "time_ratio_high", "batch_size", "file"),
)


def compare(
    trained: Run | keras.Model,
    methods: Sequence[CompressionMethod],
    data: Dataset | None = None,
    batch_size: int = 128,
    repeats: int = 7,
    calls: int = 20,
    seed: int = 0,
    folder: Path | str | None = None,
) -> pandas.DataFrame:
    r"""Compress a trained model with each method, and measure each model as read from its file.

    The table has one row for the original model, and then one row per method. Columns:

    - `accuracy`: Accuracy on the test data.
    - `lost`, `gained`: Numbers of test answers that only one model has right. `lost` counts answers
      that only the original model has right. `gained` counts answers that only the compressed model
      has right.
    - `chance`: p-value of a two-sided sign test of the answers. The tested hypothesis is that lost
      and gained answers are equally likely.
    - `bytes`: Size in bytes of the model's file. Pruned models have a sparse file, and other models
      have a .keras file without optimizer state.
    - `smaller`: Ratio of the original's `bytes` to the method's `bytes`.
    - `keras_gzip_bytes`: Bytes of the model's .keras file after gzip -9. The measurement is the
      same for all compression methods.
    - `inference_ms`: Milliseconds of a model's call on one batch. Each repeat gives a median over
      its calls. The value `inference_ms` is the median over all repeats.
    - `time_ratio`: Median over repeats of the model's inference time divided by the original's
      inference time. `time_ratio_low` and `time_ratio_high` are the minimum and the maximum of this
      ratio.
    - `what`: Description of the compression, or the reason why the method cannot compress the
      model. If the method cannot compress the model, its row contains no measurements.

    Args:
        trained: A completed run with a saved model, or a Keras model; the model is not modified.
        methods: Compression methods, such as `[Quantize(mode="int8"), Prune(sparsity=0.9),
            LowRank()]`.
        data: Data set with training data for fine-tuning and test data; default: the data set of
            the run.
        batch_size: Number of samples in the timed batch; default: 128.
        repeats: Number of rounds in which the models are timed in turn, after 10 warm-up calls;
            default: 7.
        calls: Number of calls of each model per round; default: 20.
        seed: Random seed of each method's fine-tuning; default: 0.
        folder: Folder for the model files. The default is the folder `deployment` in the run's
            folder. If `trained` is a Keras model, the default is a temporary folder.

    Raises:
        InvalidInput: Two methods have the same label, or accuracy is undefined for the data.
            `InvalidInput` is also raised if `batch_size`, `repeats` or `calls` is below 1.
    """
    import keras
    import pandas as pd

    _validate(methods, batch_size=batch_size, repeats=repeats, calls=calls)
    data = _data(trained, data)
    # The uncompiled copy has no optimizer state, which would otherwise count in the file size.
    original = uncompiled_copy(trained.model() if isinstance(trained, Run) else trained)
    # `right_answers` raises an error if accuracy is undefined for the data.
    before = right_answers(original, data, batch_size)
    if folder is None and isinstance(trained, Run):
        folder = trained.path / "deployment"
    rows: dict[str, Row] = {}
    models: dict[str, keras.Model] = {}
    with _target_folder(folder) as target_folder:
        models[ORIGINAL], rows[ORIGINAL] = _write_and_read(
            CompressionMethod(), original, ORIGINAL, target_folder
        )
        rows[ORIGINAL] |= {"family": ORIGINAL, "what": "uncompressed", "extra_epochs": 0}
        for method in methods:
            # The seed is set again for each method, so that results do not depend on earlier
            # methods.
            keras.utils.set_random_seed(seed)
            row: Row = {"family": method.family, "extra_epochs": method.extra_epochs}
            try:
                compressed = method.apply(original, data)
            except InvalidInput as error:
                # A method that cannot compress the model still gets a row in the table, with the
                # reason.
                rows[method.label] = row | {"what": str(error)}
                continue
            models[method.label], files = _write_and_read(
                method, compressed.model, method.label, target_folder
            )
            rows[method.label] = row | files | {"what": compressed.what}
        for name, model in models.items():
            rows[name] |= _answers(before, right_answers(model, data, batch_size))
        _add_times(rows, models, data.x_test[:batch_size], repeats, calls)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=COLUMNS).rename_axis("method")
    table["smaller"] = table["bytes"][ORIGINAL] / table["bytes"]
    return table


def _write_and_read(
    method: CompressionMethod, model: keras.Model, label: str, target_folder: Path
) -> tuple[keras.Model, Row]:
    """Write a model to a file; return the model as read from the file, and the file's size."""
    path = target_folder / (re.sub(r"[^A-Za-z0-9.]+", "-", label) + method.suffix)
    method.write(model, path)
    plain = target_folder / ".plain.keras"
    model.save(plain)
    figures = {
        "bytes": path.stat().st_size,
        "keras_gzip_bytes": gzip_bytes(plain),
        "parameters": model.count_params(),
        "file": path.name,
    }
    plain.unlink()
    return method.read(path), figures


def _answers(before: NDArray[np.bool_], after: NDArray[np.bool_]) -> Row:
    """Compare the right answers of the original model with those of the compressed model."""
    lost, gained = int(np.sum(before & ~after)), int(np.sum(after & ~before))
    return {
        "accuracy": float(after.mean()),
        "right": int(after.sum()),
        "lost": lost,
        "gained": gained,
        "chance": chance(lost, gained),
        "test_answers": len(after),
    }


def _add_times(
    rows: dict[str, Row],
    models: dict[str, keras.Model],
    batch: NDArray[np.generic],
    repeats: int,
    calls: int,
) -> None:
    times = inference_ms(models, batch, repeats, calls)
    for name, milliseconds in times.items():
        # Each ratio compares two models within one repeat, because a repeat times all models within
        # a short interval.
        ratios = milliseconds / times[ORIGINAL]
        rows[name] |= {
            "inference_ms": float(np.median(milliseconds)),
            "time_ratio": float(np.median(ratios)),
            "time_ratio_low": float(ratios.min()),
            "time_ratio_high": float(ratios.max()),
            "batch_size": len(batch),
        }


def _validate(methods: Sequence[CompressionMethod], **numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise InvalidInput(f"{name}={value!r} is impossible; give a whole number of at least 1")
    refuse_alike(methods)


def refuse_alike(methods: Sequence[CompressionMethod]) -> None:
    """Raise InvalidInput if there are no methods, or if two methods have the same label."""
    labels = [method.label for method in methods]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated or not labels:
        problem = f"{', '.join(repeated)} twice" if repeated else "no methods"
        raise InvalidInput(
            f"the list of methods contains {problem}; give one or more methods, each of them once"
        )


def _data(trained: Run | keras.Model, data: Dataset | None) -> Dataset:
    if data is not None:
        return data
    name = trained.experiment["dataset"] if isinstance(trained, Run) else None
    if not isinstance(name, str):
        raise LabkitError(
            "no data set is given, and the trained model has no run that names one: give "
            "data=labkit.datasets.load(…), or a Dataset"
        )
    return datasets.load(name, **trained.experiment["dataset_options"])


@contextmanager
def _target_folder(folder: Path | str | None) -> Iterator[Path]:
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)
