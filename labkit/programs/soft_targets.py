"""Soft targets: the predictions of one model as training targets of another model."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput

# The dict _KINDS maps each loss class to its counterpart for soft targets. For each loss class,
# _KINDS also contains the function from logits to targets.
_KINDS: dict[str, tuple[type[keras.Loss], Callable[[tf.Tensor], tf.Tensor]]] = {
    "SparseCategoricalCrossentropy": (keras.losses.CategoricalCrossentropy, tf.nn.softmax),
    "CategoricalCrossentropy": (keras.losses.CategoricalCrossentropy, tf.nn.softmax),
    "BinaryCrossentropy": (keras.losses.BinaryCrossentropy, tf.nn.sigmoid),
}


class Soft:
    """The loss between a model's predictions and the soft targets of another model.

    Args:
        model: Compiled model, whose own loss determines the loss for soft targets.

    Raises:
        InvalidInput: If the model is not a classifier, so that its predictions are not class
            probabilities.
    """

    def __init__(self, model: keras.Model) -> None:
        loss = keras.losses.get(model.loss) if isinstance(model.loss, str) else model.loss
        # A Keras loss may be a function or an object. The name of a loss is its `__name__` or its
        # class name.
        name = getattr(loss, "__name__", type(loss).__name__)
        kind = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
        if kind not in _KINDS or len(model.outputs) != 1:
            raise InvalidInput(
                f"predictions of a model with loss {kind} and {len(model.outputs)} outputs are not "
                f"class probabilities; give a model with one output, and one of the losses "
                f"{', '.join(_KINDS)}"
            )
        loss_class, self._probabilities = _KINDS[kind]
        self._logits = bool(getattr(loss, "from_logits", False))
        self._loss = loss_class(from_logits=self._logits)

    def targets(self, predicted: tf.Tensor) -> tf.Tensor:
        """Return class probabilities for predictions, which may be logits or probabilities."""
        return self._probabilities(predicted) if self._logits else predicted

    def __call__(
        self, soft: tf.Tensor, predicted: tf.Tensor, weight: tf.Tensor | None
    ) -> tf.Tensor:
        """Return the mean loss between predictions and the flat vector of soft targets."""
        targets = tf.cast(tf.reshape(soft, tf.shape(predicted)), predicted.dtype)
        return self._loss(targets, predicted, sample_weight=weight)
