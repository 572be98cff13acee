"""A model of slices: which layers are cut and how, and what stays whole."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.functional import Nest, functional_of, mask_of, masked
from labkit.model_parallel.meter import LayerRow, layer_row
from labkit.model_parallel.tensor.linear import Channels, Column, Row
from labkit.model_parallel.tensor.slice import Slice
from labkit.model_parallel.tensor.slice_link import Link
from labkit.model_parallel.tensor.sliceable import SLICES, Graph, refuse_whole
from labkit.model_parallel.weights import Pair, Share


class Sliced(Share):
    """One rank's slice of a model, with the initial weights of the whole one.

    Layers that stay whole are those of the model itself.

    Args:
        model: Sequential or functional, built.
        communicator: the slices of one replica.
        algorithm: how they add up, see `Communicator.allreduce`.
        cut_scores: leave the outputs of a Dense layer at the end cut, for `cross_entropy`.
        required: whether to refuse a model of which no layer can be cut.

    Attributes:
        model: what computes this slice's part.
        link: that of the scores that were left cut, or None.

    Raises:
        InvalidInput: the model hides its layers, or none of them can be cut.
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
            refuse_whole([model], communicator.size)
        self._algorithm = algorithm
        self.link: Link | None = None
        self._scores = 0  # of all slices together, where they were left cut
        self._made: dict[str, tuple[keras.Layer, Slice]] = {}  # whole and slice, by name
        graph = Graph(functional)
        self._rows = {layer.name: (layer, "whole", "one slice") for layer in graph.layers}
        if communicator.size > 1:
            self._slice(graph, cut_scores and not graph.masked)
        # The same calls on new inputs, with slices in the place of layers that are cut: branches
        # and whatever else the model has stay as they are.
        inputs = keras.tree.map_structure(
            lambda x: keras.Input(batch_shape=x.shape, dtype=x.dtype, name=x.name),
            functional._inputs_struct,
        )
        masks = dict(zip(map(id, functional.inputs), keras.tree.flatten(inputs), strict=True))
        for given in functional.inputs:
            masked(masks[id(given)], masks.get(id(mask_of(given))))
        outputs = functional._run_through_graph(inputs, operation_fn=self._instead)
        self.model = keras.Model(inputs, outputs)

    def predict(self, x: Nest) -> tf.Tensor:
        """The outputs of the whole model for x, on all slices."""
        y = self.model(x, training=False)
        return y if self.link is None else self.link.join(y, self._scores)

    def meters(self) -> Iterator[Link]:
        """The links of all slices."""
        return (made.link for _, made in self._made.values())

    def pairs(self) -> Iterator[Pair]:
        """Of all layers that are cut."""
        return (pair for layer, made in self._made.values() for pair in made.pairs(layer))

    def describe(self, steps: int = 1) -> list[LayerRow]:
        """A row a layer: how it is cut or why it is not, bytes a step each way, bytes of weights.

        Args:
            steps: taken so far.
        """
        rows = []
        for name, (layer, kind, why) in self._rows.items():
            _, made = self._made.get(name, (layer, None))
            sizes = _nbytes(made or layer), _nbytes(layer)
            rows.append(layer_row(name, kind, why, made and made.link, steps, *sizes))
        return rows

    def _slice(self, graph: Graph, cut_scores: bool) -> None:
        for layer in graph.layers:
            if layer.name in self._made:  # it stands behind another one, as its pair
                continue
            why = graph.why_whole(layer, self.communicator.size)
            self._rows[layer.name] = (layer, "whole", why)
            if why:
                continue
            if SLICES[type(layer)] is not Column:
                self._keep(layer, SLICES[type(layer)])
            elif behind := graph.behind(layer):
                self._keep(layer, Column)
                for between in behind[:-1]:
                    self._keep(between, Channels)
                self._keep(behind[-1], Row)
            elif cut_scores and graph.last(layer) and layer.activation.__name__ == "linear":
                self.link, self._scores = self._keep(layer, Column, "scores"), layer.units
            else:
                self._keep(layer, Column, "outputs, gathered", joined=True)

    def _keep(self, layer: keras.Layer, of: type[Slice], kind: str = "", **options: bool) -> Link:
        link = Link(self.communicator, self._algorithm, len(self._made))
        self._made[layer.name] = (layer, of(layer, link, **options))
        self._rows[layer.name] = (layer, kind or of.kind, "")
        return link

    def _instead(self, operation: keras.Operation) -> keras.Operation:
        _, made = self._made.get(operation.name, (None, None))
        return made or operation


def _nbytes(layer: keras.Layer) -> int:
    return sum(prod(weight.shape) * tf.as_dtype(weight.dtype).size for weight in layer.weights)
