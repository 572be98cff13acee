"""The models: name to options and builder; how one is checked against the data, and built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from labkit.common.errors import InvalidInput
from labkit.common.options import lookup, parse
from labkit.datasets import Dataset, Shapes
from labkit.models.applications import APPLICATIONS, application, smallest
from labkit.models.networks import (
    CnnOptions,
    LinearOptions,
    LocallyConnectedOptions,
    MlpOptions,
    RnnOptions,
    cnn,
    linear,
    locally_connected,
    mlp,
    rnn,
)
from labkit.models.transformer import TransformerOptions, transformer
from labkit.models.unbuilt import ModelOptions, dense_plane, first_plane
from labkit.schedules.grid import Layer

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class ModelSpec:
    """How a model is built: `build(options, shapes)`; what is known before is in its options.

    `pixels` are the height and width of the smallest image, where the options do not say it.
    """

    build: Callable[[Any, Shapes], keras.Model]
    options: type[ModelOptions] = ModelOptions
    pixels: int = 0


# A model more is its options and builder in a file, and its line here.
MODELS: dict[str, ModelSpec] = {
    "linear": ModelSpec(linear, LinearOptions),
    "mlp": ModelSpec(mlp, MlpOptions),
    "cnn": ModelSpec(cnn, CnnOptions),
    "rnn": ModelSpec(rnn, RnnOptions),
    "transformer": ModelSpec(transformer, TransformerOptions),
    "locally_connected": ModelSpec(locally_connected, LocallyConnectedOptions),
    **{name: ModelSpec(partial(application, name), pixels=smallest(name)) for name in APPLICATIONS},
}


def check(
    name: str, options: Mapping[str, object], data: Dataset | Shapes | None = None
) -> ModelOptions:
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


def blocks(name: str, options: Mapping[str, object]) -> int | None:
    """Return how many blocks the chain of a model has; None where only ranks know.

    Raises InvalidInput as `check`.
    """
    return check(name, options).blocks


def widest(name: str, options: Mapping[str, object], data: Dataset | Shapes) -> int | None:
    """Return the most slices into which a layer of a model can be cut; None where only ranks know.

    Raises InvalidInput as `check`.
    """
    return check(name, options, data).widest(_shapes(data))


def planes(name: str, options: Mapping[str, object], shapes: Shapes) -> list[Layer]:
    """Return a model's layers from the input to the loss, as machines in a grid see them.

    Raises InvalidInput for a model of which a layer cannot be cut, and as `check`.
    """
    layers = check(name, options, shapes).hidden([first_plane(shapes)])
    if layers is None:
        # Those that say more than the base, which knows of no such layers.
        able = [one for one, its in MODELS.items() if its.options.hidden is not ModelOptions.hidden]
        raise InvalidInput(
            f"model {name!r} cannot be cut over a grid of machines; allowed: {', '.join(able)}"
        )
    layers.append(dense_plane(layers, shapes.outputs))
    return [*layers, Layer("loss", "loss", layers[-1].shape, trains=False)]


def check_recurrent(name: str) -> None:
    """Raise InvalidInput for a model whose layers do not go from step to step."""
    if not lookup(MODELS, name, "model").options.recurrent:
        able = ", ".join(other for other, its in MODELS.items() if its.options.recurrent)
        raise InvalidInput(
            f"model {name!r} has no recurrent layers; allowed: {able}, or a callable that returns "
            "a model of your own"
        )


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


def _check_fit(name: str, spec: ModelSpec, options: ModelOptions, shapes: Shapes) -> None:
    steps, least = shapes.task == "next_character", spec.pixels or options.smallest
    if steps and not options.sequences:
        able = ", ".join(other for other, its in MODELS.items() if its.options.sequences)
        raise InvalidInput(
            f"model {name!r} cannot predict the next character of a sequence; allowed: {able}"
        )
    if options.codes and not steps:
        able = ", ".join(
            other for other, its in MODELS.items() if not (its.options.codes or _wants_image(its))
        )
        raise InvalidInput(
            f"model {name!r} reads sequences of characters, not examples of shape "
            f"{list(shapes.input_shape)}; choose a data set such as 'shakespeare', or a model such "
            f"as {able}"
        )
    if least and (len(shapes.input_shape) != 3 or min(shapes.input_shape[:2]) < least):
        raise InvalidInput(
            f"model {name!r} does not fit examples of shape {list(shapes.input_shape)}; "
            f"allowed: images of at least [{least}, {least}, channels]; "
            "choose another data set or model"
        )


def _wants_image(spec: ModelSpec) -> bool:
    return bool(spec.pixels or spec.options().smallest)
