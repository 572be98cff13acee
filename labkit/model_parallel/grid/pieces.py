"""Division of a Keras model into a chain of layers that a grid of machines can compute."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import keras

from labkit.common.errors import InvalidInput
from labkit.model_parallel.functional import ELEMENTWISE, is_plain, nodes_of, weight_modification
from labkit.models.unshared import LocallyConnected2D
from labkit.schedules.grid import GridLayer, Shape, window

ALLOWED = (
    "LocallyConnected2D, Conv2D, MaxPooling2D and AveragePooling2D without padding, Flatten, Dense "
    "after Flatten, and elementwise activations; no regularizers, no constraints"
)
_POOLING = (keras.layers.MaxPooling2D, keras.layers.AveragePooling2D)
_ACTIVATIONS = (
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
)


class LayerPiece(NamedTuple):
    """A layer that a grid of machines divides, with the elementwise Keras layers that follow it.

    Attributes:
        plane: Output shape and kernel window of the layer (`GridLayer`).
        layer: The Keras layer of the whole model.
        behind: Elementwise layers that are applied to the output of `layer`.
    """

    plane: GridLayer
    layer: keras.Layer
    behind: list[keras.Layer]


def cut(model: keras.Model) -> list[LayerPiece]:
    """Return the layers of a model as `LayerPiece` objects, starting with the input.

    Raises:
        InvalidInput: If a layer cannot be divided, or if the model has branches.
    """
    shape = tuple(model.inputs[0].shape[1:]) if getattr(model, "inputs", None) else (None,)
    if None in shape:
        raise InvalidInput(
            "the model does not define the size of its input; begin the model with keras.Input"
        )
    size: Shape = (shape[0], shape[1], shape[2]) if len(shape) == 3 else (1, 1, prod(shape))
    first, *layers = _chain_of_layers(model)
    pieces = [LayerPiece(GridLayer("input", "input", size, trains=False), first, [])]
    flat = len(shape) == 1
    for layer in layers:
        if isinstance(layer, keras.layers.Flatten):
            flat = True
        elif _is_elementwise(layer):
            pieces[-1].behind.append(layer)
        else:
            pieces.append(LayerPiece(_plane(layer, pieces[-1].plane.shape, flat), layer, []))
    return pieces


def _plane(layer: keras.Layer, before: Shape, flat: bool) -> GridLayer:
    trains = bool(layer.trainable_variables)
    if _is_divisible(layer):
        if type(layer) is keras.layers.Dense and flat:
            return GridLayer(layer.name, "units", (1, 1, layer.units), trains=trains)
        sizes = None if flat else _window_of(layer)
        if sizes is not None:
            channels = getattr(layer, "filters", before[2])
            return window(layer.name, before, channels, *sizes, trains)
    why = f": {reason}" if (reason := weight_modification(layer)) else ""
    raise InvalidInput(
        f"layer {layer.name!r} ({type(layer).__name__}) cannot be divided over a grid of machines"
        f"{why}; allowed: {ALLOWED}"
    )


def _window_of(layer: keras.Layer) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return a layer's kernel size and strides, or None if it has no window or uses padding."""
    if type(layer) is LocallyConnected2D:
        return layer.kernel_size, layer.strides
    if getattr(layer, "padding", "") != "valid" or layer.data_format != "channels_last":
        return None
    if type(layer) is keras.layers.Conv2D and layer.groups == 1 and layer.dilation_rate == (1, 1):
        return layer.kernel_size, layer.strides
    return (layer.pool_size, layer.strides) if type(layer) in _POOLING else None


def _chain_of_layers(model: keras.Model) -> list[keras.Layer]:
    """Return a model's layers in order; fail if a layer reads anything but the previous one."""
    graph = model._functional if isinstance(model, keras.Sequential) else model
    nodes = nodes_of(graph) if hasattr(graph, "_nodes_by_depth") else []
    operations = [node.operation for node in nodes]
    distinct = len({id(operation) for operation in operations}) == len(operations)
    row = nodes and len(graph._nodes_by_depth) == len(nodes)  # whether the model has no branches
    if not row or not distinct or any(len(node.arguments.keras_tensors) > 1 for node in nodes):
        raise InvalidInput(
            "a grid of machines needs a chain of layers, each called once; give a "
            "keras.Sequential that starts with keras.Input, or a functional keras.Model without "
            "branches"
        )
    return operations


def _is_elementwise(layer: keras.Layer) -> bool:
    return type(layer) in _ACTIVATIONS and _is_divisible(layer)


def _is_divisible(layer: keras.Layer) -> bool:
    """Return whether a layer's activation is elementwise and its weights can be divided."""
    activation = getattr(layer, "activation", None)
    by_element = activation is None or activation.__name__ in ELEMENTWISE
    return by_element and is_plain(layer) and not weight_modification(layer)
