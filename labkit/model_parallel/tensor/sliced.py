"""One rank's slice of a model for tensor parallelism, with divided and undivided layers."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.functional import Nest, attach_mask, functional_of, mask_of
from labkit.model_parallel.meter import LayerRow, layer_row
from labkit.model_parallel.tensor.linear import Channels, ColumnParallel, Row
from labkit.model_parallel.tensor.slice import LayerSlice
from labkit.model_parallel.tensor.slice_link import Link
from labkit.model_parallel.tensor.sliceable import SLICES, LayerGraph, require_divisible
from labkit.model_parallel.weights import Share, WeightShard


class Sliced(Share):
    """One rank's slice of a model, whose initial weights are copied from the whole model.

    The slice uses the whole model's own objects for layers that are not divided.

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
        InvalidInput: If the model is neither sequential nor functional, or if `required` is set and
            no layer can be divided.
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
        self._scores = 0  # number of scores in all slices; 0 if scores are gathered
        self._slices: dict[str, tuple[keras.Layer, LayerSlice]] = {}  # by name: (layer, its slice)
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
        """Return one row per layer: how or why not it is divided, its weight bytes and traffic.

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
            if layer.name in self._slices:  # already divided together with an earlier layer
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
