"""The table of named models, with functions that build a model or check it against a data set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from labkit.common.errors import InvalidInput
from labkit.common.options import Options, lookup, parse
from labkit.datasets import Dataset, Shapes
from labkit.models.networks import (
    CnnOptions,
    LinearOptions,
    LocallyConnectedOptions,
    MlpOptions,
    ModelOptions,
    RnnOptions,
    TransformerOptions,
    cnn,
    dense_plane,
    first_plane,
    linear,
    locally_connected,
    mlp,
    rnn,
    transformer,
)
from labkit.schedules.grid_layers import GridLayer

if TYPE_CHECKING:
    import keras


# The tuple APPLICATIONS lists the names of architectures. The notebook's kernel can check a name in
# the tuple without importing TensorFlow.
APPLICATIONS = (
    *(f"convnext_{size}" for size in ("base", "large", "small", "tiny", "xlarge")),
    *(f"densenet{layers}" for layers in (121, 169, 201)),
    *(f"efficientnet_b{size}" for size in range(8)),
    *(f"efficientnet_v2_{size}" for size in ("b0", "b1", "b2", "b3", "l", "m", "s")),
    *("inception_resnet_v2", "inception_v3"),
    *("mobilenet", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small"),
    *("nasnet_large", "nasnet_mobile"),
    *(f"resnet{layers}{version}" for layers in (101, 152, 50) for version in ("", "_v2")),
    *("vgg16", "vgg19", "xception"),
)


def smallest(name: str) -> int:
    """Return the minimum height and width, in pixels, of an architecture's input images."""
    return {"inception_v3": 75, "inception_resnet_v2": 75, "xception": 71}.get(name, 32)


def class_of(name: str) -> Callable[..., keras.Model]:
    """Return the Keras function that creates an architecture.

    The name of the Keras function has capitals and no underscores, for example:

        efficientnet_v2_b0  ->  keras.applications.EfficientNetV2B0
    """
    import keras

    functions = {key.lower(): key for key in dir(keras.applications) if key[0].isupper()}
    create: Callable[..., keras.Model] = getattr(
        keras.applications, functions[name.replace("_", "")]
    )
    return create


def application(name: str, options: Options, shapes: Shapes) -> keras.Model:
    """Return an architecture with random weights, without a final softmax and without rescaling."""

    create = class_of(name)
    # Some architectures rescale pixels from 0…255, but the pixels of labkit's data sets are 0…1.
    # EfficientNet B0 to B7 have no option to omit rescaling. Batch normalisation after the first
    # convolution of EfficientNet compensates for the rescaling.
    preprocessing = {"include_preprocessing": False}
    if "include_preprocessing" not in inspect.signature(create).parameters:
        preprocessing = {}
    return create(
        weights=None,
        input_shape=shapes.input_shape,
        classes=shapes.outputs,
        classifier_activation=None,
        **preprocessing,
    )


@dataclass(frozen=True)
class ModelSpec:
    """The specification of a named model: its builder and the class of its options.

    Attributes:
        build: Function of (options, shapes) that returns the uncompiled model.
        options: The class of the model's options, derived from `ModelOptions`.
        pixels: The minimum height and width of an image, in pixels. If the minimum depends on the
            options, `pixels` is 0.
    """

    build: Callable[[Any, Shapes], keras.Model]
    options: type[ModelOptions] = ModelOptions
    pixels: int = 0


# To add a named model, define its options and builder in a file. Then add an entry for the named
# model to the dict `MODELS`.
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
    """Return the validated options of a model, without importing TensorFlow.

    With `data` (a data set, or its shapes), `check` also tests whether the model fits the data.
    Raises InvalidInput for an unknown model, an unknown option, an invalid value, or data that do
    not fit.
    """
    spec = lookup(MODELS, name, "model")
    parsed = parse(spec.options, f"model {name!r}", options)
    if data is not None:
        _check_fit(name, spec, parsed, _shapes(data))
    return parsed


def build(name: str, data: Dataset | Shapes, **options: Any) -> keras.Model:
    """Return an uncompiled named model that fits the data; its outputs are scores (logits).

    Call `keras.utils.set_random_seed` first for reproducible weights. Raises InvalidInput in the
    same cases as `check`.
    """
    parsed = check(name, options, data)
    return MODELS[name].build(parsed, _shapes(data))


def blocks(name: str, options: Mapping[str, object]) -> int | None:
    """Return the number of pipeline blocks of a model; None if it is unknown before the build.

    Raises InvalidInput in the same cases as `check`.
    """
    return check(name, options).blocks


def max_slices(name: str, options: Mapping[str, object], data: Dataset | Shapes) -> int | None:
    """Return the maximum number of slices of any layer; None if not yet known.

    Raises InvalidInput in the same cases as `check`.
    """
    return check(name, options, data).max_slices(_shapes(data))


def grid_layers(name: str, options: Mapping[str, object], shapes: Shapes) -> list[GridLayer]:
    """Return the layer descriptions that a grid of machines needs in order to divide a model.

    Raises InvalidInput for a model with a layer that a grid cannot divide. Raises InvalidInput also
    in the same cases as `check`.
    """
    layers = check(name, options, shapes).hidden([first_plane(shapes)])
    if layers is None:
        # A grid of machines can divide a model whose options class overrides the method `hidden`.
        allowed = [
            model
            for model, spec in MODELS.items()
            if spec.options.hidden is not ModelOptions.hidden
        ]
        raise InvalidInput(
            f"model {name!r} cannot be divided over a grid of machines; allowed: "
            f"{', '.join(allowed)}"
        )
    layers.append(dense_plane(layers, shapes.outputs))
    return [*layers, GridLayer("loss", "loss", layers[-1].shape, trains=False)]


def check_recurrent(name: str) -> None:
    """Raise InvalidInput if the named model has no recurrent layers."""
    if not lookup(MODELS, name, "model").options.recurrent:
        allowed = ", ".join(model for model, spec in MODELS.items() if spec.options.recurrent)
        raise InvalidInput(
            f"model {name!r} has no recurrent layers; allowed: {allowed}, or a callable that "
            "returns a custom model"
        )


def task_loss(task: str) -> keras.losses.Loss:
    """Return the loss for a task: sparse cross-entropy of logits, or mean squared error."""
    import keras

    if task == "regression":
        return keras.losses.MeanSquaredError()
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def task_metrics(task: str) -> list[keras.metrics.Metric]:
    """Return the metrics for a task: `mean_absolute_error` for regression, or else `accuracy`."""
    import keras

    if task == "regression":
        return [keras.metrics.MeanAbsoluteError()]
    return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]


def _shapes(data: Dataset | Shapes) -> Shapes:
    return data.shapes if isinstance(data, Dataset) else data


def _check_fit(name: str, spec: ModelSpec, options: ModelOptions, shapes: Shapes) -> None:
    steps, minimum = shapes.task == "next_character", spec.pixels or options.smallest
    if steps and not options.sequences:
        allowed = ", ".join(
            model for model, other_spec in MODELS.items() if other_spec.options.sequences
        )
        raise InvalidInput(
            f"model {name!r} cannot predict the next character of a sequence; allowed: {allowed}"
        )
    if options.codes and not steps:
        allowed = ", ".join(
            model
            for model, other_spec in MODELS.items()
            if not (other_spec.options.codes or _wants_image(other_spec))
        )
        raise InvalidInput(
            f"model {name!r} reads sequences of characters, not examples of shape "
            f"{list(shapes.input_shape)}; choose a data set such as 'shakespeare', or a model such "
            f"as {allowed}"
        )
    if minimum and (len(shapes.input_shape) != 3 or min(shapes.input_shape[:2]) < minimum):
        raise InvalidInput(
            f"model {name!r} does not fit examples of shape {list(shapes.input_shape)}; "
            f"allowed: images of at least [{minimum}, {minimum}, channels]; "
            "choose another data set or model"
        )


def _wants_image(spec: ModelSpec) -> bool:
    return bool(spec.pixels or spec.options().smallest)
