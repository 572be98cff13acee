"""The models: name to options and builder; how one is checked against the data, and built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from labkit.common.errors import InvalidInput
from labkit.common.options import Options, lookup, parse
from labkit.datasets import Dataset, Shapes
from labkit.models.applications import APPLICATIONS, application, smallest
from labkit.models.locally_connected import LocallyConnectedOptions, locally_connected
from labkit.models.networks import CnnOptions, MlpOptions, RnnOptions, cnn, linear, mlp, rnn
from labkit.models.transformer import TransformerOptions, transformer

if TYPE_CHECKING:
    import keras


@dataclass(frozen=True)
class ModelSpec:
    """How a model is built: `build(options, shapes)`; `pixels(options)` if it wants an image.

    `sequences` says whether it can answer every step of a sequence, `codes` whether it can do
    nothing else. `blocks(options)` counts what `stages.Chain` finds in the built model;
    `recurrent` says whether its layers go from step to step. `widest(options, shapes)` is the most
    units, filters, words or heads that a layer of it has.
    """

    build: Callable[[Any, Shapes], keras.Model]
    options: type[Options] = Options
    pixels: Callable[[Any], int] | None = None
    sequences: bool = False
    codes: bool = False
    blocks: Callable[[Any], int] | None = None
    recurrent: bool = False
    widest: Callable[[Any, Shapes], int] | None = None


def _application(name: str) -> ModelSpec:
    return ModelSpec(
        lambda options, shapes: application(name, shapes), pixels=lambda options: smallest(name)
    )


MODELS: dict[str, ModelSpec] = {
    "linear": ModelSpec(
        linear, blocks=lambda options: 2, widest=lambda options, shapes: shapes.outputs
    ),
    "mlp": ModelSpec(
        mlp,
        MlpOptions,
        blocks=lambda options: options.blocks,
        widest=lambda options, shapes: max(*options.widths, shapes.outputs, 1),
    ),
    "cnn": ModelSpec(
        cnn,
        CnnOptions,
        pixels=lambda options: options.smallest,
        blocks=lambda options: options.blocks,
        widest=lambda options, shapes: max(*options.filters, options.dense, shapes.outputs),
    ),
    "rnn": ModelSpec(
        rnn,
        RnnOptions,
        sequences=True,
        blocks=lambda options: options.layers + 2,
        recurrent=True,
        widest=lambda options, shapes: shapes.outputs,
    ),
    "transformer": ModelSpec(
        transformer,
        TransformerOptions,
        sequences=True,
        codes=True,
        blocks=lambda options: options.blocks,
        widest=lambda options, shapes: options.widest(shapes),
    ),
    "locally_connected": ModelSpec(
        locally_connected,
        LocallyConnectedOptions,
        pixels=lambda options: options.smallest,
        blocks=lambda options: options.blocks,
        widest=lambda options, shapes: shapes.outputs,
    ),
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


def blocks(name: str, options: Mapping[str, object]) -> int | None:
    """Return how many blocks the chain of a model has; None where that is known when it is built.

    Raises InvalidInput as `check`.
    """
    count = lookup(MODELS, name, "model").blocks
    return count(check(name, options)) if count else None


def widest(name: str, options: Mapping[str, object], data: Dataset | Shapes) -> int | None:
    """Return the most slices into which a layer of a model can be cut; None where only ranks know.

    Raises InvalidInput as `check`.
    """
    count = lookup(MODELS, name, "model").widest
    return count(check(name, options, data), _shapes(data)) if count else None


def check_recurrent(name: str) -> None:
    """Raise InvalidInput for a model whose layers do not go from step to step."""
    if not lookup(MODELS, name, "model").recurrent:
        able = ", ".join(other for other, its in MODELS.items() if its.recurrent)
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


def _check_fit(name: str, spec: ModelSpec, options: Options, shapes: Shapes) -> None:
    if shapes.task == "next_character" and not spec.sequences:
        able = ", ".join(other for other, its in MODELS.items() if its.sequences)
        raise InvalidInput(
            f"model {name!r} cannot predict the next character of a sequence; allowed: {able}"
        )
    if shapes.task != "next_character" and spec.codes:
        able = ", ".join(other for other, its in MODELS.items() if not its.codes and not its.pixels)
        raise InvalidInput(
            f"model {name!r} reads sequences of characters, not examples of shape "
            f"{list(shapes.input_shape)}; choose a data set such as 'shakespeare', or a model such "
            f"as {able}"
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
