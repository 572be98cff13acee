"""A Keras model as pieces that machines in a grid can share: what is cut, and how."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import keras

from labkit.common.errors import InvalidInput
from labkit.model_parallel.functional import ELEMENTWISE, adapted, is_plain, nodes_of
from labkit.models.unshared import LocallyConnected2D
from labkit.schedules.grid import Layer, Shape, window

ALLOWED = (
    "LocallyConnected2D, Conv2D, MaxPooling2D and AveragePooling2D without padding, Flatten, Dense "
    "behind it, and activations that work by element; no regularizers, no constraints"
)
_POOLING = (keras.layers.MaxPooling2D, keras.layers.AveragePooling2D)
_ACTIVATIONS = (
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
)


class Piece(NamedTuple):
    """A layer as machines see it, and what computes it.

    plane: what is held and read; layer: of the whole model; behind: layers
    that work by element on its output.
    """

    plane: Layer
    layer: keras.Layer
    behind: list[keras.Layer]


def cut(model: keras.Model) -> list[Piece]:
    """The pieces of a model from its input on.

    Raises:
        InvalidInput: a layer that cannot be cut, or layers that do not follow one another.
    """
    shape = tuple(model.inputs[0].shape[1:]) if getattr(model, "inputs", None) else (None,)
    if None in shape:
        raise InvalidInput("the model does not say its input's size; begin it with keras.Input")
    size: Shape = (shape[0], shape[1], shape[2]) if len(shape) == 3 else (1, 1, prod(shape))
    first, *layers = _in_a_row(model)
    pieces = [Piece(Layer("input", "input", size, trains=False), first, [])]
    flat = len(shape) == 1
    for layer in layers:
        if isinstance(layer, keras.layers.Flatten):
            flat = True
        elif _by_element(layer):
            pieces[-1].behind.append(layer)
        else:
            pieces.append(Piece(_plane(layer, pieces[-1].plane.shape, flat), layer, []))
    return pieces


def _plane(layer: keras.Layer, before: Shape, flat: bool) -> Layer:
    trains = bool(layer.trainable_variables)
    if _plain(layer):
        if type(layer) is keras.layers.Dense and flat:
            return Layer(layer.name, "units", (1, 1, layer.units), trains=trains)
        sizes = None if flat else _window_of(layer)
        if sizes is not None:
            channels = getattr(layer, "filters", before[2])
            return window(layer.name, before, channels, *sizes, trains)
    why = f": {made}" if (made := adapted(layer)) else ""
    raise InvalidInput(
        f"layer {layer.name!r} ({type(layer).__name__}) cannot be cut over a grid of machines"
        f"{why}; allowed: {ALLOWED}"
    )


def _window_of(layer: keras.Layer) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Kernel and strides of a layer of places; None where it is none, or one with padding."""
    if type(layer) is LocallyConnected2D:
        return layer.kernel_size, layer.strides
    if getattr(layer, "padding", "") != "valid" or layer.data_format != "channels_last":
        return None
    if type(layer) is keras.layers.Conv2D and layer.groups == 1 and layer.dilation_rate == (1, 1):
        return layer.kernel_size, layer.strides
    return (layer.pool_size, layer.strides) if type(layer) in _POOLING else None


def _in_a_row(model: keras.Model) -> list[keras.Layer]:
    """The layers from the input on, each of which reads the one before it alone."""
    graph = model._functional if isinstance(model, keras.Sequential) else model
    nodes = nodes_of(graph) if hasattr(graph, "_nodes_by_depth") else []
    called = [node.operation for node in nodes]
    once = len({id(each) for each in called}) == len(called)
    row = nodes and len(graph._nodes_by_depth) == len(nodes)  # one call at each depth
    if not row or not once or any(len(node.arguments.keras_tensors) > 1 for node in nodes):
        raise InvalidInput(
            "a grid of machines wants layers one after another, each called once: give a "
            "keras.Sequential that starts with keras.Input, or a functional keras.Model without "
            "branches"
        )
    return called


def _by_element(layer: keras.Layer) -> bool:
    return type(layer) in _ACTIVATIONS and _plain(layer)


def _plain(layer: keras.Layer) -> bool:
    """Whether its activation is by element, and nothing looks at all of its weights at once."""
    activation = getattr(layer, "activation", None)
    by_element = activation is None or activation.__name__ in ELEMENTWISE
    return by_element and is_plain(layer) and not adapted(layer)
