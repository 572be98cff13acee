"""Access to the layer graph of a built Keras model: layers, calls, masks, and modifications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput

if TYPE_CHECKING:
    from keras.src.models.functional import Functional
    from keras.src.ops.node import Node

# The type `Nest` is a nested structure of tensors that `keras.tree` can traverse.
Nest: TypeAlias = "tf.Tensor | Sequence[Nest] | Mapping[str, Nest] | None"

# The tuple ELEMENTWISE lists activations that act on each unit separately. A rank can apply an
# elementwise activation to some of the units.
ELEMENTWISE = (
    *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish"),
    *("tanh", "sigmoid", "hard_sigmoid", "hard_silu", "softplus", "softsign", "exponential"),
)
_REGULAR = ("kernel", "bias", "embeddings", "activity", "gamma", "beta")


def functional_of(model: keras.Model) -> Functional:
    """Return the functional model behind a Keras model, which holds the graph of its layers.

    Raises:
        InvalidInput: The model has no layer graph, because it is subclassed or not built.
    """
    functional = model._functional if isinstance(model, keras.Sequential) else model
    if not hasattr(functional, "_nodes_by_depth"):
        raise InvalidInput(
            f"the graph of layers of a {type(model).__name__} is unknown; give a keras.Sequential "
            "that starts with keras.Input, or a functional keras.Model"
        )
    return functional


def nodes_of(functional: Functional) -> list[Node]:
    """Return the calls of the model's layers in topological order."""
    # Keras counts a node's depth from the model's outputs, so the deepest nodes come first.
    depths = sorted(functional._nodes_by_depth, reverse=True)
    return [node for depth in depths for node in functional._nodes_by_depth[depth]]


def leaves(functional: Functional, x: Nest) -> list[Nest]:
    """Return the tensors in x as a list, in the order of the model's inputs."""
    if isinstance(x, Mapping) and not isinstance(functional._inputs_struct, dict):
        return [x[tensor.name] for tensor in functional.inputs]
    return list(keras.tree.flatten(x))


def mask_of(tensor: tf.Tensor | keras.KerasTensor) -> tf.Tensor | keras.KerasTensor | None:
    """Return the mask that Keras has attached to a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def attach_mask(tensor: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Attach a mask to a tensor as Keras does (None removes the mask), and return the tensor."""
    tensor._keras_mask = mask
    return tensor


def is_masked(tensor: keras.KerasTensor) -> bool:
    """Return whether Keras has attached a mask to the tensor."""
    return mask_of(tensor) is not None


def reject_lost_masks(functional: Functional) -> None:
    """Raise an error if an attention layer reads a mask, because later layers would lose the mask.

    When Keras's MultiHeadAttention is called, it removes the masks from its input tensors. Layers
    that read the same tensors after the attention layer find no mask. The model's graph does not
    show that the mask is missing.

    Raises:
        InvalidInput: An attention layer reads a tensor with a mask.
    """
    for node in nodes_of(functional):
        attends = isinstance(node.operation, keras.layers.MultiHeadAttention)
        if attends and any(map(is_masked, node.arguments.keras_tensors)):
            raise InvalidInput(
                f"layer {node.operation.name!r} removes the masks of its inputs, so later layers "
                "and the loss cannot read these masks; use lk.TensorParallel or lk.AllReduce in "
                "one replica, or give the mask as attention_mask, with inputs that have no masks"
            )


def weight_modification(layer: keras.Layer) -> str:
    """Describe how Keras has modified a layer's weights (LoRA, quantization); "" if it has not.

    Low-rank weights and quantized weights cannot be divided into slices.
    """
    for sublayer in layer._flatten_layers():
        if getattr(sublayer, "lora_enabled", False):
            return "it has low-rank weights (enable_lora)"
        if mode := getattr(sublayer, "quantization_mode", None):
            return f"it is quantized to {mode}"
    return ""


def is_plain(layer: keras.Layer) -> bool:
    """Return whether a layer has no regularizers and no constraints, which need whole weights."""
    # Attention layers store regularizers and constraints in private attributes, whose names begin
    # with an underscore.
    prefixes = [f"{lead}{of}_" for of in _REGULAR for lead in ("", "_")]
    names = [f"{of}{what}" for of in prefixes for what in ("regularizer", "constraint")]
    return all(getattr(layer, name, None) is None for name in names)
