"""What every method of model compression is: a model in, a smaller model and its file out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from labkit.common.canonical_json import JSON
from labkit.common.validated import Checked
from labkit.datasets import Dataset

if TYPE_CHECKING:
    import keras


class Compressed(NamedTuple):
    """A compressed model, and what was done to it in a few words."""

    model: keras.Model
    what: str


class Method(Checked):
    """How a trained model is made smaller: fields are what a notebook names.

    Attributes:
        family: the same for methods that differ in their fields only.
        suffix: of the file that `write` makes.
    """

    family: ClassVar[str]
    suffix: ClassVar[str] = ".keras"

    @property
    def label(self) -> str:
        """The method's name in tables and figures, unique among methods of other fields."""
        raise NotImplementedError

    @property
    def extra_epochs(self) -> int:
        """Passes over the training data that the method trains and the original did not have."""
        return 0

    def apply(self, model: keras.Model, data: Dataset) -> Compressed:
        """Return a compressed copy; the given model stays as it is.

        Raises: InvalidInput, where the method cannot do anything with this model.
        """
        raise NotImplementedError

    def write(self, model: keras.Model, path: Path) -> None:
        """Write the model to a file that `read` opens; its size is what deployment carries."""
        model.save(path)

    def read(self, path: Path) -> keras.Model:
        """Open what `write` wrote."""
        from labkit.keras.safe_mode import load_model

        return load_model(path)


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
        self, model: keras.Model, data: Dataset, callbacks: Sequence[keras.callbacks.Callback] = ()
    ) -> keras.Model:
        """Train the model, and return an uncompiled copy: its file holds no optimizer state."""
        import keras

        # A model of the user's own may end in a softmax; ours end in scores.
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


def config_of(model: keras.Model) -> dict[str, JSON]:
    """The model without its values, as JSON has it; no optimizer, loss and metrics."""
    import keras

    config = dict(keras.saving.serialize_keras_object(model))
    # Else Keras would compile the copy, and save the optimizer's state with it.
    config.pop("compile_config", None)
    return config


def copy_of(model: keras.Model) -> keras.Model:
    """A copy that shares nothing, uncompiled: what it saves holds no optimizer state."""
    import keras

    copied: keras.Model = keras.saving.deserialize_keras_object(config_of(model))
    copied.set_weights(model.get_weights())
    return copied


def layers_of(model: keras.Model) -> Iterator[keras.Layer]:
    """The layers of a model and of the models in it, in order."""
    for layer in model.layers:
        if hasattr(layer, "layers"):
            yield from layers_of(layer)
        else:
            yield layer
