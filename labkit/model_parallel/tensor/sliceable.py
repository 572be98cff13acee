"""Analysis of a functional model: the layers, and pairs of layers, that can be divided."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import keras

from labkit.common.errors import InvalidInput
from labkit.model_parallel.functional import (
    ELEMENTWISE,
    functional_of,
    is_masked,
    is_plain,
    nodes_of,
    weight_modification,
)
from labkit.model_parallel.tensor.attention import Heads
from labkit.model_parallel.tensor.linear import ColumnParallel
from labkit.model_parallel.tensor.vocabulary import Words

if TYPE_CHECKING:
    from keras.src.models.functional import Functional
    from keras.src.ops.node import Node

# For each layer class, the class of its slices. Another layer class needs a slice class and an
# entry here.
SLICES = {kind: slices for slices in (ColumnParallel, Words, Heads) for kind in slices.cuts}
_LINEAR = tuple(ColumnParallel.cuts)
_BETWEEN = (keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU)
_BETWEEN_IMAGES = (
    keras.layers.MaxPooling2D,
    keras.layers.AveragePooling2D,
    keras.layers.ZeroPadding2D,
    keras.layers.UpSampling2D,
)


class LayerGraph:
    """The layers of a functional model, and the layers that read each layer's output.

    Args:
        functional: The functional Keras model.

    Attributes:
        layers: Layers with weights, in the order of the model.
        masked: Whether an output of the model has a mask, which the loss uses.
    """

    def __init__(self, functional: Functional) -> None:
        self._nodes = nodes_of(functional)
        self._ends = {id(tensor) for tensor in functional.outputs}
        called = {id(node.operation): node.operation for node in self._nodes}
        self.layers = [layer for layer in called.values() if getattr(layer, "weights", None)]
        self.masked = any(map(is_masked, functional.outputs))

    def indivisible_reason(self, layer: keras.Layer, size: int) -> str:
        """Return why a layer cannot be divided into `size` slices; "" if it can be divided."""
        if obstacle := self._obstacle(layer):
            return obstacle
        units = _units_of(layer)
        return f"{_unit_field(layer)}={units} for {size} slices" if units < size else ""

    def units(self, layer: keras.Layer) -> int:
        """Return the maximum number of slices of a layer; 1 if it cannot be divided."""
        return 1 if self._obstacle(layer) else _units_of(layer)

    def last(self, layer: keras.Layer) -> bool:
        """Return whether the layer's output is a model output that no other layer reads."""
        (tensor,) = self.node(layer).outputs
        return id(tensor) in self._ends and not self._readers(tensor)

    def behind(self, layer: keras.Layer) -> list[keras.Layer]:
        """Return the normalisations after a layer, and the layer after them that reads the slices.

        The list is empty if no following layer can read the layer's slices.
        """
        between: list[keras.Layer] = []
        at = layer
        while self._is_unitwise(at, type(layer)):
            reader = self._reader(at)
            if reader is None:  # all units are needed, unless exactly one layer reads them
                return []
            if isinstance(reader, _LINEAR):
                same = type(reader) is type(layer) and not self._obstacle(reader)
                return [*between, reader] if same else []
            if isinstance(reader, keras.layers.BatchNormalization):
                between.append(reader)
            at = reader
        return []

    def node(self, layer: keras.Layer) -> Node:
        """Return the only call of a layer in the model."""
        (node,) = (node for node in self._nodes if node.operation is layer)
        return node

    def _reader(self, layer: keras.Layer) -> keras.Layer | None:
        """Return the only layer that reads a layer's output; None unless it is called only once."""
        (tensor,) = self.node(layer).outputs
        readers = self._readers(tensor)
        if id(tensor) in self._ends or len(readers) != 1 or not self._once(readers[0].operation):
            return None
        return readers[0].operation

    def _readers(self, tensor: keras.KerasTensor) -> list[Node]:
        return [n for n in self._nodes if any(t is tensor for t in n.arguments.keras_tensors)]

    def _once(self, layer: keras.Layer) -> bool:
        return sum(node.operation is layer for node in self._nodes) == 1

    def _obstacle(self, layer: keras.Layer) -> str:
        if not self._once(layer):
            return "it is called more than once"
        slices = SLICES.get(type(layer))
        if slices is None:
            return f"{type(layer).__name__} has no slices"
        if reason := weight_modification(layer):
            return reason
        if not is_plain(layer):
            return "a regularizer or constraint reads all of its weights"
        for name, needed in slices.needs.items():
            if getattr(layer, name, needed) != needed:
                return f"{name}={getattr(layer, name)!r}"
        return slices.why_not(layer, self.node(layer))

    def _is_unitwise(self, layer: keras.Layer, kind: type) -> bool:
        """Return whether each output unit of a layer depends on only one input unit."""
        if isinstance(layer, keras.layers.BatchNormalization):
            return _by_channel(layer, self.node(layer))
        if isinstance(layer, _BETWEEN):
            return True
        if isinstance(layer, _BETWEEN_IMAGES):
            return kind is keras.layers.Conv2D and layer.data_format == "channels_last"
        elementwise = type(layer) in (keras.layers.Activation, *_LINEAR)
        return elementwise and getattr(layer.activation, "__name__", None) in ELEMENTWISE


def require_divisible(models: Iterable[keras.Model], size: int) -> None:
    """Raise an error if no layer of the models can be divided into `size` slices.

    Raises:
        InvalidInput: If no layer can be divided; the error message lists the reasons.
    """
    graphs = [LayerGraph(functional_of(model)) for model in models]
    reasons = {
        layer.name: graph.indivisible_reason(layer, size)
        for graph in graphs
        for layer in graph.layers
    }
    if size > 1 and all(reasons.values()):
        maximum = max((graph.units(layer) for graph in graphs for layer in graph.layers), default=1)
        advice = (
            f"give tensor_parallel_size={maximum} or fewer"
            if maximum > 1
            else "give tensor_parallel_size=1"
        )
        details = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise InvalidInput(f"no layer can be divided into {size} slices ({details}); {advice}")


def _unit_field(layer: keras.Layer) -> str:
    """Return the name of the attribute with a layer's number of units, filters, words or heads."""
    return SLICES[type(layer)].cuts[type(layer)]


def _units_of(layer: keras.Layer) -> int:
    return int(getattr(layer, _unit_field(layer)))


def _by_channel(layer: keras.Layer, node: Node) -> bool:
    (x,) = node.arguments.keras_tensors
    last = layer.axis % len(x.shape) == len(x.shape) - 1
    return last and not (layer.renorm or layer.synchronized or is_masked(x)) and is_plain(layer)
