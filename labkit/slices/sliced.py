"""A model of slices: which layers are cut and how, and what stays whole."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from labkit.communicator import Communicator
from labkit.errors import InvalidInput
from labkit.slices.linear import Column, Part, Row
from labkit.slices.link import Link
from labkit.slices.vocabulary import Words

Record = dict[str, Any]
# What acts on each unit alone, so that a slice needs no other.
ELEMENTWISE = (
    *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish"),
    *("tanh", "sigmoid", "hard_sigmoid", "hard_silu", "softplus", "softsign", "exponential"),
)
_BETWEEN = (keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU)
_BETWEEN_IMAGES = (
    keras.layers.MaxPooling2D,
    keras.layers.AveragePooling2D,
    keras.layers.ZeroPadding2D,
    keras.layers.UpSampling2D,
)
_REGULAR = ("kernel_", "bias_", "embeddings_", "activity_")


class Sliced:
    """One rank's slice of a model, with the initial weights of the whole one.

    Layers that stay whole are those of the model itself. The whole weights of the others stay in
    the model too, for callbacks and evaluation, and are brought up to date by `collect`.

    Args:
        model: Sequential or functional, built.
        communicator: the slices of one replica.
        algorithm: how they add up, see `Communicator.allreduce`.
        cut_scores: leave the outputs of a Dense layer at the end cut, for `cross_entropy`.

    Attributes:
        model: what computes this slice's part.
        link: that of the scores that were left cut, or None.

    Raises:
        InvalidInput: the model hides its layers, or none of them can be sliced.
    """

    def __init__(
        self, model: Any, communicator: Communicator, algorithm: str, cut_scores: bool = False
    ) -> None:
        graph = model._functional if isinstance(model, keras.Sequential) else model
        if not hasattr(graph, "_nodes_by_depth"):
            raise InvalidInput(
                f"a {type(model).__name__} hides its layers: give a keras.Sequential that starts "
                "with keras.Input, or a functional keras.Model"
            )
        self._communicator = communicator
        self.link: Link | None = None
        self._made: dict[str, tuple[Any, Any, Link]] = {}  # whole, slice, link, by name
        self._kinds = dict.fromkeys(
            (op.name for op in graph.operations if getattr(op, "variables", None)), "whole"
        )
        self._slice(_Uses(graph), algorithm, cut_scores)
        if not self._made and communicator.size > 1:
            raise InvalidInput(
                f"no layer can be cut into {communicator.size} slices: a Dense, Conv2D or "
                "Embedding layer without regularizers needs as many units; give fewer slices"
            )
        inputs = keras.tree.map_structure(
            lambda x: keras.Input(batch_shape=x.shape, dtype=x.dtype, name=x.name),
            graph._inputs_struct,
        )
        outputs = graph._run_through_graph(inputs, operation_fn=self._instead)
        self.model = keras.Model(inputs, outputs)

    def collect(self) -> None:
        """Bring the weights of the whole model up to date, on all ranks of the replica."""
        for whole, own, axis in self._parts():
            found = self._communicator.allgather(own.numpy(), "the weights of the slices")
            whole.assign(np.concatenate(found, axis=axis))

    def describe(self) -> list[Record]:
        """Each layer with weights: how it is cut, its weights here, and its bytes so far."""
        rows: list[Record] = []
        for name, kind in self._kinds.items():
            row: Record = {"layer": name, "slices": kind}
            if name in self._made:
                link = self._made[name][2]
                row |= {f"{way}_bytes": link.payload[way] for way in link.payload}
                row |= {f"{way}_wire_bytes": link.wire[way] for way in link.wire}
            rows.append(row)
        return rows

    def _slice(self, uses: _Uses, algorithm: str, cut_scores: bool) -> None:
        size = self._communicator.size

        def link() -> Link:
            return Link(self._communicator, algorithm, len(self._made))

        def keep(kind: str, layer: Any, made: Any) -> None:
            self._kinds[layer.name] = kind
            self._made[layer.name] = (layer, made, made.link)

        for layer in uses.layers():
            if size == 1 or layer.name in self._made or not _plain(layer):
                continue
            if isinstance(layer, keras.layers.Embedding):
                if layer.input_dim >= size and not layer.mask_zero:
                    keep("words", layer, Words(layer, link()))
                continue
            if not _linear(layer) or layer.kernel.shape[-1] < size:
                continue
            partner = uses.partner(layer)
            if partner is not None:
                keep("outputs", layer, Column(layer, link(), joined=False))
                keep("inputs", partner, Row(partner, link()))
            elif cut_scores and uses.last(layer) and layer.activation.__name__ == "linear":
                made = Column(layer, link(), joined=False)
                self.link = made.link
                keep("scores", layer, made)
            else:
                keep("outputs, gathered", layer, Column(layer, link(), joined=True))

    def _instead(self, operation: Any) -> Any:
        found = self._made.get(operation.name)
        return found[1] if found else operation

    def _parts(self) -> list[Part]:
        return [part for whole, own, _ in self._made.values() for part in own.parts(whole)]


class _Uses:
    """Who reads the output of whom in a functional model."""

    def __init__(self, graph: Any) -> None:
        depths = sorted(graph._nodes_by_depth, reverse=True)
        self._nodes = [node for depth in depths for node in graph._nodes_by_depth[depth]]
        self._ends = {id(tensor) for tensor in graph.outputs}

    def layers(self) -> list[Any]:
        """Those that are called once, in their order."""
        called = [node.operation for node in self._nodes]
        return [each for each in called if sum(other is each for other in called) == 1]

    def last(self, layer: Any) -> bool:
        """Whether its output is that of the model, and nobody else reads it."""
        (node,) = (node for node in self._nodes if node.operation is layer)
        (tensor,) = node.outputs
        return id(tensor) in self._ends and not self._readers(tensor)

    def partner(self, layer: Any) -> Any:
        """The layer that may read the units of this one in slices; None where there is none."""
        once = self.layers()
        images = isinstance(layer, keras.layers.Conv2D)
        at = layer
        while _elementwise(at) or (images and isinstance(at, _BETWEEN_IMAGES)):
            (node,) = (node for node in self._nodes if node.operation is at)
            (tensor,) = node.outputs
            readers = self._readers(tensor)
            if id(tensor) in self._ends or len(readers) != 1:
                return None
            at = readers[0].operation
            if not any(at is each for each in once):
                return None
            if _linear(at):
                return at if type(at) is type(layer) and _plain(at) else None
        return None

    def _readers(self, tensor: Any) -> list[Any]:
        return [n for n in self._nodes if any(t is tensor for t in n.arguments.keras_tensors)]


def _linear(layer: Any) -> bool:
    if type(layer) is keras.layers.Dense:
        return True
    images = type(layer) is keras.layers.Conv2D and layer.groups == 1
    return images and layer.data_format == "channels_last"


def _elementwise(layer: Any) -> bool:
    if isinstance(layer, _BETWEEN):
        return True
    named = getattr(layer, "activation", None)
    known = type(layer) is keras.layers.Activation or _linear(layer)
    return known and getattr(named, "__name__", None) in ELEMENTWISE


def _plain(layer: Any) -> bool:
    """Without what looks at all of its weights at once."""
    names = [f"{of}{what}" for of in _REGULAR for what in ("regularizer", "constraint")]
    return all(getattr(layer, name, None) is None for name in names)
