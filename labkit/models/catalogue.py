"""The models: name to options and builder; how one is checked against the data, and built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.datasets import Dataset, Shapes
from labkit.errors import InvalidInput
from labkit.models.applications import APPLICATIONS, application, smallest
from labkit.models.networks import CnnOptions, MlpOptions, RnnOptions, cnn, linear, mlp, rnn
from labkit.options import Options, lookup, parse

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class ModelSpec:
    """How a model is built: `build(options, shapes)`; `pixels(options)` if it wants an image.

    `sequences` says whether it can answer every step of a sequence.
    """

    build: Callable[[Any, Shapes], keras.Model]
    options: type[Options] = Options
    pixels: Callable[[Any], int] | None = None
    sequences: bool = False


def _application(name: str) -> ModelSpec:
    return ModelSpec(
        lambda options, shapes: application(name, shapes), pixels=lambda options: smallest(name)
    )


MODELS: dict[str, ModelSpec] = {
    "linear": ModelSpec(linear),
    "mlp": ModelSpec(mlp, MlpOptions),
    "cnn": ModelSpec(cnn, CnnOptions, pixels=lambda options: options.smallest),
    "rnn": ModelSpec(rnn, RnnOptions, sequences=True),
    **{name: _application(name) for name in APPLICATIONS},
}


def check(
    name: str, options: Mapping[str, object], data: Dataset | Shapes | None = None
) -> Options:
    """Return the model's options, checked, without importing TensorFlow.

    With `data` (a data set, or its shapes) the model must also fit it. Raises InvalidInput for an
    unknown model, an unknown option, an impossible value, or data that do not fit.
    """
    spec = lookup(MODELS, name, "model")
    parsed = parse(spec.options, f"model {name!r}", options)
    if data is not None:
        _check_fit(name, spec, parsed, _shapes(data))
    return parsed


def build(name: str, data: Dataset | Shapes, **options: Any) -> keras.Model:
    """Return the model for these data, uncompiled; its outputs are scores (logits).

    `keras.utils.set_random_seed` before the call fixes the weights. Raises InvalidInput as `check`.
    """
    parsed = check(name, options, data)
    return MODELS[name].build(parsed, _shapes(data))


def task_loss(task: str) -> keras.losses.Loss:
    """Return the loss of a task: cross-entropy of scores, or the mean squared error."""
    import keras

    if task == "regression":
        return keras.losses.MeanSquaredError()
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def task_metrics(task: str) -> list[keras.metrics.Metric]:
    """Return the metrics of a task: `accuracy`, or `mean_absolute_error` of a regression."""
    import keras

    if task == "regression":
        return [keras.metrics.MeanAbsoluteError()]
    return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]


def _shapes(data: Dataset | Shapes) -> Shapes:
    return data.shapes if isinstance(data, Dataset) else data


def _check_fit(name: str, spec: ModelSpec, options: Options, shapes: Shapes) -> None:
    if shapes.task == "next_character" and not spec.sequences:
        able = ", ".join(other for other, its in MODELS.items() if its.sequences)
        raise InvalidInput(
            f"model {name!r} cannot predict the next character of a sequence; allowed: {able}"
        )
    if spec.pixels is None:
        return
    least = spec.pixels(options)
    if len(shapes.input_shape) != 3 or min(shapes.input_shape[:2]) < least:
        raise InvalidInput(
            f"model {name!r} does not fit examples of shape {list(shapes.input_shape)}; "
            f"allowed: images of at least [{least}, {least}, channels]; "
            "choose another data set or model"
        )
