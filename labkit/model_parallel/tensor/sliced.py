"""A model of slices: which layers are cut and how, and what stays whole."""

from __future__ import annotations

from contextlib import AbstractContextManager
from math import prod
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.model_parallel.freed import free, is_there, put
from labkit.model_parallel.tensor.attention import Heads
from labkit.model_parallel.tensor.graph import (
    ATTENTION,
    Graph,
    functional_of,
    refuse_whole,
    units_of,
)
from labkit.model_parallel.tensor.linear import Column, Part, Row
from labkit.model_parallel.tensor.link import Link, uncounted
from labkit.model_parallel.tensor.normalization import Channels
from labkit.model_parallel.tensor.vocabulary import Words

Record = dict[str, Any]


class Sliced:
    """One rank's slice of a model, with the initial weights of the whole one.

    Layers that stay whole are those of the model itself. The whole weights of the others are the
    model's, too: `release` frees them while slices train, `collect` brings them back.

    Args:
        model: Sequential or functional, built.
        communicator: the slices of one replica.
        algorithm: how they add up, see `Communicator.allreduce`.
        cut_scores: leave the outputs of a Dense layer at the end cut, for `cross_entropy`.
        required: whether to refuse a model of which no layer can be cut.

    Attributes:
        model: what computes this slice's part.
        link: that of the scores that were left cut, or None.
        first: whether this is the first slice of its replica.

    Raises:
        InvalidInput: the model hides its layers, or none of them can be cut.
    """

    def __init__(
        self,
        model: Any,
        communicator: Communicator,
        algorithm: str,
        cut_scores: bool = False,
        required: bool = True,
    ) -> None:
        functional = functional_of(model)
        if required:
            refuse_whole([model], communicator.size)
        self._communicator, self._algorithm = communicator, algorithm
        self.first = communicator.rank == 0
        self.link: Link | None = None
        self._scores = 0  # of all slices together, where they were left cut
        self._made: dict[str, tuple[Any, Any, Link]] = {}  # whole, slice, link, by name
        graph = Graph(functional)
        self._rows = {layer.name: (layer, "whole", "one slice") for layer in graph.layers}
        self._released = False
        if communicator.size > 1:
            self._slice(graph, cut_scores and not graph.masked)
        inputs = keras.tree.map_structure(
            lambda x: keras.Input(batch_shape=x.shape, dtype=x.dtype, name=x.name),
            functional._inputs_struct,
        )
        outputs = functional._run_through_graph(inputs, operation_fn=self._instead)
        self.model = keras.Model(inputs, outputs)

    def predict(self, x: Any) -> Any:
        """The outputs of the whole model for x, on all slices."""
        y = self.model(x, training=False)
        return y if self.link is None else self.link.join(y, self._scores)

    def uncounted(self) -> AbstractContextManager[None]:
        """What crosses between slices in here is none of their training's."""
        return uncounted(link for _, _, link in self._made.values())

    def release(self, look: bool = True) -> None:
        """Free the whole weights of what is cut, until `collect`; slices first take what was set.

        Args:
            look: whether some may have been set since they were freed.
        """
        if self._released and not look:
            return
        for layer, made, link in self._made.values():
            for whole, own, axis in made.parts(layer):
                if is_there(whole):
                    units = units_of(layer) if isinstance(layer, ATTENTION) else whole.shape[axis]
                    each, mine = whole.shape[axis] // units, link.own(units)
                    place = [slice(None)] * axis + [slice(mine.start * each, mine.stop * each)]
                    own.assign(whole.value[tuple(place)])
                    free(whole)
        self._released = True

    def collect(self) -> None:
        """Bring the weights of the whole model up to date, on all ranks of the replica."""
        if self._released:
            self.release()  # what was set since then
        for whole, own, axis in self._parts():
            found = self._communicator.allgather(own.numpy(), "the weights of the slices")
            put(whole, np.concatenate(found, axis=axis))
        self._released = False

    def describe(self, steps: int = 1) -> list[Record]:
        """A row a layer: how it is cut or why it is not, bytes a step each way, bytes of weights.

        Args:
            steps: taken so far.
        """
        rows: list[Record] = []
        for name, (layer, kind, why) in self._rows.items():
            row: Record = {"layer": name, "slices": kind, "why": why}
            _, own, link = self._made.get(name, (None, layer, None))
            for way in ("forward", "backward"):
                row[f"{way}_bytes"] = link.payload[way] / steps if link else 0.0
                row[f"{way}_wire_bytes"] = link.wire[way] / steps if link else 0.0
            rows.append(
                row | {"weights_bytes": _nbytes(own), "whole_weights_bytes": _nbytes(layer)}
            )
        return rows

    def _slice(self, graph: Graph, cut_scores: bool) -> None:
        size = self._communicator.size
        for layer in graph.layers:
            why = graph.why_whole(layer, size)
            if layer.name in self._made:
                continue
            self._rows[layer.name] = (layer, "whole", why)
            if why:
                continue
            if isinstance(layer, keras.layers.Embedding):
                self._keep("words", layer, Words)
            elif isinstance(layer, ATTENTION):
                self._keep("heads", layer, Heads)
            elif behind := graph.behind(layer):
                self._keep("outputs", layer, Column)
                for between in behind[:-1]:
                    self._keep("channels", between, Channels)
                self._keep("inputs", behind[-1], Row)
            elif cut_scores and graph.last(layer) and layer.activation.__name__ == "linear":
                self.link, self._scores = self._keep("scores", layer, Column), layer.units
            else:
                self._keep("outputs, gathered", layer, Column, joined=True)

    def _keep(self, kind: str, layer: Any, of: type, **options: Any) -> Link:
        link = Link(self._communicator, self._algorithm, len(self._made))
        self._made[layer.name] = (layer, of(layer, link, **options), link)
        self._rows[layer.name] = (layer, kind, "")
        return link

    def _instead(self, operation: Any) -> Any:
        found = self._made.get(operation.name)
        return found[1] if found else operation

    def _parts(self) -> list[Part]:
        return [part for whole, own, _ in self._made.values() for part in own.parts(whole)]


def _nbytes(layer: Any) -> int:
    return sum(prod(each.shape) * tf.as_dtype(each.dtype).size for each in layer.weights)
