"""Which layers of a functional model can be cut, and which of them make pairs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from labkit.common.errors import InvalidInput

# What acts on each unit alone, so that a slice needs no other.
ELEMENTWISE = (
    *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish"),
    *("tanh", "sigmoid", "hard_sigmoid", "hard_silu", "softplus", "softsign", "exponential"),
)
LINEAR = (keras.layers.Dense, keras.layers.Conv2D)
ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
# What is counted out to the slices.
UNITS = {
    keras.layers.Dense: "units",
    keras.layers.Conv2D: "filters",
    keras.layers.Embedding: "input_dim",
    keras.layers.MultiHeadAttention: "num_heads",
    keras.layers.GroupQueryAttention: "num_key_value_heads",
}
_BETWEEN = (keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU)
_BETWEEN_IMAGES = (
    keras.layers.MaxPooling2D,
    keras.layers.AveragePooling2D,
    keras.layers.ZeroPadding2D,
    keras.layers.UpSampling2D,
)
_REGULAR = ("kernel", "bias", "embeddings", "activity", "gamma", "beta")


class Graph:
    """The layers of a model, and who reads the output of whom.

    Args:
        functional: the model.

    Attributes:
        layers: those with weights, in their order.
        masked: whether the outputs carry a mask, by which the loss counts them.
    """

    def __init__(self, functional: Any) -> None:
        depths = sorted(functional._nodes_by_depth, reverse=True)
        self._nodes = [node for depth in depths for node in functional._nodes_by_depth[depth]]
        self._ends = {id(tensor) for tensor in functional.outputs}
        called = {id(node.operation): node.operation for node in self._nodes}
        self.layers = [each for each in called.values() if getattr(each, "weights", None)]
        self.masked = any(map(_mask, functional.outputs))

    def why_whole(self, layer: Any, size: int) -> str:
        """Why a layer cannot be cut into so many slices; nothing where it can."""
        return self._obstacle(layer) or _too_few(layer, size)

    def units(self, layer: Any) -> int:
        """The most slices that a layer can be cut into; 1 for one that cannot."""
        return 1 if self._obstacle(layer) else units_of(layer)

    def last(self, layer: Any) -> bool:
        """Whether its output is that of the model, and nobody else reads it."""
        (tensor,) = self.node(layer).outputs
        return id(tensor) in self._ends and not self._readers(tensor)

    def behind(self, layer: Any) -> list[Any]:
        """The normalisations behind a layer, and the last that may read its units in slices.

        Nothing where nobody may.
        """
        between: list[Any] = []
        at = layer
        while self._unit_by_unit(at, type(layer)):
            reader = self._reader(at)
            if reader is None:
                return []
            if isinstance(reader, LINEAR):
                same = type(reader) is type(layer) and not self._obstacle(reader)
                return [*between, reader] if same else []
            if isinstance(reader, keras.layers.BatchNormalization):
                between.append(reader)
            at = reader
        return []

    def node(self, layer: Any) -> Any:
        """The one call of a layer."""
        (node,) = (node for node in self._nodes if node.operation is layer)
        return node

    def _reader(self, layer: Any) -> Any:
        """The only one that reads a layer's output, if it reads nothing else."""
        (tensor,) = self.node(layer).outputs
        readers = self._readers(tensor)
        if id(tensor) in self._ends or len(readers) != 1 or not self._once(readers[0].operation):
            return None
        return readers[0].operation

    def _readers(self, tensor: Any) -> list[Any]:
        return [n for n in self._nodes if any(t is tensor for t in n.arguments.keras_tensors)]

    def _once(self, layer: Any) -> bool:
        return sum(node.operation is layer for node in self._nodes) == 1

    def _obstacle(self, layer: Any) -> str:
        if not self._once(layer):
            return "called more than once"
        if type(layer) not in UNITS:
            return f"{type(layer).__name__} has no slices"
        if not _plain(layer):
            return "a regularizer or constraint looks at all of its weights"
        if isinstance(layer, ATTENTION):
            return _why_not_by_heads(layer, self.node(layer))
        given = {"mask_zero": False, "groups": 1, "data_format": "channels_last"}
        for name, needed in given.items():
            if getattr(layer, name, needed) != needed:
                return f"{name}={getattr(layer, name)!r}"
        return ""

    def _unit_by_unit(self, layer: Any, kind: type) -> bool:
        """Whether what a layer gives in a place depends on one unit of what it gets."""
        if isinstance(layer, keras.layers.BatchNormalization):
            return _by_channel(layer, self.node(layer))
        if isinstance(layer, _BETWEEN):
            return True
        if isinstance(layer, _BETWEEN_IMAGES):
            return kind is keras.layers.Conv2D and layer.data_format == "channels_last"
        known = type(layer) in (keras.layers.Activation, *LINEAR)
        return known and getattr(layer.activation, "__name__", None) in ELEMENTWISE


def functional_of(model: Any) -> Any:
    """The model as one whose layers are known.

    Raises:
        InvalidInput: it hides them.
    """
    found = model._functional if isinstance(model, keras.Sequential) else model
    if not hasattr(found, "_nodes_by_depth"):
        raise InvalidInput(
            f"a {type(model).__name__} hides its layers: give a keras.Sequential that starts with "
            "keras.Input, or a functional keras.Model"
        )
    return found


def refuse_whole(models: Iterable[Any], size: int) -> None:
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


def units_of(layer: Any) -> int:
    """Units, filters, words or heads of a layer that has slices."""
    return int(getattr(layer, UNITS[type(layer)]))


def _too_few(layer: Any, size: int) -> str:
    units = units_of(layer)
    return f"{UNITS[type(layer)]}={units} for {size} slices" if units < size else ""


def _why_not_by_heads(layer: Any, node: Any) -> str:
    if layer.dropout:
        return f"dropout={layer.dropout} of attention scores would differ from head to head"
    if len(node.outputs) > 1:
        return "its attention scores are asked for"
    args, given = node.arguments.args, node.arguments.kwargs
    masks = [*args[3:], *(given.get(f"{role}_mask") for role in ("query", "key", "value"))]
    if any(mask is not None for mask in masks) or any(map(_mask, node.arguments.keras_tensors)):
        return "its inputs carry masks"
    return ""


def _by_channel(layer: Any, node: Any) -> bool:
    (x,) = node.arguments.keras_tensors
    last = layer.axis % len(x.shape) == len(x.shape) - 1
    return last and not (layer.renorm or layer.synchronized or _mask(x)) and _plain(layer)


def _mask(tensor: Any) -> bool:
    return getattr(tensor, "_keras_mask", None) is not None


def _plain(layer: Any) -> bool:
    """Without what looks at all of its weights at once."""
    prefixes = [f"{lead}{of}_" for of in _REGULAR for lead in ("", "_")]
    names = [f"{of}{what}" for of in prefixes for what in ("regularizer", "constraint")]
    return all(getattr(layer, name, None) is None for name in names)
