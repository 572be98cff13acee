"""Base classes of compression methods, which create a smaller model and write it to a file."""

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


class CompressedModel(NamedTuple):
    """A compressed model, with a short description of the compression in `what`."""

    model: keras.Model
    what: str


class CompressionMethod(Checked):
    """A method that makes a trained model smaller; the fields are the method's options.

    Attributes:
        family: Name of the method without its options, such as "prune".
        suffix: File name suffix of the file that `write` creates.
    """

    family: ClassVar[str]
    suffix: ClassVar[str] = ".keras"

    @property
    def label(self) -> str:
        """Name of the method in tables and diagrams; the name also depends on the options."""
        raise NotImplementedError

    @property
    def extra_epochs(self) -> int:
        """Number of training epochs that the method adds to the training of the original model."""
        return 0

    def apply(self, model: keras.Model, data: Dataset) -> CompressedModel:
        """Return a compressed copy of the model; the model itself is not modified.

        Raises:
            InvalidInput: The method cannot compress this model.
        """
        raise NotImplementedError

    def write(self, model: keras.Model, path: Path) -> None:
        """Write the model to a file for deployment; `read` can open this file."""
        model.save(path)

    def read(self, path: Path) -> keras.Model:
        """Return the model in a file that `write` has written."""
        from labkit.keras.safe_mode import load_model

        return load_model(path)


class FineTuned(CompressionMethod):
    """A compression method that can train the compressed model further.

    Args:
        epochs: Number of epochs of further training; default: 0.
        batch_size: Number of samples per training step; default: 128.
        learning_rate: Learning rate of the optimizer Adam; default: 0.001.
    """

    epochs: int = Field(default=0, ge=0)
    batch_size: PositiveInt = 128
    learning_rate: PositiveFloat = 0.001

    @property
    def extra_epochs(self) -> int:
        """Number of epochs for which the compressed model is trained further."""
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
        """Train the model, and return an uncompiled copy, which has no optimizer state."""
        import keras

        # labkit treats a model's outputs as logits, unless the activation of the last layer is
        # softmax. A user's model may end in a softmax, but labkit's models do not.
        scores = getattr(model.layers[-1], "activation", None) is not keras.activations.softmax
        model.compile(
            optimizer=keras.optimizers.Adam(self.learning_rate),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=scores),
            # XLA compilation is off, because compilation takes longer than it saves in a few
            # epochs.
            jit_compile=False,
        )
        model.fit(
            data.x_train,
            data.y_train,
            batch_size=self.batch_size,
            epochs=self.epochs,
            callbacks=list(callbacks),
            verbose=0,
        )
        return uncompiled_copy(model)


def config_of(model: keras.Model) -> dict[str, JSON]:
    """Return the model's architecture as JSON, without weights, optimizer, loss and metrics."""
    import keras

    config = dict(keras.saving.serialize_keras_object(model))
    # With the entry "compile_config", Keras would compile a copy of the model. The file would then
    # also contain the state of the copy's optimizer.
    config.pop("compile_config", None)
    return config


def uncompiled_copy(model: keras.Model) -> keras.Model:
    """Return an independent copy of a model, uncompiled and without optimizer state."""
    import keras

    copied: keras.Model = keras.saving.deserialize_keras_object(config_of(model))
    copied.set_weights(model.get_weights())
    return copied


def layers_of(model: keras.Model) -> Iterator[keras.Layer]:
    """Yield the layers of a model and of its nested models, in order."""
    for layer in model.layers:
        if hasattr(layer, "layers"):
            yield from layers_of(layer)
        else:
            yield layer
