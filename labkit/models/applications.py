"""Every architecture of `keras.applications`, by its name in snake case, untrained."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from labkit.common.options import Options
from labkit.datasets import Shapes

if TYPE_CHECKING:
    import keras

# Written out, so that a kernel can check a name without importing TensorFlow.
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
    """Return the smallest height and width, in pixels, that Keras accepts for the architecture."""
    return {"inception_v3": 75, "inception_resnet_v2": 75, "xception": 71}.get(name, 32)


def class_of(name: str) -> Callable[..., keras.Model]:
    """Return what makes the architecture: Keras has the same letters, some of them capitals.

    efficientnet_v2_b0  ->  keras.applications.EfficientNetV2B0
    """
    import keras

    known = {each.lower(): each for each in dir(keras.applications) if each[0].isupper()}
    create: Callable[..., keras.Model] = getattr(keras.applications, known[name.replace("_", "")])
    return create


def application(name: str, options: Options, shapes: Shapes) -> keras.Model:
    """Return the architecture with random weights, scores without softmax, and our own scaling."""

    create = class_of(name)
    # Several rescale from 0…255 themselves; our pixels are 0…1. (EfficientNet B0 to B7 cannot be
    # told so: there the batch normalisation behind the first convolution makes up for it.)
    own = {"include_preprocessing": False}
    if "include_preprocessing" not in inspect.signature(create).parameters:
        own = {}
    return create(
        weights=None,
        input_shape=shapes.input_shape,
        classes=shapes.outputs,
        classifier_activation=None,
        **own,
    )
