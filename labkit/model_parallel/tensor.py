"""Tensor parallelism: each rank stores and computes some of the units of each divided layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.model_parallel.functional import (
    ELEMENTWISE,
    Nest,
    attach_mask,
    functional_of,
    is_masked,
    is_plain,
    mask_of,
    nodes_of,
    weight_modification,
)
from labkit.model_parallel.messages import LayerRow, Link, layer_row
from labkit.model_parallel.sliced_layers import (
    Channels,
    ColumnParallel,
    Heads,
    LayerSlice,
    Row,
    Words,
    cross_entropy,
)
from labkit.model_parallel.weights import Share, WeightShard

if TYPE_CHECKING:
    from keras.src.models.functional import Functional
    from keras.src.ops.node import Node


# The dict SLICES maps each layer class to the class of its slices. To divide another layer class,
# define its slice class and add the slice class to `SLICES`.
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

        Return an empty list if no following layer can read the layer's slices.
        """
        between: list[keras.Layer] = []
        at = layer
        while self._is_unitwise(at, type(layer)):
            reader = self._reader(at)
            # Slices of a layer's output suffice only if exactly one layer reads the output.
            if reader is None:
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
        """Return the only layer that reads a layer's output; None if the reader is called twice."""
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
            return "the model calls the layer more than once"
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
        InvalidInput: No layer can be divided; the error message lists the reasons.
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


class Sliced(Share):
    """One rank's slice of a model, whose initial weights are copied from the whole model.

    The slice and the whole model share the objects of layers that are not divided.

    Args:
        model: Sequential or functional Keras model, built.
        communicator: Communicator of the ranks that have the slices of one replica.
        algorithm: Allreduce algorithm, see `Communicator.allreduce`.
        cut_scores: Whether a final Dense layer returns only the class scores (logits) of this
            slice, for `cross_entropy`.
        required: Whether to raise an error if no layer of the model can be divided.

    Attributes:
        model: This rank's slice of the model, as a Keras model.
        link: Collectives of the final layer if each slice returns only its own scores; otherwise
            None.

    Raises:
        InvalidInput: The model is neither sequential nor functional, or `required` is set and no
            layer can be divided.
    """

    def __init__(
        self,
        model: keras.Model,
        communicator: Communicator,
        algorithm: str,
        cut_scores: bool = False,
        required: bool = True,
    ) -> None:
        super().__init__(communicator)
        functional = functional_of(model)
        if required:
            require_divisible([model], communicator.size)
        self._algorithm = algorithm
        self.link: Link | None = None
        # The attribute `_scores` is the number of class scores in all slices. If the ranks gather
        # the scores, `_scores` is 0.
        self._scores = 0
        # `_slices` maps a layer name to the pair of the whole layer and its slice.
        self._slices: dict[str, tuple[keras.Layer, LayerSlice]] = {}
        graph = LayerGraph(functional)
        self._rows = {layer.name: (layer, "whole", "one slice") for layer in graph.layers}
        if communicator.size > 1:
            self._slice(graph, cut_scores and not graph.masked)
        # All layers of the model are called again on new inputs; slices replace the divided layers.
        # The branches of the model, and its layers that are not divided, stay unchanged.
        inputs = keras.tree.map_structure(
            lambda x: keras.Input(batch_shape=x.shape, dtype=x.dtype, name=x.name),
            functional._inputs_struct,
        )
        masks = dict(zip(map(id, functional.inputs), keras.tree.flatten(inputs), strict=True))
        for tensor in functional.inputs:
            attach_mask(masks[id(tensor)], masks.get(id(mask_of(tensor))))
        outputs = functional._run_through_graph(inputs, operation_fn=self._replacement)
        self.model = keras.Model(inputs, outputs)

    def predict(self, x: Nest) -> tf.Tensor:
        """Return the outputs of the whole model for x, on the ranks of all slices."""
        y = self.model(x, training=False)
        return y if self.link is None else self.link.join(y, self._scores)

    def meters(self) -> Iterator[Link]:
        """Return the byte counters of all divided layers."""
        return (part.link for _, part in self._slices.values())

    def pairs(self) -> Iterator[WeightShard]:
        """Yield each weight of the divided layers' slices, paired with the whole layer's weight."""
        return (pair for layer, part in self._slices.values() for pair in part.pairs(layer))

    def describe(self, steps: int = 1) -> list[LayerRow]:
        """Return a row per layer: name, kind of slices or why none, weight bytes, and traffic.

        Args:
            steps: Number of training steps since the start, by which message bytes are divided.
        """
        rows = []
        for name, (layer, kind, why) in self._rows.items():
            _, part = self._slices.get(name, (layer, None))
            sizes = _nbytes(part or layer), _nbytes(layer)
            rows.append(layer_row(name, kind, why, part and part.link, steps, *sizes))
        return rows

    def _slice(self, graph: LayerGraph, cut_scores: bool) -> None:
        for layer in graph.layers:
            # The layer is already divided together with an earlier layer.
            if layer.name in self._slices:
                continue
            why = graph.indivisible_reason(layer, self.communicator.size)
            self._rows[layer.name] = (layer, "whole", why)
            if why:
                continue
            if SLICES[type(layer)] is not ColumnParallel:
                self._add_slice(layer, SLICES[type(layer)])
            elif behind := graph.behind(layer):
                self._add_slice(layer, ColumnParallel)
                for between in behind[:-1]:
                    self._add_slice(between, Channels)
                self._add_slice(behind[-1], Row)
            elif cut_scores and graph.last(layer) and layer.activation.__name__ == "linear":
                self.link, self._scores = (
                    self._add_slice(layer, ColumnParallel, "scores"),
                    layer.units,
                )
            else:
                self._add_slice(layer, ColumnParallel, "outputs, gathered", joined=True)

    def _add_slice(
        self, layer: keras.Layer, of: type[LayerSlice], kind: str = "", **options: bool
    ) -> Link:
        link = Link(self.communicator, self._algorithm, len(self._slices))
        self._slices[layer.name] = (layer, of(layer, link, **options))
        self._rows[layer.name] = (layer, kind or of.kind, "")
        return link

    def _replacement(self, operation: keras.Operation) -> keras.Operation:
        _, part = self._slices.get(operation.name, (None, None))
        return part or operation


def _nbytes(layer: keras.Layer) -> int:
    return sum(prod(weight.shape) * tf.as_dtype(weight.dtype).size for weight in layer.weights)


__all__ = ["Link", "Sliced", "cross_entropy", "require_divisible"]
