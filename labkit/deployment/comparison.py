"""The table of a model before and after each compression: accuracy, bytes on disk, time."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit import datasets
from labkit.common.errors import InvalidInput, LabkitError
from labkit.datasets import Dataset
from labkit.deployment import metrics
from labkit.deployment.smaller_models import Method, copy_of
from labkit.records.run import Run

if TYPE_CHECKING:
    import keras
    import pandas

ORIGINAL = "original"
Row: TypeAlias = dict[str, float | str]  # of the table, by its columns
COLUMNS = (
    *("family", "what", "extra_epochs", "accuracy", "right", "lost", "gained", "chance"),
    *("test_answers", "parameters", "bytes", "smaller", "keras_gzip_bytes"),
    *("inference_ms", "time_ratio", "time_ratio_low", "time_ratio_high", "batch_size", "file"),
)


def compare(
    trained: Run | keras.Model,
    methods: Sequence[Method],
    data: Dataset | None = None,
    batch_size: int = 128,
    repeats: int = 7,
    calls: int = 20,
    seed: int = 0,
    folder: Path | str | None = None,
) -> pandas.DataFrame:
    r"""Compress a trained model in each way, and measure what each file holds.

    A row a method, the original first. What is measured is the model read back from its file.
    `accuracy` on the test data; `lost` and `gained`: answers that were right in the original only,
    or here only, and `chance`, the sign test's probability of such a split; `bytes` of the file on
    disk: a .keras file without optimizer state, or the sparse file; `smaller`: the original's bytes
    over these; `keras_gzip_bytes`: the same model's .keras file after gzip -9, which asks no method
    for a format of its own; `inference_ms`: median over repeats of the median call on one batch;
    `time_ratio`: to the original's in the same repeat, with the least and the largest. `what`
    says what was done; where a method can do nothing with the model, why, and figures are missing.

    Args:
        trained: a completed run, or a model of Keras's; it stays as it is.
        methods: such as `[Quantize(mode="int8"), Prune(sparsity=0.9), LowRank()]`.
        data: training data to fine-tune with and test data; of a run by default its own.
        batch_size: samples of the timed batch.
        repeats: rounds in which the models take turns; 10 calls each warm up before.
        calls: of each model in a round.
        seed: of each method's training.
        folder: where the files stay; of a run by default `deployment` in its folder; else nowhere.

    Raises:
        InvalidInput: methods of the same label, a number below 1, data without an accuracy.
    """
    import keras
    import pandas as pd

    _check(methods, batch_size=batch_size, repeats=repeats, calls=calls)
    data = _data(trained, data)
    # A copy: what it saves holds no optimizer state, which would count as bytes of the model.
    original = copy_of(trained.model() if isinstance(trained, Run) else trained)
    before = metrics.right_answers(original, data, batch_size)  # refuses what has no accuracy
    if folder is None and isinstance(trained, Run):
        folder = trained.path / "deployment"
    rows: dict[str, Row] = {}
    models: dict[str, keras.Model] = {}
    with _place(folder) as place:
        models[ORIGINAL], rows[ORIGINAL] = _written(Method(), original, ORIGINAL, place)
        rows[ORIGINAL] |= {"family": ORIGINAL, "what": "as it was trained", "extra_epochs": 0}
        for method in methods:
            # Anew for each: what a method gives shall not depend on which ones came before it.
            keras.utils.set_random_seed(seed)
            row: Row = {"family": method.family, "extra_epochs": method.extra_epochs}
            try:
                compressed = method.apply(original, data)
            except InvalidInput as error:
                # What cannot be done is a row of the table, too: a person asked for it.
                rows[method.label] = row | {"what": str(error)}
                continue
            models[method.label], files = _written(method, compressed.model, method.label, place)
            rows[method.label] = row | files | {"what": compressed.what}
        for name, model in models.items():
            rows[name] |= _answers(before, metrics.right_answers(model, data, batch_size))
        _add_times(rows, models, data.x_test[:batch_size], repeats, calls)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=COLUMNS).rename_axis("method")
    table["smaller"] = table["bytes"][ORIGINAL] / table["bytes"]
    return table


def _written(
    method: Method, model: keras.Model, label: str, place: Path
) -> tuple[keras.Model, Row]:
    """The model as its file has it, and the file's figures."""
    path = place / (re.sub(r"[^A-Za-z0-9.]+", "-", label) + method.suffix)
    method.write(model, path)
    plain = place / ".plain.keras"
    model.save(plain)
    figures = {
        "bytes": path.stat().st_size,
        "keras_gzip_bytes": metrics.gzip_bytes(plain),
        "parameters": model.count_params(),
        "file": path.name,
    }
    plain.unlink()
    return method.read(path), figures


def _answers(before: NDArray[np.bool_], after: NDArray[np.bool_]) -> Row:
    """Right answers, a flag each, held against those of the original."""
    lost, gained = int(np.sum(before & ~after)), int(np.sum(after & ~before))
    return {
        "accuracy": float(after.mean()),
        "right": int(after.sum()),
        "lost": lost,
        "gained": gained,
        "chance": metrics.chance(lost, gained),
        "test_answers": len(after),
    }


def _add_times(
    rows: dict[str, Row],
    models: dict[str, keras.Model],
    batch: NDArray[np.generic],
    repeats: int,
    calls: int,
) -> None:
    times = metrics.inference_ms(models, batch, repeats, calls)
    for name, milliseconds in times.items():
        # By repeat: both were measured within the same moments.
        ratios = milliseconds / times[ORIGINAL]
        rows[name] |= {
            "inference_ms": float(np.median(milliseconds)),
            "time_ratio": float(np.median(ratios)),
            "time_ratio_low": float(ratios.min()),
            "time_ratio_high": float(ratios.max()),
            "batch_size": len(batch),
        }


def _check(methods: Sequence[Method], **numbers: int) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise InvalidInput(f"{name}={value!r} is impossible; give a whole number from 1")
    refuse_alike(methods)


def refuse_alike(methods: Sequence[Method]) -> None:
    """Refuse methods that no table tells apart, and none at all. Raises: InvalidInput."""
    labels = [method.label for method in methods]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice or not labels:
        given = f"{', '.join(twice)} twice" if twice else "no methods"
        raise InvalidInput(f"{given} cannot be compared; give one or more that differ")


def _data(trained: Run | keras.Model, data: Dataset | None) -> Dataset:
    if data is not None:
        return data
    name = trained.experiment["dataset"] if isinstance(trained, Run) else None
    if not isinstance(name, str):
        raise LabkitError(
            "the data are not known by name: give data=labkit.datasets.load(…), or a Dataset"
        )
    return datasets.load(name, **trained.experiment["dataset_options"])


@contextmanager
def _place(folder: Path | str | None) -> Iterator[Path]:
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)
