"""Which layers of a functional model can be cut, and which of them make pairs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import keras

from labkit.common.errors import InvalidInput
from labkit.model_parallel.functional import (
    ELEMENTWISE,
    adapted,
    functional_of,
    is_masked,
    is_plain,
    nodes_of,
)
from labkit.model_parallel.tensor.attention import Heads
from labkit.model_parallel.tensor.linear import Column
from labkit.model_parallel.tensor.vocabulary import Words

if TYPE_CHECKING:
    from keras.src.models.functional import Functional
    from keras.src.ops.node import Node

# How each kind of layer is cut by itself: another one is its class of slices, and its name here.
SLICES = {kind: slices for slices in (Column, Words, Heads) for kind in slices.cuts}
_LINEAR = tuple(Column.cuts)
_BETWEEN = (keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU)
_BETWEEN_IMAGES = (
    keras.layers.MaxPooling2D,
    keras.layers.AveragePooling2D,
    keras.layers.ZeroPadding2D,
    keras.layers.UpSampling2D,
)


class Graph:
    """The layers of a model, and who reads the output of whom.

    Args:
        functional: the model.

    Attributes:
        layers: those with weights, in their order.
        masked: whether the outputs carry a mask, by which the loss counts them.
    """

    def __init__(self, functional: Functional) -> None:
        self._nodes = nodes_of(functional)
        self._ends = {id(tensor) for tensor in functional.outputs}
        called = {id(node.operation): node.operation for node in self._nodes}
        self.layers = [each for each in called.values() if getattr(each, "weights", None)]
        self.masked = any(map(is_masked, functional.outputs))

    def why_whole(self, layer: keras.Layer, size: int) -> str:
        """Why a layer cannot be cut into so many slices; nothing where it can."""
        if obstacle := self._obstacle(layer):
            return obstacle
        units = _units_of(layer)
        return f"{_counted(layer)}={units} for {size} slices" if units < size else ""

    def units(self, layer: keras.Layer) -> int:
        """The most slices that a layer can be cut into; 1 for one that cannot."""
        return 1 if self._obstacle(layer) else _units_of(layer)

    def last(self, layer: keras.Layer) -> bool:
        """Whether its output is that of the model, and nobody else reads it."""
        (tensor,) = self.node(layer).outputs
        return id(tensor) in self._ends and not self._readers(tensor)

    def behind(self, layer: keras.Layer) -> list[keras.Layer]:
        """The normalisations behind a layer, and the last that may read its units in slices.

        Nothing where nobody may.
        """
        between: list[keras.Layer] = []
        at = layer
        while self._unit_by_unit(at, type(layer)):
            reader = self._reader(at)
            if reader is None:  # two readers, or the end: somebody needs all units
                return []
            if isinstance(reader, _LINEAR):
                same = type(reader) is type(layer) and not self._obstacle(reader)
                return [*between, reader] if same else []
            if isinstance(reader, keras.layers.BatchNormalization):
                between.append(reader)
            at = reader
        return []

    def node(self, layer: keras.Layer) -> Node:
        """The one call of a layer."""
        (node,) = (node for node in self._nodes if node.operation is layer)
        return node

    def _reader(self, layer: keras.Layer) -> keras.Layer | None:
        """The only one that reads a layer's output, if it reads nothing else."""
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
            return "called more than once"
        slices = SLICES.get(type(layer))
        if slices is None:
            return f"{type(layer).__name__} has no slices"
        if made := adapted(layer):
            return made
        if not is_plain(layer):
            return "a regularizer or constraint looks at all of its weights"
        for name, needed in slices.needs.items():
            if getattr(layer, name, needed) != needed:
                return f"{name}={getattr(layer, name)!r}"
        return slices.why_not(layer, self.node(layer))

    def _unit_by_unit(self, layer: keras.Layer, kind: type) -> bool:
        """Whether what a layer gives in a place depends on one unit of what it gets."""
        if isinstance(layer, keras.layers.BatchNormalization):
            return _by_channel(layer, self.node(layer))
        if isinstance(layer, _BETWEEN):
            return True
        if isinstance(layer, _BETWEEN_IMAGES):
            return kind is keras.layers.Conv2D and layer.data_format == "channels_last"
        known = type(layer) in (keras.layers.Activation, *_LINEAR)
        return known and getattr(layer.activation, "__name__", None) in ELEMENTWISE


def refuse_whole(models: Iterable[keras.Model], size: int) -> None:
    """Refuse models of which not one has a layer that can be cut into so many slices."""
    graphs = [Graph(functional_of(model)) for model in models]
    reasons = {
        layer.name: graph.why_whole(layer, size) for graph in graphs for layer in graph.layers
    }
    if size > 1 and all(reasons.values()):
        most = max((graph.units(layer) for graph in graphs for layer in graph.layers), default=1)
        advice = f"give slices={most} or fewer" if most > 1 else "give slices=1"
        told = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        raise InvalidInput(f"no layer can be cut into {size} slices ({told}); {advice}")


def _counted(layer: keras.Layer) -> str:
    """The field that says how many units, filters, words or heads a layer has."""
    return SLICES[type(layer)].cuts[type(layer)]


def _units_of(layer: keras.Layer) -> int:
    return int(getattr(layer, _counted(layer)))


def _by_channel(layer: keras.Layer, node: Node) -> bool:
    (x,) = node.arguments.keras_tensors
    last = layer.axis % len(x.shape) == len(x.shape) - 1
    return last and not (layer.renorm or layer.synchronized or is_masked(x)) and is_plain(layer)
