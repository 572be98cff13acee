"""All architectures of `keras.applications` as named models, without trained weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from labkit.common.options import Options
from labkit.datasets import Shapes

if TYPE_CHECKING:
    import keras

# The names are listed here, so that the notebook's kernel can check a name without importing
# TensorFlow.
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

    The function's name has capitals and no underscores, for example:

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
    # EfficientNet B0 to B7 have no option to omit rescaling, but the batch normalisation after
    # their first convolution compensates for it.
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
