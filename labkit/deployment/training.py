"""The training that follows a compression, so that the weights left make up for those gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveFloat, PositiveInt

from labkit.datasets import Dataset
from labkit.deployment.base import Method, copy_of

if TYPE_CHECKING:
    import keras


class FineTuned(Method):
    """A method that may train its model further.

    Args:
        epochs: passes over the training data; 0: none.
        batch_size: samples a step.
        learning_rate: of Adam.
    """

    epochs: int = Field(default=0, ge=0)
    batch_size: PositiveInt = 128
    learning_rate: PositiveFloat = 0.001

    @property
    def extra_epochs(self) -> int:
        """The epochs of further training."""
        return self.epochs

    @property
    def _trained(self) -> str:
        if not self.epochs:
            return ""
        changed = [
            f", {name} {getattr(self, name):g}"
            for name in ("batch_size", "learning_rate")
            if getattr(self, name) != FineTuned.model_fields[name].default
        ]
        return f" + {self.epochs} epoch{'s' * (self.epochs > 1)}{''.join(changed)}"

    def fine_tune(
        self, model: keras.Model, data: Dataset, callbacks: Sequence[Any] = ()
    ) -> keras.Model:
        """Train the model, and return an uncompiled copy: its file holds no optimizer state."""
        import keras

        scores = getattr(model.layers[-1], "activation", None) is not keras.activations.softmax
        model.compile(
            optimizer=keras.optimizers.Adam(self.learning_rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=scores),
            jit_compile=False,  # a few epochs do not earn back what XLA takes to compile
        )
        model.fit(
            data.x_train,
            data.y_train,
            batch_size=self.batch_size,
            epochs=self.epochs,
            callbacks=list(callbacks),
            verbose=0,
        )
        return copy_of(model)
