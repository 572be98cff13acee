"""Every architecture of `keras.applications`, by its name in snake case, untrained."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from labkit.datasets import Shapes

if TYPE_CHECKING:
    import keras

# Written out, so that a kernel can check a name without importing TensorFlow.
APPLICATIONS = {
    "convnext_base": "ConvNeXtBase",
    "convnext_large": "ConvNeXtLarge",
    "convnext_small": "ConvNeXtSmall",
    "convnext_tiny": "ConvNeXtTiny",
    "convnext_xlarge": "ConvNeXtXLarge",
    "densenet121": "DenseNet121",
    "densenet169": "DenseNet169",
    "densenet201": "DenseNet201",
    "efficientnet_b0": "EfficientNetB0",
    "efficientnet_b1": "EfficientNetB1",
    "efficientnet_b2": "EfficientNetB2",
    "efficientnet_b3": "EfficientNetB3",
    "efficientnet_b4": "EfficientNetB4",
    "efficientnet_b5": "EfficientNetB5",
    "efficientnet_b6": "EfficientNetB6",
    "efficientnet_b7": "EfficientNetB7",
    "efficientnet_v2_b0": "EfficientNetV2B0",
    "efficientnet_v2_b1": "EfficientNetV2B1",
    "efficientnet_v2_b2": "EfficientNetV2B2",
    "efficientnet_v2_b3": "EfficientNetV2B3",
    "efficientnet_v2_l": "EfficientNetV2L",
    "efficientnet_v2_m": "EfficientNetV2M",
    "efficientnet_v2_s": "EfficientNetV2S",
    "inception_resnet_v2": "InceptionResNetV2",
    "inception_v3": "InceptionV3",
    "mobilenet": "MobileNet",
    "mobilenet_v2": "MobileNetV2",
    "mobilenet_v3_large": "MobileNetV3Large",
    "mobilenet_v3_small": "MobileNetV3Small",
    "nasnet_large": "NASNetLarge",
    "nasnet_mobile": "NASNetMobile",
    "resnet101": "ResNet101",
    "resnet101_v2": "ResNet101V2",
    "resnet152": "ResNet152",
    "resnet152_v2": "ResNet152V2",
    "resnet50": "ResNet50",
    "resnet50_v2": "ResNet50V2",
    "vgg16": "VGG16",
    "vgg19": "VGG19",
    "xception": "Xception",
}


def smallest(name: str) -> int:
    """Return the smallest height and width, in pixels, that Keras accepts for the architecture."""
    return {"inception_v3": 75, "inception_resnet_v2": 75, "xception": 71}.get(name, 32)


def application(name: str, shapes: Shapes) -> keras.Model:
    """Return the architecture with random weights, scores without softmax, and our own scaling."""
    import keras

    create = getattr(keras.applications, APPLICATIONS[name])
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
