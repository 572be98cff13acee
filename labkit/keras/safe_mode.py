"""Models of files, read in Keras's safe mode: code that lies in a file does not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from zipfile import BadZipFile

import keras

import labkit.keras.lars
import labkit.models.unshared  # noqa: F401  registers its layer, which a file may name
from labkit.common.canonical_json import JSON
from labkit.common.errors import LabkitError

LETTERS = 200  # of what Keras says
# What Keras raises of a file that is damaged or forged.
_ODD = (
    *(ArithmeticError, AttributeError, BadZipFile, LookupError, OSError, RuntimeError),
    *(TypeError, ValueError),
)


def load_model(path: Path | str, compile: bool = True) -> keras.Model:
    """Read a saved model.

    Args:
        path: of the file.
        compile: as its optimizer, loss and metrics say.

    Raises:
        LabkitError: the file is damaged, or names what is neither Keras's nor registered.
    """
    with _safely(Path(path).name):
        model: keras.Model = keras.saving.load_model(path, compile=compile, safe_mode=True)
    return model


def model_of(config: Mapping[str, JSON], name: str) -> keras.Model:
    """Make a model of its configuration, without weights.

    Args:
        config: what `keras.saving.serialize_keras_object` gives.
        name: of the file, for errors; see `load_model`.
    """
    with _safely(name):
        model: keras.Model = keras.saving.deserialize_keras_object(config, safe_mode=True)
    return model


@contextmanager
def _safely(name: str) -> Iterator[None]:
    try:
        yield
    except _ODD as error:
        raise _refusal(name, error) from error


def _refusal(name: str, error: Exception) -> LabkitError:
    text = " ".join(str(error).rpartition("Exception encountered: ")[2].split())
    if "unsafe_deserialization" in text:
        return LabkitError(
            f"{name} holds code, such as a Lambda layer, which labkit does not run; if the file is "
            "your own, call keras.config.enable_unsafe_deserialization() before"
        )
    return LabkitError(
        f"{name} is no model of Keras's classes and of those that this process has registered: "
        f"{text[:LETTERS]}; import the module that registers yours, or give another file"
    )
