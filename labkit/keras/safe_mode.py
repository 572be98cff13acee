"""Loading of Keras models in safe mode, which does not run code from model files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

import keras

import labkit.keras.lars
import labkit.models.unshared  # noqa: F401  registers a layer that files may contain
from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError

LETTERS = 200  # An error message quotes at most LETTERS characters of Keras's own message.
# The tuple _ODD contains the exception types that Keras raises if a model file is damaged or
# forged.
_ODD = (
    *(ArithmeticError, AttributeError, BadZipFile, LookupError, OSError, RuntimeError),
    *(TypeError, ValueError),
)


def load_model(path: Path | str, compile: bool = True) -> keras.Model:
    """Load a saved Keras model from a file.

    Args:
        path: Path of the model file.
        compile: Whether to compile the model with the optimizer, loss and metrics that the file
            contains.

    Raises:
        LabkitError: The file is damaged, or contains classes that are not registered with Keras.
    """
    with _convert_errors(Path(path).name):
        model: keras.Model = keras.saving.load_model(path, compile=compile, safe_mode=True)
    return model


def model_of(config: Mapping[str, JSON], name: str) -> keras.Model:
    """Create a model from its configuration; the configuration contains no weights.

    Args:
        config: Configuration from `keras.saving.serialize_keras_object`.
        name: Name of the file that contains the configuration, for error messages.
    """
    with _convert_errors(name):
        model: keras.Model = keras.saving.deserialize_keras_object(config, safe_mode=True)
    return model


@contextmanager
def _convert_errors(name: str) -> Iterator[None]:
    try:
        yield
    except _ODD as error:
        raise _load_error(name, error) from error


def _load_error(name: str, error: Exception) -> LabkitError:
    text = " ".join(str(error).rpartition("Exception encountered: ")[2].split())
    if "unsafe_deserialization" in text:
        return LabkitError(
            f"{name} contains code, such as a Lambda layer, which labkit does not run; if you "
            "trust the file, call keras.config.enable_unsafe_deserialization() first"
        )
    return LabkitError(
        f"{name} is not a model of Keras classes or of classes registered in this process: "
        f"{text[:LETTERS]}; import the module that registers your classes, or give another file"
    )
