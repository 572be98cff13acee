"""What a model's predictions are as targets of another, and how far others are from them."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput

# By the loss of the model: the one to soft targets, and what makes targets of its logits.
_KINDS: dict[str, tuple[type[keras.Loss], Callable[[tf.Tensor], tf.Tensor]]] = {
    "SparseCategoricalCrossentropy": (keras.losses.CategoricalCrossentropy, tf.nn.softmax),
    "CategoricalCrossentropy": (keras.losses.CategoricalCrossentropy, tf.nn.softmax),
    "BinaryCrossentropy": (keras.losses.BinaryCrossentropy, tf.nn.sigmoid),
}


class Soft:
    """The loss of a model to predictions of others, which are its labels then.

    Args:
        model: compiled.

    Raises:
        InvalidInput: its labels are no classes, of which predictions are probabilities.
    """

    def __init__(self, model: keras.Model) -> None:
        loss = keras.losses.get(model.loss) if isinstance(model.loss, str) else model.loss
        name = getattr(loss, "__name__", type(loss).__name__)  # a name is that of a function
        kind = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
        if kind not in _KINDS or len(model.outputs) != 1:
            raise InvalidInput(
                f"predictions of a model with loss {kind} and {len(model.outputs)} outputs are no "
                f"probabilities of classes; use one output, and a loss of {', '.join(_KINDS)}"
            )
        known, self._probabilities = _KINDS[kind]
        self._logits = bool(getattr(loss, "from_logits", False))
        self._loss = known(from_logits=self._logits)

    def targets(self, predicted: tf.Tensor) -> tf.Tensor:
        """Probabilities."""
        return self._probabilities(predicted) if self._logits else predicted

    def __call__(
        self, soft: tf.Tensor, predicted: tf.Tensor, weight: tf.Tensor | None
    ) -> tf.Tensor:
        """The mean distance of predictions from targets, which lie flat."""
        wanted = tf.cast(tf.reshape(soft, tf.shape(predicted)), predicted.dtype)
        return self._loss(wanted, predicted, sample_weight=weight)
