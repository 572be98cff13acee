"""What Keras knows of a built model: its layers, who calls them on what, and what they look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput

if TYPE_CHECKING:
    from keras.src.models.functional import Functional
    from keras.src.ops.node import Node

# What `keras.tree` maps over.
Nest: TypeAlias = "tf.Tensor | Sequence[Nest] | Mapping[str, Nest] | None"

# Activations that act on each unit alone, so that a part of the units needs no other.
ELEMENTWISE = (
    *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish"),
    *("tanh", "sigmoid", "hard_sigmoid", "hard_silu", "softplus", "softsign", "exponential"),
)
_REGULAR = ("kernel", "bias", "embeddings", "activity", "gamma", "beta")


def functional_of(model: keras.Model) -> Functional:
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


def nodes_of(functional: Functional) -> list[Node]:
    """The calls of its layers, in an order in which they can be made."""
    # Keras counts depth from the outputs: what is deepest comes first.
    depths = sorted(functional._nodes_by_depth, reverse=True)
    return [node for depth in depths for node in functional._nodes_by_depth[depth]]


def leaves(functional: Functional, x: Nest) -> list[Nest]:
    """The inputs that a model is given, in the order in which it has them."""
    if isinstance(x, Mapping) and not isinstance(functional._inputs_struct, dict):
        return [x[each.name] for each in functional.inputs]
    return list(keras.tree.flatten(x))


def mask_of(tensor: tf.Tensor | keras.KerasTensor) -> tf.Tensor | keras.KerasTensor | None:
    """The mask that Keras has attached to a tensor, if any: what layers behind it leave out."""
    return getattr(tensor, "_keras_mask", None)


def masked(tensor: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """The tensor with this mask attached, as Keras does it; with None: without any."""
    tensor._keras_mask = mask
    return tensor


def is_masked(tensor: keras.KerasTensor) -> bool:
    """Whether the tensor carries a mask."""
    return mask_of(tensor) is not None


def refuse_lost_masks(functional: Functional) -> None:
    """Refuse attention that reads masks, where masks of a whole model must be known by its graph.

    Keras's MultiHeadAttention takes the masks off the tensors that it reads, when it is called: who
    reads these behind it finds none. The graph of the model does not know of it.
    """
    for node in nodes_of(functional):
        attends = isinstance(node.operation, keras.layers.MultiHeadAttention)
        if attends and any(map(is_masked, node.arguments.keras_tensors)):
            raise InvalidInput(
                f"layer {node.operation.name!r} takes the masks off what it reads, so that nobody "
                "knows which masks pass over a cut or count in a loss of parts: use "
                "lk.TensorParallel or lk.AllReduce in one replica, or give the mask as "
                "attention_mask, to tensors without one of their own"
            )


def adapted(layer: keras.Layer) -> str:
    """What Keras has made of a layer's own weights, or of a part's; "" where they are as built.

    Low-rank weights beside a kernel, or whole numbers in its place, are no part of a slice.
    """
    for part in layer._flatten_layers():
        if getattr(part, "lora_enabled", False):
            return "it has low-rank weights (enable_lora)"
        if mode := getattr(part, "quantization_mode", None):
            return f"it is quantized to {mode}"
    return ""


def is_plain(layer: keras.Layer) -> bool:
    """Whether no regularizer and no constraint looks at all of its weights at once."""
    # Attention keeps them under private names.
    prefixes = [f"{lead}{of}_" for of in _REGULAR for lead in ("", "_")]
    names = [f"{of}{what}" for of in prefixes for what in ("regularizer", "constraint")]
    return all(getattr(layer, name, None) is None for name in names)
