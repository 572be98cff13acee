"""A model of slices: which layers are cut and how, and what stays whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.errors import InvalidInput
from labkit.slices.attention import Heads
from labkit.slices.graph import ATTENTION, Graph
from labkit.slices.linear import Column, Part, Row
from labkit.slices.link import Link
from labkit.slices.normalization import Channels
from labkit.slices.vocabulary import Words

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

    Attributes:
        model: what computes this slice's part.
        link: that of the scores that were left cut, or None.
        first: whether this is the first slice of its replica.

    Raises:
        InvalidInput: the model hides its layers, or none of them can be sliced.
    """

    def __init__(
        self, model: Any, communicator: Communicator, algorithm: str, cut_scores: bool = False
    ) -> None:
        functional = model._functional if isinstance(model, keras.Sequential) else model
        if not hasattr(functional, "_nodes_by_depth"):
            raise InvalidInput(
                f"a {type(model).__name__} hides its layers: give a keras.Sequential that starts "
                "with keras.Input, or a functional keras.Model"
            )
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

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What crosses between slices in here is none of their training's."""
        links = [link for _, _, link in self._made.values()]
        before = [(dict(link.payload), dict(link.wire)) for link in links]
        yield
        for link, (payload, wire) in zip(links, before, strict=True):
            link.payload, link.wire = payload, wire

    def release(self) -> None:
        """Free the whole weights of the layers that are cut, until `collect`."""
        if not self._released:
            for whole, _, _ in self._parts():
                _put(whole, tf.zeros([0], whole.dtype))
            self._released = True

    def collect(self) -> None:
        """Bring the weights of the whole model up to date, on all ranks of the replica."""
        for whole, own, axis in self._parts():
            found = self._communicator.allgather(own.numpy(), "the weights of the slices")
            _put(whole, tf.constant(np.concatenate(found, axis=axis), whole.dtype))
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
        if not self._made:
            raise InvalidInput(_none(graph, size))

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


def _none(graph: Graph, size: int) -> str:
    """Why nothing can be cut, and what could be."""
    most = max((graph.units(layer) for layer in graph.layers), default=1)
    reasons = "; ".join(f"{each.name}: {graph.why_whole(each, size)}" for each in graph.layers)
    advice = f"give slices={most} or fewer" if most > 1 else "give slices=1"
    return f"no layer can be cut into {size} slices ({reasons}); {advice}"


def _put(variable: Any, value: Any) -> None:
    """Give a variable a value of any shape: what has read it before keeps reading it."""
    tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)


def _nbytes(layer: Any) -> int:
    return sum(prod(each.shape) * tf.as_dtype(each.dtype).size for each in layer.weights)
